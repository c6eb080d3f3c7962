use crate::Dtype;

pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong on a device. Cloneable, because an error on a stream is reported to everyone who waits
/// for that stream.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// `what` is the region that was asked for; `free` what the device says is free, where it can tell.
    #[error("{device}: no room for {what}: {} asked, {} held already{hint}", size(*bytes), size(*held))]
    OutOfMemory { device: String, what: String, bytes: usize, held: usize, free: Option<usize>, hint: String },

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

/// Bytes for people.
pub(crate) fn size(bytes: usize) -> String {
    match bytes {
        0..0x400 => format!("{bytes} bytes"),
        0x400..0x4000_0000 => format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

impl Error {
    pub fn argument(op: &'static str, what: impl Into<String>) -> Self {
        Error::Argument { op, what: what.into() }
    }
}
