//! Functions of one number: ReLU and both forms of GELU.

use super::elementwise::{CHUNK, load_from, store_to};
use super::float::{exp, simd};
use super::{check, scratch};
use crate::{Activation, ActivationGrad, Error, Function, Result, Stream};

/// √(2/π) and the factor on x³ of GELU's tanh form.
const TANH_SCALE: f32 = 0.797_884_6;
const TANH_CUBE: f32 = 0.044_715;
/// 1/√(2π)
const DENSITY: f32 = 0.398_942_3;

pub fn activation(stream: &Stream, args: &Activation<'_>) -> Result<()> {
    const OP: &str = "activation";
    let Activation { function, x, out } = *args;
    let dtype = check::float(OP, x)?;
    check::buffer(OP, "out", out, dtype, 0)?;
    check::same_len(OP, x, out)?;
    check::stream(OP, stream)?.run(|| {
        scratch::with([CHUNK], |[values]| {
            (0..x.len()).step_by(CHUNK).try_for_each(|start| {
                let values = &mut values[..CHUNK.min(x.len() - start)];
                load_from(x, start, values)?;
                match function {
                    Function::Relu => relu(values),
                    Function::Gelu => gelu(values),
                    Function::GeluTanh => gelu_tanh(values),
                }
                store_to(out, start, values)
            })
        })
    })
}

pub fn activation_grad(stream: &Stream, args: &ActivationGrad<'_>) -> Result<()> {
    const OP: &str = "activation_grad";
    let ActivationGrad { function, x, dout, dx } = *args;
    let dtype = check::float(OP, x)?;
    for (name, buffer) in [("dout", dout), ("dx", dx)] {
        check::buffer(OP, name, buffer, dtype, 0)?;
        check::same_len(OP, x, buffer)?;
    }
    check::stream(OP, stream)?.run(|| {
        scratch::with([CHUNK, CHUNK], |[values, grads]| {
            (0..x.len()).step_by(CHUNK).try_for_each(|start| {
                let len = CHUNK.min(x.len() - start);
                let (values, grads) = (&mut values[..len], &mut grads[..len]);
                load_from(x, start, values)?;
                load_from(dout, start, grads)?;
                match function {
                    Function::Relu => relu_grad(values, grads),
                    Function::Gelu => gelu_grad(values, grads),
                    Function::GeluTanh => gelu_tanh_grad(values, grads),
                }
                store_to(dx, start, grads)?;
                Ok::<(), Error>(())
            })
        })
    })
}

/// The normal distribution's Φ(x) = erfc(−x/√2)/2, within a few units in the last place of either tail: erfc by
/// the Chebyshev fit of Numerical Recipes, whose error is a fraction of the result (1.2e-7) everywhere.
#[inline(always)]
fn normal(x: f32) -> f32 {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.5 * z);
    let p = t.mul_add(0.170_872_77, -0.822_152_2).mul_add(t, 1.488_515_9).mul_add(t, -1.135_204);
    let p = p.mul_add(t, 0.278_868_07).mul_add(t, -0.186_288_06).mul_add(t, 0.096_784_18);
    let p = p.mul_add(t, 0.374_091_96).mul_add(t, 1.000_023_7).mul_add(t, -1.265_512_2);
    let tail = 0.5 * t * exp((-z).mul_add(z, p));
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// The tanh form of Φ, and what its exponent's slope is.
#[inline(always)]
fn normal_tanh(x: f32) -> (f32, f32) {
    let inner = 2.0 * TANH_SCALE * x * (1.0 + TANH_CUBE * x * x);
    let slope = 2.0 * TANH_SCALE * (1.0 + 3.0 * TANH_CUBE * x * x);
    (1.0 / (1.0 + exp(-inner)), slope)
}

simd! {
    fn relu(values: &mut [f32]) {
        for x in values {
            // A NaN stays one, as in PyTorch.
            *x = if *x < 0.0 { 0.0 } else { *x };
        }
    }
}

simd! {
    fn relu_grad(values: &[f32], grads: &mut [f32]) {
        for (x, grad) in values.iter().zip(grads) {
            *grad = if *x > 0.0 { *grad } else { 0.0 };
        }
    }
}

simd! {
    fn gelu(values: &mut [f32]) {
        for x in values {
            *x *= normal(*x);
        }
    }
}

simd! {
    fn gelu_grad(values: &[f32], grads: &mut [f32]) {
        for (x, grad) in values.iter().zip(grads) {
            *grad *= normal(*x) + x * DENSITY * exp(-0.5 * x * x);
        }
    }
}

simd! {
    fn gelu_tanh(values: &mut [f32]) {
        for x in values {
            *x *= normal_tanh(*x).0;
        }
    }
}

simd! {
    fn gelu_tanh_grad(values: &[f32], grads: &mut [f32]) {
        for (x, grad) in values.iter().zip(grads) {
            let (normal, slope) = normal_tanh(*x);
            *grad *= normal + x * normal * (1.0 - normal) * slope;
        }
    }
}
