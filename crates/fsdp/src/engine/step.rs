//! One training step: each action of the schedule, done.

use super::view::View;
use super::{Engine, Fixed, MAX_AHEAD, UnitGrad, Walk};
use crate::{Action, Error, HostBatch, Hyper, Result};
use comm::Reduction;
use device::Dtype;
use std::cell::Cell;
use tensor::{Arena, Context, Keep, Kind, Mode, Random, Tape, Tensor};

impl Engine {
    /// Trains on one batch, given as its micro-batches: as many as were planned or, where three or more were, any number
    /// from two on. With [`crate::Accumulate::Unsharded`] all but the last leave gradients unreduced
    /// (`set_requires_gradient_sync(False)`). Issues everything and returns; the host waits only
    /// where [`Engine::report`] is called.
    pub fn step(&mut self, batches: &[HostBatch], hyper: &Hyper) -> Result<()> {
        let plan = &self.fixed.plan;
        if !plan.has_schedules_for(batches.len()) {
            let planned = plan.settings.micro_batches;
            let what = format!("{} micro-batches where the plan has {planned}", batches.len());
            return Err(Error::Settings(what));
        }
        let num_targets: usize = batches.iter().map(|batch| batch.num_targets).sum();
        for (index, batch) in batches.iter().enumerate() {
            let schedule = self.fixed.plan.schedule_of(index, batches.len());
            self.fixed.load(batch)?;
            let first_row = self.fixed.first_row(index, batches.len());
            self.walk.random = Random { seed: self.seed, step: hyper.step, first_row };
            self.walk_schedule(schedule, num_targets, Some(hyper))?;
        }
        self.issued.push_back(self.fixed.compute.record()?);
        if self.issued.len() > MAX_AHEAD
            && let Some(oldest) = self.issued.pop_front()
        {
            oldest.synchronize()?;
        }
        Ok(())
    }

    /// `hyper` is what the schedules that end a step need.
    pub(super) fn walk_schedule(
        &mut self,
        index: usize,
        num_targets: usize,
        hyper: Option<&Hyper>,
    ) -> Result<()> {
        let plan = self.fixed.plan.clone();
        let arena = self.fixed.arenas[index].clone();
        arena.restart();
        let schedule = &plan.schedules[index];
        self.walk.ends = schedule.part.ends();
        for action in &schedule.actions {
            self.act(*action, schedule.part.mode(), &arena, num_targets, hyper).map_err(|source| {
                Error::Action {
                    rank: self.fixed.rank(),
                    action: action.name(),
                    unit: action.unit().map_or("-", |unit| self.fixed.unit_name(unit)).to_string(),
                    source: Box::new(source),
                }
            })?;
        }
        Ok(())
    }

    fn act(
        &mut self,
        action: Action,
        mode: Mode,
        arena: &Arena,
        num_targets: usize,
        hyper: Option<&Hyper>,
    ) -> Result<()> {
        let (fixed, walk) = (&self.fixed, &mut self.walk);
        let hyper = || hyper.expect("a step that updates has hyperparameters");
        match action {
            Action::Count => fixed.count(num_targets),
            Action::Fetch(unit) => walk.fetch(fixed, unit),
            Action::Gather(unit) => walk.gather(fixed, arena, unit),
            Action::Forward(unit) => walk.forward(fixed, arena, unit, mode),
            Action::Free(unit) => {
                walk.free(unit);
                Ok(())
            }
            Action::Narrow(unit) => walk.narrow(fixed, arena, unit),
            Action::Widen(unit) => walk.widen(fixed, arena, unit),
            Action::Turn(unit) => walk.turn(fixed, arena, unit),
            Action::Score(unit) => walk.score(fixed, arena, unit),
            Action::Backward(unit) => walk.backward(fixed, arena, unit),
            Action::Reduce(unit) => walk.reduce(fixed, arena, unit),
            Action::Settle(unit) => walk.settle(fixed, unit),
            Action::Norm => walk.norm(fixed, arena, hyper()),
            Action::Total => fixed.total(num_targets),
            Action::Update(unit) => walk.update(fixed, arena, unit, hyper()),
        }
    }
}

