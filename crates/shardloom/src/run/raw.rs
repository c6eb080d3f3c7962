//! RUN.toml, word for word.

use serde::{Deserialize, Serialize};

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Raw {
    pub model: Model,
    pub data: Data,
    pub train: Train,
    #[serde(default)]
    pub optimizer: Optimizer,
    #[serde(default)]
    pub schedule: Schedule,
    #[serde(default)]
    pub precision: Precision,
    #[serde(default)]
    pub shard: Shard,
    #[serde(default)]
    pub recompute: Recompute,
    #[serde(default)]
    pub device: Device,
    #[serde(default)]
    pub checkpoint: Checkpoint,
    pub output: Output,
    #[serde(default)]
    pub log: Log,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    pub path: Option<String>,
    pub config: Option<toml::Value>,
    pub init_seed: Option<u64>,
    #[serde(default)]
    pub freeze: Vec<String>,
    /// Who reads the weights.
    #[serde(default = "auto")]
    pub load: String,
}

fn auto() -> String {
    "auto".into()
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    pub kind: String,
    pub path: Option<String>,
    pub seq_len: Option<usize>,
    #[serde(default)]
    pub pack: Option<bool>,
    #[serde(default)]
    pub seed: Option<u64>,
    /// A folder with a tokenizer.json, or "bytes"; the model's own where it is left out.
    #[serde(default)]
    pub tokenizer: Option<String>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Train {
    pub steps: Option<u64>,
    pub epochs: Option<u64>,
    pub global_batch: usize,
    pub micro_batch: Option<usize>,
    #[serde(default = "one")]
    pub clip_norm: f64,
    #[serde(default = "sharded")]
    pub accumulate: String,
    #[serde(default)]
    pub seed: u64,
    #[serde(default)]
    pub loss_chunk: usize,
    /// Whether a gradient that is not a number is traced to its rank.
    #[serde(default = "yes")]
    pub check_gradients: bool,
}

fn one() -> f64 {
    1.0
}

fn sharded() -> String {
    "sharded".into()
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Optimizer {
    pub kind: String,
    pub lr: f64,
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
    pub decay: String,
    pub state: String,
}

impl Default for Optimizer {
    fn default() -> Self {
        Optimizer {
            kind: "adamw".into(),
            lr: 2e-5,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.01,
            decay: "matrices".into(),
            state: "f32".into(),
        }
    }
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Schedule {
    pub kind: String,
    pub warmup_steps: u64,
    pub min_lr: f64,
}

impl Default for Schedule {
    fn default() -> Self {
        Schedule { kind: "constant".into(), warmup_steps: 0, min_lr: 0.0 }
    }
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Precision {
    pub compute: String,
    pub reduce: String,
    pub master: String,
    pub grad: String,
    pub stochastic_rounding: bool,
    /// The first loss scale of f16.
    pub init_scale: f64,
    /// Good steps after which it doubles.
    pub scale_interval: u32,
}

impl Default for Precision {
    fn default() -> Self {
        let f32 = || "f32".to_string();
        Precision {
            compute: f32(),
            reduce: f32(),
            master: f32(),
            grad: f32(),
            stochastic_rounding: false,
            init_scale: 65536.0,
            scale_interval: 2000,
        }
    }
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Shard {
    pub strategy: String,
    pub wrap: Wrap,
    pub replicate: usize,
    pub tensor: usize,
    pub after_forward: toml::Value,
    pub prefetch: usize,
    /// 0: no limit.
    pub max_gathered: usize,
    pub offload: toml::Value,
    pub unit: Vec<UnitRule>,
}

/// `[[shard.unit]]`
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct UnitRule {
    #[serde(default)]
    pub kinds: Vec<String>,
    /// First block, and the first that is not meant any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks: Option<[usize; 2]>,
    pub after_forward: toml::Value,
}

impl Default for Shard {
    fn default() -> Self {
        Shard {
            strategy: "full".into(),
            wrap: Wrap::Name("layer".into()),
            replicate: 1,
            tensor: 1,
            after_forward: "auto".into(),
            prefetch: 1,
            max_gathered: 0,
            offload: toml::Value::Array(vec![]),
            unit: vec![],
        }
    }
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Wrap {
    Name(String),
    MinParams { min_params: usize },
    Kinds { kinds: Vec<String> },
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Recompute {
    pub mode: String,
}

impl Default for Recompute {
    fn default() -> Self {
        Recompute { mode: "none".into() }
    }
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Device {
    pub kind: String,
    pub group: String,
    pub timeout_s: f64,
    pub deterministic: bool,
}

impl Default for Device {
    fn default() -> Self {
        Device { kind: "auto".into(), group: "auto".into(), timeout_s: 600.0, deterministic: false }
    }
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Checkpoint {
    pub every: u64,
    /// Whether the last step is saved, whatever `every` is.
    pub at_end: bool,
    pub keep: usize,
    pub background: bool,
    pub dtype: String,
}

impl Default for Checkpoint {
    fn default() -> Self {
        Checkpoint { every: 0, at_end: true, keep: 2, background: true, dtype: "master".into() }
    }
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Output {
    pub dir: String,
    /// Whether the final model is written.
    #[serde(default = "yes")]
    pub model: bool,
}

fn yes() -> bool {
    true
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    pub every: u64,
    pub sinks: Vec<String>,
}

impl Default for Log {
    fn default() -> Self {
        Log { every: 1, sinks: vec!["progress".into(), "jsonl".into()] }
    }
}
