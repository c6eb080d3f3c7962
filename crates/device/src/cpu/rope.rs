//! Rotary positions.

use super::elementwise::load_from;
use super::float::{Float, by_dtype, round, simd};
use super::{check, scratch};
use crate::{Dtype, Error, Result, Rope, Rotation, Stream};

pub fn rope(stream: &Stream, args: &Rope<'_>) -> Result<()> {
    const OP: &str = "rope";
    let Rope { x, positions, cos, sin, tokens, heads, head_dim, stride, .. } = *args;
    let dtype = check::float(OP, x)?;
    if head_dim == 0 || head_dim % 2 != 0 || heads * head_dim > stride {
        let what = format!("{heads} heads of {head_dim} in rows of {stride}");
        return Err(Error::argument(OP, what));
    }
    if tokens == 0 {
        return Ok(());
    }
    check::buffer(OP, "x", x, dtype, (tokens - 1) * stride + heads * head_dim)?;
    check::buffer(OP, "positions", positions, Dtype::I32, tokens)?;
    check::buffer(OP, "cos", cos, Dtype::F32, 0)?;
    check::buffer(OP, "sin", sin, Dtype::F32, cos.len())?;
    check::stream(OP, stream)?.run(|| by_dtype!(OP, dtype, T => rotate_all::<T>(args)))
}

fn rotate_all<T: Float>(args: &Rope<'_>) -> Result<()> {
    let half = args.head_dim / 2;
    // SAFETY: stream order keeps others away from `x` and writers from the positions; they do not overlap.
    let (x, positions) = unsafe { (args.x.host_slice_mut::<T>(), args.positions.host_slice::<i32>()) };
    let positions = &positions[..args.tokens];
    check::indices("rope", "positions", positions, args.cos.len() / half)?;
    let sign = if args.direction == Rotation::Inverse { -1.0 } else { 1.0 };
    scratch::with([half, half], |[cos, sin]| {
        for (token, &position) in positions.iter().enumerate() {
            load_from(args.cos, position as usize * half, cos)?;
            load_from(args.sin, position as usize * half, sin)?;
            round_angles::<T>(cos, sin, sign);
            let row = &mut x[token * args.stride..][..args.heads * args.head_dim];
            for head in row.chunks_exact_mut(args.head_dim) {
                let (first, second) = head.split_at_mut(half);
                rotate::<T>(first, second, cos, sin);
            }
        }
        Ok(())
    })
}

simd! {
    fn round_angles<T>(cos: &mut [f32], sin: &mut [f32], sign: f32) {
        for (cos, sin) in cos.iter_mut().zip(sin) {
            *cos = round::<T>(*cos);
            *sin = round::<T>(*sin) * sign;
        }
    }
}

simd! {
    fn rotate<T>(first: &mut [T], second: &mut [T], cos: &[f32], sin: &[f32]) {
        let len = first.len();
        let (second, cos, sin) = (&mut second[..len], &cos[..len], &sin[..len]);
        for i in 0..len {
            let (a, b) = (first[i].load(), second[i].load());
            first[i] = T::store(round::<T>(a * cos[i]) - round::<T>(b * sin[i]));
            second[i] = T::store(round::<T>(b * cos[i]) + round::<T>(a * sin[i]));
        }
    }
}
