//! Ranks that are processes of one machine, over memory in common.
//!
//! Every rank has an outbox: a few slots of fixed size that it writes and all others read. A collective is a
//! number of rounds, the same on every rank, since all know the call. In round t each rank
//!
//! 1. waits until everyone has done with round t - [`SLOTS`], and *publishes*: copies what others need of its
//!    buffers into slot t modulo [`SLOTS`] and raises its `published` counter;
//! 2. waits until the peers have published round t, and *consumes*: copies or sums (in rank order) from their
//!    slots straight to its destination, and raises its `consumed` counter.
//!
//! Publishing runs ahead of consuming as far as the slots allow, so ranks copy in while others copy out. The
//! first round of a call carries its header, and everyone compares everyone's: that is how a mismatch is found.
//! Messages between two ranks go through a ring of bytes of their own.
//!
//! Nobody reads another process's own buffers, so a rank may leave, or die, at any time. Whoever waits looks
//! for a moment, then sleeps in the kernel on the counter, and wakes now and then to see whether the peers are
//! alive (a handle on each process tells, however it ended), the group has failed, or time is up.

mod pieces;
pub(crate) mod system;

use crate::call::{Call, HEADER, Header, Job};
use crate::error::list_ranks;
use crate::queued::{Engine, Queued};
use crate::store::{Joining, Store};
use crate::ticket::Who;
use crate::{Error, Group, Result};
use pieces::Pieces;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use system::{Counter, Mapping, Process, reached};

/// How many rounds a rank may be ahead of the slowest.
const SLOTS: usize = 4;
/// Bytes of one slot.
const SLOT: usize = 256 << 10;
/// Bytes of the ring between two ranks.
const RING: usize = 256 << 10;
/// Counters are this far apart, so that no two share a cache line (or the neighbour that comes with it).
const LINE: usize = 128;
/// How long one looks before one sleeps: at most this long, and less where looking was in vain of late, as it is
/// on cores that others need.
const LONGEST_SPIN_NS: u32 = 20_000;
const SHORTEST_SPIN_NS: u32 = 500;
/// How often a sleeper looks whether its peers are alive.
const LOOK: Duration = Duration::from_millis(20);

// The memory, from its start: the failure and its text, counters per rank, rings per pair, outboxes.
const FAILURE: usize = 0;
const FAILURE_LEN: usize = 4;
const FAILURE_TEXT: usize = 64;
const MAX_FAILURE: usize = 4096 - FAILURE_TEXT;
const RANKS: usize = 4096;
const PUBLISHED: usize = 0;
const CONSUMED: usize = LINE;
const LEFT: usize = 2 * LINE;
const RANK: usize = 3 * LINE;
const WRITTEN: usize = 0;
const READ: usize = LINE;
const RING_DATA: usize = 2 * LINE;
const PAIR: usize = RING_DATA + RING;
const OUTBOX: usize = SLOTS * (HEADER + SLOT);

/// States of the failure.
const NONE: u32 = 0;
const WRITING: u32 = 1;
const WRITTEN_DOWN: u32 = 2;

/// Meets the other ranks of the group through the store and maps memory in common with them. Rank 0's process
/// makes the memory; nothing of it has a name, so nothing is left of it after the processes. Groups that exist
/// at the same time in one store need different names. A wait longer than `timeout` is an error.
pub fn join(
    store: Arc<Store>,
    name: &str,
    rank: usize,
    size: usize,
    timeout: Duration,
) -> Result<Arc<dyn Group>> {
    join_at(Joining { store, scope: name, name, rank, size, timeout })
}

