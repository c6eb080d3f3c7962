//! In which order rows are trained on: a function of the seed, the epoch and the row's number alone, so that
//! any number of ranks, and a run resumed anywhere, see the same stream.

use serde::{Deserialize, Serialize};

/// How far a run has come in its data: the next row to train on. It says nothing of ranks or batches, so a run
/// may go on with other numbers of both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cursor {
    pub epoch: u64,
    pub row: u64,
}

impl Cursor {
    /// The cursor `rows` rows further on, in data of `epoch_rows` rows an epoch.
    pub fn advanced(self, rows: u64, epoch_rows: u64) -> Self {
        let row = self.row + rows;
        Cursor { epoch: self.epoch + row / epoch_rows, row: row % epoch_rows }
    }

    /// Rows from the very beginning up to here.
    pub fn rows_before(self, epoch_rows: u64) -> u64 {
        self.epoch * epoch_rows + self.row
    }
}

/// A permutation of `0..len` that is computed, not stored: a balanced Feistel network over the next even
/// number of bits, walked until it lands inside.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    keys: [u64; 6],
}

impl Permutation {
    /// `stream` tells apart permutations that share a seed.
    pub fn new(len: u64, seed: u64, stream: u64) -> Self {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        let mut state = mix(seed ^ mix(stream));
        let keys = [(); 6].map(|()| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(state)
        });
        Permutation { len, half_bits: bits.div_ceil(2).max(1), keys }
    }

    /// Where `index` (below the length) goes.
    pub fn at(&self, index: u64) -> u64 {
        assert!(index < self.len, "{index} of a permutation of {}", self.len);
        // The network permutes fewer than 4·len + 4 numbers, so this takes a few rounds on average, and it ends:
        // walking along a cycle comes back inside at the latest where it began.
        let mut at = self.round_trip(index);
        while at >= self.len {
            at = self.round_trip(at);
        }
        at
    }

    fn round_trip(&self, x: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (x >> self.half_bits, x & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// A finaliser with good avalanche: neighbouring counters give unrelated numbers.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_goes_somewhere_of_its_own() {
        for len in (1..70).chain([127, 128, 129, 1000, 4097, 65_536]) {
            for seed in [0, 1, u64::MAX] {
                let permutation = Permutation::new(len, seed, 0);
                let mut seen: Vec<u64> = (0..len).map(|i| permutation.at(i)).collect();
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..len), "length {len}, seed {seed}");
            }
        }
    }

    #[test]
    fn seeds_and_streams_shuffle_differently_and_evenly() {
        let len = 10_000;
        let all = |seed, stream| -> Vec<u64> {
            let permutation = Permutation::new(len, seed, stream);
            (0..len).map(|i| permutation.at(i)).collect()
        };
        let fixed = |a: &[u64], b: &[u64]| a.iter().zip(b).filter(|(x, y)| x == y).count();
        let (a, b, c) = (all(1, 0), all(2, 0), all(1, 1));
        let identity: Vec<u64> = (0..len).collect();
        for (x, y) in [(&a, &b), (&a, &c), (&a, &identity)] {
            assert!(fixed(x, y) < 10, "{} places agree", fixed(x, y));
        }
        // The mean distance between two random places is a third of the length.
        let moved: f64 = a.iter().zip(0..).map(|(x, i)| x.abs_diff(i) as f64).sum::<f64>() / len as f64;
        assert!((moved / len as f64 - 1.0 / 3.0).abs() < 0.02, "{moved}");
    }

    #[test]
    fn a_cursor_counts_rows_through_epochs() {
        let mut cursor = Cursor::default();
        for step in 0..50 {
            assert_eq!(cursor, Cursor::default().advanced(step * 4, 7));
            assert_eq!(cursor.rows_before(7), step * 4);
            cursor = cursor.advanced(4, 7);
        }
        let text = serde_json::to_string(&cursor).unwrap();
        assert_eq!(text, r#"{"epoch":28,"row":4}"#);
        assert_eq!(serde_json::from_str::<Cursor>(&text).unwrap(), cursor);
    }
}
