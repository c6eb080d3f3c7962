//! Numbers that live on the device, so that a step never waits for the host to read one.

use crate::plan::align;
use crate::{Engine, Result};
use device::{Buffer, Dtype, Memory, SCALER, VERDICT};
use std::sync::Arc;
use tensor::Tensor;

/// Numbers that there is one of.
const SINGLE: usize = 6 + VERDICT + SCALER;

#[derive(Debug)]
pub(super) struct Scalars {
    /// Targets of the whole batch.
    pub count: Buffer,
    /// What the loss's gradient starts from: scale / count.
    pub seed: Tensor,
    /// Sum of squares and summed loss, side by side: one collective serves both.
    pub sums: Buffer,
    pub sum_squares: Buffer,
    pub loss_sum: Buffer,
    /// Whether and how the step's update is made.
    pub verdict: Buffer,
    /// The loss scale and what it goes by.
    pub scaler: Buffer,
    pub scale: Buffer,
    /// Number of targets and summed loss of an evaluation, side by side. A step's own numbers stay.
    pub evaluated: Buffer,
    /// All of the above.
    single: Buffer,
    /// Σ g² of this rank's shards from the last unit to each, in the backward's order. Where several ranks hold the same
    /// shard, one of them counts.
    pub squares: Buffer,
    /// Σ g² of each unit's whole gradient on this rank, before it is summed over ranks.
    pub local_squares: Buffer,
}

impl Scalars {
    pub fn bytes(units: usize) -> usize {
        align((SINGLE + 2 * units) * Dtype::F32.bytes())
    }

    /// From byte `offset` of a region on.
    pub fn take(region: Arc<dyn Memory>, offset: usize, units: usize) -> Result<Scalars> {
        let all = Buffer::new(region, offset, Dtype::F32, SINGLE + 2 * units)?;
        let single = all.slice(0, SINGLE)?;
        Ok(Scalars {
            count: single.slice(0, 1)?,
            seed: Tensor::over(single.slice(1, 1)?, [1])?,
            sums: single.slice(2, 2)?,
            sum_squares: single.slice(2, 1)?,
            loss_sum: single.slice(3, 1)?,
            evaluated: single.slice(4, 2)?,
            verdict: single.slice(6, VERDICT)?,
            scaler: single.slice(6 + VERDICT, SCALER)?,
            scale: single.slice(6 + VERDICT, 1)?,
            single,
            squares: all.slice(SINGLE, units)?,
            local_squares: all.slice(SINGLE + units, units)?,
        })
    }
}

/// What a step came to, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// Mean over all targets of the batch.
    pub loss: f64,
    /// Before clipping, the loss scale taken out. Not finite where the step was not made.
    pub grad_norm: f64,
    pub num_targets: usize,
    /// Whether the step's update was made: it is not where the gradient is not finite.
    pub applied: bool,
    /// Steps that were not made so far.
    pub skipped_steps: u64,
    /// The factor on the loss's gradient from now on: 1 but for f16.
    pub loss_scale: f64,
    /// The step whose gradient was not finite, where nothing scales the loss. Weights have stayed as they were before
    /// it; [`Engine::blame`] says where it came from.
    pub ended_at: Option<u64>,
}

/// The state of f16's loss scale (`ShardedGradScaler`), equal on all ranks: what a checkpoint keeps of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaler {
    pub scale: f32,
    /// Good steps since the scale last changed.
    pub good_steps: u32,
    /// Steps that were not made. Adam has made the run's steps less these.
    pub skipped_steps: u64,
}

impl Engine {
    /// Waits for the last step and reads what it came to.
    pub fn report(&self) -> Result<Report> {
        let fixed = &self.fixed;
        let values: Vec<f32> = fixed.device.read_vec(&fixed.compute, &fixed.scalars.single)?;
        let [count, _, _, loss_sum, _, _, norm, _, applies, _, _, scale, _, skipped, ended] = values[..]
        else {
            panic!("there are {SINGLE} numbers")
        };
        Ok(Report {
            loss: f64::from(loss_sum) / f64::from(count),
            grad_norm: f64::from(norm),
            num_targets: count as usize,
            applied: applies != 0.0,
            skipped_steps: skipped as u64,
            loss_scale: f64::from(scale),
            ended_at: (ended != 0.0).then_some(ended as u64),
        })
    }

    /// Waits for the last step and reads the scaler's state.
    pub fn scaler(&self) -> Result<Scaler> {
        let fixed = &self.fixed;
        let values: Vec<f32> = fixed.device.read_vec(&fixed.compute, &fixed.scalars.scaler)?;
        Ok(Scaler { scale: values[0], good_steps: values[1] as u32, skipped_steps: values[2] as u64 })
    }

    /// Goes on from a state read earlier, the same one on all ranks. Also forgets a step that ended the run.
    pub fn set_scaler(&mut self, scaler: &Scaler) -> Result<()> {
        let fixed = &self.fixed;
        let values = [scaler.scale, scaler.good_steps as f32, scaler.skipped_steps as f32, 0.0];
        fixed.device.write_slice(&fixed.compute, &values, &fixed.scalars.scaler)?;
        Ok(fixed.device.fill(&fixed.compute, &fixed.scalars.local_squares, 0.0)?)
    }
}
