//! Ranks with a GPU each, over NCCL.
//!
//! The library is loaded when the first group is joined; where it is missing, or too old to have what we
//! call, that is an error and nothing else.
//!
//! Communicators are non-blocking and every one has a thread that watches it, so that a rank that ends, or does not
//! come, is an error on all the others and never a wait without end: see [`watch`].
//!
//! Sums are NCCL's: deterministic for a given topology, but not in rank order as elsewhere.

mod flight;
mod library;
mod watch;

pub use library::version;
pub use watch::on_stuck;

use crate::group::{agree_on_split, check_all_to_all, check_parts, check_peer, check_root};
use crate::store::{Exchange, Joining, Store};
use crate::{Error, Group, Reduction, Result, reduce};
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use device::{Buffer, Dtype, Stream};
use library::{Api, Code, Config, IN_PROGRESS, SUCCESS, api};
use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use watch::{Watch, Watched};

/// One rank of an NCCL communicator.
pub struct Nccl {
    watched: Arc<Watched>,
    store: Arc<Store>,
    exchange: Exchange,
    splits: AtomicU64,
}

/// A call as users know it, as NCCL does, and with whom where it is with one other rank.
#[derive(Clone, Copy)]
struct Call {
    op: &'static str,
    nccl: &'static str,
    peer: Option<usize>,
}

impl Call {
    fn of_all(op: &'static str, nccl: &'static str) -> Self {
        Call { op, nccl, peer: None }
    }
}

