//! Host memory, counted.

use crate::{Error, Memory, MemoryUse, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Every region starts at a multiple of this.
const ALIGN: usize = 256;

/// Bytes in regions now, and at most.
#[derive(Debug, Default)]
pub struct Counters {
    current: AtomicUsize,
    peak: AtomicUsize,
}

impl Counters {
    pub fn memory_use(&self) -> MemoryUse {
        MemoryUse {
            current_bytes: self.current.load(Ordering::Relaxed),
            peak_bytes: self.peak.load(Ordering::Relaxed),
        }
    }

    fn add(&self, bytes: usize) {
        let now = self.current.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }
}

/// One region. Pages become resident when they are first touched: the allocator has them zero already, and
/// aligning within a larger block (rather than asking the allocator to) keeps it from writing them.
#[derive(Debug)]
pub struct Region {
    block: usize,
    layout: Layout,
    bytes: usize,
    counters: Arc<Counters>,
}

impl Region {
    pub fn new(bytes: usize, what: &str, counters: &Arc<Counters>) -> Result<Self> {
        let no_room = || Error::OutOfMemory {
            device: "cpu".into(),
            what: what.into(),
            bytes,
            held: counters.memory_use().current_bytes,
            hint: String::new(),
        };
        let padded = bytes.checked_add(ALIGN).ok_or_else(no_room)?;
        let layout = Layout::from_size_align(padded, align_of::<u64>()).map_err(|_| no_room())?;
        // SAFETY: the layout's size is at least `ALIGN`.
        let block = unsafe { alloc_zeroed(layout) };
        if block.is_null() {
            return Err(no_room());
        }
        counters.add(bytes);
        Ok(Region { block: block.expose_provenance(), layout, bytes, counters: counters.clone() })
    }
}

impl Memory for Region {
    fn address(&self) -> usize {
        self.block.next_multiple_of(ALIGN)
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.counters.current.fetch_sub(self.bytes, Ordering::Relaxed);
        // SAFETY: `block` came from `alloc_zeroed` with this layout, and no buffer into it is left.
        unsafe { dealloc(std::ptr::with_exposed_provenance_mut(self.block), self.layout) }
    }
}

/// Bytes of this process that are in physical memory.
pub fn resident_bytes() -> Option<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = statm.split_whitespace().nth(1)?.parse().ok()?;
    // The kernel counts in its own pages, whose size std cannot tell; 4 KiB holds on x86-64 Linux.
    Some(pages * 4096)
}
