//! Logits, loss and every gradient against PyTorch's on the reference folders.

mod walk;

use checkpoint::folder;
use checkpoint::safetensors::File;
use device::Dtype;
use serde_json::Value;
use std::path::{Path, PathBuf};
use tensor::Mode;
use tensor::models::{Config, build};
use walk::{Walk, distance};

const CASES: [&str; 5] = ["llama3", "llama31-tied", "qwen2", "qwen3", "mistral-window"];
const ROWS: usize = 4;
const SEQ: usize = 48;

fn path(case: &str, file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference").join(case).join(file)
}

fn floats(bytes: Vec<u8>) -> Vec<f32> {
    bytes.chunks_exact(4).map(|chunk| f32::from_le_bytes(chunk.try_into().unwrap())).collect()
}

/// The first batch's tokens.
fn tokens(io: &File, name: &str) -> Vec<i32> {
    let bytes = io.read(name).unwrap();
    let eight = |chunk: &[u8]| i64::from_le_bytes(chunk.try_into().unwrap()) as i32;
    bytes.chunks_exact(8).take(ROWS * SEQ).map(eight).collect()
}

fn open(case: &str, compute: Dtype) -> (Walk, File) {
    let config = Config::parse(&std::fs::read_to_string(path(case, "config.json")).unwrap()).unwrap();
    let weights = folder::Weights::open(path(case, "")).unwrap();
    let model = build(&config, SEQ).unwrap();
    let mut walk = Walk::new(model, compute, |name| floats(weights.read(name).unwrap()));
    let io = File::open(path(case, "io.safetensors")).unwrap();
    walk.tokens(SEQ, &tokens(&io, "input_ids"), &tokens(&io, "labels"));
    (walk, io)
}

fn mean(losses: &[f32], labels: &[i32]) -> f64 {
    let targets = labels.iter().filter(|label| **label >= 0).count();
    losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / targets as f64
}

/// Names of all weights, with their gradients by PyTorch in f32.
fn gradients(io: &File) -> Vec<(String, Vec<f32>)> {
    let names = io.tensors().filter_map(|(name, _)| name.strip_prefix("grad."));
    names.map(|name| (name.to_string(), floats(io.read(&format!("grad.{name}")).unwrap()))).collect()
}

#[test]
fn logits_loss_and_gradients_are_pytorchs() {
    for case in CASES {
        let (walk, io) = open(case, Dtype::F32);
        let logits = distance(&walk.forward(Mode::Logits), &floats(io.read("logits").unwrap()));
        assert!(logits <= 1e-5, "{case}: logits are off by {logits:e}");
        let (theirs, labels) = (floats(io.read("loss").unwrap())[0], tokens(&io, "labels"));
        let losses = walk.train();
        assert_eq!(losses, walk.forward(Mode::Eval), "{case}: training and evaluation agree");
        let loss = (mean(&losses, &labels) / f64::from(theirs) - 1.0).abs();
        assert!(loss <= 1e-5, "{case}: the loss is off by {loss:e}");
        let gradients = gradients(&io);
        let members: usize = walk.model.items.iter().map(|item| item.members.len()).sum();
        assert_eq!(gradients.len(), members, "{case}: weights");
        let mut worst = (0.0, "");
        for (name, theirs) in &gradients {
            let gradient = distance(&walk.grad(name), theirs);
            assert!(gradient <= 1e-4, "{case}: {name}'s gradient is off by {gradient:e}");
            worst = if gradient > worst.0 { (gradient, name) } else { worst };
        }
        println!("{case}: logits {logits:.1e}, loss {loss:.1e}, gradients {:.1e} ({})", worst.0, worst.1);
    }
}

/// As far from f32 as PyTorch's bf16 is: really bf16, and no worse.
#[test]
fn bf16_is_as_far_from_f32_as_pytorchs() {
    let mut wrong = Vec::new();
    for case in CASES {
        let (walk, io) = open(case, Dtype::Bf16);
        let text = std::fs::read_to_string(path(case, "bf16.json")).unwrap();
        let theirs: Value = serde_json::from_str(&text).unwrap();
        let logits = distance(&walk.forward(Mode::Logits), &floats(io.read("logits").unwrap()));
        let mut ratios = vec![("logits".to_string(), logits / theirs["logits"].as_f64().unwrap())];
        walk.train();
        for (name, exact) in gradients(&io) {
            let off = theirs["grad"][&name].as_f64().unwrap();
            ratios.push((name.clone(), distance(&walk.grad(&name), &exact) / off));
        }
        let outside = |(_, ratio): &&(String, f64)| !(0.3..=1.5).contains(ratio);
        wrong.extend(ratios.iter().filter(outside).map(|(name, ratio)| format!("{case}: {name} {ratio:.2}")));
        ratios.sort_by(|a, b| a.1.total_cmp(&b.1));
        let (least, most) = (&ratios[0], &ratios[ratios.len() - 1]);
        println!("{case}: {:.2} ({}) to {:.2} ({})", least.1, least.0, most.1, most.0);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A frozen weight gets no gradient, and the others' stay the same to the bit.
#[test]
fn frozen_weights_are_left_alone() {
    for case in CASES {
        let (mut walk, io) = open(case, Dtype::F32);
        walk.train();
        let names: Vec<String> = gradients(&io).into_iter().map(|(name, _)| name).collect();
        let before: Vec<Vec<f32>> = names.iter().map(|name| walk.grad(name)).collect();
        let frozen = |name: &str| name.contains("layers.1.") || name == "model.norm.weight";
        let (mut fresh, _) = open(case, Dtype::F32);
        std::mem::swap(&mut walk, &mut fresh);
        names.iter().filter(|name| frozen(name)).for_each(|name| walk.freeze(name));
        walk.train();
        for (name, before) in names.iter().zip(&before) {
            let now = walk.grad(name);
            if frozen(name) {
                assert!(now.iter().all(|value| value.is_nan()), "{case}: {name} was written");
            } else {
                assert_eq!(&now, before, "{case}: {name}");
            }
        }
    }
}