impl Fixed {
    /// Writes a micro-batch into its fields.
    pub(super) fn load(&self, batch: &HostBatch) -> Result<()> {
        let fields = &self.plan.settings.fields;
        if batch.fields.len() != fields.len() {
            let what = format!("{} fields where the plan has {}", batch.fields.len(), fields.len());
            return Err(Error::Batch { name: "*".into(), what });
        }
        for (field, bytes) in fields.iter().zip(&batch.fields) {
            let to = self.batch.get(field.name)?.buffer();
            if field.dtype.is_float() && bytes.len() == 4 * field.shape.numel() {
                // Numbers in f32 become what the field is kept in (`cast_forward_inputs`).
                let values = bytes
                    .chunks_exact(4)
                    .map(|four| f32::from_ne_bytes([four[0], four[1], four[2], four[3]]));
                let values: Vec<f32> = values.collect();
                super::write_rounded(&*self.device, &self.compute, &values, to)?;
                continue;
            }
            if bytes.len() != field.num_bytes() {
                let what = format!("{} bytes where {} belong", bytes.len(), field.num_bytes());
                return Err(Error::Batch { name: field.name.into(), what });
            }
            self.device.write(&self.compute, bytes, to)?;
        }
        Ok(())
    }

    fn count(&self, num_targets: usize) -> Result<()> {
        let scalars = &self.scalars;
        self.device.write_slice(&self.compute, &[num_targets as f32], &scalars.count)?;
        self.sum_over_ranks(&scalars.count, "target count")?;
        self.device.reciprocal(&self.compute, &scalars.count, scalars.seed.buffer())?;
        if self.plan.settings.loss_scale().is_some() {
            self.device.multiply(&self.compute, &scalars.scale, scalars.seed.buffer())?;
            // An overflow is of one step; without a scale the first one stays visible.
            self.device.fill(&self.compute, &scalars.local_squares, 0.0)?;
        }
        self.device.fill(&self.compute, &scalars.squares, 0.0)?;
        Ok(self.device.fill(&self.compute, &scalars.sums, 0.0)?)
    }

    /// Sums a few numbers over all ranks, in place.
    pub(super) fn sum_over_ranks(&self, numbers: &device::Buffer, what: &str) -> Result<()> {
        if self.plan.settings.ranks == 1 {
            return Ok(());
        }
        self.reduce.wait(&self.compute.record()?)?;
        self.groups.world.all_reduce(&self.reduce, numbers, Reduction::Sum, what)?;
        Ok(self.compute.wait(&self.reduce.record()?)?)
    }

    /// Tokens of the whole batch before this rank's micro-batch: ranks take theirs in order, and so do
    /// micro-batches within a rank. There is a label to each; a model without labels is taken at its first field.
    fn first_row(&self, micro_batch: usize, micro_batches: usize) -> u64 {
        let fields = &self.plan.settings.fields;
        let labels = fields.iter().find(|field| field.name == tensor::ops::field::LABELS);
        let tokens = labels.or(fields.first()).map_or(0, |field| field.shape.numel());
        ((self.rank() * micro_batches + micro_batch) * tokens) as u64
    }

    fn context<'a>(
        &'a self,
        arena: &'a Arena,
        weights: &'a View<'a>,
        mode: Mode,
        random: Random,
    ) -> Context<'a> {
        Context {
            device: &*self.device,
            stream: &self.compute,
            arena,
            weights,
            constants: &self.constants,
            batch: &self.batch,
            seed: &self.scalars.seed,
            random,
            mode,
            compute: self.plan.settings.precision.compute,
            loss_chunk: self.plan.settings.loss_chunk,
            cache: None,
        }
    }
}

impl Walk {
    pub(super) fn forward(&mut self, fixed: &Fixed, arena: &Arena, unit: usize, mode: Mode) -> Result<()> {
        self.arrive(fixed, unit)?;
        let carry = std::mem::take(&mut self.carry);
        let keep = fixed.plan.keep_of(unit);
        let comes_back = unit >= fixed.plan.layout.lowest_trained();
        if mode == Mode::Train && keep == Keep::Nothing && comes_back {
            self.kept[unit] = Some(carry.clone());
        }
        (self.tapes[unit], self.carry) = self.run(fixed, arena, unit, (mode, Tape::new(keep)), carry)?;
        Ok(())
    }

    fn run(
        &self,
        fixed: &Fixed,
        arena: &Arena,
        unit: usize,
        (mode, mut tape): (Mode, Tape),
        carry: Vec<Tensor>,
    ) -> Result<(Option<Tape>, Vec<Tensor>)> {
        let blocks = &fixed.model.blocks[fixed.plan.layout.units[unit].blocks.clone()];
        let view = View::new(fixed, self);
        let context = fixed.context(arena, &view, mode, self.random);
        let carry = tape.forward(context, blocks.iter().map(|block| &**block), carry)?;
        Ok(((mode == Mode::Train).then_some(tape), carry))
    }

