//! RoPE's tables: a function of the configuration.

use super::{Config, RopeScaling};
use crate::{Constant, ConstantId, Model};
use std::sync::Arc;

/// Adds cos and sin, f32 `[positions, head_dim / 2]`, to the model.
pub(super) fn tables(model: &mut Model, config: &Config, positions: usize) -> [ConstantId; 2] {
    let frequencies: Arc<[f32]> = frequencies(config).into();
    let mut table = |name, of: fn(f64) -> f64| {
        let frequencies = frequencies.clone();
        let shape = [positions, frequencies.len()].into();
        let values = Arc::new(move || {
            let angles = (0..positions).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
            angles.map(|angle| of(f64::from(angle)) as f32).collect()
        });
        model.constant(Constant { name, shape, values })
    };
    [table("rope cos", f64::cos), table("rope sin", f64::sin)]
}

/// One angle per pair of dimensions and position, rounded to f32 where PyTorch has f32.
fn frequencies(config: &Config) -> Vec<f32> {
    let dim = config.head_dim;
    let plain = (0..dim).step_by(2).map(|i| {
        let exponent = i as f32 / dim as f32;
        1.0 / config.rope_theta.powf(f64::from(exponent)) as f32
    });
    plain.map(|f| scale(f64::from(f), config.rope_scaling) as f32).collect()
}

fn scale(frequency: f64, scaling: RopeScaling) -> f64 {
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } = scaling
    else {
        return frequency;
    };
    let wavelength = 2.0 * std::f64::consts::PI / frequency;
    if wavelength > original_max_position / low_freq_factor {
        frequency / factor
    } else if wavelength < original_max_position / high_freq_factor {
        frequency
    } else {
        let smooth =
            (original_max_position / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}
