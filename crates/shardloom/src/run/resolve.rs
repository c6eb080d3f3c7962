//! From the file's words to a [`Run`] in which every value has been checked.

use super::data::DataSource;
use super::raw::{self, Raw};
use crate::{Error, Result};
use device::{Dtype, Profile};
use fsdp::{
    Accumulate, AfterForward, Field, Keep, LossScale, Offload, Precision, Scaling, Settings, Strategy,
    UnitRule, Wrap,
};
use std::path::PathBuf;
use std::time::Duration;
use tensor::models::Config;
use tensor::optim::{AdamW, Decay};

/// Where a model's weights come from.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelSource {
    /// A Hugging Face folder.
    Folder(PathBuf),
    Seed(u64),
}

/// Who reads a folder's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Each rank where all have the folder, else rank 0.
    Auto,
    /// Each rank its own part.
    Each,
    /// Rank 0, which sends the others theirs.
    First,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    Auto,
    Cpu,
    Cuda,
}

/// How ranks talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupChoice {
    Auto,
    /// Threads of one process.
    Local,
    /// Processes of one machine, over shared memory.
    Shm,
    /// Processes on several machines, over sockets.
    Tcp,
    /// Processes of an MPI, in builds with the feature `mpi`.
    Mpi,
    Nccl,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    Constant,
    Linear,
    Cosine,
}

/// The learning rate as a function of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrSchedule {
    shape: Shape,
    peak: f64,
    min: f64,
    warmup: u64,
}

impl LrSchedule {
    /// The rate of step `step`, from 1, of `steps`.
    pub fn lr(&self, step: u64, steps: u64) -> f64 {
        if step <= self.warmup {
            return self.peak * step as f64 / self.warmup as f64;
        }
        let span = steps.saturating_sub(self.warmup).max(1) as f64;
        let progress = ((step - self.warmup - 1) as f64 / span).min(1.0);
        let share = match self.shape {
            Shape::Constant => return self.peak,
            Shape::Linear => 1.0 - progress,
            Shape::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.min + (self.peak - self.min) * share
    }
}

/// In which dtype a checkpoint has the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SavedAs {
    Master,
    /// A run that goes on from there starts from rounded weights.
    Compute,
}

/// When checkpoints are saved, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoints {
    /// Steps between them; 0: only at the end.
    pub every: u64,
    pub at_end: bool,
    /// How many stay; 0: all.
    pub keep: usize,
    pub background: bool,
    pub dtype: SavedAs,
}

impl Checkpoints {
    /// Whether a step, of `steps`, is saved.
    pub fn is_due(&self, step: u64, steps: u64) -> bool {
        (self.every > 0 && step.is_multiple_of(self.every)) || (self.at_end && step == steps)
    }
}

/// How long a run trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    Steps(u64),
    /// Through the data so many times.
    Epochs(u64),
}

/// A resolved run.
#[derive(Clone, Debug)]
pub struct Run {
    pub source: ModelSource,
    pub config: Config,
    pub load: Load,
    /// Names of weights that stay as they are.
    pub freeze: Vec<glob::Pattern>,
    /// The text of the model's config.json, as it goes into the final folder.
    pub config_text: String,
    pub data: DataSource,
    pub length: Length,
    pub global_batch: usize,
    pub micro_batch: usize,
    pub clip_norm: f32,
    /// Tokens whose logits exist at once; 0: as many as the device does well with.
    pub loss_chunk: usize,
    pub adamw: AdamW,
    pub lr: LrSchedule,
    pub precision: Precision,
    /// Decides random choices of training (rounding by chance, dropout).
    pub seed: u64,
    /// Of f16.
    pub loss_scale: LossScale,
    /// Whether a gradient that is not a number is traced to its rank.
    pub check_gradients: bool,
    pub strategy: Strategy,
    /// How many times each shard exists.
    pub replicate: usize,
    pub keep: Keep,
    pub accumulate: Accumulate,
    pub wrap: Wrap,
    pub prefetch: usize,
    /// Units that may be whole at once.
    pub max_gathered: Option<usize>,
    pub after_forward: AfterForward,
    pub units: Vec<UnitRule>,
    pub offload: Offload,
    pub device: DeviceChoice,
    pub group: GroupChoice,
    /// Whether every sum runs in a fixed order on GPUs too.
    pub deterministic: bool,
    pub timeout: Duration,
    pub checkpoint: Checkpoints,
    pub output: PathBuf,
    /// Whether the final model is written there.
    pub write_model: bool,
    pub log_every: u64,
    pub progress: bool,
    pub jsonl: bool,
    /// Ends before its time, after this step.
    pub stop_after: Option<u64>,
    /// The configuration itself, defaults filled in: checkpoints take it along.
    pub given: serde_json::Value,
}

