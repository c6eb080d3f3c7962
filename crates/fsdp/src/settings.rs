use crate::{Error, Field, Result, Wrap};
use device::{Dtype, Scaling};
use std::ops::Range;
use tensor::Keep;

/// What is sharded, and for how long weights stay whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Weights are freed after their forward and gathered again for their backward (`FULL_SHARD`, ZeRO-3).
    Full,
    /// Weights stay gathered from forward to backward (`SHARD_GRAD_OP`, ZeRO-2).
    Grad,
    /// Every rank holds everything; gradients are summed over ranks (`NO_SHARD`, DDP).
    None,
}

/// What becomes of a unit's gathered weights between its forward and its backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AfterForward {
    /// As the strategy says: freed with `full`, kept with `grad`.
    #[default]
    Auto,
    /// Freed, and gathered again from all ranks (`reshard_after_forward=True`).
    Free,
    /// Kept whole (`reshard_after_forward=False`).
    Keep,
    /// Each rank keeps one part in so many, and the backward's gather runs among that many neighbouring ranks only
    /// (`reshard_after_forward=n`): more memory than `Free`, no traffic beyond the neighbours.
    Group(usize),
}

/// An exception for the units that hold such blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct UnitRule {
    /// Blocks of any of these kinds; any block where there are none.
    pub kinds: Vec<String>,
    /// Only blocks with these numbers, counted over the whole model from 0.
    pub blocks: Option<Range<usize>>,
    pub after_forward: AfterForward,
}

/// How gradients of several micro-batches add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulate {
    /// Each micro-batch is reduced, and shards add up.
    Sharded,
    /// Whole gradients add up on each rank and are reduced once (`no_sync`): more memory, less traffic.
    Unsharded,
}

/// In which dtype what is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Precision {
    /// Gathered weights and activations.
    pub compute: Dtype,
    /// Gradients on their way between ranks.
    pub reduce: Dtype,
    /// The weights the optimizer updates.
    pub master: Dtype,
    /// A shard's gradient between backward and update.
    pub grad: Dtype,
    /// The optimizer's moments.
    pub moments: Dtype,
    /// Whether master weights of bf16 are rounded by chance instead of to the nearest.
    pub stochastic_rounding: bool,
}

impl Precision {
    pub const F32: Precision = Precision {
        compute: Dtype::F32,
        reduce: Dtype::F32,
        master: Dtype::F32,
        grad: Dtype::F32,
        moments: Dtype::F32,
        stochastic_rounding: false,
    };

    fn check(&self) -> Result<()> {
        let all = [self.compute, self.reduce, self.master, self.grad, self.moments];
        if let Some(dtype) = all.iter().find(|dtype| !dtype.is_float()) {
            return Err(Error::Settings(format!("{dtype} is no precision to train in")));
        }
        if self.compute == Dtype::F32 && (self.reduce != Dtype::F32 || self.master != Dtype::F32) {
            let what = "compute = f32 with a coarser reduce or master loses what was computed";
            return Err(Error::Settings(what.into()));
        }
        if self.compute == Dtype::F16 && self.master != Dtype::F32 {
            let what = format!("compute = f16 needs master = f32: updates vanish in {}", self.master);
            return Err(Error::Settings(what));
        }
        for (name, dtype) in [("reduce", self.reduce), ("grad", self.grad)] {
            if dtype != Dtype::F32 && dtype != self.compute {
                let what = format!("{name} = {dtype} is neither f32 nor compute = {}", self.compute);
                return Err(Error::Settings(what));
            }
        }
        Ok(())
    }
}

/// What is kept in host memory instead of the device's (`CPUOffloadPolicy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Offload {
    /// Master weights and moments: the update then runs on the host, and gradients go there.
    pub optimizer: bool,
    /// Gradients, from their reduce to the update.
    pub gradients: bool,
    /// The weights that gathers take: they come to the device for each gather.
    pub weights: bool,
}

