//! Whole weights by hand, between steps.

use super::{Engine, Slot};
use crate::{Error, Layout, Result};
use device::{Buffer, Device, Stream};
use std::sync::Arc;
use tensor::Model;

/// A slot of a unit made whole (`unshard`, `summon_full_params`), as it was then; freed when dropped (`reshard`).
/// It lies beside the plan's memory.
#[derive(Debug)]
pub struct Whole {
    device: Arc<dyn Device>,
    stream: Stream,
    model: Arc<Model>,
    layout: Layout,
    unit: usize,
    values: Buffer,
}

impl Engine {
    /// The unit that holds a weight.
    pub fn unit_of(&self, name: &str) -> Result<usize> {
        let fixed = &self.fixed;
        let has = |item: &tensor::Item| item.members.iter().any(|member| member.name == name);
        let item = fixed.model.items.iter().position(has);
        item.map(|item| fixed.plan.layout.owner[item].0)
            .ok_or_else(|| Error::Weight { name: name.into(), what: "the model has no such weight".into() })
    }

    /// Makes a slot of a unit whole on every rank: the weights that the next forward will see ([`Slot::Compute`]), those
    /// the optimizer updates, or its moments. All ranks call it, in the same order. Waits for the last step.
    pub fn gather_by_hand(&self, unit: usize, slot: Slot) -> Result<Whole> {
        self.settle_updates()?;
        let fixed = &self.fixed;
        let layout = &fixed.plan.layout;
        let missing = || Error::Settings(format!("unit {unit} has no {slot:?}: it is not there or frozen"));
        let kept =
            (unit < layout.units.len()).then(|| fixed.slot(slot, unit)).flatten().ok_or_else(missing)?;
        let values = fixed.device.alloc_buffer(kept.dtype(), layout.unit_len(unit), "a unit by hand")?;
        let place = values.slice(fixed.shard_index() * kept.len(), kept.len())?;
        fixed.gather.wait(&fixed.compute.record()?)?;
        if kept.on_host() {
            fixed.device.transfer(&fixed.gather, kept, &place)?;
        } else if !fixed.plan.settings.is_sharded() {
            fixed.device.copy(&fixed.gather, kept, &place)?;
        }
        if fixed.plan.settings.is_sharded() {
            let mine = if kept.on_host() { &place } else { kept };
            fixed.groups.gather.all_gather(&fixed.gather, mine, &values, fixed.unit_name(unit))?;
        }
        fixed.gather.synchronize()?;
        Ok(Whole {
            device: fixed.device.clone(),
            stream: fixed.compute.clone(),
            model: fixed.model.clone(),
            layout: layout.clone(),
            unit,
            values,
        })
    }
}

impl Whole {
    /// The weights it holds, in order: names and, for each, where it lies on the device.
    pub fn weights(&self) -> Result<Vec<(String, Buffer)>> {
        let mut weights = Vec::new();
        for place in &self.layout.units[self.unit].places {
            let mut offset = place.offset;
            for member in &self.model.items[place.item.0].members {
                let len = member.shape.numel();
                weights.push((member.name.clone(), self.values.slice(offset, len)?));
                offset += len;
            }
        }
        Ok(weights)
    }

    /// One weight's numbers.
    pub fn read(&self, name: &str) -> Result<Vec<f32>> {
        match self.weights()?.into_iter().find(|(found, _)| found == name) {
            Some((_, buffer)) => super::fill::read_f32(&*self.device, &self.stream, &buffer),
            None => Err(Error::Weight { name: name.into(), what: "this unit does not hold it".into() }),
        }
    }
}