pub(super) fn wrong<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Config(what.into()))
}

/// For a key whose only supported value so far is the given one.
pub(super) fn only<T: PartialEq + std::fmt::Debug>(key: &str, value: T, supported: T) -> Result<()> {
    if value == supported {
        return Ok(());
    }
    wrong(format!("{key} = {value:?} is not supported yet; leave it out or set it to {supported:?}"))
}

/// One of several words, each with what it means.
fn choose<T: Copy>(key: &str, value: &str, choices: &[(&str, T)]) -> Result<T> {
    if let Some((_, meaning)) = choices.iter().find(|(word, _)| *word == value) {
        return Ok(*meaning);
    }
    let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
    wrong(format!("{key} = \"{value}\" is unknown; it is one of: {}", words.join(", ")))
}

impl Run {
    pub(super) fn resolve(raw: Raw) -> Result<Run> {
        check_unsupported(&raw)?;
        let given = serde_json::to_value(&raw).map_err(|e| Error::Config(e.to_string()))?;
        let (source, config_text) = model(&raw.model)?;
        let config = Config::parse(&config_text)?;
        let length = match (raw.train.steps, raw.train.epochs) {
            (Some(0), _) | (_, Some(0)) => return wrong("train.steps and train.epochs must be at least 1"),
            (Some(steps), None) => Length::Steps(steps),
            (None, Some(epochs)) => Length::Epochs(epochs),
            _ => return wrong("give either train.steps or train.epochs"),
        };
        let data = super::data::resolve(&raw.data, &source, config.vocab)?;
        let micro_batch = raw.train.micro_batch.unwrap_or(0);
        if raw.train.global_batch == 0 || raw.train.micro_batch == Some(0) {
            return wrong("train.global_batch and train.micro_batch must be at least 1");
        }
        if !(raw.train.clip_norm >= 0.0 && raw.train.clip_norm.is_finite()) {
            return wrong(format!("train.clip_norm = {} must be 0 (off) or positive", raw.train.clip_norm));
        }
        if !(raw.device.timeout_s > 0.0 && raw.device.timeout_s < 1e9) {
            return wrong(format!("device.timeout_s = {} must be positive", raw.device.timeout_s));
        }
        Ok(Run {
            source,
            config,
            load: choose(
                "model.load",
                &raw.model.load,
                &[("auto", Load::Auto), ("each", Load::Each), ("rank0", Load::First)],
            )?,
            freeze: freeze(&raw.model.freeze)?,
            config_text,
            data,
            length,
            global_batch: raw.train.global_batch,
            micro_batch,
            clip_norm: raw.train.clip_norm as f32,
            loss_chunk: raw.train.loss_chunk,
            adamw: adamw(&raw.optimizer)?,
            lr: lr_schedule(&raw.optimizer, &raw.schedule)?,
            precision: precision(&raw.precision, &raw.optimizer)?,
            seed: raw.train.seed,
            loss_scale: loss_scale(&raw.precision)?,
            check_gradients: raw.train.check_gradients,
            strategy: strategy(&raw.shard.strategy)?,
            replicate: replicate(&raw.shard)?,
            keep: choose(
                "recompute.mode",
                &raw.recompute.mode,
                &[("none", Keep::All), ("cheap", Keep::Expensive), ("full", Keep::Nothing)],
            )?,
            accumulate: choose(
                "train.accumulate",
                &raw.train.accumulate,
                &[("sharded", Accumulate::Sharded), ("unsharded", Accumulate::Unsharded)],
            )?,
            wrap: wrap(raw.shard.wrap)?,
            prefetch: raw.shard.prefetch,
            max_gathered: (raw.shard.max_gathered > 0).then_some(raw.shard.max_gathered),
            after_forward: after_forward("shard.after_forward", &raw.shard.after_forward)?,
            offload: offload(&raw.shard.offload)?,
            units: raw.shard.unit.iter().map(unit_rule).collect::<Result<_>>()?,
            device: choose(
                "device.kind",
                &raw.device.kind,
                &[("auto", DeviceChoice::Auto), ("cpu", DeviceChoice::Cpu), ("cuda", DeviceChoice::Cuda)],
            )?,
            group: choose(
                "device.group",
                &raw.device.group,
                &[
                    ("auto", GroupChoice::Auto),
                    ("local", GroupChoice::Local),
                    ("shm", GroupChoice::Shm),
                    ("tcp", GroupChoice::Tcp),
                    ("mpi", GroupChoice::Mpi),
                    ("nccl", GroupChoice::Nccl),
                ],
            )?,
            deterministic: raw.device.deterministic,
            timeout: Duration::from_secs_f64(raw.device.timeout_s),
            checkpoint: Checkpoints {
                every: raw.checkpoint.every,
                at_end: raw.checkpoint.at_end,
                keep: raw.checkpoint.keep,
                background: raw.checkpoint.background,
                dtype: choose(
                    "checkpoint.dtype",
                    &raw.checkpoint.dtype,
                    &[("master", SavedAs::Master), ("compute", SavedAs::Compute)],
                )?,
            },
            output: raw.output.dir.into(),
            write_model: raw.output.model,
            log_every: raw.log.every.max(1),
            progress: raw.log.sinks.iter().any(|sink| sink == "progress"),
            jsonl: raw.log.sinks.iter().any(|sink| sink == "jsonl"),
            stop_after: None,
            given,
        })
    }

