//! Ranks with a GPU each, over NCCL.
//!
//! The library is loaded when the first group is joined; where it is missing, or too old to have what we
//! call, that is an error and nothing else. Its functions are looked up here rather than through cudarc's
//! wrappers, which panic on a missing symbol and look for no `libnccl.so.2`, the name most installations have.
//!
//! Sums are NCCL's: deterministic for a given topology, but not in rank order as elsewhere.

use crate::group::{agree_on_split, check_all_to_all, check_parts, check_peer, check_root};
use crate::store::{Exchange, Store};
use crate::{Error, Group, Reduction, Result, reduce};
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use device::{Buffer, Dtype, Stream};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Results stay numbers: a newer library may return ones that the headers at hand do not know.
type Code = c_uint;
const SUCCESS: Code = 0;
const IN_PROGRESS: Code = 7;

/// `ncclConfig_t` as of 2.26: NCCL reads as much of it as `size` says and takes its defaults for the rest.
#[repr(C)]
struct Config {
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

    fn blocking() -> Self {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 22600,
            blocking: 1,
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
        struct Api {
            $($field: unsafe extern "C" fn($($arg),*) -> $ret,)*
            /// Last, and never unloaded: the table lives in a static.
            _library: libloading::Library,
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
                Ok(Api { $($field,)* _library: library })
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

fn api() -> Result<&'static Api> {
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
    fn explain(&self, code: Code, comm: ncclComm_t) -> String {
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

/// One rank of an NCCL communicator.
pub struct Nccl {
    name: String,
    rank: usize,
    size: usize,
    api: &'static Api,
    store: Arc<Store>,
    exchange: Exchange,
    timeout: Duration,
    splits: AtomicU64,
    state: Mutex<State>,
}

struct State {
    comm: ncclComm_t,
    /// The first failure; the communicator is of no use after it.
    failed: Option<Error>,
}

// SAFETY: a communicator may be used from any thread, by one at a time: it is behind a mutex.
unsafe impl Send for State {}

impl Nccl {
    /// Meets the other ranks of the group through the store and joins their communicator, on the GPU whose
    /// context is current in this thread. Groups that exist at the same time in one store need different
    /// names.
    pub fn join(
        store: Arc<Store>,
        name: &str,
        rank: usize,
        size: usize,
        timeout: Duration,
    ) -> Result<Arc<dyn Group>> {
        Self::join_in(store, name, name, rank, size, timeout)
    }

    /// `scope` is the group's name in the store, `name` the one that users see.
    fn join_in(
        store: Arc<Store>,
        scope: &str,
        name: &str,
        rank: usize,
        size: usize,
        timeout: Duration,
    ) -> Result<Arc<dyn Group>> {
        if rank >= size {
            let what = format!("there is no rank {rank} in a group of {size}");
            return Err(Error::Argument { op: "Nccl::join", what });
        }
        let exchange = Exchange::new(store.clone(), scope, rank, size, timeout);
        let prepared = prepare(name, rank);
        let (api, id) = agree(&exchange, prepared, name, rank)?;
        let mut comm: ncclComm_t = std::ptr::null_mut();
        let mut config = Config::blocking();
        // SAFETY: the pointers are to locals that outlive the call, the id is the one rank 0 made.
        let code =
            unsafe { (api.comm_init_rank_config)(&mut comm, size as c_int, id, rank as c_int, &mut config) };
        if code != SUCCESS {
            let what = api.explain(code, std::ptr::null_mut());
            let group = name.to_string();
            return Err(Error::Nccl { call: "ncclCommInitRankConfig", rank, group, what });
        }
        let state = Mutex::new(State { comm, failed: None });
        let (name, splits) = (name.to_string(), AtomicU64::new(0));
        Ok(Arc::new(Nccl { name, rank, size, api, store, exchange, timeout, splits, state }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Issues one collective of `len` elements on the stream, and looks whether an earlier one has failed.
    fn issue(
        &self,
        call: &'static str,
        stream: &Stream,
        len: usize,
        what: &str,
        function: impl FnOnce(&Api, ncclComm_t, cudaStream_t) -> Code,
    ) -> Result<()> {
        let Stream::Cuda(stream) = stream else {
            let what = format!("{what}: NCCL works on CUDA streams only");
            return Err(Error::Argument { op: call, what });
        };
        let mut state = self.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if len == 0 {
            return Ok(());
        }
        let issued = function(self.api, state.comm, stream.handle().cast());
        let mut pending = SUCCESS;
        // SAFETY: the communicator is alive while `failed` is none; one number is written.
        let asked = unsafe { (self.api.comm_get_async_error)(state.comm, &mut pending) };
        let failure =
            [issued, asked, pending].into_iter().find(|&code| code != SUCCESS && code != IN_PROGRESS);
        let Some(code) = failure else { return Ok(()) };
        let what = format!("{what}: {}", self.api.explain(code, state.comm));
        let error = Error::Nccl { call, rank: self.rank, group: self.name.clone(), what };
        state.failed = Some(error.clone());
        Err(error)
    }
}

/// The library, and on rank 0 the communicator's identity.
fn prepare(name: &str, rank: usize) -> Result<(&'static Api, Vec<u8>)> {
    let api = api()?;
    if rank != 0 {
        return Ok((api, Vec::new()));
    }
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: writes one id.
    let code = unsafe { (api.get_unique_id)(&mut id) };
    if code != SUCCESS {
        let (group, what) = (name.to_string(), api.explain(code, std::ptr::null_mut()));
        return Err(Error::Nccl { call: "ncclGetUniqueId", rank, group, what });
    }
    Ok((api, id.internal.iter().map(|&byte| byte as u8).collect()))
}

/// Everyone hears from everyone before anyone enters NCCL, which would wait for a missing rank for ever: a
/// rank that cannot take part says why, and one that does not come is named after the timeout.
fn agree(
    exchange: &Exchange,
    prepared: Result<(&'static Api, Vec<u8>)>,
    name: &str,
    rank: usize,
) -> Result<(&'static Api, ncclUniqueId)> {
    const READY: u8 = 0;
    const UNABLE: u8 = 1;
    let message = match &prepared {
        Ok((_, id)) => [&[READY], id.as_slice()].concat(),
        Err(error) => [&[UNABLE], error.to_string().as_bytes()].concat(),
    };
    let all = exchange.exchange(&message, "joining NCCL");
    let (api, _) = prepared?;
    let all = all?;
    let lost = |peer: usize, why: String| {
        let (group, what) = (name.to_string(), "the communicator".to_string());
        Error::PeerLost { rank, group, op: "Nccl::join", what, seconds: 0.0, peer, why }
    };
    for (peer, message) in all.iter().enumerate() {
        if message.first() != Some(&READY) {
            return Err(lost(
                peer,
                String::from_utf8_lossy(message.get(1..).unwrap_or_default()).into_owned(),
            ));
        }
    }
    let id: [u8; 128] = all[0][1..].try_into().map_err(|_| lost(0, "its identity is not NCCL's".into()))?;
    Ok((api, ncclUniqueId { internal: id.map(|byte| byte as c_char) }))
}

fn data_type(dtype: Dtype) -> ncclDataType_t {
    match dtype {
        Dtype::F32 => ncclDataType_t::ncclFloat32,
        Dtype::Bf16 => ncclDataType_t::ncclBfloat16,
        Dtype::F16 => ncclDataType_t::ncclFloat16,
        Dtype::I32 => ncclDataType_t::ncclInt32,
        Dtype::U8 => ncclDataType_t::ncclUint8,
    }
}

// In the collectives below, pointers and counts are those of buffers whose sizes were checked; that they stay
// alive and unchanged until the stream has passed is what the buffers' users see to, as for any kernel.
impl Group for Nccl {
    fn name(&self) -> &str {
        &self.name
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        check_parts("all_gather", what, src, dst, self)?;
        let (from, to) = (src.address() as *const c_void, dst.address() as *mut c_void);
        self.issue("ncclAllGather", stream, src.len(), what, |api, comm, stream| {
            // SAFETY: see above.
            unsafe { (api.all_gather)(from, to, src.len(), data_type(src.dtype()), comm, stream) }
        })
    }

    fn reduce_scatter(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        reduce::supports("reduce_scatter", src.dtype())?;
        check_parts("reduce_scatter", what, dst, src, self)?;
        let (from, to) = (src.address() as *const c_void, dst.address() as *mut c_void);
        self.issue("ncclReduceScatter", stream, dst.len(), what, |api, comm, stream| {
            let (dtype, sum) = (data_type(dst.dtype()), ncclRedOp_t::ncclSum);
            // SAFETY: see above.
            unsafe { (api.reduce_scatter)(from, to, dst.len(), dtype, sum, comm, stream) }
        })
    }

    fn all_reduce(&self, stream: &Stream, buffer: &Buffer, reduction: Reduction, what: &str) -> Result<()> {
        reduce::supports("all_reduce", buffer.dtype())?;
        let op = match reduction {
            Reduction::Sum => ncclRedOp_t::ncclSum,
            Reduction::Max => ncclRedOp_t::ncclMax,
        };
        let address = buffer.address() as *mut c_void;
        self.issue("ncclAllReduce", stream, buffer.len(), what, |api, comm, stream| {
            let dtype = data_type(buffer.dtype());
            // SAFETY: see above.
            unsafe { (api.all_reduce)(address, address, buffer.len(), dtype, op, comm, stream) }
        })
    }

    fn broadcast(&self, stream: &Stream, buffer: &Buffer, root: usize, what: &str) -> Result<()> {
        check_root("broadcast", what, root, self)?;
        let address = buffer.address() as *mut c_void;
        self.issue("ncclBroadcast", stream, buffer.len(), what, |api, comm, stream| {
            let (dtype, root) = (data_type(buffer.dtype()), root as c_int);
            // SAFETY: see above.
            unsafe { (api.broadcast)(address, address, buffer.len(), dtype, root, comm, stream) }
        })
    }

    fn all_to_all(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        check_all_to_all(what, src, dst, self)?;
        let (part, dtype) = (src.len() / self.size, data_type(src.dtype()));
        let bytes = part * src.dtype().bytes();
        let (from, to) = (src.address(), dst.address());
        self.issue("ncclSend and ncclRecv", stream, part, what, |api, comm, stream| {
            // SAFETY: see above. Calls between start and end are issued together, so that none waits for
            // one that follows it; the end is called whatever became of them.
            unsafe {
                let mut code = (api.group_start)();
                for peer in 0..self.size {
                    let (out, into) =
                        ((from + peer * bytes) as *const c_void, (to + peer * bytes) as *mut c_void);
                    if code == SUCCESS {
                        code = (api.send)(out, part, dtype, peer as c_int, comm, stream);
                    }
                    if code == SUCCESS {
                        code = (api.receive)(into, part, dtype, peer as c_int, comm, stream);
                    }
                }
                let ended = (api.group_end)();
                if code == SUCCESS { ended } else { code }
            }
        })
    }

    fn send(&self, stream: &Stream, src: &Buffer, to: usize, what: &str) -> Result<()> {
        check_peer("send", what, to, self)?;
        self.issue("ncclSend", stream, src.len(), what, |api, comm, stream| {
            let (from, dtype) = (src.address() as *const c_void, data_type(src.dtype()));
            // SAFETY: see above.
            unsafe { (api.send)(from, src.len(), dtype, to as c_int, comm, stream) }
        })
    }

    fn receive(&self, stream: &Stream, dst: &Buffer, from: usize, what: &str) -> Result<()> {
        check_peer("receive", what, from, self)?;
        self.issue("ncclRecv", stream, dst.len(), what, |api, comm, stream| {
            let (to, dtype) = (dst.address() as *mut c_void, data_type(dst.dtype()));
            // SAFETY: see above.
            unsafe { (api.receive)(to, dst.len(), dtype, from as c_int, comm, stream) }
        })
    }

    /// A new communicator: unlike ncclCommSplit, which all ranks of this one would have to enter together, it
    /// is met through the store, where a rank that does not come is named.
    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn Group>>> {
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let Some(rank) = agree_on_split(self, ranks, name)? else { return Ok(None) };
        let scope = format!("{}/split {number} at {}", self.exchange.scope(), ranks[0]);
        Nccl::join_in(self.store.clone(), &scope, name, rank, ranks.len(), self.timeout).map(Some)
    }

    fn exchange(&self, bytes: &[u8], what: &str) -> Result<Vec<Vec<u8>>> {
        if let Some(error) = &self.lock().failed {
            return Err(error.clone());
        }
        self.exchange.exchange(bytes, what)
    }
}

impl Drop for Nccl {
    /// Waits for what is in flight and takes leave of the peers; after a failure, which they may not survive,
    /// cuts the connection instead. What NCCL answers no longer matters to anyone.
    fn drop(&mut self) {
        let state = self.lock();
        let broken = state.failed.is_some() || std::thread::panicking();
        // SAFETY: the communicator is alive, and this is its last use.
        unsafe {
            if broken {
                (self.api.comm_abort)(state.comm);
                return;
            }
            match (self.api.comm_finalize)(state.comm) {
                SUCCESS => (self.api.comm_destroy)(state.comm),
                _ => (self.api.comm_abort)(state.comm),
            };
        }
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({}, rank {} of {})", self.name, self.rank, self.size)
    }
}
