//! RMSNorm of single heads inside packed rows.

use super::elementwise::{add_assign, load_from, store_to};
use super::float::{by_dtype, dot};
use super::norm::{grad_row, normalise};
use super::{check, scratch};
use crate::{Buffer, Dtype, Error, HeadNorm, HeadNormGrad, Result, Stream};

/// Elements of a row that are normalised, once sizes have been found to fit.
fn check_rows(
    op: &'static str,
    x: &Buffer,
    (tokens, heads, head_dim): (usize, [usize; 2], usize),
    stride: usize,
) -> Result<usize> {
    let cols = (heads[0] + heads[1]) * head_dim;
    if head_dim == 0 || cols > stride {
        let what = format!("{} and {} heads of {head_dim} in rows of {stride}", heads[0], heads[1]);
        return Err(Error::argument(op, what));
    }
    x.expect_len(op, "x", if tokens == 0 { 0 } else { (tokens - 1) * stride + cols })?;
    Ok(cols)
}

pub fn head_norm(stream: &Stream, args: &HeadNorm<'_>) -> Result<()> {
    const OP: &str = "head_norm";
    let HeadNorm { x, weight, before, tokens, heads, head_dim, stride, eps } = *args;
    let dtype = check::float(OP, x)?;
    let cols = check_rows(OP, x, (tokens, heads, head_dim), stride)?;
    check::buffer(OP, "weight", weight, dtype, 2 * head_dim)?;
    before.map_or(Ok(()), |before| check::buffer(OP, "before", before, dtype, tokens * cols))?;
    check::stream(OP, stream)?.run(|| {
        scratch::with([2 * head_dim, cols], |[w, row]| {
            load_from(weight, 0, w)?;
            let (first, second) = w.split_at(head_dim);
            for token in 0..tokens {
                load_from(x, token * stride, row)?;
                before.map_or(Ok(()), |before| store_to(before, token * cols, row))?;
                for (index, head) in row.chunks_exact_mut(head_dim).enumerate() {
                    let scale = 1.0 / (dot(head, head) / head_dim as f32 + eps).sqrt();
                    let w = if index < heads[0] { first } else { second };
                    by_dtype!(OP, dtype, T => {
                        normalise::<T>(head, w, scale);
                        Ok(())
                    })?;
                }
                store_to(x, token * stride, row)?;
            }
            Ok(())
        })
    })
}

pub fn head_norm_grad(stream: &Stream, args: &HeadNormGrad<'_>) -> Result<()> {
    const OP: &str = "head_norm_grad";
    let HeadNormGrad {
        dx,
        before,
        weight,
        dweight,
        scratch,
        tokens,
        heads,
        head_dim,
        stride,
        eps,
        accumulate,
    } = *args;
    let dtype = check::float(OP, dx)?;
    let cols = check_rows(OP, dx, (tokens, heads, head_dim), stride)?;
    check::buffer(OP, "before", before, dtype, tokens * cols)?;
    check::buffer(OP, "weight", weight, dtype, 2 * head_dim)?;
    dweight.map_or(Ok(()), |dweight| check::dtype_or_f32(OP, "dweight", dweight, dtype, 2 * head_dim))?;
    check::buffer(OP, "scratch", scratch, Dtype::F32, 2 * head_dim)?;
    check::stream(OP, stream)?.run(|| {
        // SAFETY: scratch is this kernel's alone while it runs.
        let dw = unsafe { &mut scratch.host_slice_mut::<f32>()[..2 * head_dim] };
        dw.fill(0.0);
        scratch::with([2 * head_dim, cols, cols, cols], |[w, dout_row, row, dx_row]| {
            load_from(weight, 0, w)?;
            for token in 0..tokens {
                load_from(dx, token * stride, dout_row)?;
                load_from(before, token * cols, row)?;
                dx_row.fill(0.0);
                for index in 0..heads[0] + heads[1] {
                    let at = index * head_dim..(index + 1) * head_dim;
                    let which = if index < heads[0] { 0..head_dim } else { head_dim..2 * head_dim };
                    let head = &mut row[at.clone()];
                    let scale = 1.0 / (dot(head, head) / head_dim as f32 + eps).sqrt();
                    let (dout, dx) = (&dout_row[at.clone()], &mut dx_row[at]);
                    grad_row(head, dout, &w[which.clone()], scale, &mut dw[which], dx);
                }
                store_to(dx, token * stride, dx_row)?;
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
