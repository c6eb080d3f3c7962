//! Copies, conversions, and what is done element by element; and the sums to one number.
//!
//! Side streams use the first four and the sums, so those own their buffers and return before they have run.

use super::float::{Float, LANES, by_dtype, load, simd, store};
use super::{check, scratch};
use crate::{Buffer, Dtype, Error, Result, Stream};

/// Elements converted at a time: small enough to stay in the first-level cache.
pub const CHUNK: usize = 2048;

pub fn fill(stream: &Stream, dst: &Buffer, value: f32) -> Result<()> {
    check::float("fill", dst)?;
    let dst = dst.clone();
    check::stream("fill", stream)?.submit(move || {
        by_dtype!("fill", dst.dtype(), T => {
            // SAFETY: stream order keeps everyone else away from `dst` while this runs.
            unsafe { dst.host_slice_mut::<T>() }.fill(T::store(value));
            Ok(())
        })
    })
}

pub fn copy(stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
    check::buffer("copy", "src", src, dst.dtype(), 0)?;
    check::same_len("copy", src, dst)?;
    if src.overlaps(dst) {
        return Err(Error::argument("copy", format!("{src:?} and {dst:?} overlap")));
    }
    let (src, dst) = (src.cast_bits(Dtype::U8)?, dst.cast_bits(Dtype::U8)?);
    check::stream("copy", stream)?.submit(move || {
        // SAFETY: stream order keeps other writers away, and the two do not overlap.
        let (src, dst) = unsafe { (src.host_slice::<u8>(), dst.host_slice_mut::<u8>()) };
        dst.copy_from_slice(src);
        Ok(())
    })
}

pub fn cast(stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
    check::float("cast", src)?;
    check::float("cast", dst)?;
    check::same_len("cast", src, dst)?;
    let (src, dst) = (src.clone(), dst.clone());
    check::stream("cast", stream)?.submit(move || {
        let mut values = [0.0; CHUNK];
        for start in (0..src.len()).step_by(CHUNK) {
            let values = &mut values[..CHUNK.min(src.len() - start)];
            load_from(&src, start, values)?;
            store_to(&dst, start, values)?;
        }
        Ok(())
    })
}

pub fn add(stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
    check::float("add", src)?;
    check::float("add", dst)?;
    check::same_len("add", src, dst)?;
    let (src, dst) = (src.clone(), dst.clone());
    check::stream("add", stream)?.submit(move || {
        let (mut a, mut b) = ([0.0; CHUNK], [0.0; CHUNK]);
        for start in (0..src.len()).step_by(CHUNK) {
            let len = CHUNK.min(src.len() - start);
            load_from(&dst, start, &mut a[..len])?;
            load_from(&src, start, &mut b[..len])?;
            add_assign(&mut a[..len], &b[..len]);
            store_to(&dst, start, &a[..len])?;
        }
        Ok(())
    })
}

simd! {
    /// a += b
    pub fn add_assign(a: &mut [f32], b: &[f32]) {
        for (a, b) in a.iter_mut().zip(b) {
            *a += b;
        }
    }
}

/// Elements from `start` on, as f32.
pub fn load_from(buffer: &Buffer, start: usize, values: &mut [f32]) -> Result<()> {
    by_dtype!("load", buffer.dtype(), T => {
        // SAFETY: called from within kernels, where stream order keeps writers away; no mutable view lives.
        load(unsafe { &buffer.host_slice::<T>()[start..start + values.len()] }, values);
        Ok(())
    })
}

/// Rounds values into the elements from `start` on.
pub fn store_to(buffer: &Buffer, start: usize, values: &[f32]) -> Result<()> {
    by_dtype!("store", buffer.dtype(), T => {
        // SAFETY: called from within kernels, where stream order keeps others away; no other view lives.
        store(values, unsafe { &mut buffer.host_slice_mut::<T>()[start..start + values.len()] });
        Ok(())
    })
}

