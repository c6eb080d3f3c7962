//! How much room a device's kernels need beside their inputs and outputs.
//!
//! The memory plan is made on the null device, before the real one exists, so these are plain functions of
//! shapes that both obey: a kernel that would need more than its profile says is not used.

use crate::{AttentionShape, Dtype};

/// Rows of partial sums a row-wise gradient reduction may use.
pub const MAX_PARTIALS: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Profile {
    Cpu,
    Cuda,
}

impl Profile {
    pub const fn name(self) -> &'static str {
        match self {
            Profile::Cpu => "cpu",
            Profile::Cuda => "cuda",
        }
    }

    /// Bytes of workspace the device takes once, for its matrix products.
    pub const fn workspace_bytes(self) -> usize {
        match self {
            Profile::Cpu => 0,
            Profile::Cuda => 32 << 20,
        }
    }

    /// f32 elements of scratch for [`crate::RmsNormGrad`]: rows of partial weight gradients.
    pub fn norm_scratch(self, rows: usize, cols: usize) -> usize {
        match self {
            Profile::Cpu => cols,
            Profile::Cuda => rows.clamp(1, MAX_PARTIALS) * cols,
        }
    }

    /// f32 elements of scratch for reductions to one number.
    pub fn sum_scratch(self) -> usize {
        match self {
            Profile::Cpu => 0,
            Profile::Cuda => 1024,
        }
    }

    /// Bytes of scratch for the attention's forward.
    pub fn attention_scratch(self, _shape: &AttentionShape, _dtype: Dtype) -> usize {
        match self {
            Profile::Cpu => 0,
            Profile::Cuda => 1 << 20,
        }
    }

    /// Bytes of scratch for the attention's backward. On CUDA: one f32 row sum per head and token, f32
    /// accumulators for the queries' gradient, and per-query-head gradients of keys and values in the
    /// compute dtype before they are summed over a group.
    pub fn attention_grad_scratch(self, shape: &AttentionShape, dtype: Dtype) -> usize {
        let tokens = shape.rows * shape.seq;
        match self {
            Profile::Cpu => 0,
            Profile::Cuda => {
                let row_sums = tokens * shape.heads * 4;
                let accumulators = tokens * shape.heads * shape.head_dim * 4;
                let expanded = 2 * tokens * shape.heads * shape.head_dim * dtype.bytes();
                row_sums + accumulators + expanded + (1 << 20)
            }
        }
    }
}
