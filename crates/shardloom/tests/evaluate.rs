//! Evaluation against PyTorch's first loss, on one rank and on several.

use checkpoint::safetensors::File;
use comm::{Solo, local};
use device::{Device, Profile, cpu::Cpu};
use fsdp::{Engine, Evaluation, Field, Groups, HostBatch, Hyper, Plan, Settings, Strategy};
use shardloom::source::Folder;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tensor::Keep;
use tensor::models::{Config, build};
use tensor::optim::{AdamW, Decay};

const SEQ: usize = 48;
const VOCAB: usize = 515;

/// A rank's micro-batches of the first four rows.
fn first_batch(file: &File, rank: usize, ranks: usize, micro: usize) -> Vec<HostBatch> {
    let read = |name: &str| -> Vec<i32> {
        let bytes = file.read(name).unwrap();
        bytes.chunks_exact(8).map(|eight| i64::from_le_bytes(eight.try_into().unwrap()) as i32).collect()
    };
    let (ids, labels, rows) = (read("input_ids"), read("labels"), 4 / ranks);
    let mine = rank * rows * SEQ..(rank + 1) * rows * SEQ;
    let batches = ids[mine.clone()].chunks(micro * SEQ).zip(labels[mine].chunks(micro * SEQ));
    batches.map(|(ids, labels)| HostBatch::tokens(ids, labels, SEQ, VOCAB).unwrap()).collect()
}

fn reference(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference").join(case)
}

/// Evaluates the first batch before and after `train` steps on it, as `ranks` threads; every rank's results.
fn evaluate(
    case: &str,
    ranks: usize,
    strategy: Strategy,
    keep: Keep,
    micro: usize,
    train: u64,
) -> Vec<[Evaluation; 2]> {
    let dir = reference(case);
    let config = Config::parse(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap();
    let model = Arc::new(build(&config, SEQ).unwrap());
    let file = File::open(dir.join("io.safetensors")).unwrap();
    let fields = Field::tokens(micro, SEQ);
    let settings = Settings {
        strategy,
        micro_batches: 4 / ranks / micro,
        keep,
        loss_chunk: 32,
        ..Settings::new(ranks, fields)
    };
    let plan = Arc::new(Plan::new(&model, settings, Profile::Cpu).unwrap());
    let rank = |rank: usize, device: Arc<dyn Device>, groups: Groups| {
        let mut engine = Engine::new(device, plan.clone(), model.clone(), groups).unwrap();
        engine.fill(&Folder::open(&dir, &model).unwrap()).unwrap();
        let batch = first_batch(&file, rank, ranks, micro);
        let before = engine.evaluate(&batch).unwrap();
        let adamw = AdamW { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.0, decay: Decay::All };
        for step in 1..=train {
            engine.step(&batch, &Hyper { adamw, lr: 1e-3, clip_norm: 1.0, step }).unwrap();
        }
        let after = engine.evaluate(&batch).unwrap();
        if train > 0 {
            // The report is the last step's still, and tells of the weights before its update.
            let report = engine.report().unwrap();
            assert!(report.loss > after.loss && report.grad_norm > 0.0, "{report:?} {after:?}");
        }
        [before, after]
    };
    if ranks == 1 {
        let device: Arc<dyn Device> = Arc::new(Cpu::new());
        let groups = Groups::all(Arc::new(Solo::new("solo", device.clone())));
        return vec![rank(0, device, groups)];
    }
    let timeout = Duration::from_secs(60);
    let pairs =
        local::group("gather", ranks, timeout).into_iter().zip(local::group("reduce", ranks, timeout));
    std::thread::scope(|scope| {
        let threads: Vec<_> = pairs
            .enumerate()
            .map(|(index, (gather, reduce))| {
                let rank = &rank;
                let groups = Groups { world: reduce.clone(), gather, replicate: reduce.clone(), reduce };
                scope.spawn(move || rank(index, Arc::new(Cpu::new()), groups))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn assert_close(what: &str, a: f64, b: f64, bound: f64) {
    assert!((a / b - 1.0).abs() <= bound, "{what}: {a} against {b}");
}

#[test]
fn the_loss_is_pytorchs_on_any_number_of_ranks() {
    for case in ["llama3", "llama31-tied"] {
        let file = File::open(reference(case).join("io.safetensors")).unwrap();
        let loss = f64::from(f32::from_le_bytes(file.read("loss").unwrap().try_into().unwrap()));
        for (ranks, micro) in [(1, 4), (1, 1), (2, 2), (2, 1), (4, 1)] {
            for strategy in [Strategy::Full, Strategy::Grad, Strategy::None] {
                let what = format!("{case}, {ranks} ranks, {strategy:?}, {micro} rows");
                let results = evaluate(case, ranks, strategy, Keep::All, micro, 0);
                assert!(
                    results.iter().flatten().all(|result| *result == results[0][0]),
                    "{what}: {results:?}"
                );
                assert_close(&what, results[0][0].loss, loss, 1e-5);
                assert!(results[0][0].num_targets > 100);
            }
        }
    }
}

#[test]
fn evaluation_sees_what_training_did_and_leaves_it_alone() {
    let [before, after] = evaluate("llama31-tied", 1, Strategy::Full, Keep::All, 4, 5)[0];
    assert!(after.loss < before.loss - 0.1, "{before:?} {after:?}");
    for (ranks, strategy, keep, micro) in [
        (1, Strategy::Full, Keep::All, 2),
        (2, Strategy::Full, Keep::Expensive, 1),
        (2, Strategy::Full, Keep::Nothing, 2),
        (2, Strategy::None, Keep::Nothing, 2),
    ] {
        let results = evaluate("llama31-tied", ranks, strategy, keep, micro, 5);
        assert!(results.iter().all(|result| *result == results[0]));
        assert_close("after five steps", results[0][1].loss, after.loss, 2e-5);
    }
}
