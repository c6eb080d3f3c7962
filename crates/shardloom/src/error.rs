use std::path::PathBuf;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The user's configuration or arguments are wrong: exit status 2.
    #[error("{0}")]
    Config(String),

    #[error("{}: {what}", path.display())]
    File { path: PathBuf, what: String },

    #[error(
        "step {step}: the loss is {loss}; training stops here. Lower the learning rate, or look at the data of this step"
    )]
    NotFinite { step: u64, loss: f64 },

    #[error("{}: the logits of token {position} are not numbers; the weights are broken", model.display())]
    NotNumbers { model: PathBuf, position: u64 },

    #[error("{source}. {advice}")]
    NoRoom { source: Box<device::Error>, advice: String },

    #[error("the checkpoint of step {step} was not saved: {what}")]
    Save { step: u64, what: String },

    #[error("{} is damaged:{problems}", dir.display())]
    Damaged { dir: PathBuf, problems: String },

    /// What `check` found.
    #[error("this run is not ready: {0}")]
    Check(String),

    #[error("rank {rank} failed: {what}")]
    Rank { rank: usize, what: String },

    /// Ranks could not be started, or ended together.
    #[error("{0}")]
    Launch(String),

    #[error("the loader of training data ended early (see its message above)")]
    Loader,

    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),

    #[error(transparent)]
    Fsdp(#[from] fsdp::Error),

    #[error(transparent)]
    Comm(#[from] comm::Error),

    #[error(transparent)]
    Tensor(#[from] tensor::Error),

    #[error(transparent)]
    Device(#[from] device::Error),
}

impl Error {
    pub fn file(path: impl Into<PathBuf>, what: impl std::fmt::Display) -> Self {
        Error::File { path: path.into(), what: what.to_string() }
    }

    /// 2 for what the user can mend before anything runs, 1 for what failed while running.
    pub fn exit_status(&self) -> u8 {
        match self {
            Error::Config(_) | Error::File { .. } | Error::Checkpoint(_) => 2,
            Error::Fsdp(
                fsdp::Error::Settings(_)
                | fsdp::Error::WrapMatchesNothing { .. }
                | fsdp::Error::RuleMatchesNothing { .. },
            ) => 2,
            Error::Tensor(tensor::Error::Config(_)) => 2,
            _ => 1,
        }
    }
}
