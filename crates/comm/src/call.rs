//! What a rank issued, as all ranks of a group must agree on it, and as it travels between processes.

use crate::{Error, Reduction, Result};
use device::{Buffer, Dtype};
use std::fmt;

/// Bytes of a call on its way to another process.
pub(crate) const HEADER: usize = 256;
/// As much of `what` as a header holds.
const MAX_WHAT: usize = 200;

/// What all ranks that take part must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    AllGather {
        dtype: Dtype,
        part: usize,
    },
    ReduceScatter {
        dtype: Dtype,
        part: usize,
    },
    AllReduce {
        dtype: Dtype,
        len: usize,
        reduction: Reduction,
    },
    Broadcast {
        dtype: Dtype,
        len: usize,
        root: usize,
    },
    AllToAll {
        dtype: Dtype,
        part: usize,
    },
    /// One rank's `send` and the other's `receive`.
    Transfer {
        dtype: Dtype,
        len: usize,
        from: usize,
        to: usize,
    },
    Exchange,
    Barrier,
}

/// A call and what it works on.
pub(crate) struct Job {
    pub call: Call,
    pub what: String,
    pub payload: Payload,
}

pub(crate) enum Payload {
    /// `src` and `dst`; the same buffer twice where the call works in place.
    Buffers(Buffer, Buffer),
    Bytes(Vec<u8>),
}

impl Call {
    /// The function that rank `rank` called.
    pub fn op(self, rank: usize) -> &'static str {
        match self {
            Call::AllGather { .. } => "all_gather",
            Call::ReduceScatter { .. } => "reduce_scatter",
            Call::AllReduce { .. } => "all_reduce",
            Call::Broadcast { .. } => "broadcast",
            Call::AllToAll { .. } => "all_to_all",
            Call::Transfer { from, .. } if from == rank => "send",
            Call::Transfer { .. } => "receive",
            Call::Exchange => "exchange",
            Call::Barrier => "barrier",
        }
    }

    /// Whether every rank of the group takes part.
    pub fn members(self, size: usize) -> Vec<usize> {
        match self {
            Call::Transfer { from, to, .. } => vec![from, to],
            _ => (0..size).collect(),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Call::AllGather { dtype, part } => write!(f, "all_gather of {part} {dtype} a rank"),
            Call::ReduceScatter { dtype, part } => write!(f, "reduce_scatter of {part} {dtype} a rank"),
            Call::AllReduce { dtype, len, reduction } => {
                write!(f, "all_reduce ({reduction:?}) of {len} {dtype}")
            }
            Call::Broadcast { dtype, len, root } => write!(f, "broadcast from rank {root} of {len} {dtype}"),
            Call::AllToAll { dtype, part } => write!(f, "all_to_all of {part} {dtype} a rank"),
            Call::Transfer { dtype, len, from, to } => {
                write!(f, "transfer from rank {from} to rank {to} of {len} {dtype}")
            }
            Call::Exchange => write!(f, "exchange"),
            Call::Barrier => write!(f, "barrier"),
        }
    }
}

impl Job {
    pub fn issued(&self) -> String {
        format!("{} for {}", self.call, self.what)
    }

    pub fn buffers(&self) -> (&Buffer, &Buffer) {
        match &self.payload {
            Payload::Buffers(src, dst) => (src, dst),
            Payload::Bytes(_) => unreachable!("calls that agree have the same kind of payload"),
        }
    }

    /// The bytes of an exchange.
    pub fn bytes(&self) -> &[u8] {
        match &self.payload {
            Payload::Bytes(bytes) => bytes,
            Payload::Buffers(..) => &[],
        }
    }

    pub fn header(&self) -> Header {
        Header { call: self.call, num_bytes: self.bytes().len(), what: self.what.clone() }
    }

    /// The header that `peer` sent to `rank` in these bytes; an error unless it issued the same call.
    pub fn compare(&self, bytes: &[u8], group: &str, rank: usize, peer: usize) -> Result<Header> {
        let header = bytes.first_chunk::<HEADER>().and_then(Header::decode);
        if let Some(header) = header.as_ref().filter(|header| header.call == self.call) {
            return Ok(header.clone());
        }
        let theirs = header.map_or("something unknown".to_string(), |header| header.issued());
        Err(Error::Mismatch { group: group.to_string(), rank, mine: self.issued(), peer, theirs })
    }
}

