use crate::Result;
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
