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

    /// This rank's part of every weight, as (name, first element, values), unit by unit. Frozen weights are read from
    /// where they came from, since the device may hold them rounded.
    pub fn read_weights(
        &self,
        source: &dyn Source,
        mut take: impl FnMut(&str, usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let fixed = &self.fixed;
        for (unit, shard) in fixed.shards.iter().enumerate() {
            let pieces = fixed.plan.layout.pieces(&fixed.model, unit, fixed.shard_index());
            let Some(trained) = &shard.trained else {
                for piece in &pieces {
                    let mut values = vec![0.0; piece.len];
                    source.read(&piece.name, piece.start, &mut values)?;
                    take(&piece.name, piece.start, &values)?;
                }
                continue;
            };
            let values = read_f32(&*fixed.device, &fixed.compute, &trained.master)?;
            for piece in &pieces {
                take(&piece.name, piece.start, &values[piece.at..piece.at + piece.len])?;
            }
        }
        Ok(())
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

fn read_f32(device: &dyn Device, stream: &Stream, src: &Buffer) -> Result<Vec<f32>> {
    Ok(match src.dtype() {
        Dtype::Bf16 => device.read_vec::<bf16>(stream, src)?.iter().map(|value| value.to_f32()).collect(),
        Dtype::F16 => device.read_vec::<f16>(stream, src)?.iter().map(|value| value.to_f32()).collect(),
        _ => device.read_vec(stream, src)?,
    })
}