/// A job's call as a peer hears of it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Header {
    pub call: Call,
    /// Of an exchange, in which ranks may differ.
    pub num_bytes: usize,
    pub what: String,
}

const DTYPES: [Dtype; 5] = [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::I32, Dtype::U8];

impl Header {
    pub fn issued(&self) -> String {
        format!("{} for {}", self.call, self.what)
    }

    pub fn encode(&self) -> [u8; HEADER] {
        let (code, dtype, reduction, a, b, len) = match self.call {
            Call::AllGather { dtype, part } => (1, dtype, Reduction::Sum, 0, 0, part),
            Call::ReduceScatter { dtype, part } => (2, dtype, Reduction::Sum, 0, 0, part),
            Call::AllReduce { dtype, len, reduction } => (3, dtype, reduction, 0, 0, len),
            Call::Broadcast { dtype, len, root } => (4, dtype, Reduction::Sum, root, 0, len),
            Call::AllToAll { dtype, part } => (5, dtype, Reduction::Sum, 0, 0, part),
            Call::Transfer { dtype, len, from, to } => (6, dtype, Reduction::Sum, from, to, len),
            Call::Exchange => (7, Dtype::U8, Reduction::Sum, 0, 0, self.num_bytes),
            Call::Barrier => (8, Dtype::U8, Reduction::Sum, 0, 0, 0),
        };
        let mut bytes = [0; HEADER];
        bytes[0] = code;
        bytes[1] = DTYPES.iter().position(|&known| known == dtype).unwrap_or(0) as u8;
        bytes[2] = (reduction == Reduction::Max).into();
        bytes[4..8].copy_from_slice(&(a as u32).to_le_bytes());
        bytes[8..12].copy_from_slice(&(b as u32).to_le_bytes());
        bytes[12..20].copy_from_slice(&(len as u64).to_le_bytes());
        let what = &self.what.as_bytes()[..self.what.len().min(MAX_WHAT)];
        bytes[20] = what.len() as u8;
        bytes[21..21 + what.len()].copy_from_slice(what);
        bytes
    }

    /// None where the bytes are no header.
    pub fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let number =
            |at: usize| bytes[at..].first_chunk::<4>().map_or(0, |b| u32::from_le_bytes(*b) as usize);
        let len = bytes[12..].first_chunk::<8>().map(|b| u64::from_le_bytes(*b) as usize)?;
        let dtype = *DTYPES.get(usize::from(bytes[1]))?;
        let reduction = if bytes[2] == 0 { Reduction::Sum } else { Reduction::Max };
        let call = match bytes[0] {
            1 => Call::AllGather { dtype, part: len },
            2 => Call::ReduceScatter { dtype, part: len },
            3 => Call::AllReduce { dtype, len, reduction },
            4 => Call::Broadcast { dtype, len, root: number(4) },
            5 => Call::AllToAll { dtype, part: len },
            6 => Call::Transfer { dtype, len, from: number(4), to: number(8) },
            7 => Call::Exchange,
            8 => Call::Barrier,
            _ => return None,
        };
        let num_bytes = if call == Call::Exchange { len } else { 0 };
        let what = bytes.get(21..21 + usize::from(bytes[20]))?;
        Some(Header { call, num_bytes, what: String::from_utf8_lossy(what).into_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_way() {
        let calls = [
            Call::AllGather { dtype: Dtype::Bf16, part: 7 },
            Call::ReduceScatter { dtype: Dtype::F16, part: usize::MAX / 2 },
            Call::AllReduce { dtype: Dtype::I32, len: 0, reduction: Reduction::Max },
            Call::Broadcast { dtype: Dtype::U8, len: 9, root: 3 },
            Call::AllToAll { dtype: Dtype::F32, part: 1 },
            Call::Transfer { dtype: Dtype::F32, len: 1, from: 5, to: 70_000 },
            Call::Barrier,
        ];
        for call in calls {
            let header = Header { call, num_bytes: 0, what: "layers.3".into() };
            assert_eq!(Header::decode(&header.encode()), Some(header));
        }
        let header = Header { call: Call::Exchange, num_bytes: 77, what: "é".repeat(300) };
        let decoded = Header::decode(&header.encode()).unwrap();
        assert_eq!((decoded.call, decoded.num_bytes), (Call::Exchange, 77));
        assert!(decoded.what.starts_with("éé"));
        assert_eq!(Header::decode(&[0; HEADER]), None);
        assert_eq!(Header::decode(&[255; HEADER]), None);
    }
}
