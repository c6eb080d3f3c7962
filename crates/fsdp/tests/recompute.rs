//! Full recompute: the same bits, and nothing computed again that no backward needs.

use comm::{Group, Solo};
use device::timed::Timed;
use device::{Device, Profile, cpu::Cpu};
use fsdp::{Engine, Field, Groups, HostBatch, Hyper, Keep, Plan, Settings, Source};
use std::collections::BTreeMap;
use std::sync::Arc;
use tensor::Model;
use tensor::models::{Config, build};
use tensor::optim::{AdamW, Decay};

const ROWS: usize = 2;
const SEQ: usize = 16;
const VOCAB: usize = 515;
const LAYERS: usize = 5;

struct Numbers;

impl Source for Numbers {
    fn read(&self, name: &str, start: usize, out: &mut [f32]) -> fsdp::Result<()> {
        for (i, value) in out.iter_mut().enumerate() {
            *value = ((start + i + name.len()) as f32 * 0.7).sin() * 0.1;
        }
        Ok(())
    }
}

fn model() -> Arc<Model> {
    let text = format!(
        r#"{{"model_type": "llama", "vocab_size": {VOCAB}, "hidden_size": 64, "intermediate_size": 176,
            "num_hidden_layers": {LAYERS}, "num_attention_heads": 4}}"#
    );
    Arc::new(build(&Config::parse(&text).unwrap(), 256).unwrap())
}

/// Losses and norms of two steps, the last step's products by shape, and whether the last layer kept its own.
fn train(keep: Keep) -> (Vec<u64>, BTreeMap<String, usize>, bool) {
    let model = model();
    let timed = Arc::new(Timed::new(Arc::new(Cpu::new())));
    let device: Arc<dyn Device> = timed.clone();
    let solo: Arc<dyn Group> = Arc::new(Solo::new("solo", device.clone()));
    let settings = Settings { keep, ..Settings::new(1, Field::tokens(ROWS, SEQ)) };
    let plan = Arc::new(Plan::new(&model, settings, Profile::Cpu).unwrap());
    let keeps_last = plan.keeps_last;
    let mut engine = Engine::new(device, plan, model, Groups::all(solo)).unwrap();
    engine.fill(&Numbers).unwrap();
    let ids: Vec<i32> = (0..(ROWS * SEQ) as i32).map(|i| i * 5 % VOCAB as i32).collect();
    let batch = HostBatch::tokens(&ids, &ids, SEQ, VOCAB).unwrap();
    let adamw = AdamW { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.0, decay: Decay::All };
    let mut curve = Vec::new();
    for step in 1..=2 {
        timed.take().unwrap();
        let hyper = Hyper { adamw, lr: 0.01, clip_norm: 1.0, step };
        engine.step(std::slice::from_ref(&batch), &hyper).unwrap();
        let report = engine.report().unwrap();
        curve.extend([report.loss.to_bits(), report.grad_norm.to_bits()]);
    }
    let products = timed.take().unwrap().into_iter().filter(|kernel| kernel.name.starts_with("gemm"));
    (curve, products.map(|kernel| (kernel.name, kernel.calls)).collect(), keeps_last)
}

#[test]
fn a_second_forward_leaves_out_what_no_backward_needs() {
    let (curve, products, _) = train(Keep::All);
    let (same, again, keeps_last) = train(Keep::Nothing);
    assert_eq!(curve, same, "recompute changed the numbers");
    let tokens = ROWS * SEQ;
    let second_runs = LAYERS - usize::from(keeps_last);
    for (product, out, inner, extra) in [
        ("q, k and v", 192, 64, second_runs),
        ("gate and up", 352, 64, second_runs),
        ("down", 64, 176, 0),
        ("head", VOCAB, 64, 0),
    ] {
        let name = format!("gemm nt {tokens}×{out}×{inner}");
        let (once, twice) = (products[&name], again[&name]);
        assert_eq!(twice, once + extra, "{product} ({name})");
    }
}

#[test]
fn the_last_layer_is_kept_only_where_that_takes_no_more_memory() {
    let model = model();
    let plan = |ranks: usize, seq: usize, loss_chunk: usize| {
        let fields = Field::tokens(2, seq);
        let settings = Settings { keep: Keep::Nothing, loss_chunk, ..Settings::new(ranks, fields) };
        Plan::new(&model, settings, Profile::Cpu).unwrap()
    };
    // One rank ends with all gradients in memory, which is more than there is at the turn.
    assert!(plan(1, 16, 16).keeps_last);
    // With many ranks and logits in one chunk the turn is the fullest moment; a layer kept through it adds to it.
    assert!(!plan(64, 256, 512).keeps_last);
}
