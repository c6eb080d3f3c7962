//! Ranks that are threads of one process and read each other's memory.
//!
//! A collective is a slot that all ranks meet in. Each takes its number when it is *issued*, so that ranks
//! meet in the same slot whatever their streams are doing, and then, when its stream comes to it:
//!
//! 1. posts its call and buffers in the slot, and sleeps until everyone has;
//! 2. copies or sums what it needs straight from the peers' memory (a sum in rank order, so every rank and
//!    every run has the same bits);
//! 3. sleeps until everyone has done so, because only then may its own buffers change.
//!
//! # Note: no reading after leaving
//! Between 1 and 3 peers read this rank's memory, so it must not return there, not even with an error. A rank
//! gives up only in 1, while the slot is incomplete, and then the group fails first; a rank that finds the
//! group failed does not post. So a slot that became complete has every rank inside, and each of them has
//! only copying left before it arrives at 3: that meeting needs no timeout and looks at no failure.

use crate::group::{check_parts, check_root};
use crate::{Error, Group, Reduction, Result, reduce};
use device::{Buffer, Dtype, Stream};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Makes a group of `size` ranks; element r of the result is rank r's handle. A wait longer than `timeout` is
/// an error. A rank leaves when its handle is dropped: whoever still needs it fails at once.
pub fn group(name: &str, size: usize, timeout: Duration) -> Vec<Arc<dyn Group>> {
    let state = State { failed: None, gone: vec![None; size], slots: HashMap::new() };
    let shared = Arc::new(Shared {
        name: name.to_string(),
        size,
        timeout,
        state: Mutex::new(state),
        changed: Condvar::new(),
    });
    let handle = |rank| Arc::new(Local { shared: shared.clone(), rank, issued: AtomicU64::new(0) });
    (0..size).map(|rank| handle(rank) as Arc<dyn Group>).collect()
}

/// One rank's handle.
struct Local {
    shared: Arc<Shared>,
    rank: usize,
    /// How many calls this rank has issued: the number of the next one.
    issued: AtomicU64,
}

struct Shared {
    name: String,
    size: usize,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The first failure; the group is of no use after it.
    failed: Option<Error>,
    /// Per rank that has left: from which number on it issues nothing, and why.
    gone: Vec<Option<(u64, &'static str)>>,
    slots: HashMap<u64, Slot>,
}

/// One collective.
struct Slot {
    posts: Vec<Option<Arc<Post>>>,
    /// Per rank, how many of the collective's meetings it has come to.
    met: Vec<usize>,
}

/// What one rank brings to a collective.
struct Post {
    call: Call,
    what: String,
    payload: Payload,
}

enum Payload {
    /// `src` and `dst`; the same buffer twice where the call works in place.
    Buffers(Buffer, Buffer),
    Bytes(Vec<u8>),
}

/// What all ranks must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    AllGather { dtype: Dtype, part: usize },
    ReduceScatter { dtype: Dtype, part: usize },
    AllReduce { dtype: Dtype, len: usize, reduction: Reduction },
    Broadcast { dtype: Dtype, len: usize, root: usize },
    Exchange,
}

impl Call {
    fn op(self) -> &'static str {
        match self {
            Call::AllGather { .. } => "all_gather",
            Call::ReduceScatter { .. } => "reduce_scatter",
            Call::AllReduce { .. } => "all_reduce",
            Call::Broadcast { .. } => "broadcast",
            Call::Exchange => "exchange",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Call::AllGather { dtype, part } => write!(f, "all_gather of {part} {dtype} a rank"),
            Call::ReduceScatter { dtype, part } => write!(f, "reduce_scatter of {part} {dtype} a rank"),
            Call::AllReduce { dtype, len, reduction } => {
                write!(f, "all_reduce ({reduction:?}) of {len} {dtype}")
            }
            Call::Broadcast { dtype, len, root } => write!(f, "broadcast from rank {root} of {len} {dtype}"),
            Call::Exchange => write!(f, "exchange"),
        }
    }
}

