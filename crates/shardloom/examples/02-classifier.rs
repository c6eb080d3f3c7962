//! A classifier on tabular data, sharded over ranks: the model of many introductions to FSDP.
//!
//! ```sh
//! cargo run --release --example 02-classifier
//! ```
//!
//! Rows have eight features and one of three classes, by a formula the model has to find. It shows what a model
//! that is no language model needs beside example 01: batch fields of its own, an operation of its own that hands
//! such a field to the model, and evaluation on rows it has not seen.

use shardloom::device::{Dtype, Profile};
use shardloom::fsdp::{Engine, Field, HostBatch, Hyper, Plan, Result, Settings, Values, on_threads};
use shardloom::source::Seeded;
use shardloom::tensor::ops::{self, field};
use shardloom::tensor::optim::{AdamW, Decay};
use shardloom::tensor::{
    Block, Context, Init, ItemId, Model, Op, Outcome, Pass, Result as OpResult, Tensor, Var, WeightSpec,
};
use std::sync::Arc;

const FEATURES: &str = "features";
const NUM_FEATURES: usize = 8;
const WIDTH: usize = 64;
const CLASSES: usize = 3;
/// Rows of the whole batch, over all ranks.
const ROWS: usize = 240;

/// An operation without inputs: the batch's features, to which no gradient flows back.
#[derive(Debug)]
struct Features;

impl Op for Features {
    fn name(&self) -> &'static str {
        "features"
    }

    fn forward(&self, cx: &Context<'_>, _inputs: Vec<Tensor>) -> OpResult<Outcome> {
        Ok(Outcome { outputs: vec![cx.batch.get(FEATURES)?.clone()], saved: vec![] })
    }

    fn backward(
        &self,
        _cx: &Context<'_>,
        _saved: Vec<Tensor>,
        _grads: Vec<Option<Tensor>>,
    ) -> OpResult<Vec<Option<Tensor>>> {
        Ok(vec![])
    }
}

/// `linear`, `layer_norm`, `relu`. The first one takes the features, later ones what they are handed.
#[derive(Debug)]
struct Hidden {
    linear: [ItemId; 2],
    norm: [ItemId; 2],
}

impl Block for Hidden {
    fn kind(&self) -> &str {
        "Hidden"
    }

    fn items(&self) -> Vec<ItemId> {
        [self.linear, self.norm].concat()
    }

    fn forward(&self, pass: &mut Pass<'_>, mut carry: Vec<Var>) -> OpResult<Vec<Var>> {
        let x = match carry.pop() {
            Some(x) => x,
            None => pass.apply1(Features, vec![])?,
        };
        let x = ops::linear(pass, x, self.linear[0], Some(self.linear[1]), WIDTH)?;
        let x = ops::layer_norm(pass, x, self.norm[0], Some(self.norm[1]), 1e-5)?;
        Ok(vec![ops::relu(pass, x)?])
    }
}

/// Logits of the classes, and the loss against the batch's labels.
#[derive(Debug)]
struct Classify {
    linear: [ItemId; 2],
}

impl Block for Classify {
    fn kind(&self) -> &str {
        "Classify"
    }

    fn items(&self) -> Vec<ItemId> {
        self.linear.to_vec()
    }

    fn forward(&self, pass: &mut Pass<'_>, mut carry: Vec<Var>) -> OpResult<Vec<Var>> {
        let x = carry.pop().expect("hidden blocks hand on one tensor");
        let logits = ops::linear(pass, x, self.linear[0], Some(self.linear[1]), CLASSES)?;
        Ok(vec![ops::cross_entropy(pass, logits)?])
    }
}

fn model() -> Model {
    let mut model = Model::default();
    let mut weight = |name: String, shape: Vec<usize>, init: Init| {
        model.item(vec![WeightSpec { name, shape: shape.into(), init }])
    };
    let mut blocks = Vec::new();
    for (layer, cols) in [NUM_FEATURES, WIDTH].into_iter().enumerate() {
        let std = (2.0 / cols as f32).sqrt();
        let name = |part: &str| format!("hidden.{layer}.{part}");
        let linear = [
            weight(name("linear.weight"), vec![WIDTH, cols], Init::Normal { std }),
            weight(name("linear.bias"), vec![WIDTH], Init::Constant(0.0)),
        ];
        let norm = [
            weight(name("norm.weight"), vec![WIDTH], Init::Constant(1.0)),
            weight(name("norm.bias"), vec![WIDTH], Init::Constant(0.0)),
        ];
        blocks.push(Hidden { linear, norm });
    }
    let linear = [
        weight("classify.weight".into(), vec![CLASSES, WIDTH], Init::Normal { std: 0.1 }),
        weight("classify.bias".into(), vec![CLASSES], Init::Constant(0.0)),
    ];
    blocks.into_iter().for_each(|block| model.block(block));
    model.block(Classify { linear });
    model
}

/// Row `index` of an endless table: features in ±1, and the class that a formula gives them.
fn row(index: usize) -> ([f32; NUM_FEATURES], i32) {
    // Multiples of irrational numbers, without their whole part, spread evenly and have nothing to do with each other.
    let primes = [2.0f64, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0];
    let x = primes.map(|prime| ((index as f64 * prime.sqrt()).fract() * 2.0 - 1.0) as f32);
    let score = x[0] * x[1] + x[2] - 0.5 * x[3].abs();
    let class = if score > 0.2 { 2 } else { i32::from(score > -0.4) };
    (x, class)
}

/// A rank's rows of a step's batch. Its fields are in the order of the plan's.
fn batch(first: usize, rows: usize) -> HostBatch {
    let (features, labels): (Vec<_>, Vec<i32>) = (first..first + rows).map(row).unzip();
    HostBatch::of(&[Values::F32(&features.concat()), Values::I32(&labels)], rows)
}

/// Trains on so many ranks. Returns the losses of all steps, and the loss on rows that were never trained on.
pub fn train(ranks: usize, steps: u64) -> Result<(Vec<f64>, f64)> {
    let results = on_threads(ranks, |rank, device, groups| {
        let model = Arc::new(model());
        let rows = ROWS / ranks;
        let fields = vec![
            Field::new(FEATURES, Dtype::F32, [rows, NUM_FEATURES]),
            Field::new(field::LABELS, Dtype::I32, [rows]),
        ];
        let plan = Arc::new(Plan::new(&model, Settings::new(ranks, fields), Profile::Cpu)?);
        let mut engine = Engine::new(device, plan, model.clone(), groups)?;
        engine.fill(&Seeded::new(1, &model))?;
        let adamw = AdamW { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01, decay: Decay::Matrices };
        let mut losses = Vec::new();
        for step in 1..=steps {
            // Ten batches, again and again; ranks take their part of each in order (`DistributedSampler`).
            let first = (step as usize % 10) * ROWS + rank * rows;
            engine.step(&[batch(first, rows)], &Hyper { adamw, lr: 3e-3, clip_norm: 1.0, step })?;
            losses.push(engine.report()?.loss);
        }
        let unseen = engine.evaluate(&[batch(20 * ROWS + rank * rows, rows)])?;
        Ok((losses, unseen.loss))
    })?;
    Ok(results.into_iter().next().unwrap_or_default())
}

#[allow(dead_code, reason = "a test uses this file as a module")]
fn main() -> Result<()> {
    for ranks in [1, 2, 3] {
        let (losses, unseen) = train(ranks, 200)?;
        let (first, last) = (losses[0], losses[losses.len() - 1]);
        println!(
            "{ranks} ranks: loss {first:.6} at first, {last:.6} after 200 steps, {unseen:.6} on unseen rows"
        );
    }
    Ok(())
}
