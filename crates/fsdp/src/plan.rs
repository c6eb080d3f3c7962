//! What a rank will hold and do, before anything is allocated.

use crate::engine::{Engine, scalar_bytes};
use crate::{Action, HostBatch, Hyper, Layout, Part, Result, Schedule, Settings};
use comm::{Group, Reduction};
use device::{Buffer, Device, Dtype, ProductShape, Profile, Stream, VERDICT, null::Null};
use std::sync::Arc;
use tensor::arena::{ALIGN_BYTES, Placement};
use tensor::optim::{AdamW, Decay};
use tensor::{Arena, Keep, Kind, Mode, Model};

/// One allocation on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub name: &'static str,
    pub bytes: usize,
}

/// The plan of a rank. Every rank's is the same but for which shard is its own.
#[derive(Clone, Debug)]
pub struct Plan {
    pub settings: Settings,
    pub profile: Profile,
    pub layout: Layout,
    pub schedules: Vec<Schedule>,
    /// Where each schedule's tensors lie in the step's region.
    pub placements: Vec<Arc<Placement>>,
    /// A hash of the model's weights: names, shapes, which are trained.
    pub(crate) weights: u64,
    /// Products of the schedules, each shape once, for devices that choose how to compute them.
    pub products: Vec<ProductShape>,
    /// Whether the unit before the turn keeps what its backward needs although the others run forward again: its
    /// backward is next, and where that takes no more memory a forward is saved.
    pub keeps_last: bool,
    /// A hash of all the above, equal on ranks that will work together.
    pub fingerprint: u64,
}

impl Plan {
    /// Plans by running each schedule once on the null device.
    pub fn new(model: &Arc<Model>, settings: Settings, profile: Profile) -> Result<Plan> {
        settings.check()?;
        let layout = Layout::new(model, &settings)?;
        if layout.lowest_trained() == layout.num_walked {
            return Err(crate::Error::Settings("every weight is frozen: there is nothing to train".into()));
        }
        let mut parts: Vec<Part> =
            (0..settings.micro_batches.min(3)).map(|i| Part::of(i, settings.micro_batches)).collect();
        if settings.micro_batches > 2 {
            parts[2] = Part::Last;
        }
        parts.push(Part::Eval);
        let schedules = parts.iter().map(|&part| Schedule::new(&layout, &settings, part)).collect();
        let mut plan = Plan {
            settings,
            profile,
            layout,
            schedules,
            placements: vec![],
            products: vec![],
            keeps_last: false,
            weights: fnv(&format!("{:?}", model.items)),
            fingerprint: 0,
        };
        (plan.placements, plan.products) = plan.trace(model)?;
        if plan.settings.keep == Keep::Nothing {
            let mut keeping = Plan { keeps_last: true, ..plan.clone() };
            (keeping.placements, keeping.products) = keeping.trace(model)?;
            if keeping.step_bytes() <= plan.step_bytes() {
                plan = keeping;
            }
        }
        plan.fingerprint = fnv(&plan.description().join("\n"));
        Ok(plan)
    }

    /// Runs all schedules on the null device and places what they ask for; and the products they compute.
    fn trace(&self, model: &Arc<Model>) -> Result<(Vec<Arc<Placement>>, Vec<ProductShape>)> {
        let null = Arc::new(Null::new(self.profile));
        let device: Arc<dyn Device> = null.clone();
        let arenas: Vec<Arena> = self.schedules.iter().map(|_| Arena::record(device.clone())).collect();
        let mute: Arc<dyn Group> = Arc::new(Mute { size: self.settings.ranks });
        let groups = crate::Groups::all(mute);
        let plan = Arc::new(self.clone());
        let mut engine = Engine::with_arenas(device, plan, model.clone(), groups, arenas.clone())?;
        let fields = self.settings.fields.iter().map(|field| vec![0; field.num_bytes()]).collect();
        let batches = vec![HostBatch { fields, num_targets: 1 }; self.training_schedules()];
        let adamw = AdamW { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.0, decay: Decay::All };
        engine.step(&batches, &Hyper { adamw, lr: 0.0, clip_norm: 0.0, step: 1 })?;
        engine.evaluate(&batches[..1])?;
        drop(engine);
        let placements = arenas.iter().map(|arena| Arc::new(arena.finish().place())).collect();
        Ok((placements, null.products()))
    }

    /// Bytes of the region that the schedules share.
    fn step_bytes(&self) -> usize {
        self.placements.iter().map(|placement| placement.bytes).max().unwrap_or(0)
    }

    /// What a unit keeps of its forward. What no backward will come to is not kept at all.
    pub(crate) fn keep_of(&self, unit: usize) -> Keep {
        match self.settings.keep {
            _ if unit < self.layout.lowest_trained() => Keep::Nothing,
            Keep::Nothing if self.keeps_last && unit + 2 == self.layout.num_walked => Keep::All,
            keep => keep,
        }
    }

