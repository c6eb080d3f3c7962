//! The scratch of the backward of packed documents.
//!
//! cuDNN takes one table of offsets for k and dk (v and dv), and multiplies it by the heads of a group where dk of
//! each query head goes. In q ‖ k ‖ v that would leave gaps of many heads between tokens; so k and v are copied to
//! where they are alone, and dk and dv back from there, by whoever issues the backward.

use super::part::SLACK;
use super::table::DocumentTable;
use crate::{AttentionShape, Dtype};

/// Bytes of scratch for the backward of packed documents, the table of documents included.
pub fn packed_backward_scratch(shape: &AttentionShape, dtype: Dtype) -> usize {
    DocumentTable::bytes(shape) + PackedLayout::new(shape, dtype).workspace + SLACK
}

/// Bytes from the start of the scratch behind the table; the row sums are at 0.
#[derive(Clone, Copy, Debug)]
pub struct PackedLayout {
    /// f32 sums of dq, laid out as q ‖ k ‖ v.
    pub accumulator: usize,
    /// Of each query head, where heads share keys.
    pub dk_each: usize,
    pub dv_each: usize,
    pub k: usize,
    pub v: usize,
    pub dk: usize,
    pub dv: usize,
    pub workspace: usize,
}

impl PackedLayout {
    pub fn new(shape: &AttentionShape, dtype: Dtype) -> Self {
        let tokens = shape.tokens();
        let after = |start: usize, bytes: usize| start + bytes.next_multiple_of(256);
        let keys = tokens * shape.kv_heads * shape.head_dim * dtype.bytes();
        let each = if shape.heads > shape.kv_heads { tokens * shape.out_cols() * dtype.bytes() } else { 0 };
        let accumulator = after(0, tokens * shape.heads * 4);
        let dk_each = after(accumulator, tokens * shape.qkv_cols() * 4);
        let dv_each = after(dk_each, each);
        let k = after(dv_each, each);
        let [v, dk, dv, workspace] = [1, 2, 3, 4].map(|n| k + n * after(0, keys));
        PackedLayout { accumulator, dk_each, dv_each, k, v, dk, dv, workspace }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_the_scratch_follow_each_other() {
        let shape = AttentionShape { rows: 2, seq: 100, heads: 4, kv_heads: 2, head_dim: 64, window: None };
        let layout = PackedLayout::new(&shape, Dtype::Bf16);
        let places = [
            (0, 200 * 4 * 4),
            (layout.accumulator, 200 * 8 * 64 * 4),
            (layout.dk_each, 200 * 4 * 64 * 2),
            (layout.dv_each, 200 * 4 * 64 * 2),
            (layout.k, 200 * 2 * 64 * 2),
            (layout.v, 200 * 2 * 64 * 2),
            (layout.dk, 200 * 2 * 64 * 2),
            (layout.dv, 200 * 2 * 64 * 2),
            (layout.workspace, 0),
        ];
        for pair in places.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{places:?}");
        }
        assert!(packed_backward_scratch(&shape, Dtype::Bf16) > layout.workspace);
    }
}
