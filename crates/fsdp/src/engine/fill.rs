//! Weights into shards: each rank asks only for what it owns.

use super::{Engine, Fixed};
use crate::{Piece, Result};
use device::{Buffer, Device, Dtype, Stream};
use half::{bf16, f16};

/// Where weights come from: a checkpoint, a seed.
pub trait Source {
    /// Elements `start..start + out.len()` of the named weight.
    fn read(&self, name: &str, start: usize, out: &mut [f32]) -> Result<()>;
}

/// Elements of a weight that the host makes at a time.
pub(super) const FILL_LEN: usize = 4 << 20;

impl Engine {
    /// Fills this rank's shards, moments and padding with zeros. The host holds a small part at a time, in the same
    /// memory over and over: pages of a large model's weights would take longer to come by than the weights.
    pub fn fill(&mut self, source: &dyn Source) -> Result<()> {
        self.settle_updates()?;
        let mut values = vec![0.0f32; FILL_LEN];
        (0..self.fixed.shards.len()).try_for_each(|unit| self.fixed.fill_unit(unit, source, &mut values))?;
        Ok(self.fixed.compute.synchronize()?)
    }
}

impl Fixed {
    pub(super) fn fill_unit(&self, unit: usize, source: &dyn Source, values: &mut [f32]) -> Result<()> {
        let shard = &self.shards[unit];
        let weights = shard.trained.as_ref().map_or(&shard.compute, |trained| &trained.master);
        self.zero(weights)?;
        for piece in self.filled_pieces(unit, self.shard_index()) {
            let part = &mut values[..piece.len];
            source.read(&piece.name, piece.start, part)?;
            write_rounded(&*self.device, &self.compute, part, &weights.slice(piece.at, piece.len)?)?;
        }
        let Some(trained) = &shard.trained else { return Ok(()) };
        self.copy_master(shard)?;
        trained.moments.iter().try_for_each(|moment| self.zero(moment))
    }

    /// A shard's stretches of weights in the order and sizes in which they are filled.
    pub(super) fn filled_pieces(&self, unit: usize, shard: usize) -> Vec<Piece> {
        let pieces = self.plan.layout.pieces(&self.model, unit, shard).into_iter();
        let cut = |piece: Piece| {
            let firsts = (0..piece.len).step_by(FILL_LEN);
            firsts.map(move |first| Piece {
                name: piece.name.clone(),
                start: piece.start + first,
                len: FILL_LEN.min(piece.len - first),
                at: piece.at + first,
            })
        };
        pieces.flat_map(cut).collect()
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

pub(super) fn read_f32(device: &dyn Device, stream: &Stream, src: &Buffer) -> Result<Vec<f32>> {
    Ok(match src.dtype() {
        Dtype::Bf16 => device.read_vec::<bf16>(stream, src)?.iter().map(|value| value.to_f32()).collect(),
        Dtype::F16 => device.read_vec::<f16>(stream, src)?.iter().map(|value| value.to_f32()).collect(),
        _ => device.read_vec(stream, src)?,
    })
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
