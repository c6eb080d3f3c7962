//! Weights made whole and let go of again.

use super::{Fixed, Gathered, Groups, Walk};
use crate::{AfterForward, Layout, Result};
use comm::Group;
use std::collections::BTreeMap;
use std::sync::Arc;
use tensor::{Arena, Kind, Tensor};

/// Neighbouring ranks of those a unit is divided among, by how many they are.
pub(super) type Neighbours = BTreeMap<usize, Arc<dyn Group>>;

/// The groups that some unit falls back to after its forward.
pub(super) fn neighbours(layout: &Layout, groups: &Groups) -> Result<Neighbours> {
    let sizes = layout.units.iter().filter_map(|unit| match unit.after_forward {
        AfterForward::Group(size) => Some(size),
        _ => None,
    });
    let mut made = Neighbours::new();
    // All ranks have the same units, so they split in the same order.
    for size in sizes.collect::<std::collections::BTreeSet<_>>() {
        let first = groups.gather.rank() / size * size;
        let ranks: Vec<usize> = (first..first + size).collect();
        if let Some(group) = groups.gather.split(&ranks, &format!("neighbours {first}"))? {
            made.insert(size, group);
        }
    }
    Ok(made)
}

impl Walk {
    /// The gather starts once compute has reached this point: what it overwrites is then spent.
    pub(super) fn gather(&mut self, fixed: &Fixed, arena: &Arena, unit: usize) -> Result<()> {
        let (settings, name) = (&fixed.plan.settings, fixed.unit_name(unit));
        let mut mine = fixed.shards[unit].compute.clone();
        if settings.offload.weights {
            self.await_update(unit)?;
        }
        let weights = self.room(fixed, arena, unit)?;
        if settings.offload.weights {
            // From the host straight to its place among the others'.
            let place = weights.buffer().slice(fixed.shard_index() * mine.len(), mine.len())?;
            fixed.device.transfer(&fixed.gather, &mine, &place)?;
            mine = place;
        }
        if settings.is_sharded() {
            fixed.groups.gather.all_gather(&fixed.gather, &mine, weights.buffer(), name)?;
        }
        self.gathered[unit] =
            Some(Gathered { weights, arriving: Some(fixed.gather.record()?), source: None });
        Ok(())
    }

    /// Room for a unit's whole weights, which the gather stream may write to.
    fn room(&self, fixed: &Fixed, arena: &Arena, unit: usize) -> Result<Tensor> {
        let len = fixed.plan.layout.unit_len(unit);
        let weights = arena.tensor(fixed.plan.settings.precision.compute, [len], Kind::Gathered)?;
        fixed.gather.wait(&fixed.compute.record()?)?;
        Ok(weights)
    }

    /// Compute waits for the weights it is about to use.
    pub(super) fn arrive(&mut self, fixed: &Fixed, unit: usize) -> Result<()> {
        for need in &fixed.plan.layout.units[unit].needs {
            if let Some(event) = self.fetching[*need].take() {
                fixed.compute.wait(&event)?;
            }
            let Some(gathered) = self.gathered[*need].as_mut() else { continue };
            if let Some(event) = gathered.arriving.take() {
                fixed.compute.wait(&event)?;
                gathered.source = None;
            }
        }
        Ok(())
    }

    pub(super) fn free(&mut self, unit: usize) {
        self.gathered[unit] = None;
    }

    /// Of the whole weights, keeps the part that this rank will bring to the gather among its neighbours.
    pub(super) fn narrow(&mut self, fixed: &Fixed, arena: &Arena, unit: usize) -> Result<()> {
        let group = fixed.neighbours_of(unit);
        let whole = self.gathered[unit].take().expect("a unit is whole before it is narrowed");
        let len = whole.weights.buffer().len() / group.size();
        let part = arena.tensor(fixed.plan.settings.precision.compute, [len], Kind::Gathered)?;
        let mine = whole.weights.buffer().slice(group.rank() * len, len)?;
        fixed.device.copy(&fixed.compute, &mine, part.buffer())?;
        self.narrowed[unit] = Some(part);
        Ok(())
    }

    /// The part is held until the gather has arrived.
    pub(super) fn widen(&mut self, fixed: &Fixed, arena: &Arena, unit: usize) -> Result<()> {
        let part = self.narrowed[unit].take().expect("a unit is narrowed before it is widened");
        let weights = self.room(fixed, arena, unit)?;
        let group = fixed.neighbours_of(unit);
        group.all_gather(&fixed.gather, part.buffer(), weights.buffer(), fixed.unit_name(unit))?;
        let arriving = Some(fixed.gather.record()?);
        self.gathered[unit] = Some(Gathered { weights, arriving, source: Some(part) });
        Ok(())
    }
}

impl Fixed {
    fn neighbours_of(&self, unit: usize) -> &Arc<dyn Group> {
        match self.plan.layout.units[unit].after_forward {
            AfterForward::Group(size) => &self.neighbours[&size],
            other => panic!("unit {unit} has no neighbours: {other:?}"),
        }
    }
}
