//! The engine: walks the schedule on one rank.

mod blame;
mod eval;
mod fill;
mod first;
mod gather;
mod hand;
mod offload;
mod scalars;
mod shards;
mod state;
mod step;
mod update;
mod view;

pub use fill::Source;
pub(crate) use fill::write_rounded;
pub use hand::Whole;
pub use scalars::{Report, Scaler};
pub use state::{Saved, Slot, Stretch};

use crate::plan::align;
use crate::{Plan, Result};
use comm::Group;
use device::{Buffer, Device, Dtype, Event, Memory, Profile, Role, Stream};
use gather::Neighbours;
use offload::HostSide;
use scalars::Scalars;
use shards::Shard;
use std::collections::VecDeque;
use std::sync::Arc;
use tensor::arena::Arena;
use tensor::optim::AdamW;
use tensor::{Batch, Model, Random, Tape, Tensor};

/// The ranks to work with. Gathers and reduces have a group each, so that one never waits for the other.
#[derive(Clone, Debug)]
pub struct Groups {
    /// All ranks: for agreeing on things, counts, norms and losses.
    pub world: Arc<dyn Group>,
    /// The ranks a unit is divided among, for gathers.
    pub gather: Arc<dyn Group>,
    /// The same ranks, for reduces.
    pub reduce: Arc<dyn Group>,
    /// The ranks that hold the same shard (hybrid sharding).
    pub replicate: Arc<dyn Group>,
}

impl Groups {
    /// One group for every purpose: for a rank alone, or a plan.
    pub fn all(group: Arc<dyn Group>) -> Self {
        Groups { world: group.clone(), gather: group.clone(), reduce: group.clone(), replicate: group }
    }

    /// The same ranks twice, for gathers and for reduces, without replicas.
    pub fn pair(gather: Arc<dyn Group>, reduce: Arc<dyn Group>) -> Self {
        Groups { world: reduce.clone(), gather, replicate: reduce.clone(), reduce }
    }
}

/// What may change from step to step.
#[derive(Clone, Copy, Debug)]
pub struct Hyper {
    pub adamw: AdamW,
    pub lr: f64,
    /// 0: no clipping.
    pub clip_norm: f32,
    /// From 1.
    pub step: u64,
}

/// What an evaluation came to, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean over all targets; NaN where there are none.
    pub loss: f64,
    pub num_targets: usize,
}

/// One rank's engine.
#[derive(Debug)]
pub struct Engine {
    fixed: Fixed,
    walk: Walk,
    /// The ends of the last steps issued, oldest first: the host runs at most [`MAX_AHEAD`] steps ahead.
    issued: VecDeque<Event>,
    /// Decides random choices, together with step and token.
    seed: u64,
}

/// Bytes of the numbers that a plan of so many units keeps on the device.
pub(crate) fn scalar_bytes(units: usize) -> usize {
    Scalars::bytes(units)
}

/// Steps the host may issue before the device has finished them.
const MAX_AHEAD: usize = 2;

/// What stays the same from step to step.
#[derive(Debug)]
struct Fixed {
    plan: Arc<Plan>,
    model: Arc<Model>,
    device: Arc<dyn Device>,
    groups: Groups,
    neighbours: Neighbours,
    compute: Stream,
    gather: Stream,
    reduce: Stream,
    shards: Vec<Shard>,
    /// Where anything is kept in host memory.
    host: Option<HostSide>,
    constants: Vec<Tensor>,
    batch: Batch,
    scalars: Scalars,
    /// One per schedule, over one region.
    arenas: Vec<Arena>,
    /// That region, but for an engine that is only traced.
    room: Option<Arc<dyn Memory>>,
}

