//! Operations: one file each, forward and backward side by side.

mod activation;
mod attention;
mod dropout;
mod embedding;
mod head_norm;
mod layer_norm;
mod linear;
mod linear_cross_entropy;
mod loss;
mod rms_norm;
mod rope;
mod swiglu;

pub use activation::{gelu, gelu_tanh, relu};
pub use attention::attention;
pub use dropout::dropout;
pub use embedding::embedding;
pub use head_norm::head_norm;
pub use layer_norm::layer_norm;
pub use linear::linear;
pub use linear_cross_entropy::linear_cross_entropy;
pub use loss::{cross_entropy, squared_error, sum_loss};
pub use rms_norm::{add_rms_norm, rms_norm};
pub use rope::rope;
pub use swiglu::swiglu;

use crate::{Error, Result, Tensor};

/// Names of the batch's fields that token models use.
pub mod field {
    /// i32 `[tokens]`
    pub const IDS: &str = "ids";
    /// i32 `[tokens]`: positions of tokens sorted by id, for the embedding's gradient.
    pub const ORDER: &str = "order";
    /// i32 `[tokens]`: place within the document, for RoPE.
    pub const POSITIONS: &str = "positions";
    /// i32 `[tokens]`: the next token, negative where the loss ignores it.
    pub const LABELS: &str = "labels";
    /// i32 `[tokens]`: index within its row of its document's first token. Absent: a row is a document.
    pub const DOCUMENT_START: &str = "document_start";
}

/// The one gradient an operation with one result expects.
fn sole(op: &'static str, grads: Vec<Option<Tensor>>) -> Result<Tensor> {
    let missing = || Error::Argument { op, what: "no gradient arrived at its result".into() };
    grads.into_iter().next().flatten().ok_or_else(missing)
}

/// Exactly `N` tensors, as the operation saved or was given them.
fn exactly<const N: usize>(op: &'static str, tensors: Vec<Tensor>) -> Result<[Tensor; N]> {
    let count = tensors.len();
    tensors.try_into().map_err(|_| Error::Argument { op, what: format!("{count} tensors where {N} belong") })
}