fn join_at(joining: Joining<'_>) -> Result<Arc<dyn Group>> {
    let exchange = joining.exchange("shm")?;
    let Joining { store, name, rank, size, timeout, .. } = joining;
    let system = |what: String| Error::System { rank, group: name.to_string(), what };
    let start = Layout { size }.bytes();
    // Each says who and where it is; rank 0 also which of its descriptors is the memory.
    let (created, file) = match rank {
        0 => match Mapping::create(start) {
            Ok((memory, file)) => (Some(Ok(memory)), Some(file)),
            Err(e) => (Some(Err(format!("no memory in common: {e}"))), None),
        },
        _ => (None, None),
    };
    let descriptor = file.as_ref().map_or(-1, |file| file.as_raw_fd());
    let pid = std::process::id();
    let started = system::start_time(pid).map_err(|e| system(format!("/proc/{pid}/stat: {e}")))?;
    let me = format!("{pid}\n{started}\n{descriptor}\n{size}\n{}", system::machine());
    let all = exchange.exchange(me.as_bytes(), "joining over shared memory")?;
    let mapped = meet(&all, rank, size, created);
    // Everyone hears whether everyone is there, before anyone relies on it.
    let said = mapped.as_ref().err().cloned().unwrap_or_default();
    let all = exchange.exchange(said.as_bytes(), "mapping shared memory");
    drop(file);
    let ((memory, processes), all) = (mapped.map_err(system)?, all?);
    if let Some((peer, why)) = all.iter().enumerate().find(|(_, why)| !why.is_empty()) {
        return Err(system(format!("rank {peer} cannot join: {}", String::from_utf8_lossy(why))));
    }
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let longest_spin_ns = if size <= cores { LONGEST_SPIN_NS } else { 0 };
    let engine = Shm {
        store,
        scope: exchange.scope().to_string(),
        name: name.to_string(),
        rank,
        size,
        timeout,
        memory,
        processes,
        longest_spin_ns,
        spin_ns: AtomicU32::new(longest_spin_ns),
        round: Mutex::new(0),
        why_left: AtomicU32::new(0),
    };
    Ok(Arc::new(Queued::new(engine)))
}

/// Text where it went wrong, for everyone to hear.
type Told<T> = std::result::Result<T, String>;

/// Maps the memory and takes hold of the peers' processes, from what they said of themselves.
fn meet(
    all: &[Vec<u8>],
    rank: usize,
    size: usize,
    created: Option<Told<Mapping>>,
) -> Told<(Mapping, Vec<Process>)> {
    let mut said = Vec::new();
    for (peer, text) in all.iter().enumerate() {
        let text = String::from_utf8_lossy(text);
        let fields: Vec<String> = text.split('\n').map(String::from).collect();
        let [pid, started, descriptor, theirs, machine] = fields.as_slice() else {
            return Err(format!("rank {peer} is of another version"));
        };
        if theirs.parse() != Ok(size) {
            return Err(format!("it counts {size} ranks, rank {peer} counts {theirs}"));
        }
        if *machine != system::machine() {
            return Err(format!("rank {peer} is on another machine, or in another container"));
        }
        let pid: u32 = pid.parse().unwrap_or(0);
        let started: u64 = started.parse().unwrap_or(0);
        let descriptor: i32 = descriptor.parse().unwrap_or(-1);
        said.push((pid, started, descriptor));
    }
    let watch = |(peer, &(pid, started, _)): (usize, &(u32, u64, i32))| {
        Process::watch(pid, started).map_err(|e| format!("process {pid} of rank {peer}: {e}"))
    };
    let processes = said.iter().enumerate().map(watch).collect::<Told<_>>()?;
    let memory = match created {
        Some(created) => created?,
        None => Mapping::open(said[0].0, said[0].2, Layout { size }.bytes()).map_err(|e| {
            format!("rank {rank} cannot map the memory of rank 0 (process {}): {e}", said[0].0)
        })?,
    };
    Ok((memory, processes))
}

/// Where things are in the memory.
#[derive(Clone, Copy)]
struct Layout {
    size: usize,
}

impl Layout {
    fn rank(self, rank: usize) -> usize {
        RANKS + rank * RANK
    }

    fn pair(self, from: usize, to: usize) -> usize {
        let start = (RANKS + self.size * RANK).next_multiple_of(4096);
        start + (from * self.size + to) * PAIR
    }

    fn slot(self, rank: usize, round: u32) -> usize {
        let start = self.pair(self.size, 0).next_multiple_of(4096);
        start + rank * OUTBOX + round as usize % SLOTS * (HEADER + SLOT)
    }

    fn bytes(self) -> usize {
        self.slot(self.size, 0)
    }
}

