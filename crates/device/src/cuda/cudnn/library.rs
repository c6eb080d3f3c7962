//! libcudnn's functions, found by name, and what it says when a call fails.
//!
//! The bindings' own functions panic where a symbol is missing, and return an enum that a newer library may
//! leave: a status is an integer here, and a missing symbol an error.

use crate::{Error, Result};
use cudarc::cudnn::sys;
use cudarc::driver::sys::CUstream;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// The oldest version these graphs have been checked with.
const MIN_VERSION: usize = 91400;

/// CUDNN_STATUS_NOT_SUPPORTED; the reasons why follow it.
const NOT_SUPPORTED: c_int = 3000;

/// An opaque cuDNN object: a handle or a descriptor.
pub type Opaque = *mut c_void;

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($arg:ty),*) $(-> $out:ty)?;)*) => {
        pub struct Library { $(pub $field: unsafe extern "C" fn($($arg),*) $(-> $out)?,)* }

        impl Library {
            fn find() -> Result<Library> {
                // SAFETY: opening a library runs its initialisers, which is what anyone who uses cuDNN asks
                // for.
                if !unsafe { sys::is_culib_present() } {
                    return Err(unavailable("no libcudnn found on the library path"));
                }
                // SAFETY: present, as just seen, so this does not panic.
                let library = unsafe { sys::culib() };
                Ok(Library { $($field: {
                    type Function = unsafe extern "C" fn($($arg),*) $(-> $out)?;
                    // SAFETY: the type is the one cudnn_graph.h declares for this symbol, with enums as the
                    // integers they are in C. The library is never unloaded.
                    let symbol = unsafe { library.get::<Function>(concat!($symbol, "\0").as_bytes()) };
                    *symbol.map_err(|_| unavailable(concat!("it has no ", $symbol)))?
                },)* })
            }
        }
    };
}

functions! {
    version = "cudnnGetVersion": fn() -> usize;
    create = "cudnnCreate": fn(*mut Opaque) -> c_int;
    destroy = "cudnnDestroy": fn(Opaque) -> c_int;
    set_stream = "cudnnSetStream": fn(Opaque, CUstream) -> c_int;
    error_string = "cudnnGetErrorString": fn(c_int) -> *const c_char;
    last_error = "cudnnGetLastErrorString": fn(*mut c_char, usize);
    descriptor_create = "cudnnBackendCreateDescriptor": fn(c_uint, *mut Opaque) -> c_int;
    descriptor_destroy = "cudnnBackendDestroyDescriptor": fn(Opaque) -> c_int;
    descriptor_set = "cudnnBackendSetAttribute": fn(Opaque, c_uint, c_uint, i64, *const c_void) -> c_int;
    descriptor_get = "cudnnBackendGetAttribute": fn(Opaque, c_uint, c_uint, i64, *mut i64, *mut c_void) -> c_int;
    descriptor_finalize = "cudnnBackendFinalize": fn(Opaque) -> c_int;
    execute = "cudnnBackendExecute": fn(Opaque, Opaque, Opaque) -> c_int;
}

impl Library {
    /// The process's libcudnn, where there is one and it is new enough.
    pub fn load() -> Result<&'static Library> {
        static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
        let library = LIBRARY.get_or_init(Library::find).as_ref().map_err(Error::clone)?;
        let version = library.version();
        if version < MIN_VERSION {
            return Err(unavailable(&format!("version {version} is older than {MIN_VERSION}")));
        }
        Ok(library)
    }

    /// major · 10000 + minor · 100 + patch
    pub fn version(&self) -> usize {
        // SAFETY: takes nothing and may always be called.
        unsafe { (self.version)() }
    }

    pub fn check(&self, call: &'static str, status: c_int) -> std::result::Result<(), Failure> {
        if status == 0 {
            return Ok(());
        }
        let mut message = [0u8; 1024];
        // SAFETY: writes at most the given number of bytes, the terminating zero included.
        unsafe { (self.last_error)(message.as_mut_ptr().cast(), message.len()) };
        let message = CStr::from_bytes_until_nul(&message).map(CStr::to_string_lossy).unwrap_or_default();
        // SAFETY: returns a constant string of the library's for any number.
        let name = unsafe { CStr::from_ptr((self.error_string)(status)) }.to_string_lossy();
        Err(Failure { call, status, what: format!("{name} ({status}): {}", message.trim()) })
    }
}

fn unavailable(what: &str) -> Error {
    Error::Unavailable { library: "cuDNN", what: what.to_owned() }
}

/// A status that was not success.
#[derive(Debug)]
pub struct Failure {
    call: &'static str,
    status: c_int,
    what: String,
}

impl Failure {
    /// A graph that we refuse, as cuDNN would.
    pub fn unsupported(call: &'static str, what: impl Into<String>) -> Self {
        Failure { call, status: NOT_SUPPORTED, what: what.into() }
    }

    pub fn what(&self) -> &str {
        &self.what
    }

    /// Whether cuDNN says that it has no kernel for this graph here, rather than that something went wrong.
    pub fn is_unsupported(&self) -> bool {
        (NOT_SUPPORTED..NOT_SUPPORTED + 1000).contains(&self.status)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Error::Driver { call: failure.call, what: failure.what }
    }
}
