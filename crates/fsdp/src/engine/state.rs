//! An engine's state by named ranges: what a checkpoint takes of it, and gives it.

use super::{Engine, Fixed};
use crate::Result;
use device::{Buffer, Dtype};

/// Bytes that go to the device at once when state is restored.
const CHUNK_BYTES: usize = 8 << 20;

/// What is kept for each element of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Slot {
    /// The weight the optimizer updates.
    Master,
    /// The weight in the compute dtype.
    Compute,
    Moment1,
    Moment2,
}

/// A stretch of one weight that this rank holds, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    pub name: String,
    /// First element within the weight.
    pub start: usize,
    pub len: usize,
    /// Frozen weights have no state beside themselves, and the device may hold them rounded.
    pub trainable: bool,
    unit: usize,
    /// First element within the unit's shard.
    at: usize,
}

/// State that was saved.
pub trait Saved {
    /// Fills `out` with elements of a weight's slot from `start` on, as bytes of `dtype`.
    fn read(&self, slot: Slot, name: &str, start: usize, dtype: Dtype, out: &mut [u8]) -> Result<()>;
}

impl Engine {
    /// What this rank is to save. Ranks that hold the same shard share it out among themselves.
    pub fn saved_stretches(&self) -> Vec<Stretch> {
        let fixed = &self.fixed;
        let (replica, replicas) = fixed.replica();
        let mut saved = Vec::new();
        for mut stretch in fixed.stretches() {
            let shard_len = fixed.plan.layout.units[stretch.unit].shard_len;
            let mine = shard_len * replica / replicas..shard_len * (replica + 1) / replicas;
            let (from, to) = (stretch.at.max(mine.start), (stretch.at + stretch.len).min(mine.end));
            if from < to {
                stretch.start += from - stretch.at;
                (stretch.at, stretch.len) = (from, to - from);
                saved.push(stretch);
            }
        }
        saved
    }

    /// The dtype in which a slot is held.
    pub fn slot_dtype(&self, slot: Slot) -> Dtype {
        let precision = &self.fixed.plan.settings.precision;
        match slot {
            Slot::Master => precision.master,
            Slot::Compute => precision.compute,
            Slot::Moment1 | Slot::Moment2 => precision.moments,
        }
    }

    /// Waits for the last step and copies a trained stretch's slot to the host, as bytes of [`Engine::slot_dtype`].
    pub fn copy_slot(&self, slot: Slot, stretch: &Stretch, out: &mut [u8]) -> Result<()> {
        self.settle_updates()?;
        let fixed = &self.fixed;
        let held = fixed.slot(slot, stretch.unit).expect("trained weights have every slot");
        Ok(fixed.device.read(&fixed.compute, &held.slice(stretch.at, stretch.len)?, out)?)
    }

    /// Takes weights and moments as they were saved. Every rank asks only for what it holds, a few megabytes at a
    /// time.
    pub fn restore(&mut self, saved: &dyn Saved) -> Result<()> {
        self.settle_updates()?;
        let fixed = &self.fixed;
        let stretches = fixed.stretches();
        for (unit, shard) in fixed.shards.iter().enumerate() {
            let mine: Vec<&Stretch> = stretches.iter().filter(|stretch| stretch.unit == unit).collect();
            let Some(trained) = &shard.trained else {
                fixed.restore_slot(saved, Slot::Compute, &shard.compute, &mine)?;
                continue;
            };
            fixed.restore_slot(saved, Slot::Master, &trained.master, &mine)?;
            let [first, second] = &trained.moments;
            fixed.restore_slot(saved, Slot::Moment1, first, &mine)?;
            fixed.restore_slot(saved, Slot::Moment2, second, &mine)?;
            fixed.copy_master(shard)?;
        }
        Ok(fixed.compute.synchronize()?)
    }
}

impl Fixed {
    /// Everything this rank holds, unit by unit, in the order in which it lies there.
    fn stretches(&self) -> Vec<Stretch> {
        let layout = &self.plan.layout;
        let of_unit = |unit: usize| {
            let trainable = layout.units[unit].trainable;
            layout.pieces(&self.model, unit, self.shard_index()).into_iter().map(move |piece| Stretch {
                name: piece.name,
                start: piece.start,
                len: piece.len,
                trainable,
                unit,
                at: piece.at,
            })
        };
        (0..layout.units.len()).flat_map(of_unit).collect()
    }

    /// Which of those that hold the same shard this rank is, and how many there are.
    fn replica(&self) -> (usize, usize) {
        let settings = &self.plan.settings;
        match (settings.is_sharded(), settings.replicate) {
            (true, 1) => (0, 1),
            (true, replicas) => (self.groups.replicate.rank(), replicas),
            (false, _) => (self.rank(), settings.ranks),
        }
    }

    pub(super) fn slot(&self, slot: Slot, unit: usize) -> Option<&Buffer> {
        let shard = &self.shards[unit];
        let trained = shard.trained.as_ref();
        match slot {
            Slot::Compute => Some(shard.updated()),
            Slot::Master => trained.map(|trained| &trained.master),
            Slot::Moment1 => trained.map(|trained| &trained.moments[0]),
            Slot::Moment2 => trained.map(|trained| &trained.moments[1]),
        }
    }

    /// Fills one slot of a unit; between weights there are zeros.
    fn restore_slot(
        &self,
        saved: &dyn Saved,
        slot: Slot,
        held: &Buffer,
        stretches: &[&Stretch],
    ) -> Result<()> {
        let dtype = held.dtype();
        let chunk = CHUNK_BYTES / dtype.bytes();
        let mut bytes = vec![0; CHUNK_BYTES.min(held.num_bytes())];
        let mut filled = 0;
        for stretch in stretches {
            self.zero_between(held, filled, stretch.at)?;
            filled = stretch.at + stretch.len;
            for start in (0..stretch.len).step_by(chunk) {
                let len = chunk.min(stretch.len - start);
                let part = &mut bytes[..len * dtype.bytes()];
                saved.read(slot, &stretch.name, stretch.start + start, dtype, part)?;
                self.device.write(&self.compute, part, &held.slice(stretch.at + start, len)?)?;
            }
        }
        self.zero_between(held, filled, held.len())
    }

    fn zero_between(&self, held: &Buffer, from: usize, to: usize) -> Result<()> {
        match to.saturating_sub(from) {
            0 => Ok(()),
            len => self.zero(&held.slice(from, len)?),
        }
    }
}