pub fn sum(stream: &Stream, x: &Buffer, out: &Buffer, accumulate: bool) -> Result<()> {
    check::buffer("sum", "x", x, Dtype::F32, 0)?;
    reduce("sum", stream, x, out, accumulate, add_up)
}

pub fn sum_squares(stream: &Stream, x: &Buffer, out: &Buffer, accumulate: bool) -> Result<()> {
    reduce("sum_squares", stream, x, out, accumulate, add_up_squares)
}

/// Sums in f64, where neither the order nor the length is felt, and rounds once.
fn reduce(
    op: &'static str,
    stream: &Stream,
    x: &Buffer,
    out: &Buffer,
    accumulate: bool,
    step: fn(&[f32], &mut [f64; LANES]),
) -> Result<()> {
    check::float(op, x)?;
    check::buffer(op, "out", out, Dtype::F32, 1)?;
    let (x, out) = (x.clone(), out.clone());
    check::stream(op, stream)?.submit(move || {
        let mut lanes = [0.0f64; LANES];
        if x.dtype() == Dtype::F32 {
            // SAFETY: stream order keeps writers away from `x` while this runs.
            step(unsafe { x.host_slice::<f32>() }, &mut lanes);
        } else {
            scratch::with([CHUNK], |[values]| {
                (0..x.len()).step_by(CHUNK).try_for_each(|start| {
                    let values = &mut values[..CHUNK.min(x.len() - start)];
                    load_from(&x, start, values)?;
                    step(values, &mut lanes);
                    Ok::<(), Error>(())
                })
            })?;
        }
        // SAFETY: stream order keeps everyone else away from `out`.
        let out = unsafe { out.host_slice_mut::<f32>() };
        let before = if accumulate { f64::from(out[0]) } else { 0.0 };
        out[0] = (before + lanes.iter().sum::<f64>()) as f32;
        Ok(())
    })
}

/// Adds f(value) to the lanes in turn.
#[inline(always)]
fn accumulate_lanes(values: &[f32], lanes: &mut [f64; LANES], f: impl Fn(f32) -> f64) {
    let (chunks, rest) = values.as_chunks::<LANES>();
    // A copy stays in registers over the loop.
    let mut sums = *lanes;
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += f(chunk[lane]);
        }
    }
    for (sum, &value) in sums.iter_mut().zip(rest) {
        *sum += f(value);
    }
    *lanes = sums;
}

simd! {
    fn add_up(values: &[f32], lanes: &mut [f64; LANES]) {
        accumulate_lanes(values, lanes, f64::from);
    }
}

simd! {
    fn add_up_squares(values: &[f32], lanes: &mut [f64; LANES]) {
        accumulate_lanes(values, lanes, |value| f64::from(value) * f64::from(value));
    }
}

pub fn reciprocal(stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
    check::buffer("reciprocal", "src", src, Dtype::F32, 0)?;
    check::buffer("reciprocal", "dst", dst, Dtype::F32, 0)?;
    check::same_len("reciprocal", src, dst)?;
    check::stream("reciprocal", stream)?.run(|| {
        let mut value = [0.0];
        for i in 0..src.len() {
            load_from(src, i, &mut value)?;
            let inverse = if value[0] == 0.0 { 0.0 } else { 1.0 / value[0] };
            store_to(dst, i, &[inverse])?;
        }
        Ok(())
    })
}

pub fn multiply(stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
    check::buffer("multiply", "src", src, Dtype::F32, 0)?;
    check::buffer("multiply", "dst", dst, Dtype::F32, 0)?;
    check::same_len("multiply", src, dst)?;
    check::stream("multiply", stream)?.run(|| {
        let (mut a, mut b) = ([0.0], [0.0]);
        for i in 0..src.len() {
            load_from(src, i, &mut a)?;
            load_from(dst, i, &mut b)?;
            store_to(dst, i, &[a[0] * b[0]])?;
        }
        Ok(())
    })
}
