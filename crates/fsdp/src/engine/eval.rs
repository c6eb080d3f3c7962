//! Evaluation: forward only, by a schedule of its own in the step's region.

use super::step::add_up;
use super::{Engine, Fixed, Walk};
use crate::{Evaluation, HostBatch, Part, Result};
use tensor::{Arena, Mode};

impl Engine {
    /// The loss on some micro-batches, which may be any number, but the same on all ranks. Weights, gradients
    /// and the last step's report stay as they are.
    pub fn evaluate(&mut self, batches: &[HostBatch]) -> Result<Evaluation> {
        let schedule = self.fixed.plan.schedule_for(Part::Eval);
        // Each micro-batch is summed in f32 on the device, all of them in f64 here.
        let (mut loss, mut num_targets) = (0.0, 0);
        for batch in batches {
            self.fixed.load(batch)?;
            self.walk_schedule(schedule, batch.num_targets, None)?;
            let fixed = &self.fixed;
            let values: Vec<f32> = fixed.device.read_vec(&fixed.compute, &fixed.scalars.evaluated)?;
            num_targets += values[0] as usize;
            loss += f64::from(values[1]);
        }
        Ok(Evaluation { loss: loss / num_targets as f64, num_targets })
    }
}

impl Walk {
    /// Forward of the last unit, its losses summed.
    pub(super) fn score(&mut self, fixed: &Fixed, arena: &Arena, unit: usize) -> Result<()> {
        self.forward(fixed, arena, unit, Mode::Eval)?;
        let losses = std::mem::take(&mut self.carry);
        fixed.device.fill(&fixed.compute, &fixed.scalars.evaluated, 0.0)?;
        add_up(fixed, arena, &losses, &fixed.scalars.evaluated.slice(1, 1)?)
    }
}

impl Fixed {
    /// Targets and losses over all ranks, by one collective.
    pub(super) fn total(&self, num_targets: usize) -> Result<()> {
        let evaluated = &self.scalars.evaluated;
        self.device.write_slice(&self.compute, &[num_targets as f32], &evaluated.slice(0, 1)?)?;
        self.sum_over_ranks(evaluated, "evaluated targets and loss")
    }
}