impl Offload {
    pub const ALL: Offload = Offload { optimizer: true, gradients: true, weights: true };

    pub fn is_some(&self) -> bool {
        self.optimizer || self.gradients || self.weights
    }
}

/// The dynamic loss scale of f16 (`ShardedGradScaler`): gradients that would vanish in f16 are made larger, and a step
/// in which one overflows is skipped by all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    pub init: f32,
    pub scaling: Scaling,
}

impl Default for LossScale {
    fn default() -> Self {
        LossScale { init: 65536.0, scaling: Scaling { growth: 2.0, backoff: 0.5, interval: 2000 } }
    }
}

/// Everything a plan depends on beside the model and the device's profile. Equal on all ranks.
#[derive(Clone, Debug)]
pub struct Settings {
    pub ranks: usize,
    pub strategy: Strategy,
    /// How many times each shard exists (hybrid sharding): ranks form a grid of `replicate` rows, and a unit is
    /// divided among the ranks of a row.
    pub replicate: usize,
    pub wrap: Wrap,
    /// Units gathered ahead of the one computing.
    pub prefetch: usize,
    /// At most so many units are whole at once, kept ones included (`limit_all_gathers`): fewer are gathered ahead, and
    /// of those kept after their forward the ones needed last are freed. What one block needs is always gathered.
    pub max_gathered: Option<usize>,
    pub after_forward: AfterForward,
    /// Exceptions to `after_forward`; of several that fit a unit, the last holds.
    pub units: Vec<UnitRule>,
    pub offload: Offload,
    pub precision: Precision,
    /// The fields of one micro-batch on one rank.
    pub fields: Vec<Field>,
    pub micro_batches: usize,
    /// What units keep of their forward; the rest is computed again (activation checkpointing).
    pub keep: Keep,
    /// When gradients of several micro-batches are reduced.
    pub accumulate: Accumulate,
    /// Tokens whose logits exist at once.
    pub loss_chunk: usize,
    /// How the loss is scaled where `precision.compute` is f16.
    pub loss_scale: LossScale,
    /// Whether each rank's gradients are looked at before they are summed over ranks, so that a NaN can be traced to
    /// its rank: one more read of each gradient, where there are several ranks.
    pub check_gradients: bool,
}

