//! Optimizers: their scalars. The pass over a shard is a kernel.

use device::AdamWScalars;

/// AdamW's settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
    pub decay: Decay,
}

/// Which weights decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    All,
    /// Not norms and biases.
    Matrices,
}

impl AdamW {
    /// The scalars of a step that do not depend on its number, computed in f64 as PyTorch does and rounded once.
    /// The others are decided on the device ([`device::Judge`]).
    pub fn scalars(&self, lr: f64, decays: bool) -> AdamWScalars {
        let [beta1, beta2] = self.betas;
        let weight_decay = if decays { self.weight_decay } else { 0.0 };
        AdamWScalars {
            keep: (1.0 - lr * weight_decay) as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            eps: self.eps as f32,
        }
    }
}
