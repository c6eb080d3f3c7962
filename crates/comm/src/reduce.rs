//! Sums and maxima over the ranks' host memory, always in rank order.

use crate::copy::{self, LARGE};
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
    /// `scratch` has room for `values` as sums.
    fn fold(sums: &mut [Self::Sum], values: &[Self], scratch: &mut [Self::Sum], reduction: Reduction);
}

fn zip_with<T: Copy>(sums: &mut [T], values: &[T], f: impl Fn(T, T) -> T) {
    for (sum, &value) in sums.iter_mut().zip(values) {
        *sum = f(*sum, value);
    }
}

/// Types that are summed as they are.
macro_rules! reduce_plain {
    ($type:ty, $add:expr, $max:expr) => {
        impl Reduce for $type {
            type Sum = $type;
            fn load(from: &[Self], into: &mut [Self]) {
                into.copy_from_slice(from);
            }
            fn store(from: &[Self], into: &mut [Self]) {
                into.copy_from_slice(from);
            }
            fn fold(sums: &mut [Self], values: &[Self], _: &mut [Self], reduction: Reduction) {
                match reduction {
                    Reduction::Sum => zip_with(sums, values, $add),
                    Reduction::Max => zip_with(sums, values, $max),
                }
            }
        }
    };
}

/// Types that are summed in f32 and rounded once.
macro_rules! reduce_half {
    ($type:ty) => {
        impl Reduce for $type {
            type Sum = f32;
            fn load(from: &[Self], into: &mut [f32]) {
                from.convert_to_f32_slice(into);
            }
            fn store(from: &[f32], into: &mut [Self]) {
                into.convert_from_f32_slice(from);
            }
            fn fold(sums: &mut [f32], values: &[Self], scratch: &mut [f32], reduction: Reduction) {
                values.convert_to_f32_slice(scratch);
                f32::fold(sums, scratch, &mut [], reduction);
            }
        }
    };
}

// A maximum passes over NaN, as NCCL's does.
reduce_plain!(f32, |a, b| a + b, f32::max);
reduce_plain!(i32, i32::wrapping_add, Ord::max);
reduce_half!(bf16);
reduce_half!(f16);

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
    let addresses: Vec<usize> = sources.iter().map(Buffer::address).collect();
    // SAFETY: the caller's promise is passed on; buffers are aligned for their elements.
    unsafe { reduce_at(&addresses, dst.address(), dst.len(), dst.dtype(), reduction, dst.num_bytes()) }
}

/// [`reduce`] of `len` elements at bare addresses. `whole` says how many bytes the destination has that this is
/// a piece of.
///
/// # Safety
/// Each address is that of `len` elements in host memory, aligned for them; nobody writes the sources and
/// nobody else touches the destination until this returns. The destination may be one of the sources.
pub(crate) unsafe fn reduce_at(
    sources: &[usize],
    dst: usize,
    len: usize,
    dtype: Dtype,
    reduction: Reduction,
    whole: usize,
) -> device::Result<()> {
    // A destination that is also a source was just read, and so is in the cache.
    let past_cache = whole >= LARGE && !sources.contains(&dst);
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match dtype {
            Dtype::F32 => reduce_as::<f32>(sources, dst, len, reduction, past_cache),
            Dtype::Bf16 => reduce_as::<bf16>(sources, dst, len, reduction, past_cache),
            Dtype::F16 => reduce_as::<f16>(sources, dst, len, reduction, past_cache),
            Dtype::I32 => reduce_as::<i32>(sources, dst, len, reduction, past_cache),
            Dtype::U8 => return Err(Error::Unsupported { op: "reduce", dtype }),
        }
    }
    Ok(())
}

/// # Safety
/// As for [`reduce_at`].
unsafe fn reduce_as<T: Reduce>(
    sources: &[usize],
    dst: usize,
    len: usize,
    reduction: Reduction,
    past_cache: bool,
) {
    let mut sums = vec![T::Sum::default(); SLICE.min(len)];
    let mut scratch = sums.clone();
    let mut rounded = vec![T::ZERO; if past_cache { sums.len() } else { 0 }];
    for start in (0..len).step_by(SLICE) {
        let len = SLICE.min(len - start);
        let (sums, scratch) = (&mut sums[..len], &mut scratch[..len]);
        let offset = start * size_of::<T>();
        for (index, source) in sources.iter().enumerate() {
            // SAFETY: host memory that nobody writes now; the destination, which may be this source, is
            // borrowed only after the last source was read.
            let elements = unsafe { std::slice::from_raw_parts((source + offset) as *const T, len) };
            match index {
                0 => T::load(elements, sums),
                _ => T::fold(sums, elements, scratch, reduction),
            }
        }
        if past_cache {
            T::store(sums, &mut rounded[..len]);
            // SAFETY: only we touch the destination, which is no source, nor `rounded`.
            unsafe { copy::copy(rounded.as_ptr() as usize, dst + offset, len * size_of::<T>(), LARGE) };
            continue;
        }
        // SAFETY: only we touch the destination, and no slice of a source is alive.
        T::store(sums, unsafe { std::slice::from_raw_parts_mut((dst + offset) as *mut T, len) });
    }
}

/// Bytes from one host buffer to another of the same size; nothing when they are the same.
///
/// # Safety
/// Both are in host memory and do not overlap unless they are the same; nobody writes `src` and nobody else
/// touches `dst` until this returns.
pub(crate) unsafe fn copy_bytes(src: &Buffer, dst: &Buffer) {
    assert_eq!(src.num_bytes(), dst.num_bytes(), "a copy between buffers of different sizes");
    // SAFETY: sizes are equal and inside their regions; the caller vouches for the rest.
    unsafe { copy::copy(src.address(), dst.address(), src.num_bytes(), dst.num_bytes()) };
}
