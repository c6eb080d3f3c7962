//! A small decoder, its data and weights, trained under any settings.

use device::{Device, Dtype, Profile};
use fsdp::{
    Engine, Field, Groups, HostBatch, Hyper, Plan, Precision, Report, Result, Settings, Slot, Source,
    Stretch, on_threads,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use tensor::Model;
use tensor::models::{Config, build};
use tensor::optim::{AdamW, Decay};

pub const SEQ: usize = 16;
pub const VOCAB: usize = 97;
/// Rows of a step, over all ranks and micro-batches.
pub const ROWS: usize = 12;

pub const F16: Precision = Precision { compute: Dtype::F16, ..Precision::F32 };
pub const BF16: Precision = Precision { compute: Dtype::Bf16, ..Precision::F32 };

pub fn model(tied: bool) -> Arc<Model> {
    // Nothing is a multiple of anything: padding everywhere.
    let text = format!(
        r#"{{"model_type": "qwen2", "vocab_size": {VOCAB}, "hidden_size": 36, "intermediate_size": 50,
            "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1,
            "tie_word_embeddings": {tied}}}"#
    );
    Arc::new(build(&Config::parse(&text).unwrap(), SEQ).unwrap())
}

/// Settings for a step of [`ROWS`] rows.
pub fn settings(ranks: usize, micro_batches: usize) -> Settings {
    let rows = ROWS / ranks / micro_batches;
    assert_eq!(rows * ranks * micro_batches, ROWS);
    Settings { micro_batches, loss_chunk: 10, ..Settings::new(ranks, Field::tokens(rows, SEQ)) }
}

/// Weights that are a function of name and place alone.
#[derive(Debug)]
pub struct Seeded;

