use super::harness::{Bed, FLOATS, Random, Tolerance, beds, round, twice};
use device::{Bias, BiasGrad, Dtype};

const SIZES: [(usize, usize); 5] = [(1, 8), (7, 65), (33, 513), (300, 24), (1, 1)];

#[test]
fn every_row_gets_the_bias() {
    for bed in &beds() {
        for dtype in FLOATS {
            for (rows, cols) in SIZES {
                let mut random = Random::new((rows * cols) as u64);
                let x = bed.random(&mut random, dtype, rows * cols, 2.0);
                let bias = bed.random(&mut random, dtype, cols, 1.0);
                for accumulate in [false, true] {
                    let case = format!("{}: bias {rows}×{cols} {dtype} {accumulate}", bed.device.name());
                    let [got] = twice(&case, || {
                        let out = if accumulate { bed.copy_of(&x) } else { bed.poisoned(dtype, rows * cols) };
                        let args = Bias { x: &out, bias: &bias.buffer, rows, cols, accumulate };
                        bed.device.bias(&bed.stream, &args).unwrap();
                        [bed.read(&out)]
                    });
                    let sum = |i: usize| round(dtype, x.values[i] as f32 + bias.values[i % cols] as f32);
                    let want = |i: usize| if accumulate { f64::from(sum(i)) } else { bias.values[i % cols] };
                    assert!((0..got.len()).all(|i| got[i] == want(i)), "{case}");
                }
            }
        }
    }
}

#[test]
fn the_biases_gradient_is_the_column_sums() {
    for bed in &beds() {
        for dtype in FLOATS {
            for (rows, cols) in SIZES {
                gradient(bed, dtype, dtype, rows, cols);
                gradient(bed, dtype, Dtype::F32, rows, cols);
            }
        }
    }
}

fn gradient(bed: &Bed, dtype: Dtype, dbias_dtype: Dtype, rows: usize, cols: usize) {
    let mut random = Random::new((rows + cols) as u64);
    let dout = bed.random(&mut random, dtype, rows * cols, 1.0);
    let before = bed.random(&mut random, dbias_dtype, cols, 1.0);
    for accumulate in [false, true] {
        let case = format!("{}: bias_grad {rows}×{cols} {dtype} → {dbias_dtype}", bed.device.name());
        let [got] = twice(&case, || {
            let dbias = if accumulate { bed.copy_of(&before) } else { bed.poisoned(dbias_dtype, cols) };
            let scratch = bed.poisoned(Dtype::F32, bed.device.profile().norm_scratch(rows, cols));
            let (dout, scratch) = (&dout.buffer, &scratch);
            let args = BiasGrad { dout, dbias: &dbias, scratch, rows, cols, accumulate };
            bed.device.bias_grad(&bed.stream, &args).unwrap();
            [bed.read(&dbias)]
        });
        let base = |c: usize| if accumulate { before.values[c] } else { 0.0 };
        let want: Vec<f64> =
            (0..cols).map(|c| base(c) + (0..rows).map(|r| dout.values[r * cols + c]).sum::<f64>()).collect();
        Tolerance::new(dbias_dtype, 1).check(&case, &got, &want);
    }
}