    /// Tokens the loss turns at once on such a device. Enough to keep it busy with one product of the head, few enough
    /// that logits stay small whatever the batch: 128 MiB of them on the CPU, whose products of few rows would
    /// mostly move the weight about, and on a GPU 2 GiB or 8192 rows, since each chunk reads and writes the whole
    /// gradient of the head once more.
    pub fn loss_chunk(&self, profile: Profile) -> usize {
        let token_bytes = self.config.vocab * self.precision.compute.bytes();
        match (self.loss_chunk, profile) {
            (0, Profile::Cpu) => ((128 << 20) / token_bytes).max(32),
            (0, Profile::Cuda { .. }) => ((2 << 30) / token_bytes).clamp(1024, 8192),
            (chunk, _) => chunk,
        }
    }

    /// What a plan of the run goes by.
    pub fn settings(
        &self,
        ranks: usize,
        fields: Vec<Field>,
        micro_batches: usize,
        profile: Profile,
    ) -> Settings {
        Settings {
            strategy: self.strategy,
            replicate: self.replicate,
            wrap: self.wrap.clone(),
            prefetch: self.prefetch,
            max_gathered: self.max_gathered,
            after_forward: self.after_forward,
            units: self.units.clone(),
            offload: self.offload,
            precision: self.precision,
            micro_batches,
            keep: self.keep,
            accumulate: self.accumulate,
            loss_chunk: self.loss_chunk(profile),
            loss_scale: self.loss_scale,
            check_gradients: self.check_gradients,
            ..Settings::new(ranks, fields)
        }
    }

    /// The model as shapes, for rows of `seq` tokens, with what the run freezes frozen.
    pub fn model(&self, seq: usize) -> Result<tensor::Model> {
        let mut model = tensor::models::build(&self.config, seq)?;
        let names: Vec<&str> =
            model.items.iter().flat_map(|item| &item.members).map(|member| member.name.as_str()).collect();
        for pattern in &self.freeze {
            if !names.iter().any(|name| pattern.matches(name)) {
                let what =
                    format!("model.freeze: {:?} matches no weight; weights are named like", pattern.as_str());
                let some: Vec<&str> = names.iter().copied().take(3).collect();
                return wrong(format!("{what} {}", some.join(", ")));
            }
        }
        model.freeze(|name| self.freeze.iter().any(|pattern| pattern.matches(name)))?;
        Ok(model)
    }

    /// Micro-batches each rank sees in a step.
    pub fn micro_batches(&self, ranks: usize) -> Result<(usize, usize)> {
        let per_rank = self.global_batch / ranks;
        if per_rank * ranks != self.global_batch || per_rank == 0 {
            return wrong(format!(
                "train.global_batch = {} does not divide over {ranks} ranks",
                self.global_batch
            ));
        }
        let micro = if self.micro_batch == 0 { per_rank } else { self.micro_batch };
        if !per_rank.is_multiple_of(micro) {
            return wrong(format!(
                "train.global_batch = {} over {ranks} ranks is {per_rank} rows a rank, not a multiple of \
                 train.micro_batch = {micro}",
                self.global_batch
            ));
        }
        Ok((per_rank / micro, micro))
    }
}

/// What the file may say one day and may not yet: refused, never ignored.
fn check_unsupported(raw: &Raw) -> Result<()> {
    only("optimizer.kind", raw.optimizer.kind.as_str(), "adamw")?;
    only("shard.tensor", raw.shard.tensor, 1)?;
    for sink in &raw.log.sinks {
        choose("log.sinks", sink, &[("progress", ()), ("jsonl", ())])?;
    }
    Ok(())
}