impl Settings {
    /// The usual: `full`, a unit a block, one unit ahead, everything in f32, one micro-batch, nothing recomputed.
    pub fn new(ranks: usize, fields: Vec<Field>) -> Self {
        Settings {
            ranks,
            strategy: Strategy::Full,
            replicate: 1,
            wrap: Wrap::Layer,
            prefetch: 1,
            max_gathered: None,
            after_forward: AfterForward::Auto,
            units: vec![],
            offload: Offload::default(),
            precision: Precision::F32,
            fields,
            micro_batches: 1,
            keep: Keep::All,
            accumulate: Accumulate::Sharded,
            loss_chunk: 1024,
            loss_scale: LossScale::default(),
            check_gradients: true,
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.ranks == 0 || self.micro_batches == 0 || self.loss_chunk == 0 {
            return Err(Error::Settings("ranks, micro-batches and loss chunk must be at least 1".into()));
        }
        if self.replicate == 0 || !self.ranks.is_multiple_of(self.replicate) {
            let what = format!("{} ranks do not form a mesh of {} replicas", self.ranks, self.replicate);
            return Err(Error::Settings(what));
        }
        if self.strategy == Strategy::None && self.replicate > 1 {
            let what =
                "strategy none holds everything on every rank already; replicate goes with full or grad";
            return Err(Error::Settings(what.into()));
        }
        for after in self.units.iter().map(|rule| rule.after_forward).chain([self.after_forward]) {
            if let AfterForward::Group(size) = after
                && (size == 0 || !self.num_shards().is_multiple_of(size))
            {
                let what = format!("after_forward = {size} does not divide {} shards", self.num_shards());
                return Err(Error::Settings(what));
            }
        }
        let LossScale { init, scaling } = self.loss_scale;
        let factors = scaling.growth >= 1.0 && (0.0..1.0).contains(&scaling.backoff);
        if !(init > 0.0 && init.is_finite() && factors && scaling.interval > 0) {
            return Err(Error::Settings(format!("a loss scale cannot follow {:?}", self.loss_scale)));
        }
        self.precision.check()
    }

    /// How the loss is scaled, if it is.
    pub fn loss_scale(&self) -> Option<LossScale> {
        (self.precision.compute == Dtype::F16).then_some(self.loss_scale)
    }

    pub(crate) fn checks_gradients(&self) -> bool {
        self.check_gradients && self.ranks > 1
    }

    /// A line "key = value" for each of them but the precisions.
    pub(crate) fn description(&self) -> Vec<String> {
        let fields: Vec<String> = self
            .fields
            .iter()
            .map(|field| format!("{} {} {}", field.name, field.dtype, field.shape))
            .collect();
        vec![
            format!("ranks = {}", self.ranks),
            format!("shard.strategy = {:?}", self.strategy),
            format!("shard.replicate = {}", self.replicate),
            format!("shard.wrap = {:?}", self.wrap),
            format!("shard.prefetch = {}", self.prefetch),
            format!("shard.max_gathered = {:?}", self.max_gathered),
            format!("shard.after_forward = {:?}", self.after_forward),
            format!("shard.unit = {:?}", self.units),
            format!("shard.offload = {:?}", self.offload),
            format!("batch fields = {}", fields.join(", ")),
            format!("micro-batches = {}", self.micro_batches),
            format!("recompute.mode = {:?}", self.keep),
            format!("train.accumulate = {:?}", self.accumulate),
            format!("train.loss_chunk = {}", self.loss_chunk),
            format!("loss scale = {:?}", self.loss_scale()),
            format!("train.check_gradients = {}", self.check_gradients),
        ]
    }

    /// Whether a unit's bytes are divided among ranks at all.
    pub fn is_sharded(&self) -> bool {
        self.strategy != Strategy::None && self.ranks > self.replicate
    }

    /// Number of parts a unit is divided into.
    pub fn num_shards(&self) -> usize {
        if self.is_sharded() { self.ranks / self.replicate } else { 1 }
    }

    /// What [`AfterForward`] comes to with these settings: never `Auto`, and no group of one or of all.
    pub(crate) fn resolve(&self, after: AfterForward) -> AfterForward {
        match (after, self.strategy) {
            (AfterForward::Auto, Strategy::Grad) | (AfterForward::Group(1), _) => AfterForward::Keep,
            (AfterForward::Auto, _) => AfterForward::Free,
            (AfterForward::Group(size), _) if size == self.num_shards() => AfterForward::Free,
            (after, _) => after,
        }
    }

    /// Whether a unit's weights come to be whole for a while, rather than being so all the time.
    pub fn gathers(&self) -> bool {
        self.is_sharded() || self.offload.weights
    }

    /// Whether weights the host has updated are brought to the device's shards once a step.
    pub fn fetches(&self) -> bool {
        self.offload.optimizer && !self.offload.weights
    }

    /// Whether gradients leave the device once they are reduced.
    pub fn grads_on_host(&self) -> bool {
        self.offload.gradients || self.offload.optimizer
    }

    /// Whether gathered weights come from a copy of their own rather than from the master weights.
    pub fn has_compute_copy(&self) -> bool {
        let Offload { optimizer, weights, .. } = self.offload;
        self.precision.compute != self.precision.master || optimizer != weights
    }

    /// Whether whole gradients are kept from micro-batch to micro-batch and reduced at the last one.
    pub fn reduces_once(&self) -> bool {
        self.accumulate == Accumulate::Unsharded || !self.is_sharded() && !self.grads_on_host()
    }
}
