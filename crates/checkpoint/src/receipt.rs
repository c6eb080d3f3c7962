//! What somebody has written or read of a checkpoint's tensors, small enough to be sent about.

/// Bytes `start..start + bytes` of a tensor, and their checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stretch {
    /// Its number among those of the checkpoint, the same for all who work on it.
    pub tensor: u32,
    pub start: u64,
    pub bytes: u64,
    pub crc32: u32,
}

impl Stretch {
    const SIZE: usize = 24;

    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }

    fn to_bytes(self) -> Vec<u8> {
        let numbers = [self.start, self.bytes].map(u64::to_le_bytes).concat();
        [numbers, [self.tensor, self.crc32].map(u32::to_le_bytes).concat()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
        Stretch {
            start: number(&bytes[..8]),
            bytes: number(&bytes[8..16]),
            tensor: number(&bytes[16..20]) as u32,
            crc32: number(&bytes[20..]) as u32,
        }
    }
}

/// What one of several has written, or read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Receipt(pub(crate) Vec<Stretch>);

impl Receipt {
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|stretch| stretch.to_bytes()).collect()
    }

    /// None where the bytes are not a receipt's.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let whole = bytes.len().is_multiple_of(Stretch::SIZE);
        whole.then(|| Receipt(bytes.chunks_exact(Stretch::SIZE).map(Stretch::from_bytes).collect()))
    }
}

/// Everybody's stretches, in order.
pub(crate) fn sorted(receipts: impl IntoIterator<Item = Receipt>) -> Vec<Stretch> {
    let mut all: Vec<Stretch> = receipts.into_iter().flat_map(|receipt| receipt.0).collect();
    all.sort_unstable();
    all
}

/// Takes the stretches of tensor `number` off the front of `rest` and proves that they are its `size` bytes, each once.
/// The error says what was not `done` ("written", "read"), or done twice.
pub(crate) fn take_whole<'a>(
    rest: &mut &'a [Stretch],
    number: u32,
    size: u64,
    done: &str,
) -> Result<&'a [Stretch], String> {
    let count = rest.iter().take_while(|stretch| stretch.tensor == number).count();
    let (mine, others) = rest.split_at(count);
    *rest = others;
    let starts = mine.iter().map(|stretch| stretch.start).chain([size]);
    let ends = [0].into_iter().chain(mine.iter().map(Stretch::end));
    for (end, next) in ends.zip(starts) {
        match end.cmp(&next) {
            std::cmp::Ordering::Equal => {}
            std::cmp::Ordering::Less => return Err(format!("bytes {end}..{next} were not {done}")),
            std::cmp::Ordering::Greater => return Err(format!("bytes {next}..{end} were {done} twice")),
        }
    }
    Ok(mine)
}
