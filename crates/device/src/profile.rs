//! How much room a device's kernels need beside their inputs and outputs.
//!
//! The memory plan is made on the null device, before the real one exists, so these are plain functions of
//! shapes that both obey: a kernel that would need more than its profile says is not used.

use crate::cuda::cudnn::{QuerySum, backward_scratch, packed_backward_scratch};
use crate::{AttentionShape, Dtype};

/// What the attention's backward may take to sum in a fixed order; with less it runs in more parts.
const MAX_ATTENTION_SCRATCH_BYTES: usize = 2 << 30;

/// Blocks, and so rows of partial sums, of a gradient that is summed over rows: two (of narrow rows four) for each
/// of an H100's 132 multiprocessors. It depends on nothing but the shape, so that the order of the sum does not.
pub(crate) fn partials(rows: usize, cols: usize) -> usize {
    rows.clamp(1, if cols > 2048 { 264 } else { 528 })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Profile {
    Cpu,
    Cuda {
        /// Whether every sum runs in a fixed order, at some cost in time and scratch.
        deterministic: bool,
    },
}

impl Profile {
    pub const fn name(self) -> &'static str {
        match self {
            Profile::Cpu => "cpu",
            Profile::Cuda { .. } => "cuda",
        }
    }

    /// Bytes of workspace the device takes once, for its matrix products.
    pub const fn workspace_bytes(self) -> usize {
        match self {
            Profile::Cpu => 0,
            Profile::Cuda { .. } => 32 << 20,
        }
    }

    /// f32 elements of scratch for gradients that are column sums ([`crate::RmsNormGrad`], [`crate::BiasGrad`],
    /// [`crate::HeadNormGrad`]; [`crate::LayerNormGrad`] needs twice as many): rows of partial sums.
    pub fn norm_scratch(self, rows: usize, cols: usize) -> usize {
        match self {
            Profile::Cpu => cols,
            Profile::Cuda { .. } => partials(rows, cols) * cols,
        }
    }

    /// f32 elements of scratch for reductions to one number.
    pub fn sum_scratch(self) -> usize {
        match self {
            Profile::Cpu => 0,
            Profile::Cuda { .. } => 1024,
        }
    }

    /// Bytes of scratch for the attention's forward.
    pub fn attention_scratch(self, _shape: &AttentionShape, _dtype: Dtype) -> usize {
        match self {
            Profile::Cpu => 0,
            Profile::Cuda { .. } => 1 << 20,
        }
    }

    /// Bytes of scratch for the attention's backward. On CUDA: room for the plain kernel's row sums, and for
    /// what cuDNN wants: f32 accumulators for the queries' gradient and per-query-head gradients of keys and
    /// values, or, in a fixed order, dS itself for as many heads at a time as the limit allows.
    pub fn attention_grad_scratch(self, shape: &AttentionShape, dtype: Dtype) -> usize {
        let Profile::Cuda { deterministic } = self else { return 0 };
        let row_sums = shape.tokens() * shape.heads * 4;
        let query_sum = if deterministic { QuerySum::Ordered } else { QuerySum::Atomic };
        row_sums.max(backward_scratch(shape, dtype, query_sum, MAX_ATTENTION_SCRATCH_BYTES))
    }

    /// The same where rows hold several documents. In a fixed order only our own kernel takes those.
    pub fn packed_attention_grad_scratch(self, shape: &AttentionShape, dtype: Dtype) -> usize {
        let row_sums = shape.tokens() * shape.heads * 4;
        match self {
            Profile::Cpu => 0,
            Profile::Cuda { deterministic: true } => row_sums,
            Profile::Cuda { deterministic: false } => row_sums.max(packed_backward_scratch(shape, dtype)),
        }
    }
}