/// What is in the engine's hands while it walks a schedule.
#[derive(Debug, Default)]
struct Walk {
    gathered: Vec<Option<Gathered>>,
    /// Parts of units that will be gathered among neighbours.
    narrowed: Vec<Option<Tensor>>,
    grads: Vec<Option<UnitGrad>>,
    /// Updates that the host makes: when each is done.
    updating: Vec<Option<Event>>,
    /// Fetches in flight.
    fetching: Vec<Option<Event>>,
    /// Reduces in flight: when each is done, and what it holds until then.
    reducing: Vec<Option<(Event, Vec<Tensor>)>>,
    tapes: Vec<Option<Tape>>,
    /// Carries into units whose forward will run again.
    kept: Vec<Option<Vec<Tensor>>>,
    carry: Vec<Tensor>,
    carry_grads: Vec<Option<Tensor>>,
    /// Where the micro-batch stands in the run.
    random: Random,
    /// Whether the micro-batch is the step's last.
    ends: bool,
}

#[derive(Debug)]
struct Gathered {
    weights: Tensor,
    /// Until the compute stream has waited for it.
    arriving: Option<Event>,
    /// What the gather reads, until then.
    source: Option<Tensor>,
}

/// A unit's gradient on its way.
#[derive(Debug)]
struct UnitGrad {
    /// The whole unit's, while its backward writes to it.
    slot: Option<Tensor>,
    /// Which of the unit's places have been written in this step.
    written: Vec<std::cell::Cell<bool>>,
    /// This rank's part, once reduced; the slot itself where nothing is sharded.
    shard: Option<Tensor>,
    /// Whether `shard` holds earlier micro-batches' sum.
    reduced: bool,
}

impl Engine {
    /// Takes the plan's memory and agrees with the other ranks that they have the same plan.
    pub fn new(
        device: Arc<dyn Device>,
        plan: Arc<Plan>,
        model: Arc<Model>,
        groups: Groups,
    ) -> Result<Engine> {
        blame::agree(&plan, &groups)?;
        let bytes = plan.placements.iter().map(|placement| placement.bytes).max().unwrap_or(0);
        let region = device.alloc(bytes, "step")?;
        agree_on_products(&*device, &plan, &groups, &region)?;
        let arenas =
            plan.placements.iter().map(|placed| Arena::replay(region.clone(), placed.clone())).collect();
        let mut engine = Self::with_arenas(device, plan, model, groups, arenas)?;
        engine.fixed.room = Some(region);
        Ok(engine)
    }

    pub(crate) fn with_arenas(
        device: Arc<dyn Device>,
        plan: Arc<Plan>,
        model: Arc<Model>,
        groups: Groups,
        arenas: Vec<Arena>,
    ) -> Result<Engine> {
        let compute = device.stream("compute", Role::Compute)?;
        let gather = device.stream("gather", Role::Side)?;
        let reduce = device.stream("reduce", Role::Side)?;
        let shards = shards::take(&*device, &plan)?;
        let host = HostSide::new(&*device, &plan)?;
        let constants = take_constants(&*device, &compute, &model)?;
        let (batch, scalars) = take_batch(&*device, &plan)?;
        let neighbours = gather::neighbours(&plan.layout, &groups)?;
        let fixed = Fixed {
            plan,
            model,
            device,
            groups,
            neighbours,
            compute,
            gather,
            reduce,
            shards,
            host,
            constants,
            batch,
            scalars,
            arenas,
            room: None,
        };
        let walk = Walk::new(fixed.plan.layout.units.len());
        let mut engine = Engine { walk, fixed, issued: VecDeque::new(), seed: 0 };
        let scale = engine.fixed.plan.settings.loss_scale().map_or(1.0, |loss_scale| loss_scale.init);
        engine.set_scaler(&Scaler { scale, good_steps: 0, skipped_steps: 0 })?;
        Ok(engine)
    }

    pub fn plan(&self) -> &Plan {
        &self.fixed.plan
    }

    /// What random choices (dropout) depend on, beside step and token; the same on all ranks. 0 at first.
    pub fn set_seed(&mut self, seed: u64) {
        self.seed = seed;
    }

