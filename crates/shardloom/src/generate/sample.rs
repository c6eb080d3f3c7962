//! Choosing the next token from its logits.

use crate::source::mix;

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0: always the likeliest.
    pub temperature: f64,
    /// Only this many of the likeliest; 0: all.
    pub top_k: usize,
    /// Only the likeliest that together have this probability; 1: all.
    pub top_p: f64,
    pub seed: u64,
}

impl Sampling {
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

    /// The token at `position`: a function of the logits, the seed and the position alone. None where a logit
    /// is not a number.
    pub fn choose(&self, logits: &[f32], position: u64) -> Option<i32> {
        if logits.iter().any(|logit| logit.is_nan()) {
            return None;
        }
        // Of equal ones the first.
        let likelier = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        let best = (0..logits.len()).min_by(likelier)?;
        if self.temperature == 0.0 {
            return i32::try_from(best).ok();
        }
        let mut tokens: Vec<usize> = (0..logits.len()).collect();
        if self.top_k > 0 && self.top_k < tokens.len() {
            tokens.select_nth_unstable_by(self.top_k - 1, likelier);
            tokens.truncate(self.top_k);
        }
        tokens.sort_unstable_by(likelier);
        let weight =
            |token: usize| ((f64::from(logits[token]) - f64::from(logits[best])) / self.temperature).exp();
        let mut weights: Vec<f64> = tokens.iter().map(|token| weight(*token)).collect();
        let enough = self.top_p * weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let before = |weight: &&f64| {
            let needed = sum < enough;
            sum += **weight;
            needed
        };
        let kept = weights.iter().take_while(before).count().max(1);
        weights.truncate(kept);
        let mut left = uniform(self.seed, position) * weights.iter().sum::<f64>();
        let chosen = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        i32::try_from(tokens[chosen.unwrap_or(kept - 1)]).ok()
    }
}

/// A number in 0..1 from a seed and a counter.
fn uniform(seed: u64, counter: u64) -> f64 {
    let bits = mix(mix(seed).wrapping_add(counter.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const WARM: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

    /// How often each of four tokens comes, of many draws.
    fn shares(sampling: Sampling, logits: &[f32; 4]) -> [f64; 4] {
        let mut counts = [0.0; 4];
        for position in 0..20_000 {
            counts[sampling.choose(logits, position).unwrap() as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    fn assert_near(got: [f64; 4], want: [f64; 4]) {
        assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 0.012), "{got:?}, not {want:?}");
    }

    #[test]
    fn greedy_takes_the_first_of_the_likeliest() {
        assert_eq!(Sampling::GREEDY.choose(&[0.0, 2.0, -1.0, 2.0], 5), Some(1));
        assert_eq!(Sampling::GREEDY.choose(&[f32::NEG_INFINITY, -1e30], 0), Some(1));
        assert_eq!(WARM.choose(&[0.0, f32::NAN], 0), None);
        assert_eq!(WARM.choose(&[f32::NEG_INFINITY, 0.0], 0), Some(1));
    }

    #[test]
    fn draws_have_the_softmaxs_shares() {
        // Probabilities 0.1, 0.4, 0.3, 0.2.
        let logits = [0.1f32, 0.4, 0.3, 0.2].map(f32::ln);
        assert_near(shares(WARM, &logits), [0.1, 0.4, 0.3, 0.2]);
        let squares = [0.01, 0.16, 0.09, 0.04].map(|p| p / 0.3);
        assert_near(shares(Sampling { temperature: 0.5, ..WARM }, &logits), squares);
        assert_near(shares(Sampling { top_k: 2, ..WARM }, &logits), [0.0, 4.0 / 7.0, 3.0 / 7.0, 0.0]);
        // The likeliest three are needed to reach 0.75.
        let nucleus = [0.0, 4.0 / 9.0, 3.0 / 9.0, 2.0 / 9.0];
        assert_near(shares(Sampling { top_p: 0.75, ..WARM }, &logits), nucleus);
        assert_near(shares(Sampling { top_p: 1e-9, ..WARM }, &logits), [0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn the_same_seed_gives_the_same_tokens_and_another_does_not() {
        let logits: Vec<f32> = (0..100).map(|i| (i * 37 % 100) as f32 / 50.0).collect();
        let draw = |seed| -> Vec<_> {
            let sampling = Sampling { seed, ..WARM };
            (0..50).map(|position| sampling.choose(&logits, position)).collect()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
}
