//! Fully sharded training: run configuration, data, trainer and launcher; the library beneath is re-exported.
#![forbid(unsafe_code)]

pub use {checkpoint, comm, device, fsdp, tensor};

pub mod bench;
mod check;
pub mod checkpoints;
pub mod data;
pub mod devices;
mod error;
mod floats;
pub mod generate;
pub mod launch;
pub mod metrics;
mod ranks;
pub mod run;
pub mod show;
pub mod source;
mod train;

pub use check::check;
pub use checkpoints::Resume;
pub use error::{Error, Result};
pub use generate::{Generate, generate};
pub use run::Run;
pub use show::plan;
pub use train::{make_plan, train, train_from};
