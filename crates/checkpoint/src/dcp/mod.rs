//! Checkpoints of `torch.distributed.checkpoint` (DCP), read and written without Python.
//!
//! A folder has `.metadata`, a pickle that lists every key with its boxes, and `.distcp` files of blobs, each of them
//! what `torch.save` makes of a tensor: a zip with a small pickle and the numbers.
//!
//! - [`Checkpoint`]: keys, shapes, boxes, and any flat range of any tensor's bytes;
//! - [`State`]: the weights of a model and AdamW's state among them, whatever program wrote them;
//! - [`write`]: a folder that torch loads.
//!
//! Files come from elsewhere. Nothing in them is ever run, and no number in them decides how much memory is taken
//! before it has been held against the size of the file.

mod blob;
mod boxes;
mod checkpoint;
mod metadata;
mod pickle;
mod region;
mod state;
mod write;
mod zip;

pub use blob::Tensor;
pub use checkpoint::{Checkpoint, METADATA};
pub use metadata::{Item, Location, Metadata, Piece, TensorItem};
pub use state::{Naming, Part, State, Wanted};
pub use write::{Object, Step, TensorSpec, Unlisted, write};
