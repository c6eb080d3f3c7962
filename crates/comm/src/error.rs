pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong between ranks.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("rank {rank} waited {seconds:.1} s in {op} of {what} in group {group}: {missing} did not come")]
    Timeout { rank: usize, group: String, op: &'static str, what: String, seconds: f64, missing: String },

    #[error("rank {rank}, {op} of {what} in group {group}: rank {peer} left the group ({why})")]
    PeerLost { rank: usize, group: String, op: &'static str, what: String, peer: usize, why: String },

    #[error("the ranks of group {group} disagree: rank {rank} issued {mine}, rank {peer} issued {theirs}")]
    Mismatch { group: String, rank: usize, mine: String, peer: usize, theirs: String },

    #[error("{op}: {what}")]
    Argument { op: &'static str, what: String },

    #[error("{library} is not available: {what}")]
    Unavailable { library: &'static str, what: String },

    #[error("NCCL {call} failed on rank {rank} of group {group}: {what}")]
    Nccl { call: &'static str, rank: usize, group: String, what: String },

    #[error("store at {address}: {what}")]
    Store { address: String, what: String },

    #[error(transparent)]
    Device(#[from] device::Error),
}

/// "rank 3", "ranks 1, 2".
pub(crate) fn list_ranks(ranks: impl IntoIterator<Item = usize>) -> String {
    let ranks: Vec<String> = ranks.into_iter().map(|rank| rank.to_string()).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", ranks.join(", "))
}
