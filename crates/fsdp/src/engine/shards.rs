//! What a rank owns, and where it is kept.

use crate::plan::Held;
use crate::{Plan, Result};
use device::{Buffer, Device, Dtype};

/// What a rank owns of a unit.
#[derive(Debug)]
pub(super) struct Shard {
    /// What gathers take: the master itself where dtype and place are the same.
    pub compute: Buffer,
    /// None for frozen weights.
    pub trained: Option<Trained>,
}

/// What training a unit takes beside its weights.
#[derive(Debug)]
pub(super) struct Trained {
    pub master: Buffer,
    pub moments: [Buffer; 2],
    /// The shard's gradient, or the whole unit's, kept through the micro-batches of a step; None where the arena
    /// holds it.
    pub held_grad: Option<Buffer>,
    pub held_slot: Option<Buffer>,
    /// The shard's gradient in host memory, from its reduce to the update.
    pub host_grad: Option<Buffer>,
    /// Where the host's update leaves the weights that the device then fetches; None where the master serves.
    pub fresh: Option<Buffer>,
}

/// One region per kind, on the device or the host; each unit takes its part of each.
pub(super) fn take(device: &dyn Device, plan: &Plan) -> Result<Vec<Shard>> {
    let (settings, owned, parts) = (&plan.settings, plan.layout.owned(true), plan.layout.num_shards);
    let (precision, offload) = (&settings.precision, settings.offload);
    let region = |on_host: bool, dtype: Dtype, len: usize, what: &str| match on_host {
        true => device.alloc_host_buffer(dtype, len, what),
        false => device.alloc_buffer(dtype, len, what),
    };
    let maybe = |wanted: bool, on_host: bool, dtype: Dtype, len: usize, what: &str| {
        wanted.then(|| region(on_host, dtype, len, what)).transpose()
    };
    let held = plan.held();
    let fresh = settings.fetches() && precision.compute != precision.master;
    let master = region(offload.optimizer, precision.master, owned, "master weights")?;
    let moments = region(offload.optimizer, precision.moments, 2 * owned, "moments")?;
    let copied = settings.has_compute_copy();
    let copy = maybe(copied, offload.weights, precision.compute, owned, "compute weights")?;
    let held_grads = maybe(held == Held::Shards, false, precision.grad, owned, "held gradients")?;
    let held_slots = maybe(held == Held::Whole, false, precision.reduce, owned * parts, "held gradients")?;
    let host_grads = maybe(settings.grads_on_host(), true, precision.grad, owned, "gradients")?;
    let fresh = maybe(fresh, true, precision.compute, owned, "updated weights")?;
    let num_frozen = plan.layout.owned(false);
    let frozen = maybe(num_frozen > 0, offload.weights, precision.compute, num_frozen, "frozen weights")?;
    let (mut start, mut frozen_start) = (0, 0);
    let mut shards = Vec::with_capacity(plan.layout.units.len());
    for unit in &plan.layout.units {
        let len = unit.shard_len;
        if let (false, Some(frozen)) = (unit.trainable, &frozen) {
            shards.push(Shard { compute: frozen.slice(frozen_start, len)?, trained: None });
            frozen_start += len;
            continue;
        }
        let part = |region: &Option<Buffer>, parts: usize| {
            region.as_ref().map(|region| region.slice(start * parts, len * parts)).transpose()
        };
        let master = master.slice(start, len)?;
        let compute = part(&copy, 1)?.unwrap_or_else(|| master.clone());
        let trained = Trained {
            moments: [moments.slice(start, len)?, moments.slice(owned + start, len)?],
            held_grad: part(&held_grads, 1)?,
            held_slot: part(&held_slots, parts)?,
            host_grad: part(&host_grads, 1)?,
            fresh: part(&fresh, 1)?,
            master,
        };
        shards.push(Shard { compute, trained: Some(trained) });
        start += len;
    }
    Ok(shards)
}
