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

impl Engine {
    /// Fills this rank's shards, moments with zeros. The host holds one unit's shard at a time.
    pub fn fill(&mut self, source: &dyn Source) -> Result<()> {
        let fixed = &self.fixed;
        let layout = &fixed.plan.layout;
        for (unit, shard) in fixed.shards.iter().enumerate() {
            let mut values = vec![0.0f32; layout.units[unit].shard_len];
            for piece in layout.pieces(&fixed.model, unit, fixed.shard_index()) {
                source.read(&piece.name, piece.start, &mut values[piece.at..piece.at + piece.len])?;
            }
            let Some(trained) = &shard.trained else {
                write_rounded(&*fixed.device, &fixed.compute, &values, &shard.compute)?;
                continue;
            };
            write_rounded(&*fixed.device, &fixed.compute, &values, &trained.master)?;
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
        Dtype::Bf16 => {
            let rounded: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
            device.write_slice(stream, &rounded, dst)?;
        }
        Dtype::F16 => {
            let rounded: Vec<f16> = values.iter().map(|value| f16::from_f32(*value)).collect();
            device.write_slice(stream, &rounded, dst)?;
        }
        _ => device.write_slice(stream, values, dst)?,
    }
    Ok(())
}