    /// How many of the schedules are for training.
    pub(crate) fn training_schedules(&self) -> usize {
        self.schedules.iter().filter(|schedule| schedule.part.mode() == Mode::Train).count()
    }

    /// Which schedule serves a step's micro-batch.
    pub fn schedule_of(&self, micro_batch: usize, micro_batches: usize) -> usize {
        self.schedule_for(Part::of(micro_batch, micro_batches))
    }

    /// Whether a step may have so many micro-batches.
    pub(crate) fn has_schedules_for(&self, micro_batches: usize) -> bool {
        let planned = |part: Part| self.schedules.iter().any(|schedule| schedule.part == part);
        micro_batches > 0 && (0..micro_batches).all(|index| planned(Part::of(index, micro_batches)))
    }

    pub(crate) fn schedule_for(&self, part: Part) -> usize {
        self.schedules.iter().position(|schedule| schedule.part == part).expect("a schedule for every part")
    }

    /// Everything the rank allocates on its device.
    pub fn regions(&self) -> Vec<Region> {
        let Settings { precision, offload, fields, .. } = &self.settings;
        let owned = self.layout.owned(true);
        let held = |on_device: bool, dtype: Dtype| if on_device { owned * dtype.bytes() } else { 0 };
        let batch: usize = fields.iter().map(|field| align(field.num_bytes())).sum();
        let copy = self.settings.has_compute_copy() && !offload.weights;
        let frozen = if offload.weights { 0 } else { self.layout.owned(false) };
        let gradients = match self.held() {
            Held::Nothing => 0,
            Held::Shards => held(true, precision.grad),
            Held::Whole => owned * self.layout.num_shards * precision.reduce.bytes(),
        };
        named([
            ("master weights", held(!offload.optimizer, precision.master)),
            ("compute weights", held(copy, precision.compute)),
            ("frozen weights", frozen * precision.compute.bytes()),
            ("moments", 2 * held(!offload.optimizer, precision.moments)),
            ("held gradients", gradients),
            ("step", self.step_bytes()),
            ("batch", batch + scalar_bytes(self.layout.units.len())),
            ("workspace", self.profile.workspace_bytes()),
        ])
    }

    /// Everything the rank keeps in host memory instead.
    pub fn host_regions(&self) -> Vec<Region> {
        let Settings { precision, offload, .. } = &self.settings;
        let owned = self.layout.owned(true);
        let held = |on_host: bool, dtype: Dtype| if on_host { owned * dtype.bytes() } else { 0 };
        let compute = match offload.weights {
            true => self.settings.has_compute_copy(),
            // What the host updates goes to the device from a copy in its dtype.
            false => offload.optimizer && precision.compute != precision.master,
        };
        let frozen = if offload.weights { self.layout.owned(false) } else { 0 };
        named([
            ("master weights", held(offload.optimizer, precision.master)),
            ("compute weights", held(compute, precision.compute)),
            ("frozen weights", frozen * precision.compute.bytes()),
            ("moments", 2 * held(offload.optimizer, precision.moments)),
            ("gradients", held(self.settings.grads_on_host(), precision.grad)),
            ("verdict", if offload.optimizer { VERDICT * 4 } else { 0 }),
        ])
    }

    /// Bytes of the model's constants; they are the same for every plan of a model.
    pub fn constant_bytes(model: &Model) -> usize {
        model.constants.iter().map(|constant| align(constant.shape.numel() * 4)).sum()
    }

    /// All bytes of [`Plan::regions`] and constants: the device's peak.
    pub fn peak_bytes(&self, model: &Model) -> usize {
        self.regions().iter().map(|region| region.bytes).sum::<usize>() + Self::constant_bytes(model)
    }

    /// Bytes a rank needs in host memory beside what its device holds: what is kept there; one unit's shard in f32, as it is filled
    /// or read back, and one step's micro-batches.
    pub fn host_bytes(&self) -> usize {
        let shard = self.layout.units.iter().map(|unit| unit.shard_len).max().unwrap_or(0) * 4;
        let batch: usize = self.settings.fields.iter().map(|field| field.num_bytes()).sum();
        let kept: usize = self.host_regions().iter().map(|region| region.bytes).sum();
        kept + shard + batch * self.settings.micro_batches
    }

    /// What fills the step's region at its fullest.
    pub fn step_peak_by_kind(&self) -> Vec<(Kind, usize)> {
        let fullest = self.placements.iter().max_by_key(|placement| placement.bytes);
        fullest.map(|placement| placement.trace.peak_by_kind()).unwrap_or_default()
    }

    /// Which gradients outlive a micro-batch. The others share the step's region with activations already
    /// spent.
    pub(crate) fn held(&self) -> Held {
        match (self.settings.micro_batches, self.settings.is_sharded(), self.settings.reduces_once()) {
            (1, ..) => Held::Nothing,
            (_, true, true) => Held::Whole,
            (_, _, false) if self.settings.grads_on_host() => Held::Nothing,
            _ => Held::Shards,
        }
    }