fn freeze(patterns: &[String]) -> Result<Vec<glob::Pattern>> {
    let parse = |pattern: &String| {
        let wrong = |e| Error::Config(format!("model.freeze: {pattern:?} is no pattern: {e}"));
        glob::Pattern::new(pattern).map_err(wrong)
    };
    patterns.iter().map(parse).collect()
}

fn model(raw: &raw::Model) -> Result<(ModelSource, String)> {
    match (&raw.path, &raw.config) {
        (Some(path), None) => {
            let path = PathBuf::from(path);
            let file = path.join("config.json");
            let text = std::fs::read_to_string(&file).map_err(|e| Error::file(&file, e))?;
            Ok((ModelSource::Folder(path), text))
        }
        (path, Some(config)) => {
            let text = match config {
                toml::Value::String(path) => {
                    std::fs::read_to_string(path).map_err(|e| Error::file(path, e))?
                }
                table => serde_json::to_string_pretty(table).map_err(|e| Error::Config(e.to_string()))?,
            };
            let source = match path {
                // With a configuration of its own, for machines that do not have the folder.
                Some(path) => ModelSource::Folder(path.into()),
                None => ModelSource::Seed(raw.init_seed.unwrap_or(0)),
            };
            Ok((source, text))
        }
        _ => wrong("model: give either path (a Hugging Face folder) or config (with init_seed)"),
    }
}

fn adamw(raw: &raw::Optimizer) -> Result<AdamW> {
    if !(raw.lr >= 0.0 && raw.lr.is_finite()) {
        return wrong(format!("optimizer.lr = {} must not be negative", raw.lr));
    }
    if raw.betas.iter().any(|beta| !(0.0..1.0).contains(beta)) {
        return wrong(format!("optimizer.betas = {:?} must lie in 0..1", raw.betas));
    }
    if raw.eps.is_nan() || raw.eps <= 0.0 || raw.weight_decay.is_nan() || raw.weight_decay < 0.0 {
        return wrong("optimizer.eps must be positive, optimizer.weight_decay not negative");
    }
    let decay = choose("optimizer.decay", &raw.decay, &[("all", Decay::All), ("matrices", Decay::Matrices)])?;
    Ok(AdamW { betas: raw.betas, eps: raw.eps, weight_decay: raw.weight_decay, decay })
}

/// The optimizer's settings and learning rates, of the first step and of the one after `step`, in a run as a checkpoint
/// has it. `None` where it has none.
pub(crate) fn optimizer_at(given: &serde_json::Value, step: u64) -> Result<Option<(AdamW, [f64; 2])>> {
    let Some(optimizer) = given.get("optimizer") else { return Ok(None) };
    let unreadable = |e: serde_json::Error| Error::Config(format!("the optimizer in state.json: {e}"));
    let optimizer: raw::Optimizer = serde_json::from_value(optimizer.clone()).map_err(unreadable)?;
    let schedule =
        given.get("schedule").cloned().map(serde_json::from_value).transpose().map_err(unreadable)?;
    let schedule = lr_schedule(&optimizer, &schedule.unwrap_or_default())?;
    // The length of a run by epochs is not known here; nor is then where its schedule stands.
    let steps = given.pointer("/train/steps").and_then(serde_json::Value::as_u64);
    let lr = steps.map_or(optimizer.lr, |steps| schedule.lr(step + 1, steps));
    Ok(Some((adamw(&optimizer)?, [optimizer.lr, lr])))
}

fn lr_schedule(optimizer: &raw::Optimizer, raw: &raw::Schedule) -> Result<LrSchedule> {
    let shapes = [("constant", Shape::Constant), ("linear", Shape::Linear), ("cosine", Shape::Cosine)];
    let shape = choose("schedule.kind", &raw.kind, &shapes)?;
    if !(0.0..=optimizer.lr).contains(&raw.min_lr) {
        return wrong(format!("schedule.min_lr = {} must lie in 0..optimizer.lr", raw.min_lr));
    }
    Ok(LrSchedule { shape, peak: optimizer.lr, min: raw.min_lr, warmup: raw.warmup_steps })
}

fn precision(raw: &raw::Precision, optimizer: &raw::Optimizer) -> Result<Precision> {
    let all = [("f32", Dtype::F32), ("bf16", Dtype::Bf16), ("f16", Dtype::F16)];
    let kept = &all[..2];
    let precision = Precision {
        compute: choose("precision.compute", &raw.compute, &all)?,
        reduce: choose("precision.reduce", &raw.reduce, &all)?,
        master: choose("precision.master", &raw.master, kept)?,
        grad: choose("precision.grad", &raw.grad, &all)?,
        moments: choose("optimizer.state", &optimizer.state, kept)?,
        stochastic_rounding: raw.stochastic_rounding,
    };
    if precision.stochastic_rounding && precision.master != Dtype::Bf16 {
        let what = "precision.stochastic_rounding = true is for precision.master = \"bf16\"; f32 weights lose nothing";
        return wrong(what);
    }
    Ok(precision)
}

