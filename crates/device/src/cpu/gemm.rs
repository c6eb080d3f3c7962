//! Matrix products: the `gemm` crate on f32; 16-bit operands and transposed left ones go through it block by
//! block.

use super::float::{Float, by_dtype, load, simd};
use super::{check, scratch, transpose};
use crate::{Dtype, Gemm, Matrix, Result, Stream};
use std::ops::Range;

/// Rows, columns and depth of the blocks 16-bit operands are converted in: three f32 squares of 1 MiB. Each
/// converted value serves this many products, which hides the conversion.
const BLOCK: usize = 512;

/// Rows and depth of the blocks a transposed left operand is turned round in: 2 MiB of f32. The crate would pack
/// all of it, column by column, into memory it allocates for every product.
const TURNED_ROWS: usize = 1024;
const TURNED_DEPTH: usize = 512;
/// Below this many of either, a product is over before turning its operand has paid.
const WORTH_TURNING: usize = 256;

/// A row-major f32 matrix, read as its transpose when `transposed`.
#[derive(Clone, Copy)]
pub struct Operand<'a> {
    pub values: &'a [f32],
    pub stride: usize,
    pub transposed: bool,
}

impl<'a> Operand<'a> {
    pub fn new(values: &'a [f32], stride: usize) -> Self {
        Operand { values, stride, transposed: false }
    }

    pub fn t(values: &'a [f32], stride: usize) -> Self {
        Operand { values, stride, transposed: true }
    }

    /// (elements from row to row, elements from column to column), once the matrix is known to fit.
    fn strides(&self, rows: usize, cols: usize) -> (isize, isize) {
        let (outer, inner) = if self.transposed { (cols, rows) } else { (rows, cols) };
        assert!(outer == 0 || inner == 0 || (outer - 1) * self.stride + inner <= self.values.len());
        let stride = self.stride as isize;
        if self.transposed { (1, stride) } else { (stride, 1) }
    }
}

/// c = a · b + beta · c for (m, n, k) on f32; `c` is not read when `beta` is 0.
pub fn product(
    (m, n, k): (usize, usize, usize),
    a: Operand<'_>,
    b: Operand<'_>,
    c: &mut [f32],
    c_stride: usize,
    beta: f32,
) {
    if m == 0 || n == 0 {
        return;
    }
    let ((a_row, a_col), (b_row, b_col)) = (a.strides(m, k), b.strides(k, n));
    assert!((m - 1) * c_stride + n <= c.len());
    if k == 0 {
        c.chunks_mut(c_stride).take(m).for_each(|row| {
            row[..n].iter_mut().for_each(|c| *c = if beta == 0.0 { 0.0 } else { beta * *c });
        });
        return;
    }
    // SAFETY: all three matrices lie inside their slices, as just asserted, and `c` is borrowed alone.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            1,
            c_stride as isize,
            beta != 0.0,
            a.values.as_ptr(),
            a_col,
            a_row,
            b.values.as_ptr(),
            b_col,
            b_row,
            beta,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// [`product`] of a transposed `a`, which is turned round block by block.
fn turned(
    (m, n, k): (usize, usize, usize),
    a: Operand<'_>,
    b: Operand<'_>,
    c: &mut [f32],
    c_stride: usize,
    beta: f32,
) {
    scratch::with([m.min(TURNED_ROWS) * k.min(TURNED_DEPTH)], |[block]| {
        for rows in steps(m, TURNED_ROWS) {
            for depth in steps(k, TURNED_DEPTH) {
                let shape = (rows.len(), n, depth.len());
                let corner = &a.values[depth.start * a.stride + rows.start..];
                transpose::transpose(corner, a.stride, (depth.len(), rows.len()), block);
                let skipped = if b.transposed { depth.start } else { depth.start * b.stride };
                let b = Operand { values: &b.values[skipped..], ..b };
                let beta = if depth.start == 0 { beta } else { 1.0 };
                let c = &mut c[rows.start * c_stride..];
                product(shape, Operand::new(block, depth.len()), b, c, c_stride, beta);
            }
        }
    });
}

pub fn gemm(stream: &Stream, args: &Gemm<'_>) -> Result<()> {
    let shape = args.check()?;
    let dtype = check::float("gemm", args.a.buffer)?;
    check::dtype_or_f32("gemm", "c", args.c.buffer, dtype, 0)?;
    check::stream("gemm", stream)?.run(|| match (dtype, args.c.buffer.dtype()) {
        (Dtype::F32, _) => {
            // SAFETY: stream order keeps other writers away; the output is not one of the inputs.
            let c = unsafe { args.c.buffer.host_slice_mut::<f32>() };
            let (a, b) = (operand(&args.a), operand(&args.b));
            let (m, n, k) = shape;
            if a.transposed && m.min(n).min(k) >= WORTH_TURNING {
                turned(shape, a, b, c, args.c.stride, args.beta);
            } else {
                product(shape, a, b, c, args.c.stride, args.beta);
            }
            Ok(())
        }
        (_, Dtype::F32) => by_dtype!("gemm", dtype, T => blocked::<T, f32>(args, shape)),
        _ => by_dtype!("gemm", dtype, T => blocked::<T, T>(args, shape)),
    })
}

fn operand<'a>(matrix: &Matrix<'a>) -> Operand<'a> {
    // SAFETY: stream order keeps writers away from a product's inputs while it runs.
    let values = unsafe { matrix.buffer.host_slice::<f32>() };
    Operand { values, stride: matrix.stride, transposed: matrix.transposed }
}

