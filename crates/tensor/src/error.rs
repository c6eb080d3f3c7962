use crate::Shape;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("{op}: shape {found} where {expected} was expected")]
    Shape { op: &'static str, expected: String, found: Shape },

    #[error("{op}: {what}")]
    Argument { op: &'static str, what: String },

    #[error("the batch has no field {name}; it has {has}")]
    NoField { name: String, has: String },

    #[error("model configuration: {0}")]
    Config(String),

    #[error("weight {name} is not gathered")]
    NotGathered { name: String },

    #[error(transparent)]
    Device(#[from] device::Error),
}

impl Error {
    pub fn shape(op: &'static str, expected: impl Into<String>, found: &Shape) -> Self {
        Error::Shape { op, expected: expected.into(), found: found.clone() }
    }
}
