//! Which libraries are there. `cudarc` panics where a library or a symbol is missing, so both are looked for
//! before anything is called.

use super::driver::check;
use super::search::load_library;
use crate::{Error, Result};
use cudarc::{cublaslt::sys as lt, driver::sys, nvrtc::sys as nvrtc};
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

/// Everything this device calls in the driver. `cudarc` resolves symbols one by one on first use.
const DRIVER: &[&str] = &[
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD2D8Async",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

const NVRTC: &[&str] = &[
    "nvrtcCompileProgram",
    "nvrtcCreateProgram",
    "nvrtcDestroyProgram",
    "nvrtcGetCUBIN",
    "nvrtcGetCUBINSize",
    "nvrtcGetNumSupportedArchs",
    "nvrtcGetPTX",
    "nvrtcGetPTXSize",
    "nvrtcGetProgramLog",
    "nvrtcGetProgramLogSize",
    "nvrtcGetSupportedArchs",
    "nvrtcVersion",
];

const CUBLASLT: &[&str] = &[
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetVersion",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoCheck",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
];

/// Whether a CUDA device can be opened here, and if not, what is missing. Never panics.
pub fn present() -> std::result::Result<(), String> {
    let ready = driver().and_then(|()| nvrtc_ready()).and_then(|()| cublaslt_ready());
    ready.map_err(|error| error.to_string())
}

/// How many GPUs the driver shows; none where there is no driver.
pub fn device_count() -> usize {
    driver().and_then(|()| count()).unwrap_or(0)
}

fn missing(library: &'static str, what: impl Into<String>) -> Error {
    Error::Unavailable { library, what: what.into() }
}

/// Looks for a library and its symbols, once.
macro_rules! look_for {
    ($name:literal, $sys:ident, $symbols:expr) => {{
        // SAFETY: loading a library runs its initialisers, which is what the user's installation is for.
        if !unsafe { $sys::is_culib_present() } {
            Err(missing($name, "the library was not found (on LD_LIBRARY_PATH, in CUDA_HOME, or among Python's nvidia packages)"))
        } else {
            let is_absent = |symbol: &&&str| {
                // SAFETY: the symbol is only looked up here, not called.
                unsafe { $sys::culib().get::<*const c_void>(symbol.as_bytes()).is_err() }
            };
            let absent = $symbols.iter().find(is_absent);
            absent.map_or(Ok(()), |symbol| Err(missing($name, format!("it has no {symbol}"))))
        }
    }};
}

/// The driver, initialised, with at least one device.
pub(super) fn driver() -> Result<()> {
    static READY: OnceLock<Result<()>> = OnceLock::new();
    let look = || -> Result<()> {
        look_for!("the CUDA driver", sys, DRIVER)?;
        // SAFETY: cuInit may be called any number of times, from any thread.
        check("cuInit", unsafe { sys::cuInit(0) })?;
        if count()? == 0 { Err(missing("a CUDA device", "the driver shows none")) } else { Ok(()) }
    };
    READY.get_or_init(look).clone()
}

pub(super) fn nvrtc_ready() -> Result<()> {
    static READY: OnceLock<Result<()>> = OnceLock::new();
    let look = || {
        load_library(&["libnvrtc.so.13", "libnvrtc.so.12"]);
        look_for!("NVRTC", nvrtc, NVRTC)
    };
    READY.get_or_init(look).clone()
}

pub(super) fn cublaslt_ready() -> Result<()> {
    static READY: OnceLock<Result<()>> = OnceLock::new();
    let look = || {
        load_library(&["libcublasLt.so.13", "libcublasLt.so.12"]);
        look_for!("cuBLASLt", lt, CUBLASLT)
    };
    READY.get_or_init(look).clone()
}

/// Finds cuDNN, for whoever opens it next.
pub(super) fn load_cudnn() {
    static LOADED: OnceLock<bool> = OnceLock::new();
    LOADED.get_or_init(|| load_library(&["libcudnn.so.9"]));
}

/// Whether the driver has a symbol that is not required.
pub(super) fn driver_has(symbol: &str) -> bool {
    // SAFETY: the symbol is only looked up, not called.
    driver().is_ok() && unsafe { sys::culib().get::<*const c_void>(symbol.as_bytes()).is_ok() }
}

fn count() -> Result<usize> {
    let mut count: c_int = 0;
    // SAFETY: the pointer is to a local integer.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(count.max(0) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presence_is_told_without_panicking() {
        match present() {
            Ok(()) => assert!(device_count() > 0),
            Err(what) => println!("no CUDA here: {what}"),
        }
    }
}
