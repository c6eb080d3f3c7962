//! Training against PyTorch's curves on the reference folders, by the same path `shardloom train` takes.

mod as_pytorch;

use as_pytorch::{reference, run};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Relative bounds on every step's loss and gradient norm.
const LOSS: f64 = 2e-5;
const NORM: f64 = 1e-4;

const CASES: [&str; 5] = ["llama3", "llama31-tied", "qwen2", "qwen3", "mistral-window"];

fn read_json(path: PathBuf) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Trains a case in a folder of its own and returns (losses, norms, peaks) of its metrics.
fn train(case: &str, ranks: usize, set: &[&str], out: &Path) -> [Vec<f64>; 3] {
    shardloom::train(&run(case, set, out), ranks).unwrap();
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    ["loss", "grad_norm", "peak_bytes"]
        .map(|key| lines.iter().map(|line| line[key].as_f64().unwrap()).collect())
}

fn assert_close(what: &str, ours: &[f64], theirs: &[f64], bound: f64) {
    assert_eq!(ours.len(), theirs.len());
    let off = ours.iter().zip(theirs).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
    println!("{what}: within {off:.1e}");
    for (step, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!((a / b - 1.0).abs() <= bound, "{what}, step {}: {a} against {b}", step + 1);
    }
}

fn against_pytorch(case: &str, curve: &str, ranks: usize, set: &[&str]) {
    let out = tempfile::tempdir().unwrap();
    let [losses, norms, _] = train(case, ranks, set, out.path());
    let curve = &read_json(reference(case).join("curve.json"))["curves"][curve];
    let what = format!("{case}, {ranks} ranks, {set:?}");
    assert_close(&format!("{what}: loss"), &losses, &numbers(&curve["loss"]), LOSS);
    assert_close(&format!("{what}: norm"), &norms, &numbers(&curve["grad_norm"]), NORM);
}

#[test]
fn one_rank_follows_pytorch() {
    for case in CASES {
        against_pytorch(case, "clip1", 1, &["shard.strategy=full"]);
        against_pytorch(case, "plain", 1, &["train.clip_norm=0"]);
    }
}

#[test]
fn two_ranks_follow_pytorch_with_every_strategy() {
    for case in CASES {
        for strategy in ["full", "grad", "none"] {
            against_pytorch(case, "clip1", 2, &[&format!("shard.strategy={strategy}")]);
        }
    }
}

#[test]
fn four_ranks_and_other_units_follow_pytorch() {
    for set in ["shard.wrap=none", "shard.prefetch=0", "shard.prefetch=3", "shard.wrap={min_params=60000}"] {
        against_pytorch("llama31-tied", "clip1", 4, &[set]);
    }
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    for (ranks, strategy) in [(1, "full"), (2, "full"), (2, "grad"), (2, "none")] {
        for case in CASES {
            let set = ["train.micro_batch=1", &format!("shard.strategy={strategy}")];
            against_pytorch(case, "accum4", ranks, &set);
        }
    }
}

fn floats(bytes: Vec<u8>) -> Vec<f64> {
    bytes.chunks_exact(4).map(|c| f64::from(f32::from_le_bytes(c.try_into().unwrap()))).collect()
}

fn doubles(bytes: Vec<u8>) -> Vec<f64> {
    bytes.chunks_exact(8).map(|c| f64::from_le_bytes(c.try_into().unwrap())).collect()
}

#[test]
fn the_head_may_turn_few_tokens_at_a_time() {
    for chunk in ["train.loss_chunk=1", "train.loss_chunk=37"] {
        against_pytorch("llama3", "clip1", 2, &[chunk]);
        against_pytorch("llama31-tied", "clip1", 1, &[chunk]);
    }
}