impl Source for Seeded {
    fn read(&self, name: &str, start: usize, out: &mut [f32]) -> Result<()> {
        let seed = name.bytes().fold(17u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
        for (at, value) in out.iter_mut().enumerate() {
            let mixed = (seed ^ (start + at) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let uniform = (mixed >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            *value = if name.contains("norm") { 1.0 + 0.1 * uniform } else { 0.2 * uniform };
        }
        Ok(())
    }
}

/// The micro-batches of one rank in one step.
pub fn batches(settings: &Settings, rank: usize, step: u64) -> Vec<HostBatch> {
    let per_rank = ROWS / settings.ranks;
    let rows = per_rank / settings.micro_batches;
    let token = |row: usize, at: usize| ((row * 31 + at * 7 + step as usize * 13 + row * at) % VOCAB) as i32;
    (0..settings.micro_batches)
        .map(|micro| {
            let first = rank * per_rank + micro * rows;
            let cells = (first..first + rows).flat_map(|row| (0..SEQ).map(move |at| (row, at)));
            let (ids, labels): (Vec<i32>, Vec<i32>) = cells
                .map(|(row, at)| (token(row, at), if at % 5 == 4 { -100 } else { token(row, at + 1) }))
                .unzip();
            HostBatch::tokens(&ids, &labels, SEQ, VOCAB).unwrap()
        })
        .collect()
}

pub fn hyper(step: u64) -> Hyper {
    let adamw = AdamW { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, decay: Decay::Matrices };
    Hyper { adamw, lr: 3e-3, clip_norm: 1.0, step }
}

/// Every weight, by name.
pub type Weights = BTreeMap<String, Vec<f32>>;

/// This rank's part of every weight: (name, first element, values).
pub type Part = Vec<(String, usize, Vec<f32>)>;

pub fn part(engine: &Engine) -> Part {
    let master = engine.plan().settings.precision.master;
    let read = |stretch: Stretch| {
        let mut bytes = vec![0; stretch.len * master.bytes()];
        engine.copy_slot(Slot::Master, &stretch, &mut bytes).unwrap();
        let value = |bytes: &[u8]| match *bytes {
            [a, b, c, d] => f32::from_ne_bytes([a, b, c, d]),
            // bf16 is the upper half of f32.
            [a, b] => f32::from_bits(u32::from(u16::from_ne_bytes([a, b])) << 16),
            _ => unreachable!("masters are f32 or bf16"),
        };
        (stretch.name, stretch.start, bytes.chunks_exact(master.bytes()).map(value).collect())
    };
    engine.saved_stretches().into_iter().filter(|stretch| stretch.trainable).map(read).collect()
}

pub fn assemble(model: &Model, parts: &[Part]) -> Weights {
    let specs = model.items.iter().flat_map(|item| &item.members);
    let mut weights: Weights =
        specs.map(|spec| (spec.name.clone(), vec![f32::NAN; spec.shape.numel()])).collect();
    for (name, start, values) in parts.iter().flatten() {
        weights.get_mut(name).unwrap()[*start..start + values.len()].copy_from_slice(values);
    }
    assert!(weights.values().flatten().all(|value| !value.is_nan()), "every element is some rank's");
    weights
}

/// The groups of a grid of `replicate` rows.
fn grid(groups: Groups, replicate: usize) -> Result<Groups> {
    if replicate == 1 {
        return Ok(groups);
    }
    let (rank, shards) = (groups.world.rank(), groups.world.size() / replicate);
    let row: Vec<usize> = (0..shards).map(|at| rank / shards * shards + at).collect();
    let column: Vec<usize> = (0..replicate).map(|at| at * shards + rank % shards).collect();
    let split = |group: &Arc<dyn comm::Group>, ranks: &[usize], name: &str| {
        Ok::<_, fsdp::Error>(group.split(ranks, name)?.expect("every rank is in one"))
    };
    Ok(Groups {
        gather: split(&groups.gather, &row, "gather")?,
        reduce: split(&groups.reduce, &row, "reduce")?,
        replicate: split(&groups.reduce, &column, "replicate")?,
        world: groups.world,
    })
}

/// Runs `body` as every rank, with an engine that has its weights.
pub fn on_ranks<T: Send>(
    model: &Arc<Model>,
    settings: &Settings,
    body: impl Fn(usize, Engine) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let plan = Arc::new(Plan::new(model, settings.clone(), Profile::Cpu)?);
    on_threads(settings.ranks, |rank, device: Arc<dyn Device>, groups: Groups| {
        let groups = grid(groups, settings.replicate)?;
        let mut engine = Engine::new(device, plan.clone(), model.clone(), groups)?;
        engine.fill(&Seeded)?;
        body(rank, engine)
    })
}

/// What training came to: every step's report, the same on all ranks, and the weights.
pub struct Outcome {
    pub reports: Vec<Report>,
    pub weights: Weights,
}

pub fn train(model: &Arc<Model>, settings: &Settings, steps: u64) -> Outcome {
    let ranks = on_ranks(model, settings, |rank, mut engine| {
        let mut reports = Vec::new();
        for step in 1..=steps {
            engine.step(&batches(settings, rank, step), &hyper(step))?;
            reports.push(engine.report()?);
        }
        let planned = engine.plan().peak_bytes(model);
        assert_eq!(engine.device().memory_use().peak_bytes, planned, "the peak is the plan's");
        let on_host: usize = engine.plan().host_regions().iter().map(|region| region.bytes).sum();
        assert_eq!(engine.device().host_use().peak_bytes, on_host, "and the host's");
        Ok((reports, part(&engine)))
    });
    let (reports, parts): (Vec<_>, Vec<_>) = ranks.unwrap().into_iter().unzip();
    for other in &reports[1..] {
        // NaN is not equal to itself.
        assert_eq!(format!("{other:?}"), format!("{:?}", reports[0]), "ranks see the same numbers");
    }
    let reports = reports.into_iter().next().unwrap();
    Outcome { reports, weights: assemble(model, &parts) }
}

/// The farthest relative distance of losses and norms.
pub fn distance(a: &[Report], b: &[Report]) -> (f64, f64) {
    assert_eq!(a.len(), b.len());
    let pairs = || a.iter().zip(b);
    let far = |x: f64, y: f64| (x / y - 1.0).abs();
    (
        pairs().map(|(a, b)| far(a.loss, b.loss)).fold(0.0, f64::max),
        pairs().map(|(a, b)| far(a.grad_norm, b.grad_norm)).fold(0.0, f64::max),
    )
}

/// The relative distance of all weights together.
pub fn apart(a: &Weights, b: &Weights) -> f64 {
    let pairs =
        || a.values().flatten().zip(b.values().flatten()).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let (apart, size) = (pairs().map(|(a, b)| (a - b).powi(2)), pairs().map(|(_, b)| b.powi(2)));
    (apart.sum::<f64>() / size.sum::<f64>()).sqrt()
}