    /// Forward of the last unit, its losses summed, and straight back.
    fn turn(&mut self, fixed: &Fixed, arena: &Arena, unit: usize) -> Result<()> {
        self.take_slots(fixed, arena, unit)?;
        self.arrive(fixed, unit)?;
        let carry = std::mem::take(&mut self.carry);
        let losses;
        (self.tapes[unit], losses) =
            self.run(fixed, arena, unit, (Mode::Train, Tape::new(Keep::All)), carry)?;
        add_up(fixed, arena, &losses, &fixed.scalars.loss_sum)?;
        self.carry_grads = losses.iter().map(|_| None).collect();
        drop(losses);
        self.walk_back(fixed, arena, unit)
    }

    fn backward(&mut self, fixed: &Fixed, arena: &Arena, unit: usize) -> Result<()> {
        self.take_slots(fixed, arena, unit)?;
        self.arrive(fixed, unit)?;
        if let Some(carry) = self.kept[unit].take() {
            let first = self.tapes[unit].take().unwrap_or_default();
            let (tape, _) = self.run(fixed, arena, unit, (Mode::Train, Tape::second(first)), carry)?;
            self.tapes[unit] = tape;
        }
        self.walk_back(fixed, arena, unit)
    }

    fn walk_back(&mut self, fixed: &Fixed, arena: &Arena, unit: usize) -> Result<()> {
        let tape = self.tapes[unit].take().expect("a unit's forward comes before its backward");
        let grads = std::mem::take(&mut self.carry_grads);
        let view = View::new(fixed, self);
        self.carry_grads = tape.backward(fixed.context(arena, &view, Mode::Train, self.random), grads)?;
        Ok(())
    }

    /// Room for the gradients of the units this one's backward writes to.
    fn take_slots(&mut self, fixed: &Fixed, arena: &Arena, unit: usize) -> Result<()> {
        let settings = &fixed.plan.settings;
        for &need in &fixed.plan.layout.units[unit].needs {
            let Some(trained) = &fixed.shards[need].trained else { continue };
            let len = fixed.plan.layout.unit_len(need);
            let places = fixed.plan.layout.units[need].places.len();
            let grad = self.grads[need].get_or_insert_with(|| UnitGrad {
                slot: None,
                written: vec![Cell::new(false); places],
                shard: None,
                reduced: false,
            });
            if grad.slot.is_some() {
                continue;
            }
            let held = if settings.is_sharded() { &trained.held_slot } else { &trained.held_grad };
            grad.slot = Some(match held {
                Some(held) => Tensor::over(held.clone(), [len])?,
                None if settings.is_sharded() => {
                    arena.tensor(settings.precision.reduce, [len], Kind::GradientSlot)?
                }
                None => arena.tensor(settings.precision.grad, [len], Kind::Gradient)?,
            });
        }
        Ok(())
    }

    /// The reduce starts once the backward has written its last; it is in flight until settled.
    fn reduce(&mut self, fixed: &Fixed, arena: &Arena, unit: usize) -> Result<()> {
        let grad = self.grads[unit].as_mut().expect("a unit's backward comes before its reduce");
        fill_unwritten(fixed, unit, grad)?;
        fixed.square_before_reduce(arena, unit, grad)?;
        fixed.reduce.wait(&fixed.compute.record()?)?;
        let name = fixed.unit_name(unit);
        let on_host = fixed.plan.settings.grads_on_host();
        let mut holds = Vec::new();
        if fixed.plan.settings.is_sharded() {
            let slot = grad.slot.take().expect("a slot until the reduce");
            // The next micro-batch writes a slot of its own.
            grad.written.iter().for_each(|written| written.set(false));
            let (shard, staging) = self.shard_grad(fixed, arena, unit)?;
            let landing = staging.as_ref().unwrap_or(&shard);
            fixed.groups.reduce.reduce_scatter(&fixed.reduce, slot.buffer(), landing.buffer(), name)?;
            if fixed.plan.settings.replicate > 1 {
                let replicas = &fixed.groups.replicate;
                replicas.all_reduce(&fixed.reduce, landing.buffer(), Reduction::Sum, name)?;
            }
            self.add_micro_batch(fixed, unit, staging.as_ref(), &shard)?;
            holds.extend([Some(slot), staging].into_iter().flatten());
            if on_host {
                holds.extend(self.grad_to_host(fixed, arena, unit, &shard)?);
                holds.push(shard);
            } else {
                self.grads[unit].as_mut().expect("still there").shard = Some(shard);
            }
        } else {
            let slot = grad.slot.clone().expect("unsharded gradients stay where they are");
            if fixed.plan.settings.ranks > 1 {
                fixed.groups.world.all_reduce(&fixed.reduce, slot.buffer(), Reduction::Sum, name)?;
            }
            if on_host {
                grad.slot = None;
                grad.written.iter().for_each(|written| written.set(false));
                let (shard, staging) = self.host_sum(fixed, arena, unit, slot)?;
                self.add_micro_batch(fixed, unit, staging.as_ref(), &shard)?;
                holds.extend(self.grad_to_host(fixed, arena, unit, &shard)?);
                holds.extend([Some(shard), staging].into_iter().flatten());
            }
        }
        self.reducing[unit] = Some((fixed.reduce.record()?, holds));
        Ok(())
    }

