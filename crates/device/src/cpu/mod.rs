//! The host as a device: the default one, and the reference the others are compared with.

mod stream;

pub use stream::{Event, Stream};
