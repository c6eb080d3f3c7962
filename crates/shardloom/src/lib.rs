//! Fully sharded training: run configuration, data, trainer and launcher; the library beneath is re-exported.
#![forbid(unsafe_code)]

pub use {checkpoint, comm, device, fsdp, tensor};

pub mod bench;
pub mod data;
pub mod devices;
mod error;
pub mod generate;
pub mod launch;
pub mod metrics;
mod ranks;
pub mod run;
mod save;
pub mod show;
pub mod source;
mod train;

pub use error::{Error, Result};
pub use generate::{Generate, generate};
pub use run::Run;
pub use show::plan;
pub use train::{make_plan, train};
