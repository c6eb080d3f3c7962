//! The trainer's checkpoints: what goes into one, saving while training goes on, resuming, and the command that
//! looks into them.

mod command;
mod contents;
mod dcp;
mod resume;
mod save;

pub use command::{Export, export, inspect, verify};
pub(crate) use contents::snapshot_bytes;
pub use dcp::{DcpExport, DcpImport, export_dcp, import_dcp};
pub use resume::Resume;
pub(crate) use resume::{Resumed, agree_on};
pub(crate) use save::{Saver, SharedSource, What};
