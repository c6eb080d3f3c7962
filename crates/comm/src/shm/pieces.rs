//! Which bytes a rank publishes and consumes in which round of a collective.

use super::SLOT;
use crate::call::{Call, Header, Job, Payload};
use crate::copy::copy;
use crate::{Reduction, Result, reduce};
use device::Dtype;

/// Smaller all-reduces take one round: everyone reads everything and sums it for itself.
const SMALL: usize = 32 << 10;

/// One rank's side of a collective.
pub struct Pieces<'a> {
    call: Call,
    me: usize,
    size: usize,
    /// Addresses of source and destination.
    src: usize,
    dst: usize,
    /// Of an exchange: what this rank brings, and what it has of all.
    bytes: &'a [u8],
    answers: Vec<Vec<u8>>,
    rounds: usize,
    /// Bytes of the destination.
    whole: usize,
}

/// Into a slot, which stays in the cache.
///
/// # Safety
/// As for [`copy::copy`].
unsafe fn publish_bytes(from: usize, slot: usize, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy(from, slot, len, 0) };
}

impl<'a> Pieces<'a> {
    pub fn new(job: &'a Job, me: usize, size: usize) -> Self {
        let (src, dst, whole) = match &job.payload {
            Payload::Buffers(src, dst) => (src.address(), dst.address(), dst.num_bytes()),
            Payload::Bytes(_) => (0, 0, 0),
        };
        let mut pieces = Pieces {
            call: job.call,
            me,
            size,
            src,
            dst,
            bytes: job.bytes(),
            answers: Vec::new(),
            rounds: 1,
            whole,
        };
        pieces.rounds = pieces.count().max(1);
        pieces
    }

    /// Bytes that go to each of the ranks in one round, when every rank gets its own.
    fn share(&self) -> usize {
        SLOT / self.size / 64 * 64
    }

    fn count(&self) -> usize {
        match self.call {
            Call::AllGather { dtype, part } => (part * dtype.bytes()).div_ceil(SLOT),
            Call::ReduceScatter { dtype, part } | Call::AllToAll { dtype, part } => {
                (part * dtype.bytes()).div_ceil(self.share())
            }
            Call::AllReduce { .. } if self.is_small() => 1,
            Call::AllReduce { .. } => self.reducing() + self.largest_part().div_ceil(SLOT),
            Call::Broadcast { dtype, len, .. } => (len * dtype.bytes()).div_ceil(SLOT),
            Call::Exchange | Call::Barrier | Call::Transfer { .. } => 1,
        }
    }

    pub fn rounds(&self) -> usize {
        self.rounds
    }

    fn is_small(&self) -> bool {
        matches!(self.call, Call::AllReduce { dtype, len, .. } if len * dtype.bytes() <= SMALL)
    }

    /// Of an all-reduce that is not small: the bytes that rank `rank` sums, as start and length.
    fn part(&self, rank: usize) -> (usize, usize) {
        let Call::AllReduce { dtype, len, .. } = self.call else { return (0, 0) };
        let start = |rank: usize| rank * len / self.size * dtype.bytes();
        (start(rank), start(rank + 1) - start(rank))
    }

    fn largest_part(&self) -> usize {
        (0..self.size).map(|rank| self.part(rank).1).max().unwrap_or(0)
    }

    /// The rounds of an all-reduce in which sums are made; in those that follow, they are handed round.
    fn reducing(&self) -> usize {
        self.largest_part().div_ceil(self.share())
    }

    /// Whether round `put` may be published when `got` rounds are consumed: sums must be made first.
    pub fn is_ready(&self, put: usize, got: usize) -> bool {
        match self.call {
            Call::AllReduce { .. } if !self.is_small() => put < self.reducing() || got >= self.reducing(),
            _ => true,
        }
    }

    /// The peers that have something for this rank after the first round.
    pub fn sources(&self, peers: &[usize]) -> Vec<usize> {
        match self.call {
            Call::Broadcast { root, .. } => peers.iter().copied().filter(|&peer| peer == root).collect(),
            _ => peers.to_vec(),
        }
    }

    /// What the headers say that the call alone does not.
    pub fn learn(&mut self, headers: &[Header]) {
        if self.call == Call::Exchange {
            self.answers = headers.iter().map(|header| vec![0; header.num_bytes]).collect();
            let longest = headers.iter().map(|header| header.num_bytes).max().unwrap_or(0);
            self.rounds = longest.div_ceil(SLOT).max(1);
            self.answers[self.me].copy_from_slice(self.bytes);
        }
    }

