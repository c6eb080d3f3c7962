//! Weights into shards: each rank asks only for what it owns.

use super::Engine;
use crate::Result;
use device::{Buffer, Device, Dtype, Stream};
use half::{bf16, f16};

/// Where weights come from: a checkpoint, a seed.
pub trait Source {
    /// Elements `start..start + out.len()` of the named weight.
    fn read(&self, name: &str, start: usize, out: &mut [f32]) -> Result<()>;
}

/// Elements of a weight that the host makes at a time.
const FILL_LEN: usize = 4 << 20;

impl Engine {
    /// Fills this rank's shards, moments and padding with zeros. The host holds a small part at a time, in the same
    /// memory over and over: pages of a large model's weights would take longer to come by than the weights.
    pub fn fill(&mut self, source: &dyn Source) -> Result<()> {
        let fixed = &self.fixed;
        let layout = &fixed.plan.layout;
        let mut values = vec![0.0f32; FILL_LEN];
        for (unit, shard) in fixed.shards.iter().enumerate() {
            let weights = shard.trained.as_ref().map_or(&shard.compute, |trained| &trained.master);
            fixed.device.fill(&fixed.compute, weights, 0.0)?;
            for piece in layout.pieces(&fixed.model, unit, fixed.shard_index()) {
                for first in (0..piece.len).step_by(FILL_LEN) {
                    let part = &mut values[..FILL_LEN.min(piece.len - first)];
                    source.read(&piece.name, piece.start + first, part)?;
                    let dst = weights.slice(piece.at + first, part.len())?;
                    write_rounded(&*fixed.device, &fixed.compute, part, &dst)?;
                }
            }
            let Some(trained) = &shard.trained else { continue };
            if fixed.plan.settings.precision.has_compute_copy() {
                fixed.device.cast(&fixed.compute, &trained.master, &shard.compute)?;
            }
            for moment in &trained.moments {
                fixed.device.fill(&fixed.compute, moment, 0.0)?;
            }
        }
        Ok(fixed.compute.synchronize()?)
    }
}

pub(crate) fn write_rounded(
    device: &dyn Device,
    stream: &Stream,
    values: &[f32],
    dst: &Buffer,
) -> Result<()> {
    match dst.dtype() {
        Dtype::Bf16 => device.write_slice(stream, &rounded(values, bf16::from_f32), dst)?,
        Dtype::F16 => device.write_slice(stream, &rounded(values, f16::from_f32), dst)?,
        _ => device.write_slice(stream, values, dst)?,
    }
    Ok(())
}

/// Every value rounded, by as many threads as there are cores: a large model's start waits for this.
fn rounded<T: Copy + Default + Send>(values: &[f32], round: fn(f32) -> T) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    let share = values.len().div_ceil(threads).max(1 << 16);
    let mut out = vec![T::default(); values.len()];
    std::thread::scope(|scope| {
        for (values, out) in values.chunks(share).zip(out.chunks_mut(share)) {
            scope.spawn(move || out.iter_mut().zip(values).for_each(|(out, value)| *out = round(*value)));
        }
    });
    out
}
