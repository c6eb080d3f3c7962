//! Ranks that talk together.
//!
//! A [`Group`] moves bare device buffers between ranks, on streams: a collective is issued like a kernel and
//! runs in its stream's order, so what is in flight is simply what an [`device::Event`] has not reached yet.
//! Every rank of a group issues the same collectives in the same order.
//!
//! [`Solo`] is a group of one, [`local`] one of threads in this process, [`shm`] one of processes of this
//! machine, [`tcp`] one of processes on several, [`nccl`] one of processes with a GPU each; with the cargo feature
//! `mpi` there is one of processes that an MPI has started. Processes find each other through a [`store`];
//! [`process`] is what starting and ending them takes. A [`Mesh`] splits a group along named axes.

pub mod bench;
mod call;
mod copy;
mod error;
mod group;
pub mod local;
mod mesh;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod nccl;
pub mod process;
mod queued;
mod reduce;
mod secret;
pub mod shm;
mod socket;
mod solo;
pub mod store;
pub mod tcp;
mod ticket;

pub use error::{Error, Result};
pub use group::{Group, Reduction};
pub use mesh::Mesh;
pub use solo::Solo;
