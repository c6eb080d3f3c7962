//! The end of a step: the gradient's norm, the verdict on it, and the update.

use super::step::{fill_unwritten, sum_scratch};
use super::{Fixed, UnitGrad, Walk};
use crate::layout::Span;
use crate::{Hyper, Result};
use device::{Buffer, ByChance, Judge};
use tensor::optim::Decay;
use tensor::{Arena, Tensor};

/// Sets a unit's rounding apart from all other random choices of a step; models count theirs from 0.
const ROUNDING_SITE: u64 = 1 << 32;

impl Walk {
    /// Squares of owned gradients, summed over ranks together with the loss; then the verdict. Of ranks that hold
    /// the same shard, one counts.
    pub(super) fn norm(&mut self, fixed: &Fixed, arena: &Arena, hyper: &Hyper) -> Result<()> {
        let scalars = &fixed.scalars;
        let counts = fixed.is_counted();
        for unit in (0..self.grads.len()).rev() {
            let Some(unit_grad) = &self.grads[unit] else { continue };
            fill_unwritten(fixed, unit, unit_grad)?;
            let scratch = sum_scratch(fixed, arena)?;
            if let (true, Some(grad)) = (counts, self.owned_grad(fixed, unit)) {
                let spans = fixed.plan.layout.spans(unit, fixed.shard_index());
                let (sum, so_far) = (&scalars.sum_squares, scalars.squares.slice(unit, 1)?);
                fixed.add_squares(grad.buffer(), &spans, sum, scratch.buffer())?;
                fixed.device.cast(&fixed.compute, sum, &so_far)?;
            }
        }
        fixed.sum_over_ranks(&scalars.sums, "gradient norm and loss")?;
        let judge = Judge {
            sum_squares: &scalars.sum_squares,
            scaler: &scalars.scaler,
            verdict: &scalars.verdict,
            max_norm: hyper.clip_norm,
            step: hyper.step,
            betas: hyper.adamw.betas,
            lr: hyper.lr,
            scaling: fixed.plan.settings.loss_scale().map(|loss_scale| loss_scale.scaling),
        };
        Ok(fixed.device.judge(&fixed.compute, &judge)?)
    }

    fn owned_grad(&self, fixed: &Fixed, unit: usize) -> Option<&Tensor> {
        let grad = self.grads[unit].as_ref()?;
        if fixed.plan.settings.is_sharded() { grad.shard.as_ref() } else { grad.slot.as_ref() }
    }

    /// Clip and AdamW in one pass over each span; the gradient is gone afterwards.
    pub(super) fn update(&mut self, fixed: &Fixed, unit: usize, hyper: &Hyper) -> Result<()> {
        let shard = &fixed.shards[unit];
        let precision = &fixed.plan.settings.precision;
        if let (Some(grad), Some(trained)) = (self.owned_grad(fixed, unit), &shard.trained) {
            for span in fixed.plan.layout.spans(unit, fixed.shard_index()) {
                let part = |buffer: &Buffer| buffer.slice(span.start, span.len);
                let decays = hyper.adamw.decay == Decay::All || span.is_matrix;
                let compute = precision.has_compute_copy().then(|| part(&shard.compute)).transpose()?;
                // By the element's place in the unit, not in the shard.
                let rounding = precision.stochastic_rounding.then(|| ByChance {
                    key: self.random.key(ROUNDING_SITE + unit as u64),
                    first: (fixed.shard_index() * fixed.plan.layout.units[unit].shard_len + span.start)
                        as u64,
                });
                let args = device::AdamW {
                    master: &part(&trained.master)?,
                    moment1: &part(&trained.moments[0])?,
                    moment2: &part(&trained.moments[1])?,
                    grad: &part(grad.buffer())?,
                    verdict: &fixed.scalars.verdict,
                    compute: compute.as_ref(),
                    scalars: hyper.adamw.scalars(hyper.lr, decays),
                    rounding,
                };
                fixed.device.adamw(&fixed.compute, &args)?;
            }
        }
        self.grads[unit] = None;
        Ok(())
    }
}

impl Fixed {
    /// Adds Σ g² of some spans of a gradient to one number.
    fn add_squares(&self, grad: &Buffer, spans: &[Span], out: &Buffer, scratch: &Buffer) -> Result<()> {
        for span in spans {
            let part = grad.slice(span.start, span.len)?;
            self.device.sum_squares(&self.compute, &part, out, scratch, true)?;
        }
        Ok(())
    }

    /// What this rank alone brings to a unit's gradient: after the reduce nobody could tell whose it was that is
    /// not finite.
    pub(super) fn square_before_reduce(&self, arena: &Arena, unit: usize, grad: &UnitGrad) -> Result<()> {
        let Some(slot) = grad.slot.as_ref().filter(|_| self.plan.settings.checks_gradients()) else {
            return Ok(());
        };
        let (scratch, out) = (sum_scratch(self, arena)?, self.scalars.local_squares.slice(unit, 1)?);
        self.add_squares(slot.buffer(), &self.plan.layout.whole_spans(unit), &out, scratch.buffer())
    }
}
