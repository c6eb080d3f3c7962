pub type Result<T> = std::result::Result<T, Error>;

#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("rank {rank}, {action} of unit {unit}: {source}")]
    Action { rank: usize, action: &'static str, unit: String, source: Box<Error> },

    #[error("wrap policy: no block is of kind {wanted}; this model has {kinds}")]
    WrapMatchesNothing { wanted: String, kinds: String },

    #[error("shard.unit: no block is {wanted}; this model has {kinds}")]
    RuleMatchesNothing { wanted: String, kinds: String },

    #[error("settings: {0}")]
    Settings(String),

    #[error(
        "rank {rank} and rank {peer} do not have the same plan: {what}. Model, mesh, precision, batch and \
         schedule must be equal on all ranks"
    )]
    PlansDiffer { rank: usize, peer: usize, what: String },

    #[error(
        "step {step}: the gradient {place} is not finite. The weights are as they were before this step; look \
         at its data, lower the learning rate, or clip"
    )]
    NotFinite { step: u64, place: String },

    #[error("weight {name}: {what}")]
    Weight { name: String, what: String },

    #[error("batch field {name}: {what}")]
    Batch { name: String, what: String },

    #[error(transparent)]
    Tensor(#[from] tensor::Error),

    #[error(transparent)]
    Comm(#[from] comm::Error),

    #[error(transparent)]
    Device(#[from] device::Error),
}