/// One rank.
struct Shm {
    store: Arc<Store>,
    scope: String,
    name: String,
    rank: usize,
    size: usize,
    timeout: Duration,
    memory: Mapping,
    processes: Vec<Process>,
    longest_spin_ns: u32,
    spin_ns: AtomicU32,
    /// The number of the next round, the same on all ranks between two collectives. Wraps around, which
    /// is seamless because the number of slots is a power of two.
    round: Mutex<u32>,
    why_left: AtomicU32,
}

const REASONS: [&str; 3] = ["its group was dropped", "its handle was dropped", "its thread panicked"];

/// What a rank waits for: a counter of each of some peers, to come to a number.
struct Wait<'a> {
    job: &'a Job,
    peers: &'a [usize],
    counter: &'a dyn Fn(usize) -> (usize, u32),
}

impl Shm {
    fn layout(&self) -> Layout {
        Layout { size: self.size }
    }

    fn counter(&self, offset: usize) -> Counter<'_> {
        Counter { value: self.memory.word(offset), sleepers: self.memory.word(offset + 4) }
    }

    fn published(&self, rank: usize) -> usize {
        self.layout().rank(rank) + PUBLISHED
    }

    fn consumed(&self, rank: usize) -> usize {
        self.layout().rank(rank) + CONSUMED
    }

    fn slot(&self, rank: usize, round: u32) -> usize {
        self.memory.at(self.layout().slot(rank, round), HEADER + SLOT)
    }

    /// Waits for all counters, each at `counter(peer)` = (where it is, what it must come to).
    fn wait(&self, wait: &Wait<'_>) -> Result<()> {
        for &peer in wait.peers {
            let (offset, target) = (wait.counter)(peer);
            let counter = self.counter(offset);
            if reached(counter.get(), target) || self.spin(counter, target) {
                continue;
            }
            let started = Instant::now();
            while !counter.sleep(target, LOOK) {
                self.look_around(wait, started)?;
            }
        }
        Ok(())
    }

    /// Looks for a moment, and learns how long that is worth.
    fn spin(&self, counter: Counter<'_>, target: u32) -> bool {
        let time = self.spin_ns.load(Ordering::Relaxed);
        let seen = time > 0 && counter.spin(target, Duration::from_nanos(time.into()));
        let next = if seen { time * 2 } else { time / 2 };
        let shortest = SHORTEST_SPIN_NS.min(self.longest_spin_ns);
        self.spin_ns.store(next.clamp(shortest, self.longest_spin_ns), Ordering::Relaxed);
        seen
    }

    /// Fails when what is waited for will not come.
    fn look_around(&self, wait: &Wait<'_>, started: Instant) -> Result<()> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let seconds = started.elapsed().as_secs_f64();
        let (rank, group) = (self.rank, self.name.clone());
        let (op, what) = (wait.job.call.op(rank), wait.job.what.clone());
        let behind = |peer: usize| {
            let (offset, target) = (wait.counter)(peer);
            !reached(self.counter(offset).get(), target)
        };
        for &peer in wait.peers {
            let left = self.memory.word(self.layout().rank(peer) + LEFT).load(Ordering::Acquire);
            let ended = self.processes[peer].has_ended();
            // What it did before it left counts: so its counter is looked at after.
            if (left == 0 && !ended) || !behind(peer) {
                continue;
            }
            let why = match REASONS.get((left as usize).wrapping_sub(1)) {
                Some(reason) => reason.to_string(),
                None => format!("its process {} has ended", self.processes[peer].pid()),
            };
            return Err(self.fail(Error::PeerLost { rank, group, op, what, seconds, peer, why }));
        }
        if started.elapsed() < self.timeout {
            return Ok(());
        }
        let missing = list_ranks(wait.peers.iter().copied().filter(|&peer| behind(peer)));
        Err(self.fail(Error::Timeout { rank, group, op, what, seconds, missing }))
    }

    /// One collective, round by round.
    fn collective(&self, job: &Job) -> Result<Vec<Vec<u8>>> {
        let mut round = self.round.lock().unwrap_or_else(PoisonError::into_inner);
        let (me, first) = (self.rank, *round);
        let at = |index: usize| first.wrapping_add(index as u32);
        let peers: Vec<usize> = (0..self.size).filter(|&peer| peer != me).collect();
        let mut pieces = Pieces::new(job, me, self.size);
        let (mut put, mut got) = (0, 0);
        while got < pieces.rounds() {
            while put < pieces.rounds() && put < got + SLOTS && pieces.is_ready(put, got) {
                let counter = |peer| (self.consumed(peer), at(put).wrapping_sub(SLOTS as u32 - 1));
                let room = |&peer: &usize| reached(self.counter(counter(peer).0).get(), counter(peer).1);
                // With something to consume, one does not wait for room.
                if put > got && !peers.iter().all(room) {
                    break;
                }
                self.wait(&Wait { job, peers: &peers, counter: &counter })?;
                let slot = self.slot(me, at(put));
                if put == 0 {
                    // SAFETY: a header's room at the slot's start; everyone has done with the slot.
                    unsafe { (slot as *mut [u8; HEADER]).write_unaligned(job.header().encode()) };
                }
                // SAFETY: the slot is this rank's to write until it is published.
                unsafe { pieces.publish(put, slot + HEADER) };
                self.counter(self.published(me)).set(at(put + 1));
                put += 1;
            }
            let from = if got == 0 { peers.clone() } else { pieces.sources(&peers) };
            let counter = |peer| (self.published(peer), at(got + 1));
            self.wait(&Wait { job, peers: &from, counter: &counter })?;
            if got == 0 {
                let headers = self.compare(job, &peers, at(0))?;
                pieces.learn(&headers);
            }
            // SAFETY: the sources have published this round, and leave it alone until we have consumed it.
            unsafe { pieces.consume(got, |peer| self.slot(peer, at(got)) + HEADER)? };
            self.counter(self.consumed(me)).set(at(got + 1));
            got += 1;
        }
        *round = at(got);
        Ok(pieces.into_answers())
    }

    /// Everyone's header; fails unless all issued the same call.
    fn compare(&self, job: &Job, peers: &[usize], round: u32) -> Result<Vec<Header>> {
        let mut headers = vec![job.header(); self.size];
        for &peer in peers {
            // SAFETY: published, so written and left alone.
            let bytes = unsafe { (self.slot(peer, round) as *const [u8; HEADER]).read_unaligned() };
            headers[peer] = self.compare_one(job, peer, &bytes)?;
        }
        Ok(headers)
    }

    fn compare_one(&self, job: &Job, peer: usize, bytes: &[u8; HEADER]) -> Result<Header> {
        job.compare(bytes, &self.name, self.rank, peer).map_err(|error| self.fail(error))
    }

    /// Writes into the ring to `to`, waiting for room.
    fn write(&self, job: &Job, to: usize, from: usize, len: usize) -> Result<()> {
        let pair = self.layout().pair(self.rank, to);
        let (written, data) = (self.counter(pair + WRITTEN), self.memory.at(pair + RING_DATA, RING));
        let mut sent = 0;
        while sent < len {
            let at = written.get();
            let counter = |_| (pair + READ, at.wrapping_sub(RING as u32 - 1));
            self.wait(&Wait { job, peers: &[to], counter: &counter })?;
            let room = RING - at.wrapping_sub(self.counter(pair + READ).get()) as usize;
            let start = at as usize % RING;
            // Half a ring at a time, so that the receiver reads one half while the other is written.
            let now = room.min(len - sent).min(RING - start).min(RING / 2);
            // SAFETY: these bytes of the ring are free, and the job's buffer is ours to read.
            unsafe {
                std::ptr::copy_nonoverlapping((from + sent) as *const u8, (data + start) as *mut u8, now)
            };
            written.set(at.wrapping_add(now as u32));
            sent += now;
        }
        Ok(())
    }

    /// Reads from the ring of `from`, waiting for bytes.
    fn read(&self, job: &Job, from: usize, into: usize, len: usize) -> Result<()> {
        let pair = self.layout().pair(from, self.rank);
        let (read, data) = (self.counter(pair + READ), self.memory.at(pair + RING_DATA, RING));
        let mut received = 0;
        while received < len {
            let at = read.get();
            let counter = |_| (pair + WRITTEN, at.wrapping_add(1));
            self.wait(&Wait { job, peers: &[from], counter: &counter })?;
            let there = self.counter(pair + WRITTEN).get().wrapping_sub(at) as usize;
            let start = at as usize % RING;
            let now = there.min(len - received).min(RING - start);
            // SAFETY: these bytes of the ring are written, and the job's buffer is ours to write.
            unsafe {
                std::ptr::copy_nonoverlapping((data + start) as *const u8, (into + received) as *mut u8, now);
            }
            read.set(at.wrapping_add(now as u32));
            received += now;
        }
        Ok(())
    }
}

