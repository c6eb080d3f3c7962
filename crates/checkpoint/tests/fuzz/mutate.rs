//! Changes to bytes: blind ones, and ones that know where numbers are.

/// SplitMix64: a seed gives the same numbers everywhere.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `end`, which is not zero.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// Numbers that readers get wrong.
const NUMBERS: [u64; 18] = [
    0,
    1,
    2,
    7,
    8,
    127,
    128,
    255,
    256,
    65535,
    65536,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 32,
    1 << 53,
    i64::MAX as u64,
    u64::MAX,
];

pub fn number(random: &mut Random) -> u64 {
    match random.below(4) {
        0 => random.next(),
        1 => random.next() % 1000,
        _ => random.pick(&NUMBERS).wrapping_add(random.below(3) as u64).wrapping_sub(1),
    }
}

/// A few changes anywhere in `bytes`.
pub fn blindly(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..=random.below(4) {
        change(random, bytes);
    }
}

fn change(random: &mut Random, bytes: &mut Vec<u8>) {
    if bytes.is_empty() {
        bytes.push(random.next() as u8);
        return;
    }
    let at = random.below(bytes.len());
    let len = 1 + random.below(32).min(bytes.len() - at - 1);
    match random.below(9) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.next() as u8,
        2 => {
            let value = number(random).to_le_bytes();
            let width = *random.pick(&[1, 2, 4, 8]);
            let end = (at + width).min(bytes.len());
            bytes[at..end].copy_from_slice(&value[..end - at]);
        }
        3 => bytes.truncate(at),
        4 => drop(bytes.drain(at..at + len)),
        5 => {
            let piece = bytes[at..at + len].to_vec();
            let to = random.below(bytes.len());
            bytes.splice(to..to, piece);
        }
        6 => {
            let piece = bytes[at..at + len].to_vec();
            let to = random.below(bytes.len());
            let end = (to + len).min(bytes.len());
            bytes[to..end].copy_from_slice(&piece[..end - to]);
        }
        7 => digits(random, bytes, at),
        _ => {
            let new: Vec<u8> = (0..random.below(8)).map(|_| random.next() as u8).collect();
            bytes.splice(at..at, new);
        }
    }
}

/// Another number where the next run of digits is.
pub fn digits(random: &mut Random, bytes: &mut Vec<u8>, from: usize) {
    let Some(start) = bytes[from..].iter().position(u8::is_ascii_digit).map(|at| from + at) else { return };
    let len = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let sign = if random.one_in(8) { "-" } else { "" };
    bytes.splice(start..start + len, format!("{sign}{}", number(random)).into_bytes());
}