/// Calls of which the ends were not looked for yet, at most.
const MAX_FLIGHTS: usize = 1024;

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
        Self::join_at(Joining { store, scope: name, name, rank, size, timeout })
    }

    fn join_at(joining: Joining<'_>) -> Result<Arc<dyn Group>> {
        let exchange = joining.exchange("nccl")?;
        let Joining { store, name, rank, size, timeout, .. } = joining;
        let (api, id) = agree(&exchange, prepare(name, rank), name, rank)?;
        let mut comm: ncclComm_t = std::ptr::null_mut();
        let mut config = Config::non_blocking();
        // SAFETY: the pointers are to locals that outlive the call, the id is the one rank 0 made.
        let code =
            unsafe { (api.comm_init_rank_config)(&mut comm, size as c_int, id, rank as c_int, &mut config) };
        if comm.is_null() || (code != SUCCESS && code != IN_PROGRESS) {
            let what = api.explain(code, std::ptr::null_mut());
            let group = name.to_string();
            return Err(Error::Nccl { call: "ncclCommInitRankConfig", rank, group, what });
        }
        let watched = Watched::new((api, comm), (name, exchange.scope()), rank, size, timeout);
        let group = Nccl { watched: Arc::new(watched), store, exchange, splits: AtomicU64::new(0) };
        // From here on the group's end sees to the communicator's.
        Watch::start(group.watched.clone(), group.store.clone())?;
        let state = group.watched.lock();
        drop(group.watched.settle(state, ("ncclCommInitRankConfig", "join", "the group"), code)?);
        Ok(Arc::new(group))
    }

    /// Issues one call of `len` elements on the stream.
    fn issue(
        &self,
        call: Call,
        stream: &Stream,
        len: usize,
        what: &str,
        function: impl FnOnce(&Api, ncclComm_t, cudaStream_t) -> Code,
    ) -> Result<()> {
        let Call { op, nccl, peer } = call;
        let Stream::Cuda(stream) = stream else {
            let what = format!("{what}: NCCL works on CUDA streams only");
            return Err(Error::Argument { op, what });
        };
        let mut state = self.watched.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if len == 0 {
            return Ok(());
        }
        if state.flights.len() >= MAX_FLIGHTS {
            state.flights.look(std::time::Instant::now())?;
        }
        let before = stream.record()?;
        let code = function(self.watched.api, state.comm(), stream.handle().cast());
        // What follows on the stream must find the call there.
        let mut state = self.watched.settle(state, (nccl, op, what), code)?;
        let after = stream.record()?;
        state.flights.add(op, what, peer, Box::new(before), Box::new(after));
        if state.stream.is_none() {
            state.stream = Some(stream.clone());
        }
        Ok(())
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
        &self.watched.name
    }

    fn rank(&self) -> usize {
        self.watched.rank
    }

    fn size(&self) -> usize {
        self.watched.size
    }

    fn all_gather(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        check_parts("all_gather", what, src, dst, self)?;
        let (from, to) = (src.address() as *const c_void, dst.address() as *mut c_void);
        self.issue(
            Call::of_all("all_gather", "ncclAllGather"),
            stream,
            src.len(),
            what,
            |api, comm, stream| {
                // SAFETY: see above.
                unsafe { (api.all_gather)(from, to, src.len(), data_type(src.dtype()), comm, stream) }
            },
        )
    }

    fn reduce_scatter(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        reduce::supports("reduce_scatter", src.dtype())?;
        check_parts("reduce_scatter", what, dst, src, self)?;
        let (from, to) = (src.address() as *const c_void, dst.address() as *mut c_void);
        self.issue(
            Call::of_all("reduce_scatter", "ncclReduceScatter"),
            stream,
            dst.len(),
            what,
            |api, comm, stream| {
                let (dtype, sum) = (data_type(dst.dtype()), ncclRedOp_t::ncclSum);
                // SAFETY: see above.
                unsafe { (api.reduce_scatter)(from, to, dst.len(), dtype, sum, comm, stream) }
            },
        )
    }

    fn all_reduce(&self, stream: &Stream, buffer: &Buffer, reduction: Reduction, what: &str) -> Result<()> {
        reduce::supports("all_reduce", buffer.dtype())?;
        let op = match reduction {
            Reduction::Sum => ncclRedOp_t::ncclSum,
            Reduction::Max => ncclRedOp_t::ncclMax,
        };
        let address = buffer.address() as *mut c_void;
        self.issue(
            Call::of_all("all_reduce", "ncclAllReduce"),
            stream,
            buffer.len(),
            what,
            |api, comm, stream| {
                let dtype = data_type(buffer.dtype());
                // SAFETY: see above.
                unsafe { (api.all_reduce)(address, address, buffer.len(), dtype, op, comm, stream) }
            },
        )
    }

    fn broadcast(&self, stream: &Stream, buffer: &Buffer, root: usize, what: &str) -> Result<()> {
        check_root("broadcast", what, root, self)?;
        let address = buffer.address() as *mut c_void;
        self.issue(
            Call::of_all("broadcast", "ncclBroadcast"),
            stream,
            buffer.len(),
            what,
            |api, comm, stream| {
                let (dtype, root) = (data_type(buffer.dtype()), root as c_int);
                // SAFETY: see above.
                unsafe { (api.broadcast)(address, address, buffer.len(), dtype, root, comm, stream) }
            },
        )
    }

    fn all_to_all(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        check_all_to_all(what, src, dst, self)?;
        let (part, dtype) = (src.len() / self.size(), data_type(src.dtype()));
        let bytes = part * src.dtype().bytes();
        let (from, to) = (src.address(), dst.address());
        self.issue(
            Call::of_all("all_to_all", "ncclSend and ncclRecv"),
            stream,
            part,
            what,
            |api, comm, stream| {
                // SAFETY: see above. Calls between start and end are issued together, so that none waits for
                // one that follows it; the end is called whatever became of them.
                unsafe {
                    let good = |code| code == SUCCESS || code == IN_PROGRESS;
                    let mut code = (api.group_start)();
                    for peer in 0..self.size() {
                        let (out, into) =
                            ((from + peer * bytes) as *const c_void, (to + peer * bytes) as *mut c_void);
                        if good(code) {
                            code = (api.send)(out, part, dtype, peer as c_int, comm, stream);
                        }
                        if good(code) {
                            code = (api.receive)(into, part, dtype, peer as c_int, comm, stream);
                        }
                    }
                    let ended = (api.group_end)();
                    if good(code) { ended } else { code }
                }
            },
        )
    }

    fn send(&self, stream: &Stream, src: &Buffer, to: usize, what: &str) -> Result<()> {
        check_peer("send", what, to, self)?;
        let call = Call { op: "send", nccl: "ncclSend", peer: Some(to) };
        self.issue(call, stream, src.len(), what, |api, comm, stream| {
            let (from, dtype) = (src.address() as *const c_void, data_type(src.dtype()));
            // SAFETY: see above.
            unsafe { (api.send)(from, src.len(), dtype, to as c_int, comm, stream) }
        })
    }

    fn receive(&self, stream: &Stream, dst: &Buffer, from: usize, what: &str) -> Result<()> {
        check_peer("receive", what, from, self)?;
        let call = Call { op: "receive", nccl: "ncclRecv", peer: Some(from) };
        self.issue(call, stream, dst.len(), what, |api, comm, stream| {
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
        let (store, size, timeout) = (self.store.clone(), ranks.len(), self.watched.timeout);
        Nccl::join_at(Joining { store, scope: &scope, name, rank, size, timeout }).map(Some)
    }

    fn exchange(&self, bytes: &[u8], what: &str) -> Result<Vec<Vec<u8>>> {
        if let Some(error) = &self.watched.lock().failed {
            return Err(error.clone());
        }
        self.exchange.exchange(bytes, what)
    }
}

impl Drop for Nccl {
    /// Waits for what is in flight and takes leave of the peers; after a failure, which they may not survive,
    /// the connection is cut instead.
    fn drop(&mut self) {
        self.watched.end();
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({}, rank {} of {})", self.name(), self.rank(), self.size())
    }
}
