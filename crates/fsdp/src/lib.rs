//! Fully sharded data parallel: plan, layout, schedule and the engine that walks it.
//!
//! [`Plan`] is made first, from shapes alone: which blocks form a unit, which bytes of it each rank owns, in
//! which order things happen, and where every tensor of a step lies. [`Engine`] then does what the plan says.
#![forbid(unsafe_code)]

mod batch;
mod decode;
mod engine;
mod error;
mod layout;
mod plan;
mod schedule;
mod settings;
mod threads;
mod wrap;

pub use batch::{Field, HostBatch, Values};
pub use decode::{DecodePlan, Decoder, Decoding};
pub use device::Scaling;
pub use engine::{Engine, Evaluation, Groups, Hyper, Report, Saved, Scaler, Slot, Source, Stretch, Whole};
pub use error::{Error, Result};
pub use layout::{Layout, Piece, Place, Span, Unit};
pub use plan::{Plan, Region};
pub use schedule::{Action, Part, Schedule};
pub use settings::{Accumulate, AfterForward, LossScale, Offload, Precision, Settings, Strategy, UnitRule};
pub use tensor::Keep;
pub use threads::on_threads;
pub use wrap::{Cut, Wrap};
