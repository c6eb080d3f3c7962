//! Weights in files: names, shapes and byte ranges. Nothing here knows of devices, ranks or models.
//!
//! - [`safetensors`]: one file. Its header is read and checked when it is opened, its data only by positioned
//!   reads of the bytes somebody asks for, so that a rank reads what it owns and no more.
//! - [`folder`]: a Hugging Face folder, in one file or in parts with an index.
//! - A checkpoint is such a folder with the optimizer's tensors beside the weights, a [`State`], and a [`Manifest`] of
//!   sizes and checksums. [`Writer`] and [`Reader`] are for any number of ranks, [`Series`] for the checkpoints of
//!   a run.
//! - [`dcp`]: checkpoints of `torch.distributed.checkpoint`, both ways.
//!
//! Sizes and offsets are settled first, then anyone writes any range; anyone reads any range.
#![forbid(unsafe_code)]

pub mod dcp;
mod dtype;
mod error;
pub mod folder;
pub mod manifest;
mod read;
mod receipt;
pub mod safetensors;
mod series;
mod state;
pub mod storage;
mod write;

pub use dtype::Dtype;
pub use error::{Error, Result};
pub use manifest::{Label, Manifest};
pub use read::Reader;
pub use receipt::Receipt;
pub use series::{Latest, Series};
pub use state::{Position, Scaler, State};
pub use write::{Draft, Plan, Spec, Writer, moment_names, recover};