    /// Number and bytes of collectives a rank takes part in during one step, and of copies to and from its host's
    /// memory, by name.
    pub fn traffic(&self) -> Vec<(&'static str, usize, usize)> {
        let Settings { precision, offload, .. } = &self.settings;
        let names = ["gathers", "gathers nearby", "reduces", "from the host", "to the host"];
        let mut all = names.map(|name| (name, 0, 0));
        let mut count = |kind: usize, len: usize, dtype: Dtype| {
            all[kind].1 += 1;
            all[kind].2 += len * dtype.bytes();
        };
        for micro_batch in 0..self.settings.micro_batches {
            let schedule = &self.schedules[self.schedule_of(micro_batch, self.settings.micro_batches)];
            for action in &schedule.actions {
                let Some(unit) = action.unit() else { continue };
                let (len, part) = (self.layout.unit_len(unit), self.layout.units[unit].shard_len);
                match action {
                    Action::Fetch(_) => count(3, part, precision.compute),
                    Action::Gather(_) => {
                        if self.settings.is_sharded() {
                            count(0, len, precision.compute);
                        }
                        if offload.weights {
                            count(3, part, precision.compute);
                        }
                    }
                    Action::Widen(_) => count(1, len, precision.compute),
                    Action::Reduce(_) => {
                        if self.settings.ranks > 1 {
                            count(2, len, precision.reduce);
                        }
                        if self.settings.grads_on_host() {
                            count(4, part, precision.grad);
                            if micro_batch > 0 && !self.settings.reduces_once() {
                                count(3, part, precision.grad);
                            }
                        }
                    }
                    Action::Update(_) if !offload.optimizer => {
                        if offload.gradients {
                            count(3, part, precision.grad);
                        }
                        if offload.weights {
                            count(4, part, precision.compute);
                        }
                    }
                    _ => {}
                }
            }
        }
        all.into_iter()
            .filter(|(name, count, _)| *count > 0 || ["gathers", "reduces"].contains(name))
            .collect()
    }

    /// A line "key = value" for all that must be equal on all ranks; large things as their hashes.
    pub(crate) fn description(&self) -> Vec<String> {
        let Settings { precision, .. } = &self.settings;
        let mut lines = vec![
            format!("device = {:?}", self.profile),
            format!("precision.compute = {}", precision.compute),
            format!("precision.reduce = {}", precision.reduce),
            format!("precision.master = {}", precision.master),
            format!("precision.grad = {}", precision.grad),
            format!("optimizer.state = {}", precision.moments),
        ];
        lines.extend(self.settings.description());
        lines.push(format!("the model's weights = {:016x}", self.weights));
        lines.push(format!(
            "units = {} ({:016x})",
            self.layout.units.len(),
            fnv(&format!("{:?}", self.layout))
        ));
        lines.push(format!("the last layer is kept = {}", self.keeps_last));
        lines.push(format!("schedules = {:016x}", fnv(&format!("{:?}", self.schedules))));
        lines
    }
}

/// FNV-1a: small, stable between builds, and good enough to tell two configurations apart.
fn fnv(text: &str) -> u64 {
    text.bytes().fold(0xcbf29ce484222325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100000001b3))
}

/// Regions that take any room.
fn named<const N: usize>(regions: [(&'static str, usize); N]) -> Vec<Region> {
    let regions = regions.map(|(name, bytes)| Region { name, bytes });
    regions.into_iter().filter(|region| region.bytes > 0).collect()
}

/// Gradients that are kept from micro-batch to micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    Nothing,
    Shards,
    /// Whole units' gradients, in the dtype they will be reduced in.
    Whole,
}

pub(crate) fn align(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN_BYTES)
}

/// A group that is only counted with.
#[derive(Debug)]
struct Mute {
    size: usize,
}

impl Group for Mute {
    fn name(&self) -> &str {
        "plan"
    }

    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather(&self, _: &Stream, _: &Buffer, _: &Buffer, _: &str) -> comm::Result<()> {
        Ok(())
    }

    fn reduce_scatter(&self, _: &Stream, _: &Buffer, _: &Buffer, _: &str) -> comm::Result<()> {
        Ok(())
    }

    fn all_reduce(&self, _: &Stream, _: &Buffer, _: Reduction, _: &str) -> comm::Result<()> {
        Ok(())
    }

    fn broadcast(&self, _: &Stream, _: &Buffer, _: usize, _: &str) -> comm::Result<()> {
        Ok(())
    }

    fn exchange(&self, bytes: &[u8], _: &str) -> comm::Result<Vec<Vec<u8>>> {
        Ok(vec![bytes.to_vec(); self.size])
    }

    fn split(&self, ranks: &[usize], _: &str) -> comm::Result<Option<Arc<dyn Group>>> {
        Ok(Some(Arc::new(Mute { size: ranks.len() })))
    }
}