impl Post {
    fn buffers(&self) -> (&Buffer, &Buffer) {
        match &self.payload {
            Payload::Buffers(src, dst) => (src, dst),
            Payload::Bytes(_) => unreachable!("calls of a complete slot agree"),
        }
    }

    fn issued(&self) -> String {
        format!("{} for {}", self.call, self.what)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock, apart from a broken invariant that is reported anyway.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first failure stays. Wakes everyone.
    fn fail(&self, state: &mut State, error: Error) -> Error {
        let first = state.failed.get_or_insert(error).clone();
        self.changed.notify_all();
        first
    }

    /// Posts and sleeps until every rank has posted; then every rank's post, in rank order.
    fn meet(&self, number: u64, rank: usize, post: Post) -> Result<Vec<Arc<Post>>> {
        let (op, post) = (post.call.op(), Arc::new(post));
        let started = Instant::now();
        let mut state = self.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let slot = state.slots.entry(number).or_insert_with(|| Slot::new(self.size));
        if let Some(error) = slot.mismatch(&self.name, rank, &post) {
            return Err(self.fail(&mut state, error));
        }
        slot.posts[rank] = Some(post.clone());
        slot.met[rank] = 1;
        if slot.missing(0).next().is_none() {
            self.changed.notify_all();
        }
        loop {
            let State { failed, gone, slots } = &mut *state;
            let slot = slots.entry(number).or_insert_with(|| Slot::new(self.size));
            // A complete slot comes first: see the note on the module.
            if slot.missing(0).next().is_none() {
                return Ok(slot.posts.iter().flatten().cloned().collect());
            }
            // The first failure explains the later ones: ranks leave because of it.
            if let Some(error) = failed {
                return Err(error.clone());
            }
            let lost = slot.missing(0).find_map(|peer| {
                let (from, why) = gone[peer]?;
                (from <= number).then_some((peer, why))
            });
            if let Some((peer, why)) = lost {
                let (group, what, why) = (self.name.clone(), post.what.clone(), why.to_string());
                let error = Error::PeerLost { rank, group, op, what, peer, why };
                return Err(self.fail(&mut state, error));
            }
            let Some(left) = self.timeout.checked_sub(started.elapsed()).filter(|left| !left.is_zero())
            else {
                let missing = crate::error::list_ranks(slot.missing(0));
                let (group, what) = (self.name.clone(), post.what.clone());
                let seconds = started.elapsed().as_secs_f64();
                let error = Error::Timeout { rank, group, op, what, seconds, missing };
                return Err(self.fail(&mut state, error));
            };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sleeps until every rank has come to the meeting with this index (0 was the posting).
    fn meet_again(&self, number: u64, rank: usize, meeting: usize) {
        let mut state = self.lock();
        let Some(slot) = state.slots.get_mut(&number) else { return };
        slot.met[rank] = slot.met[rank].max(meeting + 1);
        if slot.missing(meeting).next().is_none() {
            self.changed.notify_all();
        }
        // The slot is gone once everyone has left it.
        while state.slots.get(&number).is_some_and(|slot| slot.missing(meeting).next().is_some()) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if meeting == Seat::LAST {
            state.slots.remove(&number);
        }
    }
}

impl Slot {
    fn new(size: usize) -> Self {
        Slot { posts: vec![None; size], met: vec![0; size] }
    }

    /// Ranks that have not come to the meeting.
    fn missing(&self, meeting: usize) -> impl Iterator<Item = usize> {
        self.met.iter().enumerate().filter(move |&(_, &met)| met <= meeting).map(|(rank, _)| rank)
    }

    fn mismatch(&self, group: &str, rank: usize, post: &Post) -> Option<Error> {
        let other = |(peer, theirs): (usize, &Option<Arc<Post>>)| {
            theirs.as_ref().filter(|theirs| theirs.call != post.call).map(|theirs| (peer, theirs.issued()))
        };
        let (peer, theirs) = self.posts.iter().enumerate().find_map(other)?;
        Some(Error::Mismatch { group: group.to_string(), rank, mine: post.issued(), peer, theirs })
    }
}

/// A rank inside a complete slot. However it leaves, even in a panic, the others hear of it.
struct Seat<'a> {
    shared: &'a Shared,
    number: u64,
    rank: usize,
}

impl Seat<'_> {
    const LAST: usize = 2;
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        self.shared.meet_again(self.number, self.rank, Seat::LAST);
    }
}

