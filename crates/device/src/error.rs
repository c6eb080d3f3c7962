use crate::Dtype;

pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong on a device. Cloneable, because an error on a stream is reported to everyone who waits
/// for that stream.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("{device}: no room for {what}: {bytes} bytes asked, {held} held already{hint}")]
    OutOfMemory { device: String, what: String, bytes: usize, held: usize, hint: String },

    #[error("{op}: {what}")]
    Argument { op: &'static str, what: String },

    #[error("{op}: expected {expected}, found {found}")]
    WrongDtype { op: &'static str, expected: Dtype, found: Dtype },

    #[error("{op} does not support {dtype}")]
    Unsupported { op: &'static str, dtype: Dtype },

    #[error("{library} is not available: {what}")]
    Unavailable { library: &'static str, what: String },

    #[error("{call} failed: {what}")]
    Driver { call: &'static str, what: String },

    #[error("stream {stream}: {what}")]
    Stream { stream: String, what: String },
}

impl Error {
    pub fn argument(op: &'static str, what: impl Into<String>) -> Self {
        Error::Argument { op, what: what.into() }
    }
}