    /// Copies what the others need in round `index` to `slot`.
    ///
    /// # Safety
    /// `slot` is [`SLOT`] bytes that nobody else touches; the job's buffers are ours.
    pub unsafe fn publish(&self, index: usize, slot: usize) {
        // SAFETY, of all copies: `piece` keeps within the buffers, whose sizes were checked against the call,
        // and within the slot; shares do not overlap.
        let share = self.share();
        match self.call {
            Call::AllGather { dtype, part } => {
                let (start, len) = piece(index, SLOT, part * dtype.bytes());
                // SAFETY: see above.
                unsafe { publish_bytes(self.src + start, slot, len) };
            }
            Call::ReduceScatter { dtype, part } | Call::AllToAll { dtype, part } => {
                let (start, len) = piece(index, share, part * dtype.bytes());
                for peer in (0..self.size).filter(|&peer| peer != self.me) {
                    let from = self.src + peer * part * dtype.bytes() + start;
                    // SAFETY: see above.
                    unsafe { publish_bytes(from, slot + peer * share, len) };
                }
            }
            Call::AllReduce { dtype, len, .. } if self.is_small() => {
                // SAFETY: see above; a small one fits into a slot.
                unsafe { publish_bytes(self.src, slot, len * dtype.bytes()) };
            }
            Call::AllReduce { .. } if index < self.reducing() => {
                for peer in (0..self.size).filter(|&peer| peer != self.me) {
                    let (part, bytes) = self.part(peer);
                    let (start, len) = piece(index, share, bytes);
                    // SAFETY: see above.
                    unsafe { publish_bytes(self.src + part + start, slot + peer * share, len) };
                }
            }
            Call::AllReduce { .. } => {
                let (part, bytes) = self.part(self.me);
                let (start, len) = piece(index - self.reducing(), SLOT, bytes);
                // SAFETY: see above.
                unsafe { publish_bytes(self.src + part + start, slot, len) };
            }
            Call::Broadcast { dtype, len, root } if root == self.me => {
                let (start, len) = piece(index, SLOT, len * dtype.bytes());
                // SAFETY: see above.
                unsafe { publish_bytes(self.src + start, slot, len) };
            }
            Call::Exchange => {
                let (start, len) = piece(index, SLOT, self.bytes.len());
                // SAFETY: see above.
                unsafe { publish_bytes(self.bytes.as_ptr() as usize + start, slot, len) };
            }
            Call::Broadcast { .. } | Call::Barrier | Call::Transfer { .. } => {}
        }
    }

    /// Copies or sums what the peers published in round `index`, each at `slot_of(peer)`.
    ///
    /// # Safety
    /// The slots hold that round and nobody writes them; the job's buffers are ours.
    pub unsafe fn consume(&mut self, index: usize, slot_of: impl Fn(usize) -> usize) -> Result<()> {
        let (me, size, share, whole) = (self.me, self.size, self.share(), self.whole);
        // Sums over all ranks of `len` bytes; the own ones, at `own`, were not published.
        let sum = |own: usize, dst: usize, len: usize, offset: usize, dtype: Dtype, reduction: Reduction| {
            let from = |rank: usize| if rank == me { own } else { slot_of(rank) + offset };
            let sources: Vec<usize> = (0..size).map(from).collect();
            // SAFETY: as for the copies below; slots and shares are aligned to 64 bytes, buffers to their
            // elements, and pieces begin at multiples of 64 bytes.
            unsafe { reduce::reduce_at(&sources, dst, len / dtype.bytes(), dtype, reduction, whole) }
        };
        // SAFETY, of all copies: `piece` keeps within the buffers and the slots, as when publishing.
        match self.call {
            Call::AllGather { dtype, part } => {
                let bytes = part * dtype.bytes();
                let (start, len) = piece(index, SLOT, bytes);
                for rank in 0..size {
                    let from = if rank == me { self.src + start } else { slot_of(rank) };
                    // SAFETY: see above. Where `src` is a part of `dst`, it is the own part, at its place.
                    unsafe { copy(from, self.dst + rank * bytes + start, len, whole) };
                }
            }
            Call::AllToAll { dtype, part } => {
                let bytes = part * dtype.bytes();
                let (start, len) = piece(index, share, bytes);
                for rank in 0..size {
                    let own = self.src + me * bytes + start;
                    let from = if rank == me { own } else { slot_of(rank) + me * share };
                    // SAFETY: see above; `src` and `dst` are apart.
                    unsafe { copy(from, self.dst + rank * bytes + start, len, whole) };
                }
            }
            Call::ReduceScatter { dtype, part } => {
                let bytes = part * dtype.bytes();
                let (start, len) = piece(index, share, bytes);
                let own = self.src + me * bytes + start;
                sum(own, self.dst + start, len, me * share, dtype, Reduction::Sum)?;
            }
            Call::AllReduce { dtype, len, reduction } if self.is_small() => {
                sum(self.src, self.dst, len * dtype.bytes(), 0, dtype, reduction)?;
            }
            Call::AllReduce { dtype, reduction, .. } if index < self.reducing() => {
                let (part, bytes) = self.part(me);
                let (start, len) = piece(index, share, bytes);
                let at = self.src + part + start;
                sum(at, at, len, me * share, dtype, reduction)?;
            }
            Call::AllReduce { .. } => {
                for rank in (0..size).filter(|&rank| rank != me) {
                    let (part, bytes) = self.part(rank);
                    let (start, len) = piece(index - self.reducing(), SLOT, bytes);
                    // SAFETY: see above.
                    unsafe { copy(slot_of(rank), self.dst + part + start, len, whole) };
                }
            }
            Call::Broadcast { dtype, len, root } if root != me => {
                let (start, len) = piece(index, SLOT, len * dtype.bytes());
                // SAFETY: see above.
                unsafe { copy(slot_of(root), self.dst + start, len, whole) };
            }
            Call::Exchange => {
                for rank in (0..size).filter(|&rank| rank != me) {
                    let answer = &mut self.answers[rank];
                    let (start, len) = piece(index, SLOT, answer.len());
                    // SAFETY: see above.
                    unsafe { copy(slot_of(rank), answer.as_mut_ptr() as usize + start, len, whole) };
                }
            }
            Call::Broadcast { .. } | Call::Barrier | Call::Transfer { .. } => {}
        }
        Ok(())
    }

    pub fn into_answers(self) -> Vec<Vec<u8>> {
        self.answers
    }
}

/// Piece `index` of `bytes` cut into pieces of `most`: where it starts and how long it is; empty past the end.
fn piece(index: usize, most: usize, bytes: usize) -> (usize, usize) {
    let start = (index * most).min(bytes);
    (start, most.min(bytes - start))
}