#[test]
fn memory_grows_with_the_sequence_and_not_with_its_square_or_the_vocabulary() {
    let peak = |vocab: usize, seq: usize| {
        let text = format!(
            r#"{{"model_type": "llama", "vocab_size": {vocab}, "hidden_size": 64, "intermediate_size": 128,
                "num_hidden_layers": 1, "num_attention_heads": 4}}"#
        );
        let config = tensor::models::Config::parse(&text).unwrap();
        let model = std::sync::Arc::new(tensor::models::build(&config, seq).unwrap());
        let mut run = run("llama3", &[], Path::new("unused"));
        run.config = config;
        let fields = fsdp::Field::tokens(1, seq);
        let settings = run.settings(1, fields, 1, device::Profile::Cpu);
        let plan = fsdp::Plan::new(&model, settings, device::Profile::Cpu).unwrap();
        plan.regions().iter().find(|region| region.name == "step").unwrap().bytes
    };
    let (short, long) = (peak(512, 4096), peak(512, 8192));
    assert!(long < short * 21 / 10, "{short} bytes at 4096, {long} at 8192");
    let whole = 8192 * 128_256 * 4;
    let gradient = 2 * 128_256 * 64 * 4;
    let large = peak(128_256, 8192);
    assert!(
        large < long + gradient + (200 << 20) && large < whole / 5,
        "{large} bytes, logits alone {whole}"
    );
}

/// A weight of a folder of f32, as bits.
fn weight(dir: &Path, name: &str) -> Vec<u8> {
    checkpoint::folder::Weights::open(dir).unwrap().read(name).unwrap()
}

#[test]
fn frozen_weights_stay_and_the_others_train_as_before() {
    let frozen = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.input_layernorm.weight",
    ];
    let trained =
        ["model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight", "lm_head.weight"];
    let freeze = "model.freeze=[\"*embed*\", \"model.layers.0.mlp.*\", \"model.layers.1.*\"]";
    let source = reference("llama3");
    let mut curves = Vec::new();
    for (ranks, more) in [
        (1, "shard.strategy=full"),
        (2, "shard.strategy=full"),
        (2, "recompute.mode=full"),
        (2, "shard.strategy=none"),
        (2, "train.micro_batch=1"),
    ] {
        let out = tempfile::tempdir().unwrap();
        let [losses, norms, peaks] = train("llama3", ranks, &[freeze, more], out.path());
        for name in frozen {
            assert_eq!(weight(&out.path().join("model"), name), weight(&source, name), "{name} is frozen");
        }
        for name in trained {
            assert_ne!(weight(&out.path().join("model"), name), weight(&source, name), "{name} is trained");
        }
        curves.push((losses, norms, peaks[0]));
    }
    for (losses, norms, _) in &curves[1..] {
        assert_close("frozen, loss", losses, &curves[0].0, 1e-5);
        assert_close("frozen, norm", norms, &curves[0].1, 1e-4);
    }
    // The first loss is that of all weights; the gradient has fewer parts.
    let out = tempfile::tempdir().unwrap();
    let [losses, norms, peaks] = train("llama3", 1, &[], out.path());
    assert!((losses[0] / curves[0].0[0] - 1.0).abs() < 1e-6 && norms[0] > curves[0].1[0]);
    // 112,960 frozen weights have no moments.
    assert!(curves[0].2 + 8.0 * 112_960.0 <= peaks[0], "{} bytes frozen, {} without", curves[0].2, peaks[0]);
}

#[test]
fn what_cannot_be_frozen_is_named() {
    let refuse = |freeze: &str| {
        let run = run("llama3", &[freeze], Path::new("unused"));
        shardloom::make_plan(&run, 2, device::Profile::Cpu).unwrap_err()
    };
    for (freeze, named) in [
        ("model.freeze=[\"*k_proj*\"]", "q_proj"),
        ("model.freeze=[\"transformer.*\"]", "model.embed_tokens.weight"),
        ("model.freeze=[\"*\"]", "nothing to train"),
    ] {
        let error = refuse(freeze);
        assert!(error.to_string().contains(named) && error.exit_status() == 2, "{error}");
    }
}

