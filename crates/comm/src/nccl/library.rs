//! The library, loaded when the first group is joined.
//!
//! Its functions are looked up here rather than through cudarc's wrappers, which panic on a missing symbol and look
//! for no `libnccl.so.2`, the name most installations have.

use crate::{Error, Result};
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// Results stay numbers: a newer library may return ones that the headers at hand do not know.
pub type Code = c_uint;
pub const SUCCESS: Code = 0;
pub const IN_PROGRESS: Code = 7;

/// `ncclConfig_t` as of 2.26: NCCL reads as much of it as `size` says and takes its defaults for the rest.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
}

impl Config {
    /// "Not set" in NCCL's headers.
    const UNSET: c_int = c_int::MIN;

    /// Calls return before they are done, so that nobody is caught in one: whether a communicator is done, and
    /// how it went, is asked of `ncclCommGetAsyncError`, and while it is not it can be aborted.
    pub fn non_blocking() -> Self {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 22600,
            blocking: 0,
            cga_cluster_size: Self::UNSET,
            min_ctas: Self::UNSET,
            max_ctas: Self::UNSET,
            net_name: std::ptr::null(),
            split_share: Self::UNSET,
            traffic_class: Self::UNSET,
        }
    }
}

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($arg:ty),*) -> $ret:ty;)*) => {
        /// The library and what we call in it.
        pub struct Api {
            $(pub $field: unsafe extern "C" fn($($arg),*) -> $ret,)*
            /// Last, and never unloaded: the table lives in a static.
            pub _library: Option<libloading::Library>,
        }

        impl Api {
            fn look_up(library: libloading::Library) -> std::result::Result<Self, String> {
                $(
                    // SAFETY: the type is that of NCCL's public header.
                    let $field = *unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> $ret>($symbol.as_bytes())
                    }
                    .map_err(|e| format!("it has no {}: {e}", $symbol))?;
                )*
                Ok(Api { $($field,)* _library: Some(library) })
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion": fn(*mut c_int) -> Code;
    get_unique_id = "ncclGetUniqueId": fn(*mut ncclUniqueId) -> Code;
    get_error_string = "ncclGetErrorString": fn(Code) -> *const c_char;
    get_last_error = "ncclGetLastError": fn(ncclComm_t) -> *const c_char;
    comm_init_rank_config = "ncclCommInitRankConfig":
        fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut Config) -> Code;
    comm_finalize = "ncclCommFinalize": fn(ncclComm_t) -> Code;
    comm_destroy = "ncclCommDestroy": fn(ncclComm_t) -> Code;
    comm_abort = "ncclCommAbort": fn(ncclComm_t) -> Code;
    comm_get_async_error = "ncclCommGetAsyncError": fn(ncclComm_t, *mut Code) -> Code;
    all_gather = "ncclAllGather":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, cudaStream_t) -> Code;
    reduce_scatter = "ncclReduceScatter":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) -> Code;
    all_reduce = "ncclAllReduce":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) -> Code;
    broadcast = "ncclBroadcast":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> Code;
    send = "ncclSend": fn(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> Code;
    receive = "ncclRecv": fn(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> Code;
    group_start = "ncclGroupStart": fn() -> Code;
    group_end = "ncclGroupEnd": fn() -> Code;
}

pub fn api() -> Result<&'static Api> {
    static API: OnceLock<std::result::Result<Api, String>> = OnceLock::new();
    let loaded = API.get_or_init(|| {
        let mut tried = Vec::new();
        device::cuda::load_library(&["libnccl.so.2"]);
        for name in ["libnccl.so.2", "libnccl.so"] {
            // SAFETY: NCCL's initialisers are those of an ordinary shared library.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => return Api::look_up(library),
                Err(e) => tried.push(format!("{name}: {e}")),
            }
        }
        Err(tried.join("; "))
    });
    loaded.as_ref().map_err(|what| Error::Unavailable { library: "NCCL", what: what.clone() })
}

impl Api {
    /// What a code means, with NCCL's own last words where it has any.
    pub fn explain(&self, code: Code, comm: ncclComm_t) -> String {
        // SAFETY: both return null or a static C string, for any code and for a null communicator.
        let (meaning, last) = unsafe { ((self.get_error_string)(code), (self.get_last_error)(comm)) };
        let text = |pointer: *const c_char| match pointer.is_null() {
            true => String::new(),
            // SAFETY: not null, so a C string that NCCL keeps.
            false => unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned(),
        };
        match text(last) {
            last if last.is_empty() => format!("{} (code {code})", text(meaning)),
            last => format!("{} (code {code}): {last}", text(meaning)),
        }
    }
}

/// Major, minor and patch of the NCCL library, if there is one.
pub fn version() -> Result<(usize, usize, usize)> {
    let (api, mut version) = (api()?, 0);
    // SAFETY: writes one number.
    let code = unsafe { (api.get_version)(&mut version) };
    if code != SUCCESS {
        let what = format!("ncclGetVersion: {}", api.explain(code, std::ptr::null_mut()));
        return Err(Error::Unavailable { library: "NCCL", what });
    }
    let version = version.unsigned_abs() as usize;
    Ok((version / 10000, version / 100 % 100, version % 100))
}
