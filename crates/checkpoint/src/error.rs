use std::path::{Path, PathBuf};

pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong with files of weights.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {doing} {}: {source}", path.display())]
    Io { path: PathBuf, doing: &'static str, source: std::io::Error },

    /// The file as a whole is not what it should be.
    #[error("{}: {what}", path.display())]
    Format { path: PathBuf, what: String },

    /// One entry of the file is not what it should be.
    #[error("{}: {key}: {what}", path.display())]
    Entry { path: PathBuf, key: String, what: String },

    #[error("{}: there is no {key}{hint}", path.display())]
    Missing { path: PathBuf, key: String, hint: String },

    /// A range that leaves its tensor.
    #[error("{}: {key} has {size} bytes; {len} at byte {start} leave it", path.display())]
    Range { path: PathBuf, key: String, start: u64, len: usize, size: u64 },
}

impl Error {
    pub(crate) fn io(path: &Path, doing: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Error::Io { path: path.to_path_buf(), doing, source }
    }

    pub(crate) fn format(path: &Path, what: impl Into<String>) -> Self {
        Error::Format { path: path.to_path_buf(), what: what.into() }
    }

    pub(crate) fn entry(path: &Path, key: &str, what: impl Into<String>) -> Self {
        Error::Entry { path: path.to_path_buf(), key: key.to_string(), what: what.into() }
    }
}