impl Engine for Shm {
    fn who(&self) -> Who<'_> {
        Who { kind: "shm", name: &self.name, rank: self.rank, size: self.size }
    }

    fn run(&self, job: &Job) -> Result<Vec<Vec<u8>>> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let Call::Transfer { from, to, .. } = job.call else { return self.collective(job) };
        let (src, dst) = job.buffers();
        if from == self.rank {
            let header = job.header().encode();
            self.write(job, to, header.as_ptr().expose_provenance(), HEADER)?;
            self.write(job, to, src.address(), src.num_bytes())?;
        } else {
            let mut header = [0; HEADER];
            self.read(job, from, header.as_mut_ptr().expose_provenance(), HEADER)?;
            self.compare_one(job, from, &header)?;
            self.read(job, from, dst.address(), dst.num_bytes())?;
        }
        Ok(Vec::new())
    }

    fn fail(&self, error: Error) -> Error {
        let state = self.memory.word(FAILURE);
        if state.compare_exchange(NONE, WRITING, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return self.failure().unwrap_or(error);
        }
        let text = error.encode();
        let text = &text.as_bytes()[..text.len().min(MAX_FAILURE)];
        let into = self.memory.at(FAILURE_TEXT, MAX_FAILURE) as *mut u8;
        // SAFETY: room for as much; who made the state WRITING is the only one to write here.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), into, text.len()) };
        self.memory.word(FAILURE_LEN).store(text.len() as u32, Ordering::Release);
        state.store(WRITTEN_DOWN, Ordering::Release);
        error
    }

    fn failure(&self) -> Option<Error> {
        let state = self.memory.word(FAILURE);
        if state.load(Ordering::Acquire) == NONE {
            return None;
        }
        // Who writes it down may be killed on the way.
        let started = Instant::now();
        while state.load(Ordering::Acquire) != WRITTEN_DOWN {
            if started.elapsed() > Duration::from_millis(500) {
                let what = "another rank failed and could not say why".to_string();
                return Some(Error::System { rank: self.rank, group: self.name.clone(), what });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let len = self.memory.word(FAILURE_LEN).load(Ordering::Acquire) as usize;
        let from = self.memory.at(FAILURE_TEXT, MAX_FAILURE) as *const u8;
        // SAFETY: inside the mapping, and nobody writes it any more.
        let text = unsafe { std::slice::from_raw_parts(from, len.min(MAX_FAILURE)) };
        Some(Error::decode(&String::from_utf8_lossy(text), self.rank, &self.name))
    }

    fn scope(&self) -> &str {
        &self.scope
    }

    fn join(&self, ranks: &[usize], rank: usize, scope: &str, name: &str) -> Result<Arc<dyn Group>> {
        let (store, size, timeout) = (self.store.clone(), ranks.len(), self.timeout);
        join_at(Joining { store, scope, name, rank, size, timeout })
    }

    fn leaving(&self, why: &'static str) {
        let reason = REASONS.iter().position(|&reason| reason == why).unwrap_or(0);
        self.why_left.store(reason as u32, Ordering::Relaxed);
    }
}

impl Drop for Shm {
    /// The last call has run, or never will.
    fn drop(&mut self) {
        let reason = self.why_left.load(Ordering::Relaxed);
        self.memory.word(self.layout().rank(self.rank) + LEFT).store(reason + 1, Ordering::Release);
    }
}
