//! Flat views into device memory.

use crate::{Dtype, Element, Error, Result};
use std::fmt;
use std::sync::Arc;

/// One allocation on one device; released when dropped.
pub trait Memory: fmt::Debug + Send + Sync {
    /// The device address of the first byte. 0 on the null device.
    fn address(&self) -> usize;
    fn bytes(&self) -> usize;

    /// Whether it was taken by [`crate::Device::alloc_host`]: kernels do not see it, copies do.
    fn on_host(&self) -> bool {
        false
    }
}

/// A typed, bounds-checked, flat view into device memory. Cloning shares the memory.
///
/// Buffers may overlap, as views of one region do. That is why no kernel argument is `&mut`: who may write
/// what and when is decided by the plan and kept by stream order and events, on every device alike.
#[derive(Clone)]
pub struct Buffer {
    memory: Arc<dyn Memory>,
    offset: usize,
    len: usize,
    dtype: Dtype,
}

impl Buffer {
    /// `len` elements from byte `offset` on.
    pub fn new(memory: Arc<dyn Memory>, offset: usize, dtype: Dtype, len: usize) -> Result<Self> {
        let end = len.checked_mul(dtype.bytes()).and_then(|bytes| bytes.checked_add(offset));
        if end.is_none_or(|end| end > memory.bytes()) {
            return Err(Error::argument(
                "Buffer::new",
                format!("{len} × {dtype} at byte {offset} leave a region of {} bytes", memory.bytes()),
            ));
        }
        if !offset.is_multiple_of(dtype.bytes()) {
            return Err(Error::argument("Buffer::new", format!("byte {offset} is not aligned for {dtype}")));
        }
        Ok(Buffer { memory, offset, len, dtype })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn num_bytes(&self) -> usize {
        self.len * self.dtype.bytes()
    }

    /// Whether it lies in host memory beside the device.
    pub fn on_host(&self) -> bool {
        self.memory.on_host()
    }

    /// Device address of the first element.
    pub fn address(&self) -> usize {
        self.memory.address() + self.offset
    }

    /// `len` elements from element `start` on.
    pub fn slice(&self, start: usize, len: usize) -> Result<Buffer> {
        if start.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::argument(
                "Buffer::slice",
                format!("{len} elements at {start} leave a buffer of {}", self.len),
            ));
        }
        let offset = self.offset + start * self.dtype.bytes();
        Ok(Buffer { memory: self.memory.clone(), offset, len, dtype: self.dtype })
    }

    /// The same bytes as elements of another type; the byte count must divide.
    pub fn cast_bits(&self, dtype: Dtype) -> Result<Buffer> {
        if !self.num_bytes().is_multiple_of(dtype.bytes()) {
            return Err(Error::argument(
                "Buffer::cast_bits",
                format!("{} bytes as {dtype}", self.num_bytes()),
            ));
        }
        Buffer::new(self.memory.clone(), self.offset, dtype, self.num_bytes() / dtype.bytes())
    }

    /// Whether the two views share a byte.
    pub fn overlaps(&self, other: &Buffer) -> bool {
        let (a, b) = (self.address(), other.address());
        Arc::ptr_eq(&self.memory, &other.memory) && a < b + other.num_bytes() && b < a + self.num_bytes()
    }

    pub fn expect_dtype<T: Element>(&self, op: &'static str) -> Result<()> {
        if self.dtype == T::DTYPE {
            return Ok(());
        }
        Err(Error::WrongDtype { op, expected: T::DTYPE, found: self.dtype })
    }

    /// Fails unless there are at least `len` elements.
    pub fn expect_len(&self, op: &'static str, what: &str, len: usize) -> Result<()> {
        if self.len >= len {
            return Ok(());
        }
        Err(Error::argument(op, format!("{what} has {} elements, {len} needed", self.len)))
    }

    /// The elements of a buffer in host memory.
    ///
    /// # Safety
    /// The memory is the host's and initialised, and nobody writes these elements while the slice lives.
    pub unsafe fn host_slice<T: Element>(&self) -> &[T] {
        debug_assert_eq!(self.dtype, T::DTYPE);
        // SAFETY: bounds and alignment were checked in `new` (regions are 256-byte aligned); the caller
        // vouches for the rest.
        unsafe { std::slice::from_raw_parts(self.address() as *const T, self.len) }
    }

    /// The elements of a buffer in host memory, to write.
    ///
    /// # Safety
    /// The memory is the host's, and nobody else reads or writes these elements while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn host_slice_mut<T: Element>(&self) -> &mut [T] {
        debug_assert_eq!(self.dtype, T::DTYPE);
        // SAFETY: as in `host_slice`.
        unsafe { std::slice::from_raw_parts_mut(self.address() as *mut T, self.len) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} × {} at {:#x})", self.len, self.dtype, self.address())
    }
}
