//! Host memory, counted.

use crate::{Buffer, Copied, Error, Memory, MemoryUse, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Every region starts at a multiple of this.
const ALIGN: usize = 256;
/// Regions of this size and more are asked for in huge pages, whose size this is on x86-64: a walk through a
/// large matrix by its short side would otherwise miss the table of pages at every step.
const HUGE: usize = 2 << 20;

/// Bytes copied so far.
#[derive(Debug, Default)]
pub struct CopyCounters {
    pub on_device: AtomicUsize,
    pub to_host: AtomicUsize,
    pub from_host: AtomicUsize,
}

impl CopyCounters {
    pub fn copied(&self) -> Copied {
        Copied {
            on_device: self.on_device.load(Ordering::Relaxed),
            to_host: self.to_host.load(Ordering::Relaxed),
            from_host: self.from_host.load(Ordering::Relaxed),
        }
    }

    /// Counts a transfer, which is to the host or from it.
    pub fn transferred(&self, src: &Buffer, dst: &Buffer) -> Result<()> {
        let counter = match (src.on_host(), dst.on_host()) {
            (false, true) => &self.to_host,
            (true, false) => &self.from_host,
            _ => {
                return Err(Error::argument(
                    "transfer",
                    "one of the buffers is the host's, the other is not",
                ));
            }
        };
        counter.fetch_add(src.num_bytes(), Ordering::Relaxed);
        Ok(())
    }
}

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
    align: usize,
    bytes: usize,
    counters: Arc<Counters>,
    /// Whether it stands for the host's memory rather than the device's: on the CPU both are the same.
    on_host: bool,
}

impl Region {
    pub fn new(bytes: usize, what: &str, counters: &Arc<Counters>, on_host: bool) -> Result<Self> {
        let no_room = || Error::OutOfMemory {
            device: "cpu".into(),
            what: what.into(),
            bytes,
            held: counters.memory_use().current_bytes,
            free: None,
            hint: String::new(),
        };
        let align = if bytes >= HUGE { HUGE } else { ALIGN };
        let padded = bytes.checked_add(align).ok_or_else(no_room)?;
        let layout = Layout::from_size_align(padded, align_of::<u64>()).map_err(|_| no_room())?;
        // SAFETY: the layout's size is at least `ALIGN`.
        let block = unsafe { alloc_zeroed(layout) };
        if block.is_null() {
            return Err(no_room());
        }
        counters.add(bytes);
        let (block, counters) = (block.expose_provenance(), counters.clone());
        let region = Region { block, layout, align, bytes, counters, on_host };
        if align == HUGE {
            advise_huge_pages(region.address(), bytes / HUGE * HUGE);
        }
        Ok(region)
    }
}

/// Only advice: where the system does not take it, pages are small and all is as it was.
#[cfg(all(target_os = "linux", not(miri)))]
fn advise_huge_pages(address: usize, bytes: usize) {
    // SAFETY: the range lies inside a block just allocated; the call changes no contents.
    unsafe {
        libc::madvise(std::ptr::with_exposed_provenance_mut(address), bytes, libc::MADV_HUGEPAGE);
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn advise_huge_pages(_address: usize, _bytes: usize) {}

impl Memory for Region {
    fn address(&self) -> usize {
        self.block.next_multiple_of(self.align)
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn on_host(&self) -> bool {
        self.on_host
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
