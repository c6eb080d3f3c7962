//! Ranks on the site's own MPI, with whatever fabric it drives (cargo feature `mpi`).
//!
//! A call begins with its header to every rank it concerns, and theirs to this one: that is how a mismatch, and who
//! has not come, is found. Then the bytes go by MPI's own collectives. Reductions only exchange through MPI; every
//! rank sums what it got in rank order, so the bits are those of the other backends.
//!
//! Every wait looks, and sleeps between looks, so that it ends when another rank has failed or at its timeout. A rank
//! that ends before its time takes the job with it: that is the MPI launcher's part.

use crate::call::{Call, HEADER, Header, Job, Payload};
use crate::error::list_ranks;
use crate::queued::{Engine, Queued};
use crate::ticket::Who;
use crate::{Error, Group, Reduction, Result, reduce};
use device::Dtype;
use rsmpi::environment::Universe;
use rsmpi::ffi as sys;
use std::ffi::{CStr, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Up to this many bytes, a reduction sends everyone everything.
const SMALL: usize = 32 << 10;
/// Bytes that a reduction takes from each rank at a time.
const SLICE: usize = 1 << 20;
/// How often a wait yields before it begins to sleep.
const YIELDS: u32 = 2000;
const NAP: Duration = Duration::from_micros(50);
/// Tags of messages.
const HEADERS: c_int = 0;
const DATA: c_int = 1;
const FAILURES: c_int = 2;
const MEETINGS: c_int = 3;
/// Bytes of a failure on its way to another rank.
const NOTICE: usize = 1024;

/// This process as a rank of MPI's world. Dropped without [`World::finish`], MPI is left as it is, and its launcher
/// ends the other ranks when this process ends.
pub struct World {
    universe: Option<Universe>,
    rank: usize,
    size: usize,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "mpi world, rank {} of {}", self.rank, self.size)
    }
}

impl World {
    /// Once in a process.
    pub fn init() -> Result<Self> {
        let unavailable = |what: &str| Error::Unavailable { library: "MPI", what: what.to_string() };
        let (universe, threading) = rsmpi::initialize_with_threading(rsmpi::Threading::Multiple)
            .ok_or_else(|| unavailable("it was started before in this process"))?;
        if threading != rsmpi::Threading::Multiple {
            return Err(unavailable("it does not let several threads call it (MPI_THREAD_MULTIPLE)"));
        }
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI is initialised; the answers have a place. Errors are to come back as codes, in communicators
        // made from this one too.
        unsafe {
            sys::MPI_Comm_set_errhandler(sys::RSMPI_COMM_WORLD, sys::RSMPI_ERRORS_RETURN);
            sys::MPI_Comm_rank(sys::RSMPI_COMM_WORLD, &mut rank);
            sys::MPI_Comm_size(sys::RSMPI_COMM_WORLD, &mut size);
        }
        Ok(World { universe: Some(universe), rank: rank as usize, size: size as usize })
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// A group of these ranks of the world, in this order; each of them calls it with the same list. Blocks.
    pub fn join(&self, name: &str, members: &[usize], timeout: Duration) -> Result<Arc<dyn Group>> {
        let place = members.iter().position(|&member| member == self.rank);
        let place = place.filter(|_| members.iter().all(|&member| member < self.size)).ok_or_else(|| {
            let what = format!("{name}: rank {} of {} joins {members:?}", self.rank, self.size);
            Error::Argument { op: "mpi::join", what }
        })?;
        let lobby = Mpi::new(world(), name, self.rank, self.size, timeout);
        // MPI's own call for this waits without end: so all are seen to be there first.
        let job = Job { call: Call::Barrier, what: "joining".into(), payload: Payload::Bytes(Vec::new()) };
        lobby.headers(&job, members, MEETINGS)?;
        lobby.part(members, place, name)
    }

    /// Ends MPI. Every rank has ended well and calls this; no group is used after it.
    pub fn finish(mut self) {
        drop(self.universe.take());
    }
}

impl Drop for World {
    fn drop(&mut self) {
        std::mem::forget(self.universe.take());
    }
}

/// A communicator. Never freed: groups are few, and end with the process.
#[derive(Clone, Copy)]
struct Comm(sys::MPI_Comm);

// SAFETY: a handle that MPI, with MPI_THREAD_MULTIPLE, lets any thread use.
unsafe impl Send for Comm {}
// SAFETY: likewise.
unsafe impl Sync for Comm {}

fn world() -> Comm {
    // SAFETY: a constant of the library.
    Comm(unsafe { sys::RSMPI_COMM_WORLD })
}

fn null_request() -> sys::MPI_Request {
    // SAFETY: a constant of the library.
    unsafe { sys::RSMPI_REQUEST_NULL }
}

/// What a code means, in MPI's words.
fn explain(code: c_int) -> String {
    let mut text = [0; sys::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: as much room as MPI may fill, and a zero more.
    let (asked, text) = unsafe {
        let asked = sys::MPI_Error_string(code, text.as_mut_ptr(), &mut len);
        (asked, CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned())
    };
    if asked == 0 { text } else { "no description".into() }
}

/// One rank.
struct Mpi {
    comm: Comm,
    name: String,
    rank: usize,
    size: usize,
    timeout: Duration,
    /// The first failure that this rank knows of.
    failed: Mutex<Option<Error>>,
}

/// Host memory, aligned for any element.
struct Scratch(Vec<u64>);

impl Scratch {
    fn new(bytes: usize) -> Self {
        Scratch(vec![0; bytes.div_ceil(8)])
    }

    fn of(bytes: &[u8]) -> Self {
        let mut scratch = Scratch::new(bytes.len());
        // SAFETY: as many bytes are there, and nobody else has them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), scratch.0.as_mut_ptr().cast(), bytes.len()) };
        scratch
    }

    fn address(&self) -> usize {
        self.0.as_ptr().expose_provenance()
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: any bits are bytes, and as many are there.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 8) }
    }
}

