use crate::{Error, Result};
use device::{Buffer, Stream};
use std::fmt;

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

    /// Every rank's bytes, in rank order: a small host-side all-gather for agreeing on things. Blocks; also
    /// serves as a barrier.
    fn exchange(&self, bytes: &[u8], what: &str) -> Result<Vec<Vec<u8>>>;
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

pub(crate) fn check_root(what: &str, root: usize, group: &dyn Group) -> Result<()> {
    if root < group.size() {
        return Ok(());
    }
    let what = format!("{what}: there is no rank {root} in a group of {}", group.size());
    Err(Error::Argument { op: "broadcast", what })
}
