//! Pinned host memory through which everything goes to the device.
//!
//! The driver may or may not have read pageable memory when an asynchronous copy returns: it depends on size,
//! platform and on whether the caller's memory happens to be pinned. Copying into our own pinned slots first
//! makes "the source may be reused" hold everywhere, without waiting for the stream.

use super::driver::{Context, check};
use super::stream::{Event, Stream};
use crate::Result;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

const SLOTS: usize = 4;
const SLOT_BYTES: usize = 4 << 20;

pub(super) struct Staging {
    context: Arc<Context>,
    ring: Mutex<Option<Ring>>,
}

struct Ring {
    context: Arc<Context>,
    pinned: *mut u8,
    /// Reached when the slot's last copy has been made.
    busy: [Option<Event>; SLOTS],
    next: usize,
}

// SAFETY: pinned memory belongs to the process, not to a thread.
unsafe impl Send for Ring {}

impl Staging {
    pub fn new(context: &Arc<Context>) -> Self {
        Staging { context: context.clone(), ring: Mutex::new(None) }
    }

    /// Copies `src` to `address`, in stream order. `src` has been read when this returns.
    pub fn upload(&self, stream: &Stream, src: &[u8], address: usize) -> Result<()> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = match &mut *ring {
            Some(ring) => ring,
            empty => empty.insert(Ring::new(&self.context)?),
        };
        for (i, chunk) in src.chunks(SLOT_BYTES).enumerate() {
            ring.upload(stream, chunk, address + i * SLOT_BYTES)?;
        }
        Ok(())
    }
}

impl Ring {
    fn new(context: &Arc<Context>) -> Result<Self> {
        context.enter()?;
        let mut pinned: *mut c_void = std::ptr::null_mut();
        // SAFETY: the pointer is to a local. No flags: cached, so that filling it is an ordinary copy.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut pinned, SLOTS * SLOT_BYTES, 0) })?;
        Ok(Ring { context: context.clone(), pinned: pinned.cast(), busy: [const { None }; SLOTS], next: 0 })
    }

    fn upload(&mut self, stream: &Stream, chunk: &[u8], address: usize) -> Result<()> {
        let slot = self.next;
        self.next = (slot + 1) % SLOTS;
        if let Some(event) = self.busy[slot].take() {
            event.synchronize()?;
        }
        self.context.enter()?;
        // SAFETY: a chunk is at most a slot long, and the slot's last copy has been made.
        let from = unsafe {
            let from = self.pinned.add(slot * SLOT_BYTES);
            std::ptr::copy_nonoverlapping(chunk.as_ptr(), from, chunk.len());
            from
        };
        // SAFETY: the slot stays untouched until its event; the caller checked the destination's length.
        let answer = unsafe {
            sys::cuMemcpyHtoDAsync_v2(address as sys::CUdeviceptr, from.cast(), chunk.len(), stream.handle())
        };
        check("cuMemcpyHtoDAsync", answer)?;
        self.busy[slot] = Some(stream.record()?);
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for event in self.busy.iter().flatten() {
            // The memory must outlive its copies; after an error there are none.
            let _ = event.synchronize();
        }
        if self.context.enter().is_ok() {
            // SAFETY: allocated by `cuMemHostAlloc`, freed once, no copy in flight.
            let _ = unsafe { sys::cuMemFreeHost(self.pinned.cast()) };
        }
    }
}