#[test]
fn recomputing_changes_no_bit() {
    for case in ["llama3", "llama31-tied"] {
        for set in [&["shard.strategy=full"][..], &["precision.compute=bf16", "train.micro_batch=1"]] {
            let curve = |mode: &str| {
                let out = tempfile::tempdir().unwrap();
                let mode = format!("recompute.mode={mode}");
                let [losses, norms, peaks] = train(case, 2, &[set, &[&mode]].concat(), out.path());
                (losses, norms, peaks[0])
            };
            let (none, cheap, full) = (curve("none"), curve("cheap"), curve("full"));
            assert_eq!((&none.0, &none.1), (&cheap.0, &cheap.1));
            assert_eq!((&none.0, &none.1), (&full.0, &full.1));
            assert!(none.2 > cheap.2 && cheap.2 > full.2, "{} > {} > {} bytes", none.2, cheap.2, full.2);
        }
    }
}

#[test]
fn reducing_once_gives_the_same_curve() {
    for case in ["llama3", "llama31-tied"] {
        let set = ["train.micro_batch=1", "train.accumulate=unsharded"];
        against_pytorch(case, "accum4", 2, &set);
    }
}

#[test]
fn hybrid_sharding_follows_pytorch() {
    for case in ["llama3", "llama31-tied"] {
        against_pytorch(case, "clip1", 4, &["shard.strategy=hybrid", "shard.replicate=2"]);
        against_pytorch(case, "clip1", 2, &["shard.strategy=hybrid", "shard.replicate=2"]);
    }
    let set = ["shard.strategy=HYBRID_SHARD", "shard.replicate=2", "recompute.mode=full"];
    against_pytorch("llama31-tied", "clip1", 4, &set);
}

#[test]
fn offloading_changes_no_bit() {
    for set in [&["shard.strategy=full"][..], &["precision.compute=bf16", "train.micro_batch=1"]] {
        let curve = |offload: &str| {
            let out = tempfile::tempdir().unwrap();
            let [losses, norms, peaks] = train("llama3", 2, &[set, &[offload]].concat(), out.path());
            (losses, norms, weight(&out.path().join("model"), "lm_head.weight"), peaks[0])
        };
        let plain = curve("shard.offload=[]");
        for words in ["\"all\"", "[\"moments\"]", "[\"gradients\", \"weights\"]"] {
            let offloaded = curve(&format!("shard.offload={words}"));
            assert_eq!((&plain.0, &plain.1, &plain.2), (&offloaded.0, &offloaded.1, &offloaded.2), "{words}");
            // Weights of the master's dtype on the host save nothing while the master is on the device.
            let most = if words.contains("weights") { plain.3 } else { plain.3 - 1.0 };
            assert!(offloaded.3 <= most, "{words}: {} bytes, {} without", offloaded.3, plain.3);
        }
    }
}

#[test]
fn after_forward_changes_no_bit() {
    let curve = |set: &[&str]| {
        let out = tempfile::tempdir().unwrap();
        let [losses, norms, _] = train("llama31-tied", 4, set, out.path());
        (losses, norms)
    };
    let plain = curve(&[]);
    let rules = "shard.unit=[{kinds=[\"LlamaDecoderLayer\"], blocks=[1,3], after_forward=2}]";
    for set in ["shard.after_forward=keep", "shard.after_forward=2", rules] {
        assert_eq!(curve(&[set]), plain, "{set}");
    }
}

#[test]
fn a_mesh_that_does_not_come_out_is_refused() {
    let run = run("llama3", &["shard.strategy=hybrid", "shard.replicate=3"], Path::new("unused"));
    let error = shardloom::make_plan(&run, 4, device::Profile::Cpu).unwrap_err();
    assert!(error.to_string().contains("4 ranks") && error.exit_status() == 2, "{error}");
}

