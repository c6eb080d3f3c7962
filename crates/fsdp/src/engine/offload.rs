//! State in host memory (`CPUOffloadPolicy`).
//!
//! A unit's gradient goes to the host as soon as it is reduced, its squares having been added up on the device. Once the
//! norm is known, the verdict goes after it, and a worker of the host updates unit by unit while this thread already
//! issues the next step: it waits for a unit's update only where that unit's weights are to come back.
//!
//! Why that is all the waiting there is: a unit is gathered or fetched before its forward, so at that point its update has
//! been waited for. Only later does its gradient overwrite the host's, and the next verdict comes last of all.

use super::shards::Shard;
use super::{Engine, Fixed, Walk};
use crate::{Plan, Result};
use device::{Buffer, Device, Dtype, VERDICT, host::Host};
use tensor::{Arena, Kind, Tensor};

/// The host's part in the step.
#[derive(Debug)]
pub(super) struct HostSide {
    pub worker: Host,
    /// The verdict, where the host updates.
    pub verdict: Option<Buffer>,
}

impl HostSide {
    pub fn new(device: &dyn Device, plan: &Plan) -> Result<Option<HostSide>> {
        let offload = plan.settings.offload;
        if !offload.is_some() {
            return Ok(None);
        }
        let verdict = offload.optimizer.then(|| device.alloc_host_buffer(Dtype::F32, VERDICT, "verdict"));
        Ok(Some(HostSide { worker: Host::new(device, "host")?, verdict: verdict.transpose()? }))
    }
}

impl Engine {
    /// Waits for the updates the host still makes.
    pub(super) fn settle_updates(&self) -> Result<()> {
        self.walk.updating.iter().flatten().try_for_each(|update| update.synchronize())?;
        Ok(())
    }
}

impl Walk {
    /// This thread waits until the host has updated a unit. Says whether it was being updated.
    pub(super) fn await_update(&mut self, unit: usize) -> Result<bool> {
        match self.updating[unit].take() {
            Some(update) => update.synchronize().map(|()| true).map_err(Into::into),
            None => Ok(false),
        }
    }

    /// Brings what the host has updated to the device's shard, on the stream on which it will be gathered.
    pub(super) fn fetch(&mut self, fixed: &Fixed, unit: usize) -> Result<()> {
        if self.await_update(unit)? {
            let shard = &fixed.shards[unit];
            fixed.gather.wait(&fixed.compute.record()?)?;
            fixed.device.transfer(&fixed.gather, shard.updated(), &shard.compute)?;
            self.fetching[unit] = Some(fixed.gather.record()?);
        }
        Ok(())
    }

    /// Sends a reduced gradient to the host, on the reduce stream. The last micro-batch's is complete: its squares
    /// are added to the norm's first.
    pub(super) fn grad_to_host(
        &mut self,
        fixed: &Fixed,
        arena: &Arena,
        unit: usize,
        grad: &Tensor,
    ) -> Result<Option<Tensor>> {
        let scratch = self.ends.then(|| super::step::sum_scratch(fixed, arena)).transpose()?;
        if let (Some(scratch), true) = (&scratch, fixed.is_counted()) {
            fixed.add_to_norm(&fixed.reduce, unit, grad.buffer(), scratch.buffer())?;
        }
        fixed.device.transfer(&fixed.reduce, grad.buffer(), fixed.shards[unit].host_grad())?;
        Ok(scratch)
    }

    /// The gradient as the device's update takes it: back from the host where it was sent there.
    pub(super) fn grad_for_update(
        &self,
        fixed: &Fixed,
        arena: &Arena,
        unit: usize,
    ) -> Result<Option<Tensor>> {
        if !fixed.plan.settings.grads_on_host() {
            return Ok(self.owned_grad(fixed, unit).cloned());
        }
        let host = fixed.shards[unit].host_grad();
        let grad = arena.tensor(host.dtype(), [host.len()], Kind::Gradient)?;
        fixed.device.transfer(&fixed.compute, host, grad.buffer())?;
        Ok(Some(grad))
    }
}

impl Fixed {
    /// The verdict goes to the host, whose updates start after it.
    pub(super) fn verdict_to_host(&self) -> Result<()> {
        let Some(HostSide { worker, verdict: Some(verdict) }) = &self.host else { return Ok(()) };
        self.device.transfer(&self.compute, &self.scalars.verdict, verdict)?;
        Ok(worker.wait(&self.compute.record()?)?)
    }

    /// Brings what earlier micro-batches' gradients came to back from the host, on the reduce stream.
    pub(super) fn fetch_grad(&self, unit: usize, grad: &Tensor) -> Result<()> {
        Ok(self.device.transfer(&self.reduce, self.shards[unit].host_grad(), grad.buffer())?)
    }

    /// Sets what a rank keeps to zero, wherever it is. Waits where that is the host.
    pub(super) fn zero(&self, kept: &Buffer) -> Result<()> {
        match &self.host {
            Some(host) if kept.on_host() => {
                host.worker.fill(kept, 0.0)?;
                Ok(host.worker.synchronize()?)
            }
            _ => Ok(self.device.fill(&self.compute, kept, 0.0)?),
        }
    }

    /// Makes a unit's compute weights from its master weights, wherever the two are.
    pub(super) fn copy_master(&self, shard: &Shard) -> Result<()> {
        let Some(trained) = shard.trained.as_ref().filter(|_| self.plan.settings.has_compute_copy()) else {
            return Ok(());
        };
        let (master, compute) = (&trained.master, &shard.compute);
        let Some(host) = &self.host else {
            return Ok(self.device.cast(&self.compute, master, compute)?);
        };
        match (master.on_host(), compute.on_host()) {
            (true, true) => {
                host.worker.cast(master, compute)?;
                Ok(host.worker.synchronize()?)
            }
            (true, false) => {
                if let Some(fresh) = &trained.fresh {
                    host.worker.cast(master, fresh)?;
                    host.worker.synchronize()?;
                }
                Ok(self.device.transfer(&self.compute, shard.updated(), compute)?)
            }
            (false, true) if master.dtype() == compute.dtype() => {
                Ok(self.device.transfer(&self.compute, master, compute)?)
            }
            (false, true) => {
                let values = super::fill::read_f32(&*self.device, &self.compute, master)?;
                super::write_rounded(&*self.device, &self.compute, &values, compute)
            }
            (false, false) => Ok(self.device.cast(&self.compute, master, compute)?),
        }
    }
}

impl Shard {
    /// The newest compute weights: the host's, where it updates.
    pub fn updated(&self) -> &Buffer {
        match &self.trained {
            Some(trained) if trained.master.on_host() && !self.compute.on_host() => {
                trained.fresh.as_ref().unwrap_or(&trained.master)
            }
            _ => &self.compute,
        }
    }

    fn host_grad(&self) -> &Buffer {
        let trained = self.trained.as_ref().expect("a unit with a gradient is trained");
        trained.host_grad.as_ref().expect("gradients are kept on the host")
    }
}
