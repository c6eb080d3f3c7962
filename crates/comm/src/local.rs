//! Ranks that are threads of one process and read each other's memory.
//!
//! A call is a slot that the ranks which take part meet in: all of them, or the two between which a message
//! goes. Each takes its number when it is *issued*, so that ranks meet in the same slot whatever their streams
//! are doing, and then, when its stream comes to it:
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

use crate::call::{Call, Job as Post, Payload};
use crate::group::agree_on_split;
use crate::ticket::{Ticket, Ticketed, Who};
use crate::{Error, Group, Reduction, Result, reduce};
use device::Buffer;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Makes a group of `size` ranks; element r of the result is rank r's handle. A wait longer than `timeout` is
/// an error. A rank leaves when its handle is dropped: whoever still needs it fails at once.
pub fn group(name: &str, size: usize, timeout: Duration) -> Vec<Arc<dyn Group>> {
    let state = State { failed: None, gone: vec![None; size], slots: HashMap::new(), halves: HashMap::new() };
    let shared = Arc::new(Shared {
        name: name.to_string(),
        size,
        timeout,
        state: Mutex::new(state),
        changed: Condvar::new(),
    });
    let counters = || (0..size).map(|_| AtomicU64::new(0)).collect();
    let handle = |rank| Local {
        presence: Arc::new(Presence { shared: shared.clone(), rank, why: OnceLock::new() }),
        issued: AtomicU64::new(0),
        sent: counters(),
        received: counters(),
        splits: AtomicU64::new(0),
    };
    (0..size).map(|rank| Arc::new(handle(rank)) as Arc<dyn Group>).collect()
}

/// One rank's handle.
struct Local {
    presence: Arc<Presence>,
    /// How many calls of the whole group this rank has issued: the number of the next one.
    issued: AtomicU64,
    /// Per peer, how many messages went to it and came from it.
    sent: Vec<AtomicU64>,
    received: Vec<AtomicU64>,
    splits: AtomicU64,
}

/// A rank that is in the group: it holds its handle, or calls that it issued have not run yet.
struct Presence {
    shared: Arc<Shared>,
    rank: usize,
    /// Why the handle was dropped.
    why: OnceLock<&'static str>,
}

/// Which call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Number {
    Collective(u64),
    Message { from: usize, to: usize, number: u64 },
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
    /// Per rank that has left and will not come to any call any more: why.
    gone: Vec<Option<&'static str>>,
    slots: HashMap<Number, Slot>,
    /// Sub-groups whose ranks have not all taken their handles, by the split's number and its first rank.
    halves: HashMap<(u64, usize), Handles>,
}

/// One per rank, until it takes it.
type Handles = Vec<Option<Arc<dyn Group>>>;