/// Blocks of `c` one after another, each summed over the whole depth in f32 and rounded once.
fn blocked<T: Float, C: Float>(args: &Gemm<'_>, (m, n, k): (usize, usize, usize)) -> Result<()> {
    let (mb, nb, kb) = (m.min(BLOCK), n.min(BLOCK), k.min(BLOCK));
    // SAFETY: stream order keeps other writers away; the output is not one of the inputs.
    let c = unsafe { args.c.buffer.host_slice_mut::<C>() };
    scratch::with([mb * kb, kb * nb, mb * nb], |[a_block, b_block, sums]| {
        for cols in steps(n, BLOCK) {
            for rows in steps(m, BLOCK) {
                let shape = (rows.len(), cols.len());
                sums.fill(0.0);
                for depth in steps(k, BLOCK) {
                    let a = convert::<T>(&args.a, &rows, &depth, a_block);
                    let b = convert::<T>(&args.b, &depth, &cols, b_block);
                    product((shape.0, shape.1, depth.len()), a, b, sums, shape.1, 1.0);
                }
                for (i, row) in rows.enumerate() {
                    let start = row * args.c.stride + cols.start;
                    store_plus(&sums[i * shape.1..][..shape.1], args.beta, &mut c[start..start + shape.1]);
                }
            }
        }
    });
    Ok(())
}

fn steps(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(step).map(move |start| start..len.min(start + step))
}

/// A block of a matrix, by rows and columns as the product sees them, as f32. Rows stay rows in memory.
fn convert<'a, T: Float>(
    matrix: &Matrix<'_>,
    rows: &Range<usize>,
    cols: &Range<usize>,
    block: &'a mut [f32],
) -> Operand<'a> {
    // SAFETY: stream order keeps writers away from a product's inputs while it runs.
    let values = unsafe { matrix.buffer.host_slice::<T>() };
    let (outer, inner) = if matrix.transposed { (cols, rows) } else { (rows, cols) };
    for (i, row) in outer.clone().enumerate() {
        let start = row * matrix.stride + inner.start;
        load(&values[start..start + inner.len()], &mut block[i * inner.len()..][..inner.len()]);
    }
    Operand { values: block, stride: inner.len(), transposed: matrix.transposed }
}

simd! {
    /// dst = src + beta · dst; `dst` is not read when `beta` is 0.
    fn store_plus<T>(src: &[f32], beta: f32, dst: &mut [T]) {
        if beta == 0.0 {
            for (dst, src) in dst.iter_mut().zip(src) {
                *dst = T::store(*src);
            }
        } else {
            for (dst, src) in dst.iter_mut().zip(src) {
                *dst = T::store(beta.mul_add(dst.load(), *src));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small integers: sums are exact, whatever their order.
    fn values(len: usize, step: usize) -> Vec<f32> {
        (0..len).map(|i| (i * step % 17) as f32 - 8.0).collect()
    }

    #[test]
    fn a_turned_operand_gives_the_plain_product() {
        let (m, n, k, gap) = (TURNED_ROWS + 19, 21, TURNED_DEPTH + 5, 3);
        let (a, b, before) =
            (values(k * (m + gap), 5), values((k + gap) * (n + gap), 7), values(m * (n + gap), 3));
        let a = Operand::t(&a, m + gap);
        for b in [Operand::new(&b, n + gap), Operand::t(&b, k + gap)] {
            for beta in [0.0, 1.0] {
                let (mut got, mut want) = (before.clone(), before.clone());
                turned((m, n, k), a, b, &mut got, n + gap, beta);
                product((m, n, k), a, b, &mut want, n + gap, beta);
                assert!(got == want, "transposed {}, beta {beta}", b.transposed);
            }
        }
    }
}
