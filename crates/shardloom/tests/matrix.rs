//! N ranks equal one: every reference folder × number of ranks × strategy × recompute mode × accumulation.
//!
//! `cargo test` runs a covering set: every pair of choices is in some run. The whole matrix, over threads and over
//! processes, takes minutes:
//!
//! ```sh
//! SHARDLOOM_MATRIX=all cargo test --release -p shardloom --test matrix -- --nocapture
//! ```
//!
//! The yardstick is our own curve on one rank (which `tests/reference.rs` holds against PyTorch's) on the same rows.
//! Four rows a step do not divide over every number of ranks, so the reference's 48 rows are regrouped.

use checkpoint::safetensors::{File, Layout, Writer};
use serde_json::Value;
use shardloom::Run;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Relative bounds on every step's loss and gradient norm.
const LOSS: f64 = 1e-5;
const NORM: f64 = 1e-4;

const CASES: [&str; 5] = ["llama3", "llama31-tied", "qwen2", "qwen3", "mistral-window"];
/// Ranks, and the rows of a step: at least two for each rank, so that there is something to accumulate.
const RANKS: [(usize, usize); 6] = [(1, 4), (2, 4), (3, 12), (4, 8), (8, 8), (8, 16)];
const STRATEGIES: [&str; 4] = ["full", "grad", "none", "hybrid"];
const RECOMPUTE: [&str; 3] = ["none", "cheap", "full"];
/// One micro-batch, or one of each row.
const ACCUMULATE: [&str; 3] = ["once", "sharded", "unsharded"];

/// One run, as indices into the lists above.
type Choice = [usize; 5];

fn reference(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference").join(case)
}

fn all() -> Vec<Choice> {
    let sizes = [CASES.len(), RANKS.len(), STRATEGIES.len(), RECOMPUTE.len(), ACCUMULATE.len()];
    let count = sizes.iter().product();
    let choices = (0..count).map(|mut index: usize| {
        sizes.map(|size| {
            let at = index % size;
            index /= size;
            at
        })
    });
    choices.filter(|choice| makes_sense(*choice)).collect()
}

/// Two replicas need an even number of ranks, and one row a rank is one micro-batch.
fn makes_sense([_, ranks, strategy, _, accumulate]: Choice) -> bool {
    let (ranks, rows) = RANKS[ranks];
    (STRATEGIES[strategy] != "hybrid" || ranks.is_multiple_of(2)) && (rows > ranks || accumulate == 0)
}

/// Runs such that every pair of choices that makes sense is in one of them: greedily, the run with most new pairs.
fn covering() -> Vec<Choice> {
    let pairs = |choice: &Choice| -> Vec<(usize, usize, usize, usize)> {
        let places = (0..5).flat_map(|a| (0..a).map(move |b| (a, b)));
        places.map(|(a, b)| (a, choice[a], b, choice[b])).collect()
    };
    let all = all();
    let mut missing: BTreeSet<_> = all.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let new = |choice: &&Choice| pairs(choice).iter().filter(|pair| missing.contains(pair)).count();
        let best = *all.iter().max_by_key(new).expect("there are choices");
        for pair in pairs(&best) {
            missing.remove(&pair);
        }
        chosen.push(best);
    }
    chosen
}

fn chosen() -> Vec<Choice> {
    match std::env::var("SHARDLOOM_MATRIX").as_deref() {
        Ok("all") => all(),
        Ok(other) => panic!("SHARDLOOM_MATRIX = {other:?} is unknown; it is \"all\" or not set"),
        Err(_) => covering(),
    }
}

/// The reference's rows in steps of `rows`, in a file of their own.
fn regrouped(case: &str, rows: usize, dir: &Path) -> PathBuf {
    let path = dir.join(format!("{case}-{rows}.safetensors"));
    if path.exists() {
        return path;
    }
    let io = File::open(reference(case).join("io.safetensors")).unwrap();
    let (names, dtype) = (["input_ids", "labels"], io.info("labels").unwrap().dtype);
    let [steps, of, seq] = io.info("labels").unwrap().shape[..] else { panic!("[steps, rows, length]") };
    let shape = [steps * of / rows, rows, seq];
    let layout = Layout::new(&path, names.map(|name| (name, dtype, &shape[..]))).unwrap();
    let writer = Writer::create(&path, layout).unwrap();
    for name in names {
        writer.write_range(name, 0, &io.read(name).unwrap()).unwrap();
    }
    writer.finish().unwrap();
    path
}

/// The RUN.toml of a choice, with files in `dir`.
fn toml([case, ranks, strategy, recompute, accumulate]: Choice, group: &str, dir: &Path) -> String {
    let (ranks, rows) = RANKS[ranks];
    let (micro_batch, accumulate) = match ACCUMULATE[accumulate] {
        "once" => (rows / ranks, "sharded"),
        mode => (1, mode),
    };
    let replicate = if STRATEGIES[strategy] == "hybrid" { 2 } else { 1 };
    format!(
        r#"
        model.path = "{model}"
        data = {{ kind = "batches", path = "{data}" }}
        train = {{ steps = {steps}, global_batch = {rows}, micro_batch = {micro_batch}, accumulate = "{accumulate}" }}
        optimizer = {{ lr = 1e-3, weight_decay = 0.1, decay = "all" }}
        shard = {{ strategy = "{strategy}", replicate = {replicate} }}
        recompute.mode = "{recompute}"
        device = {{ kind = "cpu", group = "{group}", timeout_s = 60 }}
        output = {{ dir = "{out}", model = false }}
        checkpoint.at_end = false
        log.sinks = ["jsonl"]
        "#,
        model = reference(CASES[case]).display(),
        data = regrouped(CASES[case], rows, dir).display(),
        steps = 48 / rows,
        strategy = STRATEGIES[strategy],
        recompute = RECOMPUTE[recompute],
        out = dir.join("out").display(),
    )
}

