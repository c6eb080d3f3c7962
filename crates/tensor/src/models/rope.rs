//! RoPE's tables: a function of the configuration.

use super::{Config, RopeScaling};
use crate::{Constant, ConstantId, Model};
use std::f64::consts::PI;
use std::sync::Arc;

/// Adds cos and sin, f32 `[positions, head_dim / 2]`, to the model.
pub(super) fn tables(model: &mut Model, config: &Config, positions: usize) -> [ConstantId; 2] {
    let frequencies: Arc<[f32]> = frequencies(config).into();
    let factor = config.rope_scaling.attention_factor() as f32;
    let mut table = |name, of: fn(f64) -> f64| {
        let frequencies = frequencies.clone();
        let shape = [positions, frequencies.len()].into();
        let values = Arc::new(move || {
            let angles = (0..positions).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
            angles.map(|angle| of(f64::from(angle)) as f32 * factor).collect()
        });
        model.constant(Constant { name, shape, values })
    };
    [table("rope cos", f64::cos), table("rope sin", f64::sin)]
}

/// One angle per pair of dimensions and position, rounded to f32 where PyTorch has f32.
fn frequencies(config: &Config) -> Vec<f32> {
    let dim = config.head_dim;
    let wavelength = |pair: usize| {
        let exponent = (2 * pair) as f32 / dim as f32;
        config.rope_theta.powf(f64::from(exponent)) as f32
    };
    (0..dim / 2).map(|pair| scaled(config, pair, wavelength(pair))).collect()
}

/// The frequency of a pair whose unscaled wavelength is 2π times `period`.
fn scaled(config: &Config, pair: usize, period: f32) -> f32 {
    let plain = 1.0 / period;
    match config.rope_scaling {
        RopeScaling::Default => plain,
        RopeScaling::Linear { factor } => plain / factor as f32,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
            let frequency = f64::from(plain);
            let turns = original_max_position * frequency / (2.0 * PI);
            let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
            let kept = smooth.clamp(0.0, 1.0);
            ((1.0 - kept) * frequency / factor + kept * frequency) as f32
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, truncate, .. } => {
            // The pair that turns `rotations` times within the original context.
            let turning = |rotations: f64| {
                let dim = config.head_dim as f64;
                dim * (original_max_position / (rotations * 2.0 * PI)).ln() / (2.0 * config.rope_theta.ln())
            };
            let (low, high) = (turning(beta_fast), turning(beta_slow));
            let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
            let (low, high) = (low.max(0.0), high.min((config.head_dim - 1) as f64));
            let high = if low == high { high + 0.001 } else { high };
            let ramp = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let kept = 1.0 - ramp;
            1.0 / (factor as f32 * period) * (1.0 - kept) + plain * kept
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies_of(scaling: &str) -> (Vec<f32>, f32) {
        frequencies_with(32, 10000.0, scaling)
    }

    fn frequencies_with(hidden: usize, theta: f64, scaling: &str) -> (Vec<f32>, f32) {
        let text = format!(
            r#"{{"model_type": "llama", "vocab_size": 10, "hidden_size": {hidden}, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 256,
            "rope_theta": {theta:?}, "rope_scaling": {scaling}}}"#
        );
        let config = Config::parse(&text).unwrap();
        (frequencies(&config), config.rope_scaling.attention_factor() as f32)
    }

    fn assert_close(ours: &[f32], theirs: &[f64]) {
        assert_eq!(ours.len(), theirs.len());
        for (a, b) in ours.iter().zip(theirs) {
            assert!((f64::from(*a) / b - 1.0).abs() < 1e-6, "{ours:?} against {theirs:?}");
        }
    }

    #[test]
    fn linear_scaling_divides() {
        let (plain, one) = frequencies_of("null");
        let (quarter, factor) = frequencies_of(r#"{"type": "linear", "factor": 4.0}"#);
        assert_eq!((one, factor), (1.0, 1.0));
        assert_eq!(quarter, plain.iter().map(|f| f / 4.0).collect::<Vec<_>>());
    }

    /// The formulas of transformers' `_compute_yarn_parameters`, worked out by hand for 8 pairs: pairs up to
    /// floor(16·ln(64/(32·2π))/(2·ln 10⁴)) = −1 → 0 keep their frequency, from ceil(2.016) = 3 on it is divided.
    #[test]
    fn yarn_ramps_from_kept_to_divided() {
        let text = r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}"#;
        let (got, factor) = frequencies_of(text);
        let plain = |pair: i32| 10f64.powf(-f64::from(pair) / 2.0);
        let kept = [1.0, 2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let want: Vec<f64> =
            (0..8).map(|i| plain(i) * (kept[i as usize] + (1.0 - kept[i as usize]) / 4.0)).collect();
        assert_close(&got, &want);
        assert!((f64::from(factor) - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-6);
        let given = r#"{"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5}"#;
        assert_eq!(frequencies_of(given).1, 0.5);
        let both = r#"{"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}"#;
        assert_eq!(frequencies_of(both).1, 1.0);
    }

    /// `inv_freq` and `attention_scaling` of transformers 5.22's `LlamaRotaryEmbedding`, heads of 32.
    #[test]
    fn yarn_has_transformers_frequencies() {
        let text = r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}"#;
        let (got, factor) = frequencies_with(64, 10000.0, text);
        let want = [
            1.0,
            0.47799012064933777,
            0.22135943174362183,
            0.09780536592006683,
            0.03999999910593033,
            0.014058532193303108,
            0.007905694656074047,
            0.004445698577910662,
            0.0024999999441206455,
            0.0014058533124625683,
            0.0007905694656074047,
            0.00044456985779106617,
            0.0002500000118743628,
            0.00014058532542549074,
            7.905694656074047e-05,
            4.4456985051510856e-05,
        ];
        assert_close(&got, &want);
        assert_close(&[factor], &[1.138629436111989]);
        let text = r#"{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}"#;
        let (got, factor) = frequencies_with(64, 1000000.0, text);
        let want = [
            1.0,
            0.4216965138912201,
            0.17782793939113617,
            0.07498941570520401,
            0.026088792830705643,
            0.00866788998246193,
            0.0026711211539804935,
            0.0007114121108315885,
            0.0001250000059371814,
            5.271206100587733e-05,
            2.2228492525755428e-05,
            9.373678039992228e-06,
            3.9528467823402025e-06,
            1.6669017668391461e-06,
            7.029266839708725e-07,
            2.964217173939687e-07,
        ];
        assert_close(&got, &want);
        assert_close(&[factor], &[1.2079441541679836]);
    }
}
