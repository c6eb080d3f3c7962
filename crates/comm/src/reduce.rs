//! Sums and maxima over the ranks' host memory, always in rank order.

use crate::{Reduction, Result};
use device::{Buffer, Dtype, Element, Error};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements reduced at a time: the accumulator stays in the first-level cache.
const SLICE: usize = 4096;

/// An element type that can be summed: in which type, and how to get there and back.
trait Reduce: Element {
    type Sum: Copy + Default;
    fn load(from: &[Self], into: &mut [Self::Sum]);
    fn store(from: &[Self::Sum], into: &mut [Self]);
    fn add(sums: &mut [Self::Sum], values: &[Self::Sum]);
    fn max(sums: &mut [Self::Sum], values: &[Self::Sum]);
}

fn zip_with<T: Copy>(sums: &mut [T], values: &[T], f: impl Fn(T, T) -> T) {
    for (sum, &value) in sums.iter_mut().zip(values) {
        *sum = f(*sum, value);
    }
}

macro_rules! reduce {
    ($type:ty, $sum:ty, $load:expr, $store:expr, $add:expr, $max:expr) => {
        impl Reduce for $type {
            type Sum = $sum;
            fn load(from: &[Self], into: &mut [$sum]) {
                $load(from, into)
            }
            fn store(from: &[$sum], into: &mut [Self]) {
                $store(from, into)
            }
            fn add(sums: &mut [$sum], values: &[$sum]) {
                zip_with(sums, values, $add)
            }
            fn max(sums: &mut [$sum], values: &[$sum]) {
                zip_with(sums, values, $max)
            }
        }
    };
}

fn copy<T: Copy>(from: &[T], into: &mut [T]) {
    into.copy_from_slice(from);
}

// A maximum passes over NaN, as NCCL's does.
reduce!(f32, f32, copy, copy, |a, b| a + b, f32::max);
reduce!(i32, i32, copy, copy, i32::wrapping_add, Ord::max);
reduce!(
    bf16,
    f32,
    |from: &[bf16], into: &mut [f32]| from.convert_to_f32_slice(into),
    |from: &[f32], into: &mut [bf16]| into.convert_from_f32_slice(from),
    |a, b| a + b,
    f32::max
);
reduce!(
    f16,
    f32,
    |from: &[f16], into: &mut [f32]| from.convert_to_f32_slice(into),
    |from: &[f32], into: &mut [f16]| into.convert_from_f32_slice(from),
    |a, b| a + b,
    f32::max
);

pub(crate) fn supports(op: &'static str, dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F32 | Dtype::Bf16 | Dtype::F16 | Dtype::I32 => Ok(()),
        Dtype::U8 => Err(Error::Unsupported { op, dtype }.into()),
    }
}

/// `dst` becomes the reduction of `sources`, taken in their order and rounded once. `dst` may be one of them.
///
/// # Safety
/// All buffers are in host memory, of `dst`'s dtype and length; nobody writes the sources and nobody else
/// touches `dst` until this returns.
pub(crate) unsafe fn reduce(sources: &[Buffer], dst: &Buffer, reduction: Reduction) -> device::Result<()> {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match dst.dtype() {
            Dtype::F32 => reduce_as::<f32>(sources, dst, reduction),
            Dtype::Bf16 => reduce_as::<bf16>(sources, dst, reduction),
            Dtype::F16 => reduce_as::<f16>(sources, dst, reduction),
            Dtype::I32 => reduce_as::<i32>(sources, dst, reduction),
            dtype @ Dtype::U8 => Err(Error::Unsupported { op: "reduce", dtype }),
        }
    }
}

/// # Safety
/// As for [`reduce`].
unsafe fn reduce_as<T: Reduce>(sources: &[Buffer], dst: &Buffer, reduction: Reduction) -> device::Result<()> {
    let mut sums = vec![T::Sum::default(); SLICE.min(dst.len())];
    let mut values = sums.clone();
    for start in (0..dst.len()).step_by(SLICE) {
        let len = SLICE.min(dst.len() - start);
        let (sums, values) = (&mut sums[..len], &mut values[..len]);
        for (index, source) in sources.iter().enumerate() {
            let source = source.slice(start, len)?;
            // SAFETY: host memory that nobody writes now; `dst`, which may be this source, is borrowed only
            // after the last source was read.
            let elements = unsafe { source.host_slice::<T>() };
            if index == 0 {
                T::load(elements, sums);
                continue;
            }
            T::load(elements, values);
            match reduction {
                Reduction::Sum => T::add(sums, values),
                Reduction::Max => T::max(sums, values),
            }
        }
        let out = dst.slice(start, len)?;
        // SAFETY: only we touch `dst`, and no slice of a source is alive.
        T::store(sums, unsafe { out.host_slice_mut::<T>() });
    }
    Ok(())
}

/// Bytes from one host buffer to another of the same size; nothing when they are the same.
///
/// # Safety
/// Both are in host memory and do not overlap unless they are the same; nobody writes `src` and nobody else
/// touches `dst` until this returns.
pub(crate) unsafe fn copy_bytes(src: &Buffer, dst: &Buffer) {
    assert_eq!(src.num_bytes(), dst.num_bytes(), "a copy between buffers of different sizes");
    if src.address() == dst.address() || src.is_empty() {
        return;
    }
    // SAFETY: sizes are equal and inside their regions; the caller vouches for the rest.
    unsafe {
        std::ptr::copy_nonoverlapping(src.address() as *const u8, dst.address() as *mut u8, src.num_bytes());
    }
}
