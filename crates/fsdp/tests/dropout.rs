//! A user's own model with dropout trains the same on any number of ranks and micro-batches.

use comm::{Group, Solo};
use device::cpu::Cpu;
use device::{Device, Profile};
use fsdp::{Engine, Field, Groups, HostBatch, Hyper, Plan, Settings, Source};
use std::sync::Arc;
use std::time::Duration;
use tensor::optim::{AdamW, Decay};
use tensor::{Block, Init, ItemId, Model, Pass, Result, Var, WeightSpec, ops};

const VOCAB: usize = 13;
const COLS: usize = 8;
const SEQ: usize = 6;
const ROWS: usize = 4;

#[derive(Debug)]
struct Embed(ItemId);

impl Block for Embed {
    fn kind(&self) -> &str {
        "Embed"
    }

    fn items(&self) -> Vec<ItemId> {
        vec![self.0]
    }

    fn forward(&self, pass: &mut Pass<'_>, _carry: Vec<Var>) -> Result<Vec<Var>> {
        let x = ops::embedding(pass, self.0, VOCAB, COLS)?;
        Ok(vec![ops::dropout(pass, x, 0.3, 0)?])
    }
}

#[derive(Debug)]
struct Classify {
    norm: [ItemId; 2],
    head: [ItemId; 2],
}

impl Block for Classify {
    fn kind(&self) -> &str {
        "Classify"
    }

    fn items(&self) -> Vec<ItemId> {
        [self.norm, self.head].concat()
    }

    fn forward(&self, pass: &mut Pass<'_>, mut carry: Vec<Var>) -> Result<Vec<Var>> {
        let x = carry.pop().expect("one tensor is carried");
        let x = ops::layer_norm(pass, x, self.norm[0], Some(self.norm[1]), 1e-5)?;
        let x = ops::gelu(pass, x)?;
        let x = ops::dropout(pass, x, 0.3, 1)?;
        let logits = ops::linear(pass, x, self.head[0], Some(self.head[1]), VOCAB)?;
        Ok(vec![ops::cross_entropy(pass, logits)?])
    }
}

fn model() -> Model {
    let mut model = Model::default();
    let mut weight = |name: &str, shape: Vec<usize>| {
        let init = Init::Normal { std: 1.0 };
        model.item(vec![WeightSpec { name: name.into(), shape: shape.into(), init }])
    };
    let table = weight("table", vec![VOCAB, COLS]);
    let norm = [weight("norm.weight", vec![COLS]), weight("norm.bias", vec![COLS])];
    let head = [weight("head.weight", vec![VOCAB, COLS]), weight("head.bias", vec![VOCAB])];
    model.block(Embed(table));
    model.block(Classify { norm, head });
    model
}

struct Numbers;

impl Source for Numbers {
    fn read(&self, name: &str, start: usize, out: &mut [f32]) -> fsdp::Result<()> {
        for (i, value) in out.iter_mut().enumerate() {
            *value = ((start + i + name.len()) as f32 * 0.7).sin();
        }
        Ok(())
    }
}

/// One rank's losses and gradient norms over three steps.
fn rank(
    rank: usize,
    ranks: usize,
    micro_batches: usize,
    groups: Groups,
    device: Arc<dyn Device>,
) -> Vec<f64> {
    let model = Arc::new(model());
    let rows = ROWS / ranks / micro_batches;
    let settings =
        Settings { micro_batches, loss_chunk: 64, ..Settings::new(ranks, Field::tokens(rows, SEQ)) };
    let plan = Arc::new(Plan::new(&model, settings, Profile::Cpu).unwrap());
    let mut engine = Engine::new(device, plan, model, groups).unwrap();
    engine.set_seed(42);
    engine.fill(&Numbers).unwrap();
    let ids: Vec<i32> = (0..(ROWS * SEQ) as i32).map(|i| i * 5 % VOCAB as i32).collect();
    let labels: Vec<i32> = ids.iter().map(|id| (id + 1) % VOCAB as i32).collect();
    let size = rows * SEQ;
    let mine = rank * micro_batches * size..(rank + 1) * micro_batches * size;
    let batches: Vec<HostBatch> = ids[mine.clone()]
        .chunks(size)
        .zip(labels[mine].chunks(size))
        .map(|(ids, labels)| HostBatch::tokens(ids, labels, SEQ, VOCAB).unwrap())
        .collect();
    let adamw = AdamW { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.0, decay: Decay::All };
    let mut curve = Vec::new();
    for step in 1..=3 {
        engine.step(&batches, &Hyper { adamw, lr: 0.05, clip_norm: 1.0, step }).unwrap();
        let report = engine.report().unwrap();
        curve.extend([report.loss, report.grad_norm]);
    }
    curve
}

fn curve(ranks: usize, micro_batches: usize) -> Vec<f64> {
    if ranks == 1 {
        let device: Arc<dyn Device> = Arc::new(Cpu::new());
        let solo: Arc<dyn Group> = Arc::new(Solo::new("solo", device.clone()));
        return rank(0, 1, micro_batches, Groups::all(solo), device);
    }
    let group = |name: &str| comm::local::group(name, ranks, Duration::from_secs(30));
    let pairs = group("gather").into_iter().zip(group("reduce"));
    let threads: Vec<_> = pairs
        .enumerate()
        .map(|(index, (gather, reduce))| {
            let groups = Groups::pair(gather, reduce);
            std::thread::spawn(move || rank(index, ranks, micro_batches, groups, Arc::new(Cpu::new())))
        })
        .collect();
    let curves: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    curves[0].clone()
}

#[test]
fn ranks_and_micro_batches_drop_the_same() {
    let one = curve(1, 1);
    for (ranks, micro_batches) in [(1, 4), (2, 1), (2, 2), (4, 1)] {
        for (a, b) in curve(ranks, micro_batches).iter().zip(&one) {
            assert!((a / b - 1.0).abs() < 1e-5, "{ranks} ranks, {micro_batches} micro-batches: {a}, {b}");
        }
    }
}
