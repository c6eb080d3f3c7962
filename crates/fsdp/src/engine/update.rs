//! The end of a step: the gradient's norm, the verdict on it, and the update.

use super::offload::HostSide;
use super::step::{fill_unwritten, sum_scratch};
use super::{Fixed, UnitGrad, Walk};
use crate::layout::Span;
use crate::{Hyper, Result};
use device::{Buffer, ByChance, Judge, Stream};
use tensor::optim::Decay;
use tensor::{Arena, Kind, Tensor};

/// Sets a unit's rounding apart from all other random choices of a step; models count theirs from 0.
const ROUNDING_SITE: u64 = 1 << 32;

impl Walk {
    /// Squares of owned gradients, summed over ranks together with the loss; then the verdict. Of ranks that hold
    /// the same shard, one counts.
    pub(super) fn norm(&mut self, fixed: &Fixed, arena: &Arena, hyper: &Hyper) -> Result<()> {
        let scalars = &fixed.scalars;
        for unit in (0..self.grads.len()).rev() {
            let Some(unit_grad) = &self.grads[unit] else { continue };
            fill_unwritten(fixed, unit, unit_grad)?;
            if fixed.plan.settings.grads_on_host() {
                // Done when it was sent there.
                continue;
            }
            let scratch = sum_scratch(fixed, arena)?;
            if let (true, Some(grad)) = (fixed.is_counted(), self.owned_grad(fixed, unit)) {
                fixed.add_to_norm(&fixed.compute, unit, grad.buffer(), scratch.buffer())?;
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
        fixed.device.judge(&fixed.compute, &judge)?;
        fixed.verdict_to_host()
    }

    pub(super) fn owned_grad(&self, fixed: &Fixed, unit: usize) -> Option<&Tensor> {
        let grad = self.grads[unit].as_ref()?;
        if fixed.plan.settings.is_sharded() { grad.shard.as_ref() } else { grad.slot.as_ref() }
    }

    /// Clip and AdamW in one pass over each span; the gradient is gone afterwards.
    pub(super) fn update(&mut self, fixed: &Fixed, arena: &Arena, unit: usize, hyper: &Hyper) -> Result<()> {
        let shard = &fixed.shards[unit];
        let settings = &fixed.plan.settings;
        if let (Some(_), Some(trained)) = (&self.grads[unit], &shard.trained) {
            match &fixed.host {
                Some(HostSide { worker, verdict: Some(verdict) }) => {
                    let grad = trained.host_grad.as_ref().expect("the host updates from its own gradients");
                    let copy = if settings.fetches() { trained.fresh.as_ref() } else { Some(&shard.compute) };
                    let copy = copy.filter(|_| settings.has_compute_copy());
                    self.each_span(fixed, unit, hyper, (grad, copy, verdict), |args| worker.adamw(args))?;
                    self.updating[unit] = Some(worker.record()?);
                }
                _ => self.update_on_device(fixed, arena, unit, hyper)?,
            }
        }
        self.grads[unit] = None;
        Ok(())
    }

    fn update_on_device(&self, fixed: &Fixed, arena: &Arena, unit: usize, hyper: &Hyper) -> Result<()> {
        let (shard, settings) = (&fixed.shards[unit], &fixed.plan.settings);
        let Some(grad) = self.grad_for_update(fixed, arena, unit)? else { return Ok(()) };
        // Weights that are kept on the host pass through the device.
        let passing = settings
            .offload
            .weights
            .then(|| arena.tensor(settings.precision.compute, [shard.compute.len()], Kind::Scratch));
        let passing = passing.transpose()?;
        let copy =
            settings.has_compute_copy().then(|| passing.as_ref().map_or(&shard.compute, Tensor::buffer));
        let args = (grad.buffer(), copy, &fixed.scalars.verdict);
        self.each_span(fixed, unit, hyper, args, |args| fixed.device.adamw(&fixed.compute, args))?;
        if let Some(passing) = &passing {
            fixed.device.transfer(&fixed.compute, passing.buffer(), &shard.compute)?;
        }
        Ok(())
    }

    /// Calls `update` for each span of a unit, with (gradient, copy in the compute dtype, verdict) cut to it.
    fn each_span(
        &self,
        fixed: &Fixed,
        unit: usize,
        hyper: &Hyper,
        (grad, copy, verdict): (&Buffer, Option<&Buffer>, &Buffer),
        update: impl Fn(&device::AdamW<'_>) -> device::Result<()>,
    ) -> Result<()> {
        let Some(trained) = &fixed.shards[unit].trained else { return Ok(()) };
        for span in fixed.plan.layout.spans(unit, fixed.shard_index()) {
            let part = |buffer: &Buffer| buffer.slice(span.start, span.len);
            let decays = hyper.adamw.decay == Decay::All || span.is_matrix;
            let compute = copy.map(part).transpose()?;
            // By the element's place in the unit, not in the shard.
            let first = fixed.shard_index() * fixed.plan.layout.units[unit].shard_len + span.start;
            let rounding =
                fixed.plan.settings.precision.stochastic_rounding.then(|| ByChance {
                    key: self.random.key(ROUNDING_SITE + unit as u64),
                    first: first as u64,
                });
            update(&device::AdamW {
                master: &part(&trained.master)?,
                moment1: &part(&trained.moments[0])?,
                moment2: &part(&trained.moments[1])?,
                grad: &part(grad)?,
                verdict,
                compute: compute.as_ref(),
                scalars: hyper.adamw.scalars(hyper.lr, decays),
                rounding,
            })?;
        }
        Ok(())
    }
}

impl Fixed {
    /// Adds a unit's owned gradient to the norm, and remembers what that came to.
    pub(super) fn add_to_norm(
        &self,
        stream: &Stream,
        unit: usize,
        grad: &Buffer,
        scratch: &Buffer,
    ) -> Result<()> {
        let spans = self.plan.layout.spans(unit, self.shard_index());
        let (sum, so_far) = (&self.scalars.sum_squares, self.scalars.squares.slice(unit, 1)?);
        self.add_squares(stream, grad, &spans, sum, scratch)?;
        Ok(self.device.cast(stream, sum, &so_far)?)
    }

    /// Adds Σ g² of some spans of a gradient to one number.
    fn add_squares(
        &self,
        stream: &Stream,
        grad: &Buffer,
        spans: &[Span],
        out: &Buffer,
        scratch: &Buffer,
    ) -> Result<()> {
        for span in spans {
            let part = grad.slice(span.start, span.len)?;
            self.device.sum_squares(stream, &part, out, scratch, true)?;
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
        let spans = self.plan.layout.whole_spans(unit);
        self.add_squares(&self.compute, slot.buffer(), &spans, &out, scratch.buffer())
    }
}
