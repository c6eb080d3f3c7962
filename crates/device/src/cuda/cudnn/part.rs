//! Running the backward on a part of the rows or heads at a time, in as much scratch as there is.

use super::backward::QuerySum;
use super::graph::ALIGNMENT;
use super::sizes::Sizes;
use crate::{AttentionShape, Dtype};

/// cuDNN's own workspace beside what is counted; it has been seen to take 256 bytes.
pub const SLACK: usize = 1 << 19;

/// cuDNN rounds `seq` up to this many where dS goes to memory.
const TILE: usize = 128;

/// Bytes of scratch for the backward of the largest part of `shape` that needs no more than `max_bytes`, or of
/// the smallest part that there is. More scratch than this is not used; less makes it slower, or impossible.
pub fn backward_scratch(
    shape: &AttentionShape,
    dtype: Dtype,
    query_sum: QuerySum,
    max_bytes: usize,
) -> usize {
    let mut bytes = 0;
    for part in Part::all(shape) {
        bytes = part.bytes(shape, dtype, query_sum);
        if bytes <= max_bytes {
            break;
        }
    }
    bytes
}

/// A number of rows, and of key heads with the query heads that share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    rows: usize,
    kv_heads: usize,
}

/// Bytes from the start of the scratch; the row sums are at 0.
pub struct ScratchLayout {
    pub accumulator: usize,
    pub workspace: usize,
}

/// Bytes from the start of each tensor to a part's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offsets {
    pub queries: usize,
    pub keys: usize,
    pub outputs: usize,
    pub lse: usize,
}

impl Part {
    pub fn largest(shape: &AttentionShape, dtype: Dtype, query_sum: QuerySum, room: usize) -> Option<Part> {
        Part::all(shape).find(|part| part.bytes(shape, dtype, query_sum) <= room)
    }

    pub fn sizes(&self, whole: &Sizes) -> Sizes {
        let heads = self.kv_heads as i64 * (whole.heads / whole.kv_heads);
        Sizes { rows: self.rows as i64, heads, kv_heads: self.kv_heads as i64, ..*whole }
    }

    pub fn offsets(self, shape: &AttentionShape, dtype: Dtype) -> impl Iterator<Item = Offsets> {
        let shape = *shape;
        let rows = (0..shape.rows).step_by(self.rows);
        rows.flat_map(move |row| {
            let kv_heads = (0..shape.kv_heads).step_by(self.kv_heads);
            kv_heads.map(move |kv_head| offsets(&shape, dtype, row, kv_head))
        })
    }

    /// Everything first; then fewer rows; then one row and fewer heads. All parts of a shape are alike, so that
    /// one plan does for them.
    fn all(shape: &AttentionShape) -> impl Iterator<Item = Part> {
        let shape = *shape;
        let by_rows = divisors(shape.rows).map(move |rows| Part { rows, kv_heads: shape.kv_heads });
        let by_heads = divisors(shape.kv_heads).skip(1).map(|kv_heads| Part { rows: 1, kv_heads });
        by_rows.chain(by_heads).filter(move |part| part.is_aligned(&shape))
    }

    /// Whether every part's lse starts at an aligned address; queries, keys and values always do.
    fn is_aligned(&self, shape: &AttentionShape) -> bool {
        let group = shape.heads / shape.kv_heads;
        let all_rows = self.rows == shape.rows || (shape.heads * shape.seq * 4).is_multiple_of(ALIGNMENT);
        let all_heads = self.kv_heads == shape.kv_heads
            || (self.kv_heads * group * shape.seq * 4).is_multiple_of(ALIGNMENT);
        all_rows && all_heads
    }

    fn bytes(&self, shape: &AttentionShape, dtype: Dtype, query_sum: QuerySum) -> usize {
        let group = shape.heads / shape.kv_heads;
        let heads = self.rows * self.kv_heads * group;
        let expanded = if group > 1 { 2 * heads * shape.seq * shape.head_dim * dtype.bytes() } else { 0 };
        let ds = match query_sum {
            QuerySum::Atomic => 0,
            QuerySum::Ordered => heads * shape.seq.next_multiple_of(TILE).pow(2) * dtype.bytes(),
        };
        ScratchLayout::new(shape, self, query_sum).workspace + expanded + ds + SLACK
    }
}

impl ScratchLayout {
    pub fn new(shape: &AttentionShape, part: &Part, query_sum: QuerySum) -> Self {
        let queries = part.rows * part.kv_heads * (shape.heads / shape.kv_heads) * shape.seq;
        let accumulator = (queries * 4).next_multiple_of(256);
        let elements = match query_sum {
            QuerySum::Atomic => queries * shape.head_dim,
            QuerySum::Ordered => 0,
        };
        ScratchLayout { accumulator, workspace: accumulator + (elements * 4).next_multiple_of(256) }
    }
}