    pub fn device(&self) -> &dyn Device {
        &*self.fixed.device
    }

    /// The farthest byte of the step's region that was really used.
    pub fn step_high_bytes(&self) -> usize {
        self.fixed.arenas.iter().map(Arena::high_bytes).max().unwrap_or(0)
    }
}

impl Fixed {
    fn rank(&self) -> usize {
        self.groups.world.rank()
    }

    /// Which part of each unit is this rank's.
    fn shard_index(&self) -> usize {
        if self.plan.settings.is_sharded() { self.groups.gather.rank() } else { 0 }
    }

    /// Whether this rank, of those that hold the same shard, is the one whose numbers count.
    fn is_counted(&self) -> bool {
        match self.plan.settings.is_sharded() {
            true => self.plan.settings.replicate == 1 || self.groups.replicate.rank() == 0,
            false => self.rank() == 0,
        }
    }

    fn unit_name(&self, unit: usize) -> &str {
        &self.plan.layout.units[unit].name
    }
}

impl Walk {
    fn new(units: usize) -> Self {
        fn nothing<T>(units: usize) -> Vec<Option<T>> {
            (0..units).map(|_| None).collect()
        }
        Walk {
            gathered: nothing(units),
            narrowed: nothing(units),
            grads: nothing(units),
            updating: nothing(units),
            fetching: nothing(units),
            reducing: nothing(units),
            tapes: nothing(units),
            kept: nothing(units),
            carry: vec![],
            carry_grads: vec![],
            random: Random::default(),
            ends: false,
        }
    }
}

/// Rank 0 chooses how products are computed, by timing them in the step's region, and all ranks compute alike.
fn agree_on_products(
    device: &dyn Device,
    plan: &Plan,
    groups: &Groups,
    room: &Arc<dyn Memory>,
) -> Result<()> {
    if !matches!(plan.profile, Profile::Cuda { deterministic: false }) {
        return Ok(());
    }
    let choices = match groups.world.rank() {
        0 => device.choose(&device.stream("choose", Role::Compute)?, &plan.products, room)?,
        _ => String::new(),
    };
    let chosen = groups.world.exchange(choices.as_bytes(), "algorithms of matrix products")?;
    if let Some(Ok(choices)) = chosen.first().map(|bytes| std::str::from_utf8(bytes)) {
        device.adopt(choices);
    }
    Ok(())
}

pub(crate) fn take_constants(device: &dyn Device, stream: &Stream, model: &Model) -> Result<Vec<Tensor>> {
    let region = device.alloc(Plan::constant_bytes(model), "constants")?;
    let mut offset = 0;
    let mut constants = Vec::with_capacity(model.constants.len());
    for constant in &model.constants {
        let buffer = Buffer::new(region.clone(), offset, Dtype::F32, constant.shape.numel())?;
        if !matches!(stream, Stream::Null) {
            device.write_slice(stream, &(constant.values)(), &buffer)?;
        }
        constants.push(Tensor::over(buffer, constant.shape.clone())?);
        offset += align(constant.shape.numel() * 4);
    }
    Ok(constants)
}

fn take_batch(device: &dyn Device, plan: &Plan) -> Result<(Batch, Scalars)> {
    let (fields, units) = (&plan.settings.fields, plan.layout.units.len());
    let bytes: usize = fields.iter().map(|field| align(field.num_bytes())).sum();
    let region = device.alloc(bytes + Scalars::bytes(units), "batch")?;
    let mut batch = Batch::default();
    let mut offset = 0;
    for field in fields {
        let buffer = Buffer::new(region.clone(), offset, field.dtype, field.shape.numel())?;
        batch.set(field.name, Tensor::over(buffer, field.shape.clone())?);
        offset += align(field.num_bytes());
    }
    Ok((batch, Scalars::take(region, offset, units)?))
}
