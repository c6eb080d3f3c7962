//! Tensors, the tape inside a unit, operations, models and optimizers, on one device.
//!
//! Nothing here knows of ranks. A model is a list of [`Block`]s over named weights; where those weights are
//! at a given moment is the business of whoever implements [`Weights`].
#![forbid(unsafe_code)]

pub mod arena;
mod cache;
mod error;
pub mod models;
pub mod ops;
pub mod optim;
mod tape;
mod tensor;
mod weights;

pub use arena::{Arena, Kind, Trace};
pub use cache::{Cache, Slot};
pub use error::{Error, Result};
pub use tape::{Batch, Block, Context, Keep, Mode, Op, Outcome, Pass, Random, Saved, Tape, Var};
pub use tensor::{Shape, Tensor};
pub use weights::{Constant, ConstantId, Grad, Init, Item, ItemId, Model, WeightSpec, Weights};
