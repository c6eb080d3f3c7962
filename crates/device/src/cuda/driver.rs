//! The primary context of one GPU, and memory in it.

use super::library;
use crate::error::size;
use crate::{Error, Memory, Result};
use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Turns a driver's answer into a `Result` that names the call.
pub(super) fn check(call: &'static str, answer: CUresult) -> Result<()> {
    if answer == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::Driver { call, what: describe(answer) })
}

fn describe(answer: CUresult) -> String {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: the driver stores a pointer to a static string, or null for a code it does not know.
    let found = unsafe { sys::cuGetErrorString(answer, &mut text) };
    if found != CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("{answer:?}");
    }
    // SAFETY: not null, and the driver's strings are static and terminated.
    let text = unsafe { CStr::from_ptr(text) };
    format!("{} ({answer:?})", text.to_string_lossy())
}

/// The primary context of one GPU, retained while this lives.
pub(super) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
    pub ordinal: usize,
    pub name: String,
    /// Compute capability as 10·major + minor: 90 for an H100.
    pub arch: u32,
    pub multiprocessors: u32,
    /// Bytes of shared memory a kernel may ask for.
    pub max_shared_bytes: usize,
    total_bytes: usize,
    current_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
    host_bytes: AtomicUsize,
    peak_host_bytes: AtomicUsize,
    /// Why results on this GPU are worth nothing, once they are.
    pub void: OnceLock<String>,
}

// SAFETY: a context may be made current on any thread, by any number of threads at once.
unsafe impl Send for Context {}
// SAFETY: as above; the counters are atomic and the rest never changes.
unsafe impl Sync for Context {}

impl Context {
    pub fn open(ordinal: usize) -> Result<Arc<Self>> {
        library::driver()?;
        let count = library::device_count();
        if ordinal >= count {
            let what = format!("there is no device {ordinal}: the driver shows {count}");
            return Err(Error::Unavailable { library: "a CUDA device", what });
        }
        let mut device: sys::CUdevice = 0;
        // SAFETY: the pointer is to a local; the ordinal is in range.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) })?;
        use sys::CUdevice_attribute_enum as attribute;
        let major = read_attribute(device, attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = read_attribute(device, attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = read_attribute(device, attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let max_shared =
            read_attribute(device, attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let arch = major * 10 + minor;
        if arch < 80 {
            let what =
                format!("device {ordinal} has compute capability {major}.{minor}, 8.0 is needed for bf16");
            return Err(Error::Unavailable { library: "a CUDA device", what });
        }
        let name = read_name(device)?;
        let mut total_bytes = 0;
        // SAFETY: the pointer is to a local and the device exists.
        check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut total_bytes, device) })?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device exists; the reference taken here is given back in `drop`.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) })?;
        Ok(Arc::new(Context {
            device,
            raw,
            ordinal,
            name,
            arch: arch as u32,
            multiprocessors: multiprocessors.max(1) as u32,
            max_shared_bytes: max_shared.max(0) as usize,
            total_bytes,
            current_bytes: AtomicUsize::new(0),
            peak_bytes: AtomicUsize::new(0),
            host_bytes: AtomicUsize::new(0),
            peak_host_bytes: AtomicUsize::new(0),
            void: OnceLock::new(),
        }))
    }

    /// Makes this context the calling thread's. Every entry into the driver starts with it, because calls come
    /// from several threads.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained while `self` lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    /// (free, total) bytes of the GPU, whoever holds them.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to locals.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    pub fn synchronize(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: takes nothing; the context was made current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Bytes held through [`DeviceMemory`] now, and at most so far.
    pub fn held(&self) -> (usize, usize) {
        (self.current_bytes.load(Ordering::Relaxed), self.peak_bytes.load(Ordering::Relaxed))
    }
}

impl Context {
    /// Bytes held through [`PinnedMemory`] now, and at most so far.
    pub fn host_held(&self) -> (usize, usize) {
        (self.host_bytes.load(Ordering::Relaxed), self.peak_host_bytes.load(Ordering::Relaxed))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // An error here has nobody to go to, and the process loses nothing by it.
        // SAFETY: gives back the reference taken in `open`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{} ({}, sm_{})", self.ordinal, self.name, self.arch)
    }
}