fn offsets(shape: &AttentionShape, dtype: Dtype, row: usize, kv_head: usize) -> Offsets {
    let (token, head) = (row * shape.seq, kv_head * (shape.heads / shape.kv_heads));
    let bytes = |cols: usize, head: usize| (token * cols + head * shape.head_dim) * dtype.bytes();
    Offsets {
        queries: bytes(shape.qkv_cols(), head),
        keys: bytes(shape.qkv_cols(), kv_head),
        outputs: bytes(shape.out_cols(), head),
        lse: (row * shape.heads + head) * shape.seq * 4,
    }
}

/// From `number` itself down to 1.
fn divisors(number: usize) -> impl Iterator<Item = usize> {
    (1..=number).rev().filter(move |&divisor| number.is_multiple_of(divisor))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(rows: usize, seq: usize, heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
        AttentionShape { rows, seq, heads, kv_heads, head_dim, window: None }
    }

    fn parts(shape: &AttentionShape) -> Vec<(usize, usize)> {
        Part::all(shape).map(|part| (part.rows, part.kv_heads)).collect()
    }

    #[test]
    fn parts_get_smaller() {
        let all = parts(&shape(2, 4096, 32, 8, 128));
        assert_eq!(all, [(2, 8), (1, 8), (1, 4), (1, 2), (1, 1)]);
        assert_eq!(parts(&shape(6, 64, 4, 2, 64)), [(6, 2), (3, 2), (2, 2), (1, 2), (1, 1)]);
    }

    #[test]
    fn a_part_never_starts_at_an_unaligned_lse() {
        // 129 · 4 bytes are no multiple of 16: two heads cannot be told apart, nor two rows of two heads.
        assert_eq!(parts(&shape(2, 129, 2, 2, 64)), [(2, 2)]);
        assert_eq!(parts(&shape(2, 129, 4, 4, 64)), [(2, 4), (1, 4)]);
    }

    #[test]
    fn parts_cover_the_shape_once() {
        let shape = shape(2, 8, 6, 3, 16);
        let part = Part { rows: 1, kv_heads: 1 };
        let found: Vec<Offsets> = part.offsets(&shape, Dtype::Bf16).collect();
        assert_eq!(found.len(), 6);
        let (row, head) = (8 * 12 * 16 * 2, 16 * 2);
        assert_eq!(found[1], Offsets { queries: 2 * head, keys: head, outputs: 2 * head, lse: 2 * 8 * 4 });
        let (queries, keys) = (row + 4 * head, row + 2 * head);
        let expected = Offsets { queries, keys, outputs: 8 * 6 * 16 * 2 + 4 * head, lse: (6 + 4) * 8 * 4 };
        assert_eq!(found[5], expected);
    }

    #[test]
    fn scratch_is_what_plans_were_seen_to_need() {
        // (rows, seq, heads, kv_heads, head_dim), Ordered and Atomic workspaces of cuDNN 9.14 and 9.19 on an H200.
        let seen = [
            (shape(2, 4096, 32, 8, 128), 2281701632, 134217984),
            (shape(1, 8192, 32, 8, 128), 4429185280, 134217984),
            (shape(2, 512, 4, 4, 128), 4194560, 256),
            (shape(2, 7, 4, 2, 128), 160000, 28928),
            (shape(2, 65, 8, 2, 64), 790784, 266496),
        ];
        for (shape, ordered, atomic) in seen {
            for (query_sum, workspace) in [(QuerySum::Ordered, ordered), (QuerySum::Atomic, atomic)] {
                let part = Part { rows: shape.rows, kv_heads: shape.kv_heads };
                let needed = ScratchLayout::new(&shape, &part, query_sum).workspace + workspace;
                let given = backward_scratch(&shape, Dtype::Bf16, query_sum, usize::MAX);
                assert!(
                    needed <= given && given < needed + 2 * SLACK,
                    "{shape:?} {query_sum:?}: {needed} {given}"
                );
            }
        }
    }

    #[test]
    fn scratch_keeps_to_its_limit_while_there_are_smaller_parts() {
        let shape = shape(2, 4096, 32, 8, 128);
        let scratch = |max| backward_scratch(&shape, Dtype::Bf16, QuerySum::Ordered, max);
        assert!(scratch(2 << 30) <= 2 << 30);
        assert!(scratch(1 << 30) <= 1 << 30);
        assert_eq!(scratch(0), scratch(160 << 20));
        let room = scratch(1 << 30);
        assert_eq!(
            Part::largest(&shape, Dtype::Bf16, QuerySum::Ordered, room),
            Some(Part { rows: 1, kv_heads: 4 })
        );
        assert_eq!(Part::largest(&shape, Dtype::Bf16, QuerySum::Ordered, 1 << 20), None);
    }
}
