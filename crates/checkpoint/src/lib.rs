//! Weights in files: names, shapes and byte ranges. Nothing here knows of devices, ranks or models.
//!
//! - [`safetensors`]: one file. Its header is read and checked when it is opened, its data only by positioned
//!   reads of the bytes somebody asks for, so that a rank reads what it owns and no more.
//! - [`folder`]: a Hugging Face folder, in one file or in parts with an index.
//! - [`dcp`]: checkpoints of `torch.distributed.checkpoint`, both ways.
//!
//! Both can be written the same way: sizes and offsets are settled first, then anyone writes any range.
#![forbid(unsafe_code)]

pub mod dcp;
mod dtype;
mod error;
pub mod folder;
pub mod safetensors;

pub use dtype::Dtype;
pub use error::{Error, Result};
