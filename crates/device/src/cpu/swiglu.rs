//! The gated activation of the MLP.

use super::elementwise::{load_from, store_to};
use super::float::{by_dtype, exp, round, simd};
use super::{check, scratch};
use crate::{Result, Stream, Swiglu, SwigluGrad};

pub fn swiglu(stream: &Stream, args: &Swiglu<'_>) -> Result<()> {
    const OP: &str = "swiglu";
    let Swiglu { gate_up, out, rows, cols } = *args;
    let dtype = check::float(OP, gate_up)?;
    check::buffer(OP, "gate_up", gate_up, dtype, 2 * rows * cols)?;
    check::buffer(OP, "out", out, dtype, rows * cols)?;
    check::stream(OP, stream)?.run(|| {
        scratch::with([2 * cols], |[row]| {
            for r in 0..rows {
                load_from(gate_up, 2 * r * cols, row)?;
                let (gate, up) = row.split_at_mut(cols);
                by_dtype!(OP, dtype, T => Ok(activate::<T>(gate, up)))?;
                store_to(out, r * cols, gate)?;
            }
            Ok(())
        })
    })
}

simd! {
    /// gate = round(silu(gate)) · up
    fn activate<T>(gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = round::<T>(*gate / (1.0 + exp(-*gate))) * up;
        }
    }
}

pub fn swiglu_grad(stream: &Stream, args: &SwigluGrad<'_>) -> Result<()> {
    const OP: &str = "swiglu_grad";
    let SwigluGrad { gate_up, dout, dgate_up, rows, cols } = *args;
    let dtype = check::float(OP, gate_up)?;
    check::buffer(OP, "gate_up", gate_up, dtype, 2 * rows * cols)?;
    check::buffer(OP, "dout", dout, dtype, rows * cols)?;
    check::buffer(OP, "dgate_up", dgate_up, dtype, 2 * rows * cols)?;
    check::stream(OP, stream)?.run(|| {
        scratch::with([2 * cols, cols], |[row, dout_row]| {
            for r in 0..rows {
                load_from(gate_up, 2 * r * cols, row)?;
                load_from(dout, r * cols, dout_row)?;
                let (gate, up) = row.split_at_mut(cols);
                differentiate(gate, up, dout_row);
                store_to(dgate_up, 2 * r * cols, row)?;
            }
            Ok(())
        })
    })
}

simd! {
    /// gate and up become their gradients.
    fn differentiate(gate: &mut [f32], up: &mut [f32], dout: &[f32]) {
        for ((gate, up), dout) in gate.iter_mut().zip(up).zip(dout) {
            let (g, u) = (*gate, *up);
            let sigmoid = 1.0 / (1.0 + exp(-g));
            *gate = dout * u * sigmoid * (1.0 + g * (1.0 - sigmoid));
            *up = dout * g * sigmoid;
        }
    }
}
