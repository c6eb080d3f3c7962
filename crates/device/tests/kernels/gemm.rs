use super::harness::{Bed, FLOATS, Input, Random, Tolerance, beds, twice};
use super::reference;
use device::{Dtype, Gemm, Matrix};

/// The last is larger than any block an implementation may cut 16-bit operands into.
const SHAPES: [(usize, usize, usize); 6] =
    [(1, 8, 65), (7, 33, 513), (33, 65, 8), (130, 5, 48), (65, 1, 7), (530, 17, 520)];

#[test]
fn products_in_all_transposes_dtypes_and_strides() {
    for bed in &beds() {
        for dtype in FLOATS {
            for c_dtype in [dtype, Dtype::F32] {
                for shape in SHAPES {
                    for transposes in 0..4 {
                        case(bed, dtype, c_dtype, shape, [transposes & 1 != 0, transposes & 2 != 0]);
                    }
                }
            }
        }
    }
}

/// A matrix whose logical shape is rows × cols, stored as its transpose if asked, with a gap after each row.
struct Stored {
    input: Input,
    rows: usize,
    cols: usize,
    transposed: bool,
}

const GAP: usize = 3;

impl Stored {
    fn new(
        bed: &Bed,
        random: &mut Random,
        dtype: Dtype,
        (rows, cols): (usize, usize),
        transposed: bool,
    ) -> Self {
        let (rows, cols) = if transposed { (cols, rows) } else { (rows, cols) };
        let input = bed.random(random, dtype, rows * (cols + GAP), 1.0);
        Stored { input, rows, cols, transposed }
    }

    fn matrix(&self) -> Matrix<'_> {
        let matrix = Matrix::new(&self.input.buffer, self.rows, self.cols).with_stride(self.cols + GAP);
        if self.transposed { matrix.t() } else { matrix }
    }

    fn at(&self, i: usize, j: usize) -> f64 {
        let (i, j) = if self.transposed { (j, i) } else { (i, j) };
        self.input.values[i * (self.cols + GAP) + j]
    }
}

fn case(bed: &Bed, dtype: Dtype, c_dtype: Dtype, (m, n, k): (usize, usize, usize), transposed: [bool; 2]) {
    let mut random = Random::new((m * n * k) as u64);
    let a = Stored::new(bed, &mut random, dtype, (m, k), transposed[0]);
    let b = Stored::new(bed, &mut random, dtype, (k, n), transposed[1]);
    let before = bed.random(&mut random, c_dtype, m * (n + GAP), 1.0);
    let product = reference::gemm((m, n, k), |i, j| a.at(i, j), |i, j| b.at(i, j));
    for beta in [0.0, 1.0] {
        let case = format!(
            "{}: gemm {m}×{n}×{k} {dtype} → {c_dtype}, {transposed:?}, beta {beta}",
            bed.device.name()
        );
        let [got] = twice(&case, || {
            let c =
                if beta == 0.0 { bed.poisoned(c_dtype, before.values.len()) } else { bed.copy_of(&before) };
            let c_matrix = Matrix::new(&c, m, n).with_stride(n + GAP);
            let args = Gemm { a: a.matrix(), b: b.matrix(), c: c_matrix, beta };
            bed.device.gemm(&bed.stream, &args).unwrap();
            [bed.read(&c)]
        });
        let inside = |values: &[f64]| -> Vec<f64> {
            values.chunks(n + GAP).flat_map(|row| row[..n].to_vec()).collect()
        };
        let gaps = |values: &[f64]| -> Vec<f64> {
            values.chunks(n + GAP).flat_map(|row| row[n..].to_vec()).collect()
        };
        let old = inside(&before.values);
        let want: Vec<f64> = product.iter().zip(&old).map(|(p, c)| p + f64::from(beta) * c).collect();
        Tolerance::new(c_dtype, 1).check(&case, &inside(&got), &want);
        let untouched = gaps(&got)
            .iter()
            .zip(gaps(&before.values))
            .all(|(&gap, before)| if beta == 0.0 { gap.is_nan() } else { gap == before });
        assert!(untouched, "{case}: wrote between the rows");
    }
}

#[test]
fn a_product_over_nothing_is_zero() {
    for bed in &beds() {
        let empty = bed.poisoned(Dtype::F32, 0);
        let c = bed.poisoned(Dtype::F32, 6);
        let args = Gemm {
            a: Matrix::new(&empty, 2, 0),
            b: Matrix::new(&empty, 0, 3),
            c: Matrix::new(&c, 2, 3),
            beta: 0.0,
        };
        bed.device.gemm(&bed.stream, &args).unwrap();
        assert_eq!(bed.read(&c), [0.0; 6], "{}", bed.device.name());
    }
}

#[test]
fn shapes_and_dtypes_that_do_not_fit_are_errors() {
    for bed in &beds() {
        let (f32s, bf16s) = (bed.poisoned(Dtype::F32, 16), bed.poisoned(Dtype::Bf16, 16));
        let square = |buffer| Matrix::new(buffer, 4, 4);
        let run = |a, b, c| bed.device.gemm(&bed.stream, &Gemm { a, b, c, beta: 0.0 });
        assert!(run(square(&f32s), square(&bf16s), square(&f32s)).is_err());
        assert!(run(square(&f32s), square(&f32s), square(&bf16s)).is_err());
        assert!(run(Matrix::new(&f32s, 4, 5), square(&f32s), square(&f32s)).is_err());
        assert!(run(Matrix::new(&f32s, 5, 4), square(&f32s), Matrix::new(&f32s, 5, 4)).is_err());
    }
}
