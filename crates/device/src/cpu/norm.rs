//! RMSNorm with the residual's addition before it, and its gradient.

use super::elementwise::{add_assign, load_from, store_to};
use super::float::{by_dtype, dot, round, simd, sum_over};
use super::{check, scratch};
use crate::{Dtype, Error, Result, RmsNorm, RmsNormGrad, Stream};

pub fn rms_norm(stream: &Stream, args: &RmsNorm<'_>) -> Result<()> {
    const OP: &str = "rms_norm";
    let RmsNorm { x, delta, weight, sum, out, rstd, rows, cols, eps } = *args;
    let dtype = check::float(OP, x)?;
    if delta.is_some() != sum.is_some() {
        return Err(Error::argument(OP, "delta and sum are given together or not at all"));
    }
    for (name, buffer) in [("x", Some(x)), ("delta", delta), ("sum", sum), ("out", Some(out))] {
        buffer.map_or(Ok(()), |buffer| check::buffer(OP, name, buffer, dtype, rows * cols))?;
    }
    check::buffer(OP, "weight", weight, dtype, cols)?;
    check::buffer(OP, "rstd", rstd, Dtype::F32, rows)?;
    check::stream(OP, stream)?.run(|| {
        scratch::with([cols, cols, cols], |[w, row, added]| {
            load_from(weight, 0, w)?;
            for r in 0..rows {
                let start = r * cols;
                load_from(x, start, row)?;
                if let (Some(delta), Some(sum)) = (delta, sum) {
                    load_from(delta, start, added)?;
                    add_assign(row, added);
                    store_to(sum, start, row)?;
                    load_from(sum, start, row)?;
                }
                let scale = 1.0 / (dot(row, row) / cols as f32 + eps).sqrt();
                by_dtype!(OP, dtype, T => {
                    normalise::<T>(row, w, scale);
                    Ok(())
                })?;
                store_to(out, start, row)?;
                store_to(rstd, r, &[scale])?;
            }
            Ok(())
        })
    })
}

simd! {
    /// row = weight · round(row · scale)
    pub fn normalise<T>(row: &mut [f32], weight: &[f32], scale: f32) {
        for (x, w) in row.iter_mut().zip(weight) {
            *x = round::<T>(*x * scale) * w;
        }
    }
}

pub fn rms_norm_grad(stream: &Stream, args: &RmsNormGrad<'_>) -> Result<()> {
    const OP: &str = "rms_norm_grad";
    let RmsNormGrad { dout, x, weight, rstd, dresidual, dx, dweight, scratch, rows, cols, accumulate } =
        *args;
    let dtype = check::float(OP, x)?;
    for (name, buffer) in [("dout", Some(dout)), ("x", Some(x)), ("dresidual", dresidual), ("dx", Some(dx))] {
        buffer.map_or(Ok(()), |buffer| check::buffer(OP, name, buffer, dtype, rows * cols))?;
    }
    check::buffer(OP, "weight", weight, dtype, cols)?;
    check::buffer(OP, "rstd", rstd, Dtype::F32, rows)?;
    dweight.map_or(Ok(()), |dweight| check::dtype_or_f32(OP, "dweight", dweight, dtype, cols))?;
    check::buffer(OP, "scratch", scratch, Dtype::F32, cols)?;
    check::stream(OP, stream)?.run(|| {
        // SAFETY: scratch is this kernel's alone while it runs.
        let dw = unsafe { &mut scratch.host_slice_mut::<f32>()[..cols] };
        dw.fill(0.0);
        scratch::with([cols, cols, cols, cols], |[w, dout_row, row, residual]| {
            load_from(weight, 0, w)?;
            for r in 0..rows {
                let (start, mut scale) = (r * cols, [0.0]);
                load_from(dout, start, dout_row)?;
                load_from(x, start, row)?;
                load_from(rstd, r, &mut scale)?;
                residual.fill(0.0);
                dresidual.map_or(Ok(()), |dresidual| load_from(dresidual, start, residual))?;
                grad_row(row, dout_row, w, scale[0], dw, residual);
                store_to(dx, start, residual)?;
            }
            let Some(dweight) = dweight else { return Ok(()) };
            if accumulate {
                load_from(dweight, 0, w)?;
                add_assign(dw, w);
            }
            store_to(dweight, 0, dw)
        })
    })
}

simd! {
    /// One row: adds to `dweight`, and to `dx` what reaches the row's input. `x` becomes x̂.
    pub fn grad_row(x: &mut [f32], dout: &[f32], weight: &[f32], rstd: f32, dweight: &mut [f32], dx: &mut [f32]) {
        let cols = x.len();
        let (dout, weight, dweight, dx) = (&dout[..cols], &weight[..cols], &mut dweight[..cols], &mut dx[..cols]);
        for i in 0..cols {
            x[i] *= rstd;
            dweight[i] += dout[i] * x[i];
        }
        let mean = sum_over([weight, dout, x], |[weight, dout, x]| weight * dout * x) / cols as f32;
        for i in 0..cols {
            dx[i] += (weight[i] * dout[i] - x[i] * mean) * rstd;
        }
    }
}