fn read_attribute(device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Result<c_int> {
    let mut value: c_int = 0;
    // SAFETY: the pointer is to a local and the device exists.
    check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
    Ok(value)
}

fn read_name(device: sys::CUdevice) -> Result<String> {
    let mut name = [0u8; 256];
    // SAFETY: the driver writes at most the given length, terminator included.
    let answer = unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, device) };
    check("cuDeviceGetName", answer)?;
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..end]).into_owned())
}

/// One region from `cuMemAlloc`.
pub(super) struct DeviceMemory {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl DeviceMemory {
    pub fn new(context: &Arc<Context>, bytes: usize, what: &str) -> Result<Self> {
        // The driver rounds sizes up; absurd ones do not reach it.
        if bytes > context.total_bytes {
            return Err(no_room(context, bytes, what));
        }
        context.enter()?;
        let mut address: sys::CUdeviceptr = 0;
        if bytes > 0 {
            // SAFETY: the pointer is to a local.
            let answer = unsafe { sys::cuMemAlloc_v2(&mut address, bytes) };
            if answer == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                return Err(no_room(context, bytes, what));
            }
            check("cuMemAlloc", answer)?;
        }
        let current = context.current_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        context.peak_bytes.fetch_max(current, Ordering::Relaxed);
        Ok(DeviceMemory { context: context.clone(), address, bytes })
    }
}

/// What a context and its libraries take beside what we count; beyond that, others hold the memory.
const OWN_BYTES: usize = 2 << 30;

fn no_room(context: &Context, bytes: usize, what: &str) -> Error {
    let (held, info) = (context.held().0, context.memory_info().ok());
    let mut hint = String::new();
    if let Some((free, total)) = info {
        hint = format!("; {} of the GPU's {} are free", size(free), size(total));
        let others = total.saturating_sub(free + held);
        if others > OWN_BYTES {
            hint += &format!(", and other processes hold about {} (nvidia-smi shows them)", size(others));
        }
    }
    let (device, free) = (format!("cuda:{}", context.ordinal), info.map(|(free, _)| free));
    Error::OutOfMemory { device, what: what.to_string(), bytes, held, free, hint }
}

impl Memory for DeviceMemory {
    fn address(&self) -> usize {
        self.address as usize
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.context.current_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        // Work that uses the region may still be in flight; regions go rarely, so waiting for all of it is
        // cheap. After an error of the context there is nothing to wait for, and freeing fails as well.
        if self.address == 0 || self.context.synchronize().is_err() {
            return;
        }
        // SAFETY: the address came from `cuMemAlloc`, is freed once, and nothing in flight uses it.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({} bytes at {:#x} of {:?})", self.bytes, self.address, self.context)
    }
}

/// One region of host memory from `cuMemHostAlloc`: the GPU copies from and to it without the driver's own buffers.
pub(super) struct PinnedMemory {
    context: Arc<Context>,
    address: usize,
    bytes: usize,
}

impl PinnedMemory {
    pub fn new(context: &Arc<Context>, bytes: usize, what: &str) -> Result<Self> {
        context.enter()?;
        let mut address: *mut std::ffi::c_void = std::ptr::null_mut();
        if bytes > 0 {
            // SAFETY: the pointer is to a local. No flags: cached, since the host computes on it.
            let answer = unsafe { sys::cuMemHostAlloc(&mut address, bytes, 0) };
            if answer == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                let (device, held) = (format!("the host of cuda:{}", context.ordinal), context.host_held().0);
                let hint = "; the system may limit locked memory (ulimit -l)".to_string();
                let free = None;
                return Err(Error::OutOfMemory { device, what: what.to_string(), bytes, held, free, hint });
            }
            check("cuMemHostAlloc", answer)?;
        }
        let current = context.host_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        context.peak_host_bytes.fetch_max(current, Ordering::Relaxed);
        Ok(PinnedMemory { context: context.clone(), address: address.expose_provenance(), bytes })
    }
}

impl Memory for PinnedMemory {
    fn address(&self) -> usize {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn on_host(&self) -> bool {
        true
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        self.context.host_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        // As with the device's own: copies may be in flight, and regions go rarely.
        if self.address == 0 || self.context.synchronize().is_err() {
            return;
        }
        // SAFETY: the address came from `cuMemHostAlloc`, is freed once, and nothing in flight uses it.
        let _ = unsafe { sys::cuMemFreeHost(std::ptr::with_exposed_provenance_mut(self.address)) };
    }
}

impl fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedMemory({} bytes at {:#x} beside {:?})", self.bytes, self.address, self.context)
    }
}