/// A collective that was issued and has not run. If its stream drops it unrun, the peers must not wait for it.
struct Ticket {
    shared: Arc<Shared>,
    number: u64,
    rank: usize,
    post: Option<Post>,
}

impl Ticket {
    fn run(mut self) -> Result<()> {
        let Some(post) = self.post.take() else { return Ok(()) };
        let posts = self.shared.meet(self.number, self.rank, post)?;
        let seat = Seat { shared: &self.shared, number: self.number, rank: self.rank };
        // SAFETY: every rank is in the slot until the seat is left.
        unsafe { carry_out(&seat, &posts) }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(post) = self.post.take() else { return };
        let (group, what) = (self.shared.name.clone(), post.what);
        let why = "its stream had failed before".to_string();
        let error =
            Error::PeerLost { rank: self.rank, group, op: post.call.op(), what, peer: self.rank, why };
        self.shared.fail(&mut self.shared.lock(), error);
    }
}

/// Moves this rank's share of the bytes.
///
/// # Safety
/// Posts are those of a complete slot, and no rank returns from it before all have carried out theirs.
unsafe fn carry_out(seat: &Seat<'_>, posts: &[Arc<Post>]) -> Result<()> {
    let (rank, size) = (seat.rank, posts.len());
    let (_, dst) = posts[rank].buffers();
    match posts[rank].call {
        Call::AllGather { part, .. } => {
            for (peer, post) in posts.iter().enumerate() {
                // SAFETY: nobody writes a `src` now. Where `src` is a part of `dst`, it is its owner's part,
                // which its owner leaves alone.
                unsafe { reduce::copy_bytes(post.buffers().0, &dst.slice(peer * part, part)?) };
            }
        }
        Call::ReduceScatter { part, .. } => {
            let part_of = |post: &Arc<Post>| post.buffers().0.slice(rank * part, part);
            let sources: Vec<Buffer> = posts.iter().map(part_of).collect::<device::Result<_>>()?;
            // SAFETY: this rank's part of every `src` is read by this rank only, so `dst` may be that part.
            unsafe { reduce::reduce(&sources, dst, Reduction::Sum)? };
        }
        Call::AllReduce { len, reduction, .. } => {
            let part = |index: usize| {
                let (start, end) = (index * len / size, (index + 1) * len / size);
                move |buffer: &Buffer| buffer.slice(start, end - start)
            };
            let part_of = |post: &Arc<Post>| part(rank)(post.buffers().0);
            let sources: Vec<Buffer> = posts.iter().map(part_of).collect::<device::Result<_>>()?;
            // SAFETY: part `rank` of every buffer is touched by this rank only until the next meeting.
            unsafe { reduce::reduce(&sources, &part(rank)(dst)?, reduction)? };
            seat.shared.meet_again(seat.number, rank, 1);
            for (peer, post) in posts.iter().enumerate() {
                // SAFETY: part `peer` of that peer's buffer is reduced, and nobody writes it any more.
                unsafe { reduce::copy_bytes(&part(peer)(post.buffers().0)?, &part(peer)(dst)?) };
            }
        }
        Call::Broadcast { root, .. } => {
            // SAFETY: nobody writes the root's buffer; everyone else writes its own.
            unsafe { reduce::copy_bytes(posts[root].buffers().0, dst) };
        }
        Call::Exchange => unreachable!("an exchange has no buffers"),
    }
    Ok(())
}

