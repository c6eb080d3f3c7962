use crate::{Error, Result};
use device::{Buffer, Stream};
use std::fmt;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    Sum,
    Max,
}

/// Ranks that talk together. All of them issue the same calls in the same order; `what` names the thing being
/// moved (a unit, "grad norm") and appears in errors.
///
/// Collectives are issued on a stream and may return before they have run. Sums run in rank order and in f32,
/// rounded once to the buffer's dtype, so that every backend that can choose gives the same bits.
///
/// After a failure (a rank that is gone, that did not come in time, or that issued something else) the group is
/// of no use to anyone: every later call of every rank returns the first failure.
///
/// The calls with a default body are those that a group which only stands for one (as in planning) can do
/// without.
pub trait Group: fmt::Debug + Send + Sync {
    fn name(&self) -> &str;
    fn rank(&self) -> usize;
    fn size(&self) -> usize;

    /// `dst` becomes every rank's `src`, in rank order. `src` may be this rank's own part of `dst`.
    fn all_gather(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()>;

    /// `dst` becomes this rank's part of the sum of every rank's `src`. `dst` may be that part of `src`.
    fn reduce_scatter(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()>;

    /// `buffer` becomes the sum or maximum over all ranks' `buffer`s.
    fn all_reduce(&self, stream: &Stream, buffer: &Buffer, reduction: Reduction, what: &str) -> Result<()>;

    /// `buffer` becomes rank `root`'s.
    fn broadcast(&self, stream: &Stream, buffer: &Buffer, root: usize, what: &str) -> Result<()>;

    /// Both buffers are one equal part per rank, and do not overlap: part r of `dst` becomes part `rank` of
    /// rank r's `src`.
    fn all_to_all(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        let _ = (stream, src, dst);
        Err(unsupported("all_to_all", self.name(), what))
    }

    /// Gives `src` to rank `to`, which issues a [`Group::receive`] of as many elements of the same dtype. The
    /// other ranks do nothing. Messages between two ranks arrive in the order in which they were sent. The
    /// call may wait for its receiver, so two ranks that both send first, on one stream, may wait for each
    /// other until the timeout.
    fn send(&self, stream: &Stream, src: &Buffer, to: usize, what: &str) -> Result<()> {
        let _ = (stream, src, to);
        Err(unsupported("send", self.name(), what))
    }

    /// `dst` becomes what rank `from` sends.
    fn receive(&self, stream: &Stream, dst: &Buffer, from: usize, what: &str) -> Result<()> {
        let _ = (stream, dst, from);
        Err(unsupported("receive", self.name(), what))
    }

    /// Every rank's bytes, in rank order: a small host-side all-gather for agreeing on things. Blocks; also
    /// serves as a barrier.
    fn exchange(&self, bytes: &[u8], what: &str) -> Result<Vec<Vec<u8>>>;

    /// Blocks until every rank has come here. Knows nothing of streams: what other ranks have in flight may
    /// still be.
    fn barrier(&self, what: &str) -> Result<()> {
        self.exchange(&[], what).map(|_| ())
    }

    /// Sub-groups. Every rank of this group calls it: with the ranks (of this group) that its sub-group
    /// shall have, in the order that they shall have there, or with none when it is to be in no sub-group.
    /// All ranks of one list pass the same list, and lists have no rank in common. Blocks. A sub-group lives
    /// and fails apart from its parent.
    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn Group>>> {
        let _ = ranks;
        Err(unsupported("split", self.name(), name))
    }
}

fn unsupported(op: &'static str, group: &str, what: &str) -> Error {
    Error::Argument { op, what: format!("{what}: group {group} does not support it") }
}

/// Agrees on a split by an exchange in the parent; this rank's rank in its sub-group, if it is in one.
pub(crate) fn agree_on_split(group: &dyn Group, ranks: &[usize], name: &str) -> Result<Option<usize>> {
    let list: Vec<u8> = ranks.iter().flat_map(|&rank| (rank as u64).to_le_bytes()).collect();
    let all = group.exchange(&list, name)?;
    let show = |list: &[u8]| {
        let numbers = list.chunks_exact(8).map(|b| b.iter().rev().fold(0, |n, &b| n << 8 | usize::from(b)));
        format!("{:?}", numbers.collect::<Vec<_>>())
    };
    let argument = |what: String| Error::Argument { op: "split", what: format!("{name}: {what}") };
    let (me, size) = (group.rank(), group.size());
    let mut seen = vec![false; size];
    for &rank in ranks {
        if rank >= size {
            return Err(argument(format!("there is no rank {rank} in group {} of {size}", group.name())));
        }
        if std::mem::replace(&mut seen[rank], true) {
            return Err(argument(format!("rank {rank} is named twice in {ranks:?}")));
        }
    }
    for (peer, theirs) in all.iter().enumerate() {
        // Whom I name must say what I say, and nobody else may name me.
        let names_me = theirs.chunks_exact(8).any(|rank| rank == (me as u64).to_le_bytes());
        if *theirs != list && (seen[peer] || names_me) {
            let (group, theirs) = (group.name().to_string(), format!("split {name} {}", show(theirs)));
            let mine = format!("split {name} {ranks:?}");
            return Err(Error::Mismatch { group, rank: me, mine, peer, theirs });
        }
    }
    if !ranks.is_empty() && !seen[me] {
        return Err(argument(format!("rank {me} is not in its own list {ranks:?}")));
    }
    Ok(ranks.iter().position(|&rank| rank == me))
}

/// Fails unless `whole` is `size` parts like `part`, and they overlap at most where `part` is this rank's own.
pub(crate) fn check_parts(
    op: &'static str,
    what: &str,
    part: &Buffer,
    whole: &Buffer,
    group: &dyn Group,
) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    if part.dtype() != whole.dtype() {
        let (expected, found) = (whole.dtype(), part.dtype());
        return Err(device::Error::WrongDtype { op, expected, found }.into());
    }
    if part.len().checked_mul(size) != Some(whole.len()) {
        let what = format!("{what}: {} elements are not {size} parts of {}", whole.len(), part.len());
        return Err(Error::Argument { op, what });
    }
    let own = whole.address() + rank * part.num_bytes();
    if part.overlaps(whole) && part.address() != own {
        let what = format!("{what}: the part overlaps the whole, but not as the part of rank {rank}");
        return Err(Error::Argument { op, what });
    }
    Ok(())
}

/// Fails unless both are the same whole of one part per rank, and apart from each other.
pub(crate) fn check_all_to_all(what: &str, src: &Buffer, dst: &Buffer, group: &dyn Group) -> Result<()> {
    let (op, size) = ("all_to_all", group.size());
    if src.dtype() != dst.dtype() {
        let (expected, found) = (src.dtype(), dst.dtype());
        return Err(device::Error::WrongDtype { op, expected, found }.into());
    }
    if src.len() != dst.len() || !src.len().is_multiple_of(size) {
        let what = format!("{what}: {} and {} elements are not {size} equal parts", src.len(), dst.len());
        return Err(Error::Argument { op, what });
    }
    if src.overlaps(dst) {
        return Err(Error::Argument { op, what: format!("{what}: source and destination overlap") });
    }
    Ok(())
}

pub(crate) fn check_root(op: &'static str, what: &str, root: usize, group: &dyn Group) -> Result<()> {
    if root < group.size() {
        return Ok(());
    }
    let what = format!("{what}: there is no rank {root} in a group of {}", group.size());
    Err(Error::Argument { op, what })
}

/// Fails unless `peer` is another rank of the group.
pub(crate) fn check_peer(op: &'static str, what: &str, peer: usize, group: &dyn Group) -> Result<()> {
    check_root(op, what, peer, group)?;
    if peer != group.rank() {
        return Ok(());
    }
    Err(Error::Argument { op, what: format!("{what}: rank {peer} talks to itself") })
}
