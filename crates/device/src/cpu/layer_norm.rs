//! LayerNorm and its gradient.

use super::elementwise::{add_assign, load_from, store_to};
use super::float::{simd, sum_over};
use super::{check, scratch};
use crate::{Buffer, Dtype, LayerNorm, LayerNormGrad, Result, Stream};

pub fn layer_norm(stream: &Stream, args: &LayerNorm<'_>) -> Result<()> {
    const OP: &str = "layer_norm";
    let LayerNorm { x, weight, bias, out, statistics, rows, cols, eps } = *args;
    let dtype = check::float(OP, x)?;
    check::buffer(OP, "x", x, dtype, rows * cols)?;
    check::buffer(OP, "out", out, dtype, rows * cols)?;
    check::buffer(OP, "weight", weight, dtype, cols)?;
    bias.map_or(Ok(()), |bias| check::buffer(OP, "bias", bias, dtype, cols))?;
    check::buffer(OP, "statistics", statistics, Dtype::F32, 2 * rows)?;
    check::stream(OP, stream)?.run(|| {
        scratch::with([cols, cols, cols], |[w, b, row]| {
            load_from(weight, 0, w)?;
            b.fill(0.0);
            bias.map_or(Ok(()), |bias| load_from(bias, 0, b))?;
            for r in 0..rows {
                load_from(x, r * cols, row)?;
                let (mean, rstd) = normalise(row, w, b, eps);
                store_to(out, r * cols, row)?;
                store_to(statistics, 2 * r, &[mean, rstd])?;
            }
            Ok(())
        })
    })
}

simd! {
    /// The row becomes its norm. Returns its mean and what it was multiplied by.
    fn normalise(row: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) -> (f32, f32) {
        let cols = row.len();
        let (weight, bias) = (&weight[..cols], &bias[..cols]);
        let mean = sum_over([row], |[x]| x) / cols as f32;
        let variance = sum_over([row], |[x]| (x - mean) * (x - mean)) / cols as f32;
        let rstd = 1.0 / (variance + eps).sqrt();
        for i in 0..cols {
            row[i] = (row[i] - mean) * rstd * weight[i] + bias[i];
        }
        (mean, rstd)
    }
}

pub fn layer_norm_grad(stream: &Stream, args: &LayerNormGrad<'_>) -> Result<()> {
    const OP: &str = "layer_norm_grad";
    let LayerNormGrad { dout, x, weight, statistics, dx, dweight, dbias, scratch, rows, cols } = *args;
    let dtype = check::float(OP, x)?;
    for (name, buffer) in [("dout", dout), ("x", x), ("dx", dx)] {
        check::buffer(OP, name, buffer, dtype, rows * cols)?;
    }
    check::buffer(OP, "weight", weight, dtype, cols)?;
    check::buffer(OP, "statistics", statistics, Dtype::F32, 2 * rows)?;
    for (name, grad) in [("dweight", dweight), ("dbias", dbias)] {
        grad.map_or(Ok(()), |(grad, _)| check::dtype_or_f32(OP, name, grad, dtype, cols))?;
    }
    check::buffer(OP, "scratch", scratch, Dtype::F32, 2 * cols)?;
    check::stream(OP, stream)?.run(|| {
        // SAFETY: scratch is this kernel's alone while it runs.
        let sums = unsafe { &mut scratch.host_slice_mut::<f32>()[..2 * cols] };
        sums.fill(0.0);
        let (dw, db) = sums.split_at_mut(cols);
        scratch::with([cols, cols, cols], |[w, dout_row, row]| {
            load_from(weight, 0, w)?;
            for r in 0..rows {
                let mut scale = [0.0; 2];
                load_from(dout, r * cols, dout_row)?;
                load_from(x, r * cols, row)?;
                load_from(statistics, 2 * r, &mut scale)?;
                grad_row(row, dout_row, w, scale, dw, db);
                store_to(dx, r * cols, row)?;
            }
            add_up(dweight, dw, w)?;
            add_up(dbias, db, w)
        })
    })
}

fn add_up(grad: Option<(&Buffer, bool)>, sums: &mut [f32], row: &mut [f32]) -> Result<()> {
    let Some((grad, accumulate)) = grad else { return Ok(()) };
    if accumulate {
        load_from(grad, 0, row)?;
        add_assign(sums, row);
    }
    store_to(grad, 0, sums)
}

simd! {
    /// One row: adds to `dweight` and `dbias`; `x` becomes its gradient.
    fn grad_row(x: &mut [f32], dout: &[f32], weight: &[f32], statistics: [f32; 2], dweight: &mut [f32], dbias: &mut [f32]) {
        let (cols, [mean, rstd]) = (x.len(), statistics);
        let (dout, weight, dweight, dbias) = (&dout[..cols], &weight[..cols], &mut dweight[..cols], &mut dbias[..cols]);
        for i in 0..cols {
            x[i] = (x[i] - mean) * rstd;
            dweight[i] += dout[i] * x[i];
            dbias[i] += dout[i];
        }
        let along = sum_over([weight, dout, x], |[weight, dout, x]| weight * dout * x) / cols as f32;
        let level = sum_over([weight, dout], |[weight, dout]| weight * dout) / cols as f32;
        for i in 0..cols {
            x[i] = (weight[i] * dout[i] - level - x[i] * along) * rstd;
        }
    }
}