impl Local {
    fn ticket(&self, post: Post) -> Result<Ticket> {
        if let Some(error) = &self.shared.lock().failed {
            return Err(error.clone());
        }
        let number = self.issued.fetch_add(1, Ordering::Relaxed);
        Ok(Ticket { shared: self.shared.clone(), number, rank: self.rank, post: Some(post) })
    }

    fn issue(&self, stream: &Stream, call: Call, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        let Stream::Cpu(stream) = stream else {
            let what = format!("{what}: a group of local threads works on CPU streams only");
            return Err(Error::Argument { op: call.op(), what });
        };
        let payload = Payload::Buffers(src.clone(), dst.clone());
        let ticket = self.ticket(Post { call, what: what.to_string(), payload })?;
        // On an inline stream the collective has failed by the time `submit` returns, and the caller hears
        // the error itself; on a worker it travels through the stream as text.
        let failure = Arc::new(OnceLock::new());
        let (reported, name) = (failure.clone(), stream.name().to_string());
        let task = move || {
            ticket.run().map_err(|error| {
                let what = error.to_string();
                let _ = reported.set(error);
                device::Error::Stream { stream: name, what }
            })
        };
        let result = stream.submit(task);
        result.map_err(|error| failure.get().cloned().unwrap_or(Error::Device(error)))
    }
}

impl Group for Local {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.shared.size
    }

    fn all_gather(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        check_parts("all_gather", what, src, dst, self)?;
        let call = Call::AllGather { dtype: src.dtype(), part: src.len() };
        self.issue(stream, call, src, dst, what)
    }

    fn reduce_scatter(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        reduce::supports("reduce_scatter", src.dtype())?;
        check_parts("reduce_scatter", what, dst, src, self)?;
        let call = Call::ReduceScatter { dtype: dst.dtype(), part: dst.len() };
        self.issue(stream, call, src, dst, what)
    }

    fn all_reduce(&self, stream: &Stream, buffer: &Buffer, reduction: Reduction, what: &str) -> Result<()> {
        reduce::supports("all_reduce", buffer.dtype())?;
        let call = Call::AllReduce { dtype: buffer.dtype(), len: buffer.len(), reduction };
        self.issue(stream, call, buffer, buffer, what)
    }

    fn broadcast(&self, stream: &Stream, buffer: &Buffer, root: usize, what: &str) -> Result<()> {
        check_root(what, root, self)?;
        let call = Call::Broadcast { dtype: buffer.dtype(), len: buffer.len(), root };
        self.issue(stream, call, buffer, buffer, what)
    }

    fn exchange(&self, bytes: &[u8], what: &str) -> Result<Vec<Vec<u8>>> {
        let payload = Payload::Bytes(bytes.to_vec());
        let mut ticket = self.ticket(Post { call: Call::Exchange, what: what.to_string(), payload })?;
        let Some(post) = ticket.post.take() else { return Ok(Vec::new()) };
        let posts = self.shared.meet(ticket.number, self.rank, post)?;
        let _seat = Seat { shared: &self.shared, number: ticket.number, rank: self.rank };
        let bytes = |post: &Arc<Post>| match &post.payload {
            Payload::Bytes(bytes) => bytes.clone(),
            Payload::Buffers(..) => unreachable!("calls of a complete slot agree"),
        };
        Ok(posts.iter().map(bytes).collect())
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        let why = if std::thread::panicking() { "its thread panicked" } else { "its handle was dropped" };
        let from = self.issued.load(Ordering::Relaxed);
        self.shared.lock().gone[self.rank] = Some((from, why));
        self.shared.changed.notify_all();
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Local({}, rank {} of {})", self.shared.name, self.rank, self.shared.size)
    }
}
