//! One safetensors file: a length, a JSON header of names, and bytes.

mod header;
mod read;
mod write;

pub(crate) use header::bytes_of;
pub use header::{MAX_HEADER_BYTES, TensorInfo};
pub use read::File;
pub use write::{Layout, Writer};