fn to(address: usize) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address)
}

/// How MPI calls `bytes` bytes an element: bits are moved, never reckoned with.
fn datatype(bytes: usize) -> sys::MPI_Datatype {
    // SAFETY: constants of the library.
    unsafe {
        match bytes {
            4 => sys::RSMPI_UINT32_T,
            2 => sys::RSMPI_UINT16_T,
            _ => sys::RSMPI_UINT8_T,
        }
    }
}

/// Elements, or places of elements, as MPI counts them.
fn count(job: &Job, rank: usize, elements: usize) -> Result<c_int> {
    c_int::try_from(elements).map_err(|_| {
        let what = format!("{}: MPI moves at most 2³¹ - 1 elements at once, not {elements}", job.what);
        Error::Argument { op: job.call.op(rank), what }
    })
}

/// Where pieces of these lengths begin, and where the last one ends.
fn starts_of(lens: &[usize]) -> Vec<usize> {
    let sums = lens.iter().scan(0, |sum, len| {
        *sum += len;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

impl Mpi {
    fn new(comm: Comm, name: &str, rank: usize, size: usize, timeout: Duration) -> Self {
        Mpi { comm, name: name.to_string(), rank, size, timeout, failed: Mutex::new(None) }
    }

    /// The group of some ranks, all of which are about to call this.
    fn part(&self, members: &[usize], place: usize, name: &str) -> Result<Arc<dyn Group>> {
        let list: Vec<c_int> = members.iter().map(|&member| member as c_int).collect();
        let mut comm = world();
        // SAFETY: every rank of the list calls this with the same list; all answers have a place.
        let (code, call) = unsafe {
            let (mut all, mut some) = (sys::RSMPI_GROUP_EMPTY, sys::RSMPI_GROUP_EMPTY);
            let mut step = ("MPI_Comm_group", sys::MPI_Comm_group(self.comm.0, &mut all));
            if step.1 == 0 {
                step = (
                    "MPI_Group_incl",
                    sys::MPI_Group_incl(all, list.len() as c_int, list.as_ptr(), &mut some),
                );
            }
            if step.1 == 0 {
                step = (
                    "MPI_Comm_create_group",
                    sys::MPI_Comm_create_group(self.comm.0, some, DATA, &mut comm.0),
                );
                sys::MPI_Group_free(&mut some);
                sys::MPI_Group_free(&mut all);
            }
            (step.1, step.0)
        };
        self.check(call, code)?;
        Ok(Arc::new(Queued::new(Mpi::new(comm, name, place, members.len(), self.timeout))))
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == sys::MPI_SUCCESS as c_int {
            return Ok(());
        }
        let what = format!("{call} failed: {} (code {code})", explain(code));
        Err(self.fail(Error::System { rank: self.rank, group: self.name.clone(), what }))
    }

    fn peers(&self, members: &[usize]) -> Vec<usize> {
        members.iter().copied().filter(|&peer| peer != self.rank).collect()
    }

    fn counts(&self, job: &Job, elements: &[usize]) -> Result<Vec<c_int>> {
        elements.iter().map(|&elements| count(job, self.rank, elements)).collect()
    }

    /// Starts one operation of all ranks with `start` and waits for its end. What MPI may still write to after a
    /// failure is never given back.
    fn wait(
        &self,
        job: &Job,
        call: &'static str,
        scratch: Vec<Scratch>,
        start: impl FnOnce(*mut sys::MPI_Request) -> c_int,
    ) -> Result<Vec<Scratch>> {
        let mut request = [null_request()];
        self.check(call, start(request.as_mut_ptr()))?;
        let peers = self.peers(&job.call.members(self.size));
        match self.wait_all(job, &mut request, |_| format!("one of {}", list_ranks(peers.clone()))) {
            Ok(()) => Ok(scratch),
            Err(error) => {
                std::mem::forget(scratch);
                if let Payload::Buffers(src, dst) = &job.payload {
                    std::mem::forget((src.clone(), dst.clone()));
                }
                Err(error)
            }
        }
    }

    /// `missing` names who has not come, by the requests that are left.
    fn wait_all(
        &self,
        job: &Job,
        requests: &mut [sys::MPI_Request],
        missing: impl Fn(&[usize]) -> String,
    ) -> Result<()> {
        let started = Instant::now();
        let mut looks = 0;
        loop {
            let mut left = Vec::new();
            for (index, request) in requests.iter_mut().enumerate() {
                let mut done = 0;
                // SAFETY: a request that was started, or the null one, which is done.
                let code = unsafe { sys::MPI_Test(request, &mut done, sys::RSMPI_STATUS_IGNORE) };
                self.check("MPI_Test", code)?;
                if done == 0 {
                    left.push(index);
                }
            }
            if left.is_empty() {
                return Ok(());
            }
            if let Some(error) = self.told() {
                return Err(error);
            }
            if started.elapsed() >= self.timeout {
                let (rank, group, what) = (self.rank, self.name.clone(), job.what.clone());
                let (op, seconds) = (job.call.op(rank), started.elapsed().as_secs_f64());
                let missing = missing(&left);
                return Err(self.fail(Error::Timeout { rank, group, op, what, seconds, missing }));
            }
            looks += 1;
            if looks < YIELDS { std::thread::yield_now() } else { std::thread::sleep(NAP) }
        }
    }

    /// Everyone's header, in rank order, of those whom the call concerns; all are of the same call.
    fn headers(&self, job: &Job, members: &[usize], tag: c_int) -> Result<Vec<Header>> {
        let peers = self.peers(members);
        let mine = Scratch::of(&job.header().encode());
        let theirs = Scratch::new(HEADER * peers.len());
        let mut requests = vec![null_request(); 2 * peers.len()];
        let (into, out) = requests.split_at_mut(peers.len());
        for (index, &peer) in peers.iter().enumerate() {
            let (len, byte, peer, comm) = (HEADER as c_int, datatype(1), peer as c_int, self.comm.0);
            // SAFETY: the memory is there until all requests are done, or for ever.
            let codes = unsafe {
                let (at, from) = (to(theirs.address() + index * HEADER), to(mine.address()));
                [
                    sys::MPI_Irecv(at, len, byte, peer, tag, comm, &mut into[index]),
                    sys::MPI_Isend(from, len, byte, peer, tag, comm, &mut out[index]),
                ]
            };
            for code in codes {
                self.check("MPI_Isend, MPI_Irecv", code)?;
            }
        }
        let missing = |left: &[usize]| {
            let mut ranks: Vec<usize> = left.iter().map(|index| peers[index % peers.len()]).collect();
            ranks.sort_unstable();
            ranks.dedup();
            list_ranks(ranks)
        };
        if let Err(error) = self.wait_all(job, &mut requests, missing) {
            std::mem::forget((mine, theirs));
            return Err(error);
        }
        // One that came to this call and gave up has left its header.
        if let Some(error) = self.told() {
            return Err(error);
        }
        let mut headers = vec![job.header(); self.size];
        for (bytes, &peer) in theirs.bytes().chunks_exact(HEADER).zip(&peers) {
            headers[peer] = job.compare(bytes, &self.name, self.rank, peer).map_err(|e| self.fail(e))?;
        }
        Ok(headers)
    }

    /// The failure that another rank has sent. Only who carries out a call asks, so there is one receiver.
    fn told(&self) -> Option<Error> {
        let (comm, mut there) = (self.comm.0, 0);
        // SAFETY: constants of the library.
        let (any, ignored) = unsafe { (sys::RSMPI_ANY_SOURCE, sys::RSMPI_STATUS_IGNORE) };
        // SAFETY: the answer has a place.
        let code = unsafe { sys::MPI_Iprobe(any, FAILURES, comm, &mut there, ignored) };
        if code != 0 || there == 0 {
            return None;
        }
        let notice = Scratch::new(NOTICE);
        let at = to(notice.address());
        // SAFETY: the notice is there, and is received into memory of its size.
        let code = unsafe { sys::MPI_Recv(at, NOTICE as c_int, datatype(1), any, FAILURES, comm, ignored) };
        if code != 0 {
            return None;
        }
        let text = String::from_utf8_lossy(notice.bytes());
        let error = Error::decode(text.trim_end_matches('\0'), self.rank, &self.name);
        Some(self.remember(error))
    }

    fn remember(&self, error: Error) -> Error {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.get_or_insert(error).clone()
    }

    fn exchange(&self, job: &Job, headers: &[Header]) -> Result<Vec<Vec<u8>>> {
        let lens: Vec<usize> = headers.iter().map(|header| header.num_bytes).collect();
        let starts = starts_of(&lens);
        let (counts, at) = (self.counts(job, &lens)?, self.counts(job, &starts[..self.size])?);
        let (mine, all) = (Scratch::of(job.bytes()), Scratch::new(starts[self.size]));
        let (from, into, own) = (to(mine.address()), to(all.address()), counts[self.rank]);
        let (byte, comm) = (datatype(1), self.comm.0);
        // SAFETY: `wait` keeps both pieces of memory until MPI is done with them.
        let scratch = self.wait(job, "MPI_Iallgatherv", vec![mine, all], |request| unsafe {
            let (counts, at) = (counts.as_ptr(), at.as_ptr());
            sys::MPI_Iallgatherv(from, own, byte, into, counts, at, byte, comm, request)
        })?;
        Ok((0..self.size).map(|rank| scratch[1].bytes()[starts[rank]..starts[rank + 1]].to_vec()).collect())
    }

    /// `dst` becomes this rank's piece of the reduction: of every rank's `src`, cut into pieces of `lens` elements,
    /// slice by slice. `dst` may be that piece of `src`.
    fn reduce(
        &self,
        job: &Job,
        src: usize,
        lens: &[usize],
        dst: usize,
        kind: (Dtype, Reduction),
    ) -> Result<()> {
        let (dtype, reduction) = kind;
        let (own, bytes, starts) = (lens[self.rank], dtype.bytes(), starts_of(lens));
        let (slice, datatype, comm) = (SLICE / bytes, datatype(bytes), self.comm.0);
        let largest = lens.iter().copied().max().unwrap_or(0);
        let mut pieces = Scratch::new(self.size * slice.min(own) * bytes);
        for first in (0..largest).step_by(slice) {
            let of = |len: usize| slice.min(len.saturating_sub(first));
            let (len, room) = (of(own), slice.min(own));
            let places: Vec<usize> =
                (0..self.size).map(|rank| starts[rank] + first.min(lens[rank])).collect();
            let out = self.counts(job, &lens.iter().map(|&len| of(len)).collect::<Vec<_>>())?;
            let out_at = self.counts(job, &places)?;
            let into = vec![count(job, self.rank, len)?; self.size];
            let into_at = self.counts(job, &(0..self.size).map(|rank| rank * room).collect::<Vec<_>>())?;
            let target = to(pieces.address());
            // SAFETY: `wait` keeps buffers and memory until MPI is done with them.
            let mut kept = self.wait(job, "MPI_Ialltoallv", vec![pieces], |request| unsafe {
                let (out, out_at) = (out.as_ptr(), out_at.as_ptr());
                let (into, into_at) = (into.as_ptr(), into_at.as_ptr());
                sys::MPI_Ialltoallv(
                    to(src),
                    out,
                    out_at,
                    datatype,
                    target,
                    into,
                    into_at,
                    datatype,
                    comm,
                    request,
                )
            })?;
            let Some(back) = kept.pop() else { unreachable!("what was given comes back") };
            pieces = back;
            let each = |rank: usize| pieces.address() + rank * room * bytes;
            let sources: Vec<usize> = (0..self.size).map(each).collect();
            let dst = dst + first.min(own) * bytes;
            // SAFETY: `len` elements each, in memory of our own; the destination is this call's to write.
            unsafe { reduce::reduce_at(&sources, dst, len, dtype, reduction, own * bytes)? };
        }
        Ok(())
    }

    fn all_reduce(&self, job: &Job, dtype: Dtype, len: usize, reduction: Reduction) -> Result<()> {
        let (at, bytes) = (job.buffers().0.address(), dtype.bytes());
        let (kind, comm) = (datatype(bytes), self.comm.0);
        if len * bytes <= SMALL {
            let all = Scratch::new(self.size * len * bytes);
            let (count, into) = (count(job, self.rank, len)?, to(all.address()));
            // SAFETY: `wait` keeps buffer and memory until MPI is done with them.
            let scratch = self.wait(job, "MPI_Iallgather", vec![all], |request| unsafe {
                sys::MPI_Iallgather(to(at), count, kind, into, count, kind, comm, request)
            })?;
            let each = |rank: usize| scratch[0].address() + rank * len * bytes;
            let sources: Vec<usize> = (0..self.size).map(each).collect();
            // SAFETY: `len` elements each, in memory of our own and in the buffer that this call may write.
            unsafe { reduce::reduce_at(&sources, at, len, dtype, reduction, len * bytes)? };
            return Ok(());
        }
        let starts: Vec<usize> = (0..=self.size).map(|rank| rank * len / self.size).collect();
        let lens: Vec<usize> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        // Not in place: what is gathered from must be apart from where it goes.
        let sums = Scratch::new(lens[self.rank] * bytes);
        self.reduce(job, at, &lens, sums.address(), (dtype, reduction))?;
        let (counts, places) = (self.counts(job, &lens)?, self.counts(job, &starts[..self.size])?);
        let (from, own) = (to(sums.address()), counts[self.rank]);
        // SAFETY: `wait` keeps buffer and memory until MPI is done with them.
        self.wait(job, "MPI_Iallgatherv", vec![sums], |request| unsafe {
            let (counts, places) = (counts.as_ptr(), places.as_ptr());
            sys::MPI_Iallgatherv(from, own, kind, to(at), counts, places, kind, comm, request)
        })?;
        Ok(())
    }

    fn carry_out(&self, job: &Job) -> Result<Vec<Vec<u8>>> {
        let headers = self.headers(job, &job.call.members(self.size), HEADERS)?;
        let comm = self.comm.0;
        match job.call {
            Call::Exchange => return self.exchange(job, &headers),
            // Everyone has heard from everyone.
            Call::Barrier => {}
            Call::AllGather { dtype, part } => {
                let (src, dst) = job.buffers();
                let (count, kind) = (count(job, self.rank, part)?, datatype(dtype.bytes()));
                let (mut from, into, mut scratch) = (src.address(), to(dst.address()), Vec::new());
                if src.overlaps(dst) {
                    // SAFETY: the part is host memory that nobody writes now.
                    let part = unsafe { std::slice::from_raw_parts(to(from).cast::<u8>(), src.num_bytes()) };
                    scratch.push(Scratch::of(part));
                    from = scratch[0].address();
                }
                // SAFETY: `wait` keeps buffers and memory until MPI is done with them.
                self.wait(job, "MPI_Iallgather", scratch, |request| unsafe {
                    sys::MPI_Iallgather(to(from), count, kind, into, count, kind, comm, request)
                })?;
            }
            Call::AllToAll { dtype, part } => {
                let (src, dst) = job.buffers();
                let (from, into) = (to(src.address()), to(dst.address()));
                let (count, kind) = (count(job, self.rank, part)?, datatype(dtype.bytes()));
                // SAFETY: `wait` keeps the buffers until MPI is done with them.
                self.wait(job, "MPI_Ialltoall", vec![], |request| unsafe {
                    sys::MPI_Ialltoall(from, count, kind, into, count, kind, comm, request)
                })?;
            }
            Call::ReduceScatter { dtype, part } => {
                let (src, dst) = job.buffers();
                let lens = vec![part; self.size];
                self.reduce(job, src.address(), &lens, dst.address(), (dtype, Reduction::Sum))?;
            }
            Call::AllReduce { dtype, len, reduction } => self.all_reduce(job, dtype, len, reduction)?,
            Call::Broadcast { dtype, len, root } => {
                let at = to(job.buffers().0.address());
                let (count, kind) = (count(job, self.rank, len)?, datatype(dtype.bytes()));
                // SAFETY: `wait` keeps the buffer until MPI is done with it.
                self.wait(job, "MPI_Ibcast", vec![], |request| unsafe {
                    sys::MPI_Ibcast(at, count, kind, root as c_int, comm, request)
                })?;
            }
            Call::Transfer { dtype, len, from, to: receiver } => {
                let (src, dst) = job.buffers();
                let (count, kind) = (count(job, self.rank, len)?, datatype(dtype.bytes()));
                // SAFETY: `wait` keeps the buffers until MPI is done with them.
                self.wait(job, "MPI_Isend, MPI_Irecv", vec![], |request| unsafe {
                    if from == self.rank {
                        let at = to(src.address());
                        sys::MPI_Isend(at, count, kind, receiver as c_int, DATA, comm, request)
                    } else {
                        let at = to(dst.address());
                        sys::MPI_Irecv(at, count, kind, from as c_int, DATA, comm, request)
                    }
                })?;
            }
        }
        Ok(Vec::new())
    }
}

impl Engine for Mpi {
    fn who(&self) -> Who<'_> {
        Who { kind: "mpi", name: &self.name, rank: self.rank, size: self.size }
    }

    fn run(&self, job: &Job) -> Result<Vec<Vec<u8>>> {
        match self.failure().or_else(|| self.told()) {
            Some(error) => Err(error),
            None => self.carry_out(job),
        }
    }

    /// Whoever waits, or comes to its next call, finds the notice.
    fn fail(&self, error: Error) -> Error {
        if let Some(first) = self.failure() {
            return first;
        }
        let mut text = error.encode().into_bytes();
        text.resize(NOTICE, 0);
        let notice = Scratch::of(&text);
        for peer in (0..self.size).filter(|&peer| peer != self.rank) {
            let mut request = null_request();
            let (len, byte, comm) = (NOTICE as c_int, datatype(1), self.comm.0);
            // SAFETY: the notice is never given back. Whether it arrives is looked at by nobody: who does not
            // hear of the failure runs into its timeout.
            unsafe {
                let at = to(notice.address());
                sys::MPI_Isend(at, len, byte, peer as c_int, FAILURES, comm, &mut request);
            }
        }
        std::mem::forget(notice);
        self.remember(error)
    }

    fn failure(&self) -> Option<Error> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn scope(&self) -> &str {
        &self.name
    }

    /// The split has just had all ranks agree, so they are here.
    fn join(&self, ranks: &[usize], rank: usize, _scope: &str, name: &str) -> Result<Arc<dyn Group>> {
        self.part(ranks, rank, name)
    }

    fn leaving(&self, _why: &'static str) {}
}