fn words([case, ranks, strategy, recompute, accumulate]: Choice) -> String {
    let (ranks, rows) = RANKS[ranks];
    let (case, strategy) = (CASES[case], STRATEGIES[strategy]);
    let (recompute, accumulate) = (RECOMPUTE[recompute], ACCUMULATE[accumulate]);
    format!(
        "{case}, {rows} rows on {ranks} ranks, {strategy}, recompute {recompute}, accumulate {accumulate}"
    )
}

/// (losses, norms, peaks) of the last run in `dir`.
fn metrics(dir: &Path) -> [Vec<f64>; 3] {
    let text = std::fs::read_to_string(dir.join("out/metrics.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    ["loss", "grad_norm", "peak_bytes"]
        .map(|key| lines.iter().map(|line| line[key].as_f64().unwrap()).collect())
}

fn on_threads(choice: Choice, dir: &Path) -> [Vec<f64>; 3] {
    let run = Run::parse(&toml(choice, "local", dir), &[]).unwrap();
    shardloom::train(&run, RANKS[choice[1]].0).unwrap();
    metrics(dir)
}

fn on_processes(choice: Choice, dir: &Path) -> [Vec<f64>; 3] {
    let path = dir.join("run.toml");
    std::fs::write(&path, toml(choice, "shm", dir)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardloom"));
    command.arg("train").arg(path).args(["--ranks", &RANKS[choice[1]].0.to_string()]);
    let out = command.output().unwrap();
    assert!(out.status.success(), "{}: {}", words(choice), String::from_utf8_lossy(&out.stderr));
    metrics(dir)
}

fn farthest(ours: &[f64], theirs: &[f64]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    ours.iter().zip(theirs).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max)
}

/// Curves of one rank, each made once.
#[derive(Default)]
struct Yardsticks(HashMap<(usize, usize), [Vec<f64>; 2]>);

impl Yardsticks {
    fn get(&mut self, case: usize, rows: usize, dir: &Path) -> &[Vec<f64>; 2] {
        self.0.entry((case, rows)).or_insert_with(|| {
            let text = toml([case, 0, 0, 0, 0], "local", dir);
            let set = [
                format!("train.global_batch={rows}"),
                format!("train.micro_batch={rows}"),
                format!("train.steps={}", 48 / rows),
                format!("data.path=\"{}\"", regrouped(CASES[case], rows, dir).display()),
            ];
            shardloom::train(&Run::parse(&text, &set).unwrap(), 1).unwrap();
            let [losses, norms, _] = metrics(dir);
            [losses, norms]
        })
    }
}

/// Holds runs against one rank's, and their memory against the plan's.
fn hold(choices: &[Choice], how: fn(Choice, &Path) -> [Vec<f64>; 3]) {
    let dir = tempfile::tempdir().unwrap();
    let (mut yardsticks, start, mut worst) = (Yardsticks::default(), Instant::now(), (0.0, 0.0));
    for &choice in choices {
        let (ranks, rows) = RANKS[choice[1]];
        let [losses, norms, peaks] = how(choice, dir.path());
        let run = Run::parse(&toml(choice, "local", dir.path()), &[]).unwrap();
        let model = tensor::models::build(&run.config, 48).unwrap();
        let planned = shardloom::make_plan(&run, ranks, device::Profile::Cpu).unwrap().peak_bytes(&model);
        let what = words(choice);
        assert!(peaks.iter().all(|peak| *peak == planned as f64), "{what}: {peaks:?}, planned {planned}");
        let [one_losses, one_norms] = yardsticks.get(choice[0], rows, dir.path());
        let off = (farthest(&losses, one_losses), farthest(&norms, one_norms));
        assert!(off.0 <= LOSS && off.1 <= NORM, "{what}: off by {:.1e}, norms {:.1e}", off.0, off.1);
        worst = (f64::max(worst.0, off.0), f64::max(worst.1, off.1));
    }
    let (count, seconds) = (choices.len(), start.elapsed().as_secs_f64());
    println!("{count} runs in {seconds:.1} s: losses within {:.1e}, norms within {:.1e}", worst.0, worst.1);
}

#[test]
fn ranks_that_are_threads_equal_one() {
    hold(&chosen(), on_threads);
}

#[test]
fn ranks_that_are_processes_equal_one() {
    let mut choices: Vec<Choice> = chosen().into_iter().filter(|choice| RANKS[choice[1]].0 > 1).collect();
    if std::env::var_os("SHARDLOOM_MATRIX").is_none() {
        choices = vec![[1, 1, 0, 1, 2], [2, 2, 1, 0, 1], [3, 3, 3, 2, 0], [0, 1, 2, 0, 1]];
    }
    hold(&choices, on_processes);
}

#[test]
fn the_covering_set_has_every_strategy_on_every_number_of_ranks() {
    let covering = covering();
    for choice in all() {
        let alike = |other: &&Choice| other[1..3] == choice[1..3];
        assert!(covering.iter().any(|other| alike(&other)), "{}", words(choice));
    }
    assert!(covering.len() < 60, "{} runs", covering.len());
}