/// Which elements of a weight have a gradient that is more than rounding.
///
/// A constant added to all keys moves all scores of a query alike, which softmax does not see. So where RoPE turns
/// slowly, the gradient of a key's bias is zero but for rounding, and Adam divides that rounding by its own size.
/// PyTorch's own f32 runs end 1.3e-4 (attention "eager") and 2.1e-4 ("sdpa") from its f64 run there, and 1.7e-4 from each
/// other. So such elements are compared with the f64 run alone, and may be as far from it as PyTorch's.
fn has_gradient(case: &str, name: &str) -> Vec<bool> {
    let io = checkpoint::safetensors::File::open(reference(case).join("io.safetensors")).unwrap();
    let gradient = floats(io.read(&format!("grad.{name}")).unwrap());
    let most = gradient.iter().fold(0.0f64, |most, g| most.max(g.abs()));
    let rounding = if name.ends_with("k_proj.bias") { 1e-4 } else { 0.0 };
    gradient.iter().map(|g| g.abs() >= rounding * most).collect()
}

/// Norm-wise, of the elements that count.
fn distance(ours: &[f64], theirs: &[f64], counts: &[bool]) -> f64 {
    let squares = (0..ours.len()).filter(|&i| counts[i]).map(|i| (ours[i] - theirs[i]).powi(2));
    (squares.sum::<f64>() / theirs.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

#[test]
fn the_final_folder_holds_what_pytorch_arrived_at() {
    for case in CASES {
        let out = tempfile::tempdir().unwrap();
        train(case, 1, &[], out.path());
        let open = |file: &str| checkpoint::safetensors::File::open(reference(case).join(file));
        let ours = checkpoint::folder::Weights::open(out.path().join("model")).unwrap();
        let (theirs, exact) = (open("after12.safetensors").unwrap(), open("after12-f64.safetensors").ok());
        assert_eq!(ours.tensors().len(), theirs.tensors().len());
        let mut worst = (0.0, String::new());
        for (name, _) in theirs.tensors() {
            let (ours, theirs) = (floats(ours.read(name).unwrap()), floats(theirs.read(name).unwrap()));
            let (counts, all) = (has_gradient(case, name), vec![true; ours.len()]);
            let far = distance(&ours, &theirs, &counts);
            assert!(far <= 1e-4, "{case}: {name}: {far:e}");
            if counts != all {
                let exact = doubles(exact.as_ref().unwrap().read(name).unwrap());
                let (from_exact, whole) = (distance(&ours, &exact, &all), distance(&ours, &theirs, &all));
                assert!(from_exact <= 2.1e-4, "{case}: {name}: {from_exact:e} from the f64 run");
                println!("{case}: {name}: {far:.1e}; all elements {whole:.1e}, {from_exact:.1e} from f64");
            }
            worst = if far > worst.0 { (far, name.to_string()) } else { worst };
        }
        println!("{case}: weights after 12 steps within {:.1e} ({})", worst.0, worst.1);
    }
}

#[test]
fn bf16_follows_pytorchs_bf16() {
    let set = ["precision.compute=bf16"];
    for case in CASES {
        let out = tempfile::tempdir().unwrap();
        let [losses, norms, _] = train(case, 2, &set, out.path());
        let curve = &read_json(reference(case).join("fsdp2.json"))["curves"]["bf16"];
        assert_close(&format!("{case}: bf16 loss"), &losses, &numbers(&curve["loss"]), 5e-4);
        assert_close(&format!("{case}: bf16 norm"), &norms, &numbers(&curve["grad_norm"]), 1e-2);
    }
}

#[test]
fn f16_follows_the_exact_curve() {
    for case in CASES {
        for ranks in [1, 2] {
            let out = tempfile::tempdir().unwrap();
            let [losses, norms, _] = train(case, ranks, &["precision.compute=f16"], out.path());
            let curve = &read_json(reference(case).join("curve.json"))["curves"]["clip1"];
            assert_close(&format!("{case}: f16 loss"), &losses, &numbers(&curve["loss"]), 1e-3);
            assert_close(&format!("{case}: f16 norm"), &norms, &numbers(&curve["grad_norm"]), 1e-2);
        }
    }
}

#[test]
fn skipped_steps_and_the_scale_are_in_the_metrics() {
    let out = tempfile::tempdir().unwrap();
    let set = ["precision.compute=f16", "precision.init_scale=1e9", "precision.scale_interval=4"];
    shardloom::train(&run("llama3", &set, out.path()), 2).unwrap();
    let text = std::fs::read_to_string(out.path().join("metrics.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let column = |key: &str| lines.iter().map(|line| line[key].as_f64()).collect::<Vec<_>>();
    let (norms, scales, skipped) = (column("grad_norm"), column("loss_scale"), column("skipped_steps"));
    assert_eq!((norms[0], scales[0], skipped[0]), (None, Some(5e8), Some(1.0)));
    let all = norms.iter().filter(|norm| norm.is_none()).count();
    assert!(all < 12 && skipped[11] == Some(all as f64), "{text}");
    assert!(norms.iter().flatten().all(|norm| *norm < 100.0), "norms are unscaled: {text}");
}

#[test]
fn a_resumed_f16_run_goes_on_with_its_scale() {
    let set = ["precision.compute=f16", "precision.init_scale=1e9", "precision.scale_interval=2"];
    let lines = |out: &Path| -> Vec<Vec<Option<f64>>> {
        let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        let keys = ["step", "loss", "grad_norm", "loss_scale", "skipped_steps"];
        let line = |line: &str| {
            let value: Value = serde_json::from_str(line).unwrap();
            keys.map(|key| value[key].as_f64()).to_vec()
        };
        text.lines().map(line).collect()
    };
    let straight = tempfile::tempdir().unwrap();
    shardloom::train(&run("llama3", &set, straight.path()), 2).unwrap();
    let one = lines(straight.path());
    assert!(one[5][4] > Some(0.0), "{one:?}");
    for offload in ["shard.offload=[]", "shard.offload=\"all\"", "shard.offload=[\"moments\"]"] {
        let stopped = tempfile::tempdir().unwrap();
        let set = [&set[..], &[offload]].concat();
        let half = [&set[..], &["train.steps=6", "checkpoint.every=6"]].concat();
        shardloom::train(&run("llama3", &half, stopped.path()), 2).unwrap();
        shardloom::train_from(&run("llama3", &set, stopped.path()), 2, &shardloom::Resume::Latest).unwrap();
        assert_eq!(one, lines(stopped.path()), "{offload}");
    }
}

#[test]
fn a_gradient_that_is_not_finite_ends_the_run_and_is_named() {
    for (ranks, place) in [(1, "on rank 0"), (2, "on ranks 0, 1")] {
        let out = tempfile::tempdir().unwrap();
        let error = shardloom::train(&run("llama3", &["optimizer.lr=1e30"], out.path()), ranks).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("step 2") && text.contains("LlamaDecoderLayer 2") && text.contains(place),
            "{text}"
        );
        assert_eq!(error.exit_status(), 1);
    }
}

#[test]
fn the_same_run_gives_the_same_bits() {
    for set in [vec![], vec!["precision.compute=bf16", "train.micro_batch=1"]] {
        let outs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [a, b] = outs.each_ref().map(|out| train("llama31-tied", 2, &set, out.path()));
        assert_eq!(a, b);
    }
}

#[test]
fn the_devices_peak_is_the_plans() {
    for (ranks, strategy, micro) in
        [(1, "full", 4), (2, "full", 2), (2, "full", 1), (2, "none", 1), (4, "grad", 1)]
    {
        for precision in ["f32", "bf16", "f16"] {
            let out = tempfile::tempdir().unwrap();
            let set = [
                format!("shard.strategy={strategy}"),
                format!("train.micro_batch={micro}"),
                format!("precision.compute={precision}"),
            ];
            let set: Vec<&str> = set.iter().map(String::as_str).collect();
            let [.., peaks] = train("llama3", ranks, &set, out.path());
            let run = run("llama3", &set, out.path());
            let model = tensor::models::build(&run.config, 48).unwrap();
            let plan = shardloom::make_plan(&run, ranks, device::Profile::Cpu).unwrap();
            let planned = plan.peak_bytes(&model) as f64;
            assert!(
                peaks.iter().all(|peak| *peak == planned),
                "{peaks:?} measured, {planned} planned: {set:?}"
            );
        }
    }
}
