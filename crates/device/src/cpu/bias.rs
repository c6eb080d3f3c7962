//! One vector for every row, and its gradient.

use super::elementwise::{add_assign, load_from, store_to};
use super::{check, scratch};
use crate::{Bias, BiasGrad, Dtype, Result, Stream};

pub fn bias(stream: &Stream, args: &Bias<'_>) -> Result<()> {
    const OP: &str = "bias";
    let Bias { x, bias, rows, cols, accumulate } = *args;
    let dtype = check::float(OP, x)?;
    check::buffer(OP, "x", x, dtype, rows * cols)?;
    check::buffer(OP, "bias", bias, dtype, cols)?;
    check::stream(OP, stream)?.run(|| {
        scratch::with([cols, cols], |[bias_row, row]| {
            load_from(bias, 0, bias_row)?;
            for r in 0..rows {
                if !accumulate {
                    store_to(x, r * cols, bias_row)?;
                    continue;
                }
                load_from(x, r * cols, row)?;
                add_assign(row, bias_row);
                store_to(x, r * cols, row)?;
            }
            Ok(())
        })
    })
}

pub fn bias_grad(stream: &Stream, args: &BiasGrad<'_>) -> Result<()> {
    const OP: &str = "bias_grad";
    let BiasGrad { dout, dbias, scratch, rows, cols, accumulate } = *args;
    let dtype = check::float(OP, dout)?;
    check::buffer(OP, "dout", dout, dtype, rows * cols)?;
    check::dtype_or_f32(OP, "dbias", dbias, dtype, cols)?;
    check::buffer(OP, "scratch", scratch, Dtype::F32, cols)?;
    check::stream(OP, stream)?.run(|| {
        // SAFETY: scratch is this kernel's alone while it runs.
        let sums = unsafe { &mut scratch.host_slice_mut::<f32>()[..cols] };
        sums.fill(0.0);
        scratch::with([cols], |[row]| {
            for r in 0..rows {
                load_from(dout, r * cols, row)?;
                add_assign(sums, row);
            }
            if accumulate {
                load_from(dbias, 0, row)?;
                add_assign(sums, row);
            }
            store_to(dbias, 0, sums)
        })
    })
}