    /// Adds a micro-batch's reduced gradient to the shard's.
    fn add_micro_batch(
        &mut self,
        fixed: &Fixed,
        unit: usize,
        staging: Option<&Tensor>,
        shard: &Tensor,
    ) -> Result<()> {
        let grad = self.grads[unit].as_mut().expect("a unit's backward comes before its reduce");
        match staging {
            Some(part) if grad.reduced => fixed.device.add(&fixed.reduce, part.buffer(), shard.buffer())?,
            Some(part) => fixed.device.cast(&fixed.reduce, part.buffer(), shard.buffer())?,
            None => {}
        }
        grad.reduced = true;
        Ok(())
    }

    /// Of an unsharded gradient that goes to the host: what is sent, and what is added to it before.
    fn host_sum(
        &mut self,
        fixed: &Fixed,
        arena: &Arena,
        unit: usize,
        slot: Tensor,
    ) -> Result<(Tensor, Option<Tensor>)> {
        if !self.grads[unit].as_ref().is_some_and(|grad| grad.reduced) {
            return Ok((slot, None));
        }
        let so_far = arena.tensor(slot.dtype(), slot.shape().clone(), Kind::Gradient)?;
        fixed.fetch_grad(unit, &so_far)?;
        Ok((so_far, Some(slot)))
    }

    /// Where a shard's gradient is kept, and a staging buffer where the reduce cannot write there directly: a
    /// reduce-scatter cannot add to its output, nor change the dtype.
    fn shard_grad(&mut self, fixed: &Fixed, arena: &Arena, unit: usize) -> Result<(Tensor, Option<Tensor>)> {
        let precision = &fixed.plan.settings.precision;
        let len = fixed.plan.layout.units[unit].shard_len;
        let grad = self.grads[unit].as_mut().expect("a unit's backward comes before its reduce");
        let held = fixed.shards[unit].trained.as_ref().and_then(|trained| trained.held_grad.as_ref());
        let shard = match (grad.shard.take(), held) {
            (Some(shard), _) => shard,
            (None, Some(held)) => Tensor::over(held.clone(), [len])?,
            (None, None) => arena.tensor(precision.grad, [len], Kind::Gradient)?,
        };
        if grad.reduced && fixed.plan.settings.grads_on_host() {
            fixed.fetch_grad(unit, &shard)?;
        }
        let direct = precision.reduce == precision.grad && !grad.reduced;
        let staging =
            (!direct).then(|| arena.tensor(precision.reduce, [len], Kind::GradientSlot)).transpose()?;
        Ok((shard, staging))
    }

    fn settle(&mut self, fixed: &Fixed, unit: usize) -> Result<()> {
        if let Some((event, holds)) = self.reducing[unit].take() {
            fixed.compute.wait(&event)?;
            drop(holds);
        }
        Ok(())
    }
}

/// A weight no operation used has a gradient of zero.
pub(super) fn fill_unwritten(fixed: &Fixed, unit: usize, grad: &UnitGrad) -> Result<()> {
    let Some(slot) = &grad.slot else { return Ok(()) };
    for (place, written) in fixed.plan.layout.units[unit].places.iter().zip(&grad.written) {
        if !written.replace(true) {
            fixed.device.fill(&fixed.compute, &slot.buffer().slice(place.offset, place.len)?, 0.0)?;
        }
    }
    Ok(())
}

/// Adds all losses to one number.
pub(super) fn add_up(fixed: &Fixed, arena: &Arena, losses: &[Tensor], out: &device::Buffer) -> Result<()> {
    for loss in losses {
        let scratch = sum_scratch(fixed, arena)?;
        fixed.device.sum(&fixed.compute, loss.buffer(), out, scratch.buffer(), true)?;
    }
    Ok(())
}

pub(super) fn sum_scratch(fixed: &Fixed, arena: &Arena) -> Result<Tensor> {
    Ok(arena.tensor(Dtype::F32, [fixed.device.profile().sum_scratch()], Kind::Scratch)?)
}
