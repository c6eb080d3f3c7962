//! Memory, streams, events and kernels: what one rank computes on.
//!
//! Three devices implement [`Device`]: [`cpu`] (the default, and the reference every other one is compared
//! with), [`cuda`] (loaded at run time where a driver is present) and [`null`] (counts bytes and computes
//! nothing; the memory plan is made on it). A device knows nothing of tensors, models or ranks: kernels work
//! on flat [`Buffer`]s and sizes.
//!
//! # What is asynchronous
//! Every kernel takes a [`Stream`] and may return before it has run. Work on one stream runs in the order in
//! which it was issued; between streams only [`Event`]s order it. On the CPU the compute stream runs inline
//! and side streams are worker threads, so the same rules have the same meaning there.

mod buffer;
pub mod cpu;
pub mod cuda;
mod dtype;
mod error;
pub mod host;
mod kernels;
pub mod null;
mod profile;
mod stream;
pub mod timed;
mod work;

pub use buffer::{Buffer, Memory};
pub use dtype::{Dtype, Element};
pub use error::{Error, Result};
pub use kernels::*;
pub use profile::Profile;
pub use stream::{Event, Role, Stream};
pub use work::Work;

use std::fmt;
use std::sync::Arc;

/// Bytes a device holds for us, now and at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    pub current_bytes: usize,
    pub peak_bytes: usize,
}

/// Bytes that were copied without being computed with, since the device was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// From one place on the device to another, by [`Kernels::copy`].
    pub on_device: usize,
    pub to_host: usize,
    pub from_host: usize,
}

/// A place with memory, streams and kernels. One rank has one device.
pub trait Device: Kernels + fmt::Debug + Send + Sync {
    /// Which device's sizes (workspaces, scratch) this one needs; the null device takes another's profile.
    fn profile(&self) -> Profile;

    /// A name a user recognises: "cpu", "cuda:0 (NVIDIA H200)".
    fn name(&self) -> String;

    /// Takes memory. Contents are unspecified. Freed when the last [`Buffer`] into it goes.
    /// `what` names the region in the error when there is no room.
    fn alloc(&self, bytes: usize, what: &str) -> Result<Arc<dyn Memory>>;

    /// Bytes taken by [`Device::alloc`].
    fn memory_use(&self) -> MemoryUse;

    /// Takes host memory that [`Device::transfer`] reaches at full speed. Counted apart from the device's own.
    fn alloc_host(&self, bytes: usize, what: &str) -> Result<Arc<dyn Memory>>;

    /// Bytes taken by [`Device::alloc_host`].
    fn host_use(&self) -> MemoryUse;

    /// Copies bytes from host memory taken by [`Device::alloc_host`] to the device, or the other way, in stream order.
    fn transfer(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()>;

    /// What has been copied so far.
    fn copied(&self) -> Copied;

    /// A worker for what the host computes itself beside the device: see [`host`].
    fn host_stream(&self, name: &str) -> Result<Stream> {
        Ok(Stream::Cpu(cpu::Stream::new(name, Role::Side)?))
    }

    /// Cores such a worker may take.
    fn host_threads(&self) -> usize {
        1
    }

    /// Bytes the device itself says this process holds, everything included (driver context, libraries),
    /// where it can tell.
    fn measured_bytes(&self) -> Option<usize>;

    /// Makes a stream. `name` appears in errors and traces.
    fn stream(&self, name: &str, role: Role) -> Result<Stream>;

    /// Copies host bytes into `dst`, in stream order. `src` may be reused as soon as this returns.
    fn write(&self, stream: &Stream, src: &[u8], dst: &Buffer) -> Result<()>;

    /// Waits for the stream and copies `src` to the host.
    fn read(&self, stream: &Stream, src: &Buffer, dst: &mut [u8]) -> Result<()>;

    /// Chooses how to compute these products, where there is a choice: by timing, on `room`, whose contents are
    /// lost. What was chosen is told in the device's own words, to be given to [`Device::adopt`] on every rank.
    fn choose(
        &self,
        _stream: &Stream,
        _products: &[ProductShape],
        _room: &Arc<dyn Memory>,
    ) -> Result<String> {
        Ok(String::new())
    }

    /// Computes products as chosen, from now on. What another kind of device chose is passed over.
    fn adopt(&self, _choices: &str) {}
}

/// Typed conveniences over [`Device::write`] and [`Device::read`].
impl dyn Device + '_ {
    pub fn write_slice<T: Element>(&self, stream: &Stream, src: &[T], dst: &Buffer) -> Result<()> {
        dst.expect_dtype::<T>("write")?;
        self.write(stream, dtype::bytes_of(src), dst)
    }

    pub fn read_vec<T: Element>(&self, stream: &Stream, src: &Buffer) -> Result<Vec<T>> {
        src.expect_dtype::<T>("read")?;
        let mut out = vec![T::ZERO; src.len()];
        self.read(stream, src, dtype::bytes_of_mut(&mut out))?;
        Ok(out)
    }

    /// As [`Self::alloc_buffer`], in host memory.
    pub fn alloc_host_buffer(&self, dtype: Dtype, len: usize, what: &str) -> Result<Buffer> {
        let memory = self.alloc_host(len * dtype.bytes(), what)?;
        Buffer::new(memory, 0, dtype, len)
    }

    /// Allocates one region and returns it as a buffer of `len` elements.
    pub fn alloc_buffer(&self, dtype: Dtype, len: usize, what: &str) -> Result<Buffer> {
        let memory = self.alloc(len * dtype.bytes(), what)?;
        Buffer::new(memory, 0, dtype, len)
    }
}
