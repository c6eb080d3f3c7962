//! Weights and gradients as operations see them: views into what the walk holds right now.

use super::{Fixed, UnitGrad, Walk};
use device::Buffer;
use tensor::{Grad, ItemId, Result, Weights};

/// The walk's present state, read by operations.
pub(super) struct View<'a> {
    pub fixed: &'a Fixed,
    pub gathered: &'a [Option<super::Gathered>],
    pub grads: &'a [Option<UnitGrad>],
}

impl<'a> View<'a> {
    pub fn new(fixed: &'a Fixed, walk: &'a Walk) -> Self {
        View { fixed, gathered: &walk.gathered, grads: &walk.grads }
    }

    fn missing(&self, item: ItemId) -> tensor::Error {
        let name = self.fixed.model.items[item.0].members[0].name.clone();
        tensor::Error::NotGathered { name }
    }
}

impl Weights for View<'_> {
    fn get(&self, item: ItemId) -> Result<Buffer> {
        let layout = &self.fixed.plan.layout;
        let (unit, at) = layout.owner[item.0];
        let place = layout.units[unit].places[at];
        let whole = if self.fixed.plan.settings.gathers() {
            self.gathered[unit].as_ref().ok_or_else(|| self.missing(item))?.weights.buffer()
        } else {
            &self.fixed.shards[unit].compute
        };
        Ok(whole.slice(place.offset, place.len)?)
    }

    fn grad(&self, item: ItemId) -> Result<Option<Grad>> {
        let layout = &self.fixed.plan.layout;
        let (unit, at) = layout.owner[item.0];
        if !layout.units[unit].trainable {
            return Ok(None);
        }
        let place = layout.units[unit].places[at];
        let grad = self.grads[unit].as_ref().ok_or_else(|| self.missing(item))?;
        let slot = grad.slot.as_ref().ok_or_else(|| self.missing(item))?;
        let buffer = slot.buffer().slice(place.offset, place.len)?;
        Ok(Some(Grad { buffer, accumulate: grad.written[at].replace(true) }))
    }
}
