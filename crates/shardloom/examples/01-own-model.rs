//! A model of one's own, sharded over two ranks and trained.
//!
//! ```sh
//! cargo run --release --example 01-own-model
//! ```
//!
//! The model predicts the next letter of a sentence from the letter before: an embedding, two layers, a head. It
//! is written as for one device, and nothing in it knows of ranks. [`Plan`] and [`Engine`] do the sharding: each
//! rank owns half of every weight, gradient and moment, and gathers a unit's weights just before they are used
//! (fully sharded data parallel, FSDP; PyTorch's `fully_shard`).

use shardloom::device::Profile;
use shardloom::fsdp::{Engine, Field, HostBatch, Hyper, Plan, Result, Settings, on_threads};
use shardloom::source::Seeded;
use shardloom::tensor::optim::{AdamW, Decay};
use shardloom::tensor::{Block, Init, ItemId, Model, Pass, Result as OpResult, Var, WeightSpec, ops};
use std::sync::Arc;

const VOCAB: usize = 128;
const WIDTH: usize = 32;
const TEXT: &str = "sharding weights over ranks means that no rank ever holds them all at once ";
/// Rows of the whole batch, each as long as the text.
const ROWS: usize = 4;

/// The first block: ids become vectors. Its carry is empty.
#[derive(Debug)]
struct Embed {
    table: ItemId,
}

impl Block for Embed {
    fn kind(&self) -> &str {
        "Embed"
    }

    fn items(&self) -> Vec<ItemId> {
        vec![self.table]
    }

    fn forward(&self, pass: &mut Pass<'_>, _carry: Vec<Var>) -> OpResult<Vec<Var>> {
        Ok(vec![ops::embedding(pass, self.table, VOCAB, WIDTH)?])
    }
}

/// A layer: wide, bent, narrow again.
#[derive(Debug)]
struct Layer {
    norm: ItemId,
    up: ItemId,
    down: ItemId,
}

impl Block for Layer {
    /// Wrap policies go by this (`transformer_auto_wrap_policy`).
    fn kind(&self) -> &str {
        "Layer"
    }

    fn items(&self) -> Vec<ItemId> {
        vec![self.norm, self.up, self.down]
    }

    fn forward(&self, pass: &mut Pass<'_>, mut carry: Vec<Var>) -> OpResult<Vec<Var>> {
        let x = carry.pop().expect("blocks hand on one tensor");
        // It gives its input as well, for models that go on with both (a residual stream).
        let (_, x) = ops::rms_norm(pass, x, self.norm, 1e-5)?;
        let x = ops::linear(pass, x, self.up, None, 4 * WIDTH)?;
        let x = ops::gelu(pass, x)?;
        Ok(vec![ops::linear(pass, x, self.down, None, WIDTH)?])
    }
}

/// The last block ends in one loss per token.
#[derive(Debug)]
struct Head {
    weight: ItemId,
}

impl Block for Head {
    fn kind(&self) -> &str {
        "Head"
    }

    fn items(&self) -> Vec<ItemId> {
        vec![self.weight]
    }

    fn forward(&self, pass: &mut Pass<'_>, mut carry: Vec<Var>) -> OpResult<Vec<Var>> {
        let x = carry.pop().expect("blocks hand on one tensor");
        let logits = ops::linear(pass, x, self.weight, None, VOCAB)?;
        Ok(vec![ops::cross_entropy(pass, logits)?])
    }
}

/// Shapes only: no weight exists yet, and no rank will ever hold the whole model (PyTorch's meta device).
fn model() -> Model {
    let mut model = Model::default();
    let weight = |model: &mut Model, name: &str, shape: Vec<usize>, init: Init| {
        model.item(vec![WeightSpec { name: name.into(), shape: shape.into(), init }])
    };
    let small = Init::Normal { std: 0.1 };
    let table = weight(&mut model, "embed.weight", vec![VOCAB, WIDTH], small);
    model.block(Embed { table });
    for layer in 0..2 {
        let name = |part: &str| format!("layers.{layer}.{part}.weight");
        let norm = weight(&mut model, &name("norm"), vec![WIDTH], Init::Constant(1.0));
        let up = weight(&mut model, &name("up"), vec![4 * WIDTH, WIDTH], small);
        let down = weight(&mut model, &name("down"), vec![WIDTH, 4 * WIDTH], small);
        model.block(Layer { norm, up, down });
    }
    let head = weight(&mut model, "head.weight", vec![VOCAB, WIDTH], small);
    model.block(Head { weight: head });
    model
}

/// Trains on so many ranks and returns the loss of every step, which is the same on all of them.
pub fn train(ranks: usize, steps: u64) -> Result<Vec<f64>> {
    let seq = TEXT.len();
    let ids: Vec<i32> = TEXT.bytes().map(i32::from).collect();
    let mut labels = ids.clone();
    labels.rotate_left(1);
    let losses = on_threads(ranks, |rank, device, groups| {
        let model = Arc::new(model());
        let rows = ROWS / ranks;
        // `full`, a unit a block, one unit gathered ahead; change fields of the settings for anything else.
        let settings = Settings::new(ranks, Field::tokens(rows, seq));
        let plan = Arc::new(Plan::new(&model, settings, Profile::Cpu)?);
        if rank == 0 {
            println!(
                "{ranks} ranks: {} bytes each, known before anything is allocated",
                plan.peak_bytes(&model)
            );
        }
        let mut engine = Engine::new(device, plan, model.clone(), groups)?;
        engine.fill(&Seeded::new(0, &model))?;
        // Every row is the same text here; real data would differ from rank to rank.
        let batch = HostBatch::tokens(&ids.repeat(rows), &labels.repeat(rows), seq, VOCAB)?;
        let adamw = AdamW { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.01, decay: Decay::Matrices };
        let mut losses = Vec::new();
        for step in 1..=steps {
            engine.step(std::slice::from_ref(&batch), &Hyper { adamw, lr: 1e-2, clip_norm: 1.0, step })?;
            losses.push(engine.report()?.loss);
        }
        Ok(losses)
    })?;
    Ok(losses.into_iter().next().unwrap_or_default())
}

#[allow(dead_code, reason = "a test uses this file as a module")]
fn main() -> Result<()> {
    let (one, two) = (train(1, 40)?, train(2, 40)?);
    for step in [1, 10, 20, 30, 40] {
        println!("step {step:>2}: loss {:.6} on one rank, {:.6} on two", one[step - 1], two[step - 1]);
    }
    Ok(())
}
