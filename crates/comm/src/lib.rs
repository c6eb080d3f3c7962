//! Ranks that talk together.
//!
//! A [`Group`] moves bare device buffers between ranks, on streams: a collective is issued like a kernel and
//! runs in its stream's order, so what is in flight is simply what an [`device::Event`] has not reached yet.
//! Every rank of a group issues the same collectives in the same order.
//!
//! [`Solo`] is a group of one, [`local`] one of threads in this process, [`nccl`] one of processes
//! with a GPU each. Processes find each other through a [`store`].

mod call;
mod error;
mod group;
pub mod local;
pub mod nccl;
mod queued;
mod reduce;
pub mod shm;
mod solo;
pub mod store;

pub use error::{Error, Result};
pub use group::{Group, Reduction};
pub use solo::Solo;
