//! Weights from rank 0, where its machine alone has the files.

use super::fill::FILL_LEN;
use super::{Engine, Fixed, Source};
use crate::{Error, Result};
use device::{Buffer, Dtype};

impl Engine {
    /// As [`Engine::fill`], each rank being sent what it owns by rank 0, which alone needs a source. All ranks call it.
    /// Nobody holds more of the model than its shards and a small part: the step's region, idle as yet, is where parts
    /// come and go.
    pub fn fill_from_first(&mut self, source: Option<&dyn Source>) -> Result<()> {
        self.settle_updates()?;
        let fixed = &self.fixed;
        let staging = fixed.staging()?;
        let mine = (fixed.shard_index() as u64).to_le_bytes();
        let shards = fixed.groups.world.exchange(&mine, "which shard is whose")?;
        let shards: Vec<usize> = shards
            .iter()
            .map(|bytes| bytes.iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte)))
            .collect();
        let mut values = vec![0.0f32; FILL_LEN];
        for unit in 0..fixed.shards.len() {
            match (fixed.rank(), source) {
                (0, Some(source)) => {
                    for (peer, &shard) in shards.iter().enumerate().skip(1) {
                        fixed.send_unit(unit, (peer, shard), source, &staging, &mut values)?;
                    }
                    fixed.fill_unit(unit, source, &mut values)?;
                }
                (0, None) => {
                    let what = "rank 0 is to send all weights, and has no source of them";
                    return Err(Error::Settings(what.into()));
                }
                _ => fixed.fill_unit(unit, &Received { fixed, staging: &staging }, &mut values)?,
            }
        }
        fixed.reduce.synchronize()?;
        Ok(fixed.compute.synchronize()?)
    }
}

impl Fixed {
    /// Room for a part on its way between ranks.
    fn staging(&self) -> Result<Buffer> {
        let room = self.room.as_ref().expect("an engine that runs has the step's region");
        let len = (room.bytes() / Dtype::F32.bytes()).min(FILL_LEN);
        Ok(Buffer::new(room.clone(), 0, Dtype::F32, len)?)
    }

    /// Sends a rank its part of a unit, piece by piece as it will ask for them.
    fn send_unit(
        &self,
        unit: usize,
        (peer, shard): (usize, usize),
        source: &dyn Source,
        staging: &Buffer,
        values: &mut [f32],
    ) -> Result<()> {
        for piece in self.filled_pieces(unit, shard) {
            let part = &mut values[..piece.len];
            source.read(&piece.name, piece.start, part)?;
            for part in part.chunks(staging.len()) {
                let room = staging.slice(0, part.len())?;
                self.device.write_slice(&self.reduce, part, &room)?;
                self.groups.world.send(&self.reduce, &room, peer, &piece.name)?;
            }
        }
        Ok(())
    }
}

/// What rank 0 sends, asked for in the order in which it is sent.
struct Received<'a> {
    fixed: &'a Fixed,
    staging: &'a Buffer,
}

impl Source for Received<'_> {
    fn read(&self, name: &str, _start: usize, out: &mut [f32]) -> Result<()> {
        let fixed = self.fixed;
        for part in out.chunks_mut(self.staging.len()) {
            let room = self.staging.slice(0, part.len())?;
            fixed.groups.world.receive(&fixed.reduce, &room, 0, name)?;
            part.copy_from_slice(&fixed.device.read_vec::<f32>(&fixed.reduce, &room)?);
        }
        Ok(())
    }
}