/// One call.
struct Slot {
    posts: Vec<Option<Arc<Post>>>,
    /// Per rank, how many of the call's meetings it has come to; more than there are, for one not in it.
    met: Vec<usize>,
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
    fn meet(&self, number: Number, rank: usize, post: Post) -> Result<Vec<Arc<Post>>> {
        let (op, post) = (post.call.op(rank), Arc::new(post));
        let slot_of_call = || Slot::new(self.size, &post.call.members(self.size));
        let started = Instant::now();
        let mut state = self.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let slot = state.slots.entry(number).or_insert_with(slot_of_call);
        if let Some(error) = slot.mismatch(&self.name, rank, &post) {
            return Err(self.fail(&mut state, error));
        }
        slot.posts[rank] = Some(post.clone());
        slot.met[rank] = 1;
        if slot.missing(0).next().is_none() {
            self.changed.notify_all();
        }
        loop {
            let State { failed, gone, slots, .. } = &mut *state;
            let slot = slots.entry(number).or_insert_with(slot_of_call);
            // A complete slot comes first: see the note on the module.
            if slot.missing(0).next().is_none() {
                return Ok(slot.posts.iter().flatten().cloned().collect());
            }
            // The first failure explains the later ones: ranks leave because of it.
            if let Some(error) = failed {
                return Err(error.clone());
            }
            let lost = slot.missing(0).find_map(|peer| Some((peer, gone[peer]?)));
            if let Some((peer, why)) = lost {
                let (group, what, why) = (self.name.clone(), post.what.clone(), why.to_string());
                let seconds = started.elapsed().as_secs_f64();
                let error = Error::PeerLost { rank, group, op, what, seconds, peer, why };
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
    fn meet_again(&self, number: Number, rank: usize, meeting: usize) {
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
    fn new(size: usize, members: &[usize]) -> Self {
        let met = |rank| if members.contains(&rank) { 0 } else { usize::MAX };
        Slot { posts: vec![None; size], met: (0..size).map(met).collect() }
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
    number: Number,
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

/// A call that was issued.
pub(crate) struct LocalTicket {
    presence: Arc<Presence>,
    number: Number,
    post: Option<Post>,
}

impl Ticket for LocalTicket {
    fn run(mut self) -> Result<Vec<Vec<u8>>> {
        let Some(post) = self.post.take() else { return Ok(Vec::new()) };
        let Presence { shared, rank, .. } = &*self.presence;
        let posts = shared.meet(self.number, *rank, post)?;
        let seat = Seat { shared, number: self.number, rank: *rank };
        if posts.iter().all(|post| matches!(post.payload, Payload::Bytes(_))) {
            return Ok(posts.iter().map(|post| post.bytes().to_vec()).collect());
        }
        // SAFETY: every rank is in the slot until the seat is left.
        unsafe { carry_out(&seat, &posts)? };
        Ok(Vec::new())
    }
}

impl Drop for LocalTicket {
    fn drop(&mut self) {
        let Some(post) = self.post.take() else { return };
        let Presence { shared, rank, .. } = &*self.presence;
        let (rank, group, op) = (*rank, shared.name.clone(), post.call.op(*rank));
        let why = "its stream had failed before".to_string();
        let error = Error::PeerLost { rank, group, op, what: post.what, seconds: 0.0, peer: rank, why };
        shared.fail(&mut shared.lock(), error);
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        let why = self.why.get().copied().unwrap_or("its group was dropped");
        self.shared.lock().gone[self.rank] = Some(why);
        self.shared.changed.notify_all();
    }
}

/// Moves this rank's share of the bytes.
///
/// # Safety
/// Posts are those of a complete slot, and no rank returns from it before all have carried out theirs.
unsafe fn carry_out(seat: &Seat<'_>, posts: &[Arc<Post>]) -> Result<()> {
    let (rank, size) = (seat.rank, seat.shared.size);
    if let Call::Transfer { from, to, .. } = posts[0].call {
        // Posts are in the order of ranks.
        let (sender, receiver) = if from < to { (&posts[0], &posts[1]) } else { (&posts[1], &posts[0]) };
        if rank == to {
            // SAFETY: the sender leaves its buffer alone; ours is ours.
            unsafe { reduce::copy_bytes(sender.buffers().0, receiver.buffers().1) };
        }
        return Ok(());
    }
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
        Call::AllToAll { part, .. } => {
            for (peer, post) in posts.iter().enumerate() {
                let from = post.buffers().0.slice(rank * part, part)?;
                // SAFETY: nobody writes a `src`, which is apart from every `dst`.
                unsafe { reduce::copy_bytes(&from, &dst.slice(peer * part, part)?) };
            }
        }
        Call::Exchange | Call::Barrier | Call::Transfer { .. } => unreachable!("not a collective on buffers"),
    }
    Ok(())
}

impl Local {
    fn shared(&self) -> &Shared {
        &self.presence.shared
    }
}

impl Ticketed for Local {
    type Ticket = LocalTicket;

    fn who(&self) -> Who<'_> {
        let Shared { name, size, .. } = self.shared();
        Who { kind: "local", name, rank: self.presence.rank, size: *size }
    }

    fn ticket(&self, post: Post) -> Result<LocalTicket> {
        if let Some(error) = &self.shared().lock().failed {
            return Err(error.clone());
        }
        let next = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        let number = match post.call {
            Call::Transfer { from, to, .. } => {
                let counter = if from == self.presence.rank { &self.sent[to] } else { &self.received[from] };
                Number::Message { from, to, number: next(counter) }
            }
            _ => Number::Collective(next(&self.issued)),
        };
        Ok(LocalTicket { presence: self.presence.clone(), number, post: Some(post) })
    }

    fn part(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn Group>>> {
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let Some(rank) = agree_on_split(self, ranks, name)? else { return Ok(None) };
        let mut state = self.shared().lock();
        let make = || group(name, ranks.len(), self.shared().timeout).into_iter().map(Some).collect();
        // Who comes first makes the sub-group for all of them; who comes last clears up.
        let handles = state.halves.entry((number, ranks[0])).or_insert_with(make);
        let mine = handles[rank].take();
        if handles.iter().all(Option::is_none) {
            state.halves.remove(&(number, ranks[0]));
        }
        Ok(mine)
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        let why = if std::thread::panicking() { "its thread panicked" } else { "its handle was dropped" };
        let _ = self.presence.why.set(why);
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.who())
    }
}
