use std::time::Instant;

pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong between ranks.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("rank {rank} waited {seconds:.1} s in {op} of {what} in group {group}: {missing} did not come")]
    Timeout { rank: usize, group: String, op: &'static str, what: String, seconds: f64, missing: String },

    #[error(
        "rank {rank}, {op} of {what} in group {group}, after {seconds:.1} s: rank {peer} left the group ({why})"
    )]
    PeerLost {
        rank: usize,
        group: String,
        op: &'static str,
        what: String,
        seconds: f64,
        peer: usize,
        why: String,
    },

    #[error("rank {rank}, {op} of {what} in group {group}, after {seconds:.1} s: {who} has ended")]
    Ended { rank: usize, group: String, op: &'static str, what: String, seconds: f64, who: String },

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

    #[error("rank {rank} of group {group}: {what}")]
    System { rank: usize, group: String, what: String },

    #[error(transparent)]
    Device(#[from] device::Error),
}

/// Where a rank is when it hears of a failure.
pub(crate) struct Place<'a> {
    pub rank: usize,
    pub group: &'a str,
    pub op: &'static str,
    pub what: &'a str,
    pub started: Instant,
}

/// "rank 3", "ranks 1, 2".
pub(crate) fn list_ranks(ranks: impl IntoIterator<Item = usize>) -> String {
    let ranks: Vec<String> = ranks.into_iter().map(|rank| rank.to_string()).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", ranks.join(", "))
}

/// The names that errors carry, to find them again in what another process wrote.
const OPS: [&str; 9] = [
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "all_to_all",
    "send",
    "receive",
    "exchange",
    "barrier",
];

/// Separates the fields of an error on its way to another process; no name contains it.
const SEPARATOR: char = '\u{1f}';

impl Error {
    /// What is written about someone who has ended, for [`Error::of_failure`].
    pub(crate) fn ended(who: &str) -> String {
        format!("E{SEPARATOR}{who}")
    }

    /// The failure of the world, as the rank at this place says it.
    pub(crate) fn of_failure(text: &str, place: &Place<'_>) -> Self {
        let Place { rank, group, op, what, started } = *place;
        match text.split_once(SEPARATOR) {
            Some(("E", who)) => {
                let (group, what, who) = (group.to_string(), what.to_string(), who.to_string());
                Error::Ended { rank, group, op, what, seconds: started.elapsed().as_secs_f64(), who }
            }
            _ => Error::decode(text, rank, group),
        }
    }

    /// The failure of the world, for one who is in no group.
    pub(crate) fn tell_failure(text: &str) -> String {
        match text.split_once(SEPARATOR) {
            Some(("E", who)) => format!("{who} has ended"),
            _ => Error::decode(text, 0, "world").to_string(),
        }
    }

    /// The error as text from which [`Error::decode`] makes it again in another process.
    pub(crate) fn encode(&self) -> String {
        let fields: Vec<String> = match self {
            Error::Timeout { rank, group, op, what, seconds, missing } => {
                let seconds = seconds.to_string();
                vec![
                    "T".into(),
                    rank.to_string(),
                    group.clone(),
                    op.to_string(),
                    what.clone(),
                    seconds,
                    missing.clone(),
                ]
            }
            Error::PeerLost { rank, group, op, what, seconds, peer, why } => {
                let (rank, seconds, peer) = (rank.to_string(), seconds.to_string(), peer.to_string());
                vec![
                    "L".into(),
                    rank,
                    group.clone(),
                    op.to_string(),
                    what.clone(),
                    seconds,
                    peer,
                    why.clone(),
                ]
            }
            Error::Mismatch { group, rank, mine, peer, theirs } => {
                let (rank, peer) = (rank.to_string(), peer.to_string());
                vec!["M".into(), group.clone(), rank, mine.clone(), peer, theirs.clone()]
            }
            Error::System { rank, group, what } => {
                vec!["S".into(), rank.to_string(), group.clone(), what.clone()]
            }
            Error::Ended { who, .. } => return Self::ended(who),
            other => return other.to_string(),
        };
        fields.join(&SEPARATOR.to_string())
    }

    /// `rank` and `group` are those of the reader, for text that is none of ours.
    pub(crate) fn decode(text: &str, rank: usize, group: &str) -> Self {
        let fields: Vec<&str> = text.split(SEPARATOR).collect();
        let number = |text: &str| text.parse::<usize>().unwrap_or(0);
        let op = |text: &str| OPS.into_iter().find(|&op| op == text).unwrap_or("collective");
        match fields.as_slice() {
            ["T", rank, group, name, what, seconds, missing] => Error::Timeout {
                rank: number(rank),
                group: group.to_string(),
                op: op(name),
                what: what.to_string(),
                seconds: seconds.parse().unwrap_or(0.0),
                missing: missing.to_string(),
            },
            ["L", rank, group, name, what, seconds, peer, why] => Error::PeerLost {
                rank: number(rank),
                group: group.to_string(),
                op: op(name),
                what: what.to_string(),
                seconds: seconds.parse().unwrap_or(0.0),
                peer: number(peer),
                why: why.to_string(),
            },
            ["M", group, rank, mine, peer, theirs] => Error::Mismatch {
                group: group.to_string(),
                rank: number(rank),
                mine: mine.to_string(),
                peer: number(peer),
                theirs: theirs.to_string(),
            },
            ["S", rank, group, what] => {
                Error::System { rank: number(rank), group: group.to_string(), what: what.to_string() }
            }
            _ => Error::System { rank, group: group.to_string(), what: text.to_string() },
        }
    }
}