fn loss_scale(raw: &raw::Precision) -> Result<LossScale> {
    let LossScale { scaling, .. } = LossScale::default();
    let init = raw.init_scale as f32;
    if !(init > 0.0 && init.is_finite()) || raw.scale_interval == 0 {
        return wrong("precision.init_scale must be positive, precision.scale_interval at least 1");
    }
    Ok(LossScale { init, scaling: Scaling { interval: raw.scale_interval, ..scaling } })
}

fn strategy(word: &str) -> Result<Strategy> {
    choose(
        "shard.strategy",
        word,
        &[
            ("full", Strategy::Full),
            ("grad", Strategy::Grad),
            ("none", Strategy::None),
            ("hybrid", Strategy::Full),
            ("HYBRID_SHARD", Strategy::Full),
            ("FULL_SHARD", Strategy::Full),
            ("SHARD_GRAD_OP", Strategy::Grad),
            ("NO_SHARD", Strategy::None),
        ],
    )
}

/// `hybrid` is `full` on a mesh with more than one row.
fn replicate(raw: &raw::Shard) -> Result<usize> {
    let hybrid = matches!(raw.strategy.as_str(), "hybrid" | "HYBRID_SHARD");
    match (hybrid, raw.replicate) {
        (_, 0) => wrong("shard.replicate must be at least 1"),
        (true, 1) => {
            wrong("shard.strategy = \"hybrid\" needs shard.replicate = 2 or more (the number of replicas)")
        }
        (false, 2..) => wrong("shard.replicate goes with shard.strategy = \"hybrid\""),
        (_, replicate) => Ok(replicate),
    }
}

fn after_forward(key: &str, value: &toml::Value) -> Result<AfterForward> {
    match value {
        toml::Value::Integer(size) if *size > 0 => Ok(AfterForward::Group(*size as usize)),
        toml::Value::String(word) => choose(
            key,
            word,
            &[("auto", AfterForward::Auto), ("free", AfterForward::Free), ("keep", AfterForward::Keep)],
        ),
        other => wrong(format!("{key} = {other} is none of auto, free, keep and a number of ranks")),
    }
}

/// Where moments or master weights are on the host, the update runs there, and takes the others and gradients along.
fn offload(value: &toml::Value) -> Result<Offload> {
    let words = match value {
        toml::Value::String(word) if word == "all" => return Ok(Offload::ALL),
        toml::Value::Array(words) => words,
        other => return wrong(format!("shard.offload = {other} is neither a list nor \"all\"")),
    };
    let mut offload = Offload::default();
    for word in words {
        let optimizer = Offload { optimizer: true, gradients: true, ..Offload::default() };
        let Offload { optimizer, gradients, weights } = choose(
            "shard.offload",
            word.as_str().unwrap_or("?"),
            &[
                ("moments", optimizer),
                ("master", optimizer),
                ("gradients", Offload { gradients: true, ..Offload::default() }),
                ("weights", Offload { weights: true, ..Offload::default() }),
            ],
        )?;
        offload.optimizer |= optimizer;
        offload.gradients |= gradients;
        offload.weights |= weights;
    }
    Ok(offload)
}

fn unit_rule(raw: &raw::UnitRule) -> Result<UnitRule> {
    let blocks = match raw.blocks {
        Some([from, to]) if from >= to => {
            return wrong(format!(
                "shard.unit: blocks = [{from}, {to}] are none; the second number is the end"
            ));
        }
        blocks => blocks.map(|[from, to]| from..to),
    };
    let after_forward = after_forward("shard.unit: after_forward", &raw.after_forward)?;
    Ok(UnitRule { kinds: raw.kinds.clone(), blocks, after_forward })
}

fn wrap(raw: raw::Wrap) -> Result<Wrap> {
    Ok(match raw {
        raw::Wrap::MinParams { min_params } => Wrap::MinParams(min_params),
        raw::Wrap::Kinds { kinds } => Wrap::Kinds(kinds),
        raw::Wrap::Name(word) => return choose_wrap(&word),
    })
}

fn choose_wrap(word: &str) -> Result<Wrap> {
    match word {
        "layer" => Ok(Wrap::Layer),
        "none" => Ok(Wrap::None),
        _ => wrong(format!(
            "shard.wrap = \"{word}\" is unknown; it is layer, none, a table with min_params or one with kinds"
        )),
    }
}
