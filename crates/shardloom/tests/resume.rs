//! Runs that go on from a checkpoint equal those that were never interrupted.
//!
//! `cargo test` resumes each number of ranks and strategy from itself and from another; every pair runs with
//!
//! ```sh
//! SHARDLOOM_MATRIX=all cargo test --release -p shardloom --test resume -- --nocapture
//! ```

use checkpoint::safetensors::{File, Layout, Writer};
use serde_json::Value;
use shardloom::{Error, Resume, Run, checkpoints};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Relative, on losses and norms of runs with other numbers of ranks.
const ROUNDING: f64 = 1e-5;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The reference's 48 rows as four steps of twelve, which every number of ranks up to four divides.
fn twelve_rows(dir: &Path) -> PathBuf {
    let path = dir.join("rows.safetensors");
    let io = File::open(root().join("tests/reference/llama3/io.safetensors")).unwrap();
    let (names, info) = (["input_ids", "labels"], io.info("labels").unwrap());
    let shape = [4, 12, info.shape[2]];
    let layout = Layout::new(&path, names.map(|name| (name, info.dtype, &shape[..]))).unwrap();
    let writer = Writer::create(&path, layout).unwrap();
    names.iter().for_each(|name| writer.write_range(name, 0, &io.read(name).unwrap()).unwrap());
    writer.finish().unwrap();
    path
}

/// Number of ranks, strategy.
type Choice = (usize, &'static str);

fn choices() -> Vec<Choice> {
    let all = (1..=4).flat_map(|ranks| ["full", "grad", "none", "hybrid"].map(|strategy| (ranks, strategy)));
    all.filter(|(ranks, strategy)| *strategy != "hybrid" || ranks % 2 == 0).collect()
}

fn run((_, strategy): Choice, data: &Path, out: &Path, more: &[&str]) -> Run {
    let text = format!(
        r#"
        model.path = "{model}"
        data = {{ kind = "batches", path = "{data}" }}
        train = {{ steps = 4, global_batch = 12 }}
        optimizer = {{ lr = 1e-3, weight_decay = 0.1, decay = "all" }}
        schedule = {{ kind = "cosine", warmup_steps = 1 }}
        shard = {{ strategy = "{strategy}", replicate = {replicate} }}
        device = {{ kind = "cpu", group = "local", timeout_s = 60 }}
        checkpoint = {{ every = 2, keep = 0 }}
        output = {{ dir = "{out}", model = false }}
        log.sinks = ["jsonl"]
        "#,
        model = root().join("tests/reference/llama3").display(),
        data = data.display(),
        out = out.display(),
        replicate = if strategy == "hybrid" { 2 } else { 1 },
    );
    Run::parse(&text, &more.iter().map(|set| set.to_string()).collect::<Vec<_>>()).unwrap()
}

/// Step, loss and norm of every line of metrics.
fn curve(out: &Path) -> Vec<(u64, f64, f64)> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines
        .map(|line| {
            (
                line["step"].as_u64().unwrap(),
                line["loss"].as_f64().unwrap(),
                line["grad_norm"].as_f64().unwrap(),
            )
        })
        .collect()
}

fn farthest(ours: &[(u64, f64, f64)], theirs: &[(u64, f64, f64)]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let off = |(a, b): (&(u64, f64, f64), &(u64, f64, f64))| {
        assert_eq!(a.0, b.0);
        (a.1 / b.1 - 1.0).abs().max((a.2 / b.2 - 1.0).abs() / 10.0)
    };
    ours.iter().zip(theirs).map(off).fold(0.0, f64::max)
}

#[test]
fn from_any_ranks_and_strategy_to_any_other() {
    let dir = tempfile::tempdir().unwrap();
    let data = twelve_rows(dir.path());
    let choices = choices();
    let folder = |(ranks, strategy): Choice| dir.path().join(format!("{ranks}-{strategy}"));
    for &choice in &choices {
        shardloom::train(&run(choice, &data, &folder(choice), &[]), choice.0).unwrap();
    }
    let all = std::env::var("SHARDLOOM_MATRIX").is_ok_and(|value| value == "all");
    let (mut resumed, mut worst, count) = (0, 0.0f64, choices.len());
    for (index, &saved) in choices.iter().enumerate() {
        let some = [saved, choices[(index + 5) % count]];
        for &loaded in if all { &choices[..] } else { &some[..] } {
            let out = dir.path().join("out");
            let _ = std::fs::remove_dir_all(&out);
            let resume = Resume::From(folder(saved).join("checkpoints/step-000002"));
            shardloom::train_from(&run(loaded, &data, &out, &[]), loaded.0, &resume).unwrap();
            let what = format!("saved by {saved:?}, loaded by {loaded:?}");
            let (mine, whole) = (curve(&out), curve(&folder(loaded)));
            if saved == loaded {
                assert_eq!(mine, whole[2..], "{what}");
                // Down to the last bit of the optimizer's state.
                for file in ["model.safetensors", "optimizer.safetensors"] {
                    let last =
                        |dir: &Path| std::fs::read(dir.join("checkpoints/step-000004").join(file)).unwrap();
                    assert!(last(&out) == last(&folder(loaded)), "{what}: {file} differs");
                }
            }
            let off = farthest(&mine, &whole[2..]);
            assert!(off <= ROUNDING, "{what}: off by {off:.1e}");
            (resumed, worst) = (resumed + 1, worst.max(off));
        }
    }
    println!("{resumed} resumed runs, within {worst:.1e}");
}

/// The command on a quickstart small enough to be run often, in folder `out`.
fn command(out: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardloom"));
    command.current_dir(root()).args(["train", "examples/quickstart/RUN.toml"]).args(args);
    let dir = format!("output.dir=\"{}\"", out.display());
    let sets = [
        "train.global_batch=4",
        "data.seq_len=32",
        "device.kind=\"cpu\"",
        "log.sinks=[\"jsonl\"]",
        "log.every=1",
        &dir,
    ];
    for set in sets {
        command.args(["--set", set]);
    }
    for name in ["RANK", "WORLD_SIZE", "SHARDLOOM_SECRET"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn finished(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    text
}

#[test]
fn a_job_that_is_killed_and_started_again_and_again_trains_as_if_nothing_had_happened() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    let args = [
        "--ranks",
        "2",
        "--set",
        "train.steps=40",
        "--set",
        "checkpoint.every=3",
        "--set",
        "output.model=false",
        "--set",
        "device.group=\"shm\"",
    ];
    let tcp = [&args[..], &["--set", "device.group=\"tcp\""]].concat();
    finished(&command(&whole, &args).output().unwrap());
    // The wait for a checkpoint is in the line after it.
    let lines = std::fs::read_to_string(whole.join("metrics.jsonl")).unwrap();
    for (line, step) in lines.lines().zip(1u64..) {
        let waited = serde_json::from_str::<Value>(line).unwrap()["checkpoint_wait_ms"].as_f64();
        assert_eq!(waited.is_some(), step % 3 == 1 && step > 1, "{line}");
    }
    let metrics = broken.join("metrics.jsonl");
    let lines = || std::fs::read_to_string(&metrics).map_or(0, |text| text.lines().count());
    for kill in 0..4 {
        // The same line starts it and starts it again.
        let args = [if kill == 1 { &tcp[..] } else { &args[..] }, &["--resume", "latest"]].concat();
        let mut job = command(&broken, &args).spawn().unwrap();
        while lines() < 8 * (kill + 1) && job.try_wait().unwrap().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // Processes of ranks end with their launcher.
        job.kill().unwrap();
        let text = String::from_utf8(job.wait_with_output().unwrap().stderr).unwrap();
        match kill {
            0 => assert!(text.contains("no checkpoint") && text.contains("from the beginning"), "{text}"),
            _ => assert!(text.contains("going on from") && text.contains("step-0000"), "{text}"),
        }
    }
    // A line that was being written when the job was killed.
    let mut text = std::fs::read_to_string(&metrics).unwrap();
    text += "{\"step\":39,\"lo";
    std::fs::write(&metrics, text).unwrap();
    finished(&command(&broken, &[&args[..], &["--resume"]].concat()).output().unwrap());
    assert_eq!(curve(&broken), curve(&whole));
    let last = |dir: &Path| std::fs::read(dir.join("checkpoints/latest/optimizer.safetensors")).unwrap();
    assert!(last(&broken) == last(&whole));
    let kept = std::fs::read_dir(broken.join("checkpoints")).unwrap().count();
    assert_eq!(kept, 3, "two checkpoints and latest");
    // With everything done there is nothing to do.
    let text = finished(&command(&broken, &[&args[..], &["--resume"]].concat()).output().unwrap());
    assert!(text.contains("nothing is left to do"), "{text}");
    assert_eq!(curve(&broken), curve(&whole));
}

#[test]
fn text_goes_on_at_the_next_row_whatever_the_ranks_and_the_batch() {
    let dir = tempfile::tempdir().unwrap();
    let set = |more: &[&str]| {
        let mut all =
            vec!["--set", "checkpoint.every=5", "--set", "checkpoint.keep=0", "--set", "output.model=false"];
        all.extend(more.iter().flat_map(|set| ["--set", *set]));
        all.into_iter().map(String::from).collect::<Vec<_>>()
    };
    let train = |out: &Path, ranks: &str, more: &[&str], resume: &[&str]| {
        let args = set(more);
        let args: Vec<&str> = args.iter().map(String::as_str).chain(["--ranks", ranks]).collect();
        finished(&command(out, &[&args[..], resume].concat()).output().unwrap())
    };
    // Long rows of few tales: steps 5 to 15 cross the end of an epoch.
    let text = dir.path().join("tales.txt");
    std::fs::write(
        &text,
        "Once there was an owl who counted pebbles by the river every single night. ".repeat(9),
    )
    .unwrap();
    let data = format!("data.path=\"{}\"", text.display());
    let few = ["train.steps=15", &data];
    let whole = dir.path().join("whole");
    let saved = whole.join("checkpoints/step-000005");
    train(&whole, "1", &few, &[]);
    for ranks in ["2", "4"] {
        let out = dir.path().join(ranks);
        train(&out, ranks, &few, &["--resume", &saved.display().to_string()]);
        let off = farthest(&curve(&out), &curve(&whole)[5..]);
        assert!(off <= 1e-4, "{ranks} ranks: off by {off:.1e}");
    }
    // Another size of batch: the position counts rows, not steps.
    let out = dir.path().join("batch");
    train(
        &out,
        "1",
        &[&few[..], &["train.global_batch=10"]].concat(),
        &["--resume", &saved.display().to_string()],
    );
    let state: Value =
        serde_json::from_slice(&std::fs::read(out.join("checkpoints/step-000010/state.json")).unwrap())
            .unwrap();
    let rows: Value = serde_json::from_slice(&std::fs::read(saved.join("state.json")).unwrap()).unwrap();
    assert_eq!(rows["data"]["fingerprint"], state["data"]["fingerprint"]);
    // In data of some number of rows these are 20 rows, and 50 more.
    let position = |data: &Value, epoch_rows: u64| {
        data["epoch"].as_u64().unwrap() * epoch_rows + data["row"].as_u64().unwrap()
    };
    let fits =
        |rows_of: u64| position(&rows["data"], rows_of) == 20 && position(&state["data"], rows_of) == 70;
    assert!((10..60).any(fits), "{} {}", rows["data"], state["data"]);
    // Other data is refused.
    std::fs::write(&text, "Something else altogether, told at length to whoever listens. ".repeat(12))
        .unwrap();
    let run = Run::load(
        &root().join("examples/quickstart/RUN.toml"),
        &[
            data,
            "data.seq_len=32".into(),
            "train.global_batch=4".into(),
            format!("output.dir=\"{}\"", dir.path().join("other").display()),
            "device.kind=\"cpu\"".into(),
        ],
    )
    .unwrap();
    let error = shardloom::train_from(&run, 1, &Resume::From(saved)).unwrap_err().to_string();
    assert!(error.contains("other data") && error.contains("model.path"), "{error}");
}

#[test]
fn coarser_checkpoints_and_frozen_weights() {
    let dir = tempfile::tempdir().unwrap();
    let data = twelve_rows(dir.path());
    let mixed = [
        "precision={compute=\"bf16\"}",
        "model.freeze=[\"model.embed_tokens.*\", \"model.layers.0.*\"]",
        "output.model=true",
    ];
    let source = checkpoint::folder::Weights::open(root().join("tests/reference/llama3")).unwrap();
    for dtype in ["master", "compute"] {
        let set = format!("checkpoint.dtype=\"{dtype}\"");
        let sets = [&mixed[..], &[&set]].concat();
        let (whole, out) = (dir.path().join(dtype), dir.path().join(format!("{dtype}-on")));
        shardloom::train(&run((2, "full"), &data, &whole, &sets), 2).unwrap();
        let resume = Resume::From(whole.join("checkpoints/step-000002"));
        shardloom::train_from(&run((3, "grad"), &data, &out, &sets), 3, &resume).unwrap();
        let off = farthest(&curve(&out), &curve(&whole)[2..]);
        assert!(off < 2e-3, "{dtype}: off by {off:.1e}");
        let model = checkpoint::folder::Weights::open(out.join("model")).unwrap();
        let (name, bits) =
            ("model.layers.0.mlp.up_proj.weight", if dtype == "master" { "F32" } else { "BF16" });
        assert_eq!(model.info(name).unwrap().dtype.name(), bits);
        if dtype == "master" {
            // Frozen weights pass through two checkpoints as they were.
            assert!(model.read(name).unwrap() == source.read(name).unwrap());
        }
        let reader = checkpoint::Reader::open(out.join("checkpoints/latest")).unwrap();
        assert!(reader.optimizer().all(|(name, _)| !name.contains("layers.0.") && !name.contains("embed")));
    }
    // A weight that was frozen has no moments to go on with.
    let thawed = run((1, "full"), &data, &dir.path().join("thawed"), &["precision={compute=\"bf16\"}"]);
    let resume = Resume::From(dir.path().join("master/checkpoints/step-000002"));
    let error = shardloom::train_from(&thawed, 1, &resume).unwrap_err().to_string();
    assert!(error.contains("layers.0.") && error.contains("exp_avg is missing"), "{error}");
}

#[test]
fn state_that_is_kept_on_the_host_is_saved_and_loaded_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let data = twelve_rows(dir.path());
    let (here, there) = (vec!["precision={compute=\"bf16\"}"], "shard.offload=\"all\"");
    let offloaded = [&here[..], &[there]].concat();
    let out = |name: &str| dir.path().join(name);
    for (name, sets) in [("here", &here), ("there", &offloaded)] {
        shardloom::train(&run((2, "full"), &data, &out(name), sets), 2).unwrap();
    }
    for (from, to, sets, ranks) in
        [("here", "there", &offloaded, 2), ("there", "here", &here, 2), ("there", "there", &offloaded, 3)]
    {
        let resumed = out(&format!("{from} to {to} on {ranks}"));
        let resume = Resume::From(out(from).join("checkpoints/step-000002"));
        shardloom::train_from(&run((ranks, "full"), &data, &resumed, sets), ranks, &resume).unwrap();
        let off = farthest(&curve(&resumed), &curve(&out(to))[2..]);
        // Sums of bf16 gradients over other ranks differ in their last bits.
        assert!(
            off <= if ranks == 2 { ROUNDING } else { 2e-3 },
            "{from} to {to} on {ranks}: off by {off:.1e}"
        );
    }
}

#[test]
fn the_loss_scale_of_f16_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let data = twelve_rows(dir.path());
    // So large that the first step is skipped, and grows again after every good one.
    let scaled = ["precision={compute=\"f16\", init_scale=1e9, scale_interval=1}"];
    let (whole, out) = (dir.path().join("whole"), dir.path().join("out"));
    shardloom::train(&run((2, "full"), &data, &whole, &scaled), 2).unwrap();
    let state = |dir: &Path, step: u64| -> Value {
        let path = dir.join(format!("checkpoints/step-{step:06}/state.json"));
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    };
    let (second, fourth) = (state(&whole, 2), state(&whole, 4));
    assert!(second["optimizer_step"].as_u64() < Some(2), "{second}");
    let resume = Resume::From(whole.join("checkpoints/step-000002"));
    shardloom::train_from(&run((2, "full"), &data, &out, &scaled), 2, &resume).unwrap();
    let resumed = state(&out, 4);
    for key in ["optimizer_step", "scaler", "data", "step"] {
        assert_eq!(resumed[key], fourth[key], "{key}");
    }
    let last = |dir: &Path| std::fs::read(dir.join("checkpoints/step-000004/optimizer.safetensors")).unwrap();
    assert!(last(&out) == last(&whole));
}

#[test]
fn what_cannot_be_resumed_is_refused_with_file_and_weight_named() {
    let dir = tempfile::tempdir().unwrap();
    let data = twelve_rows(dir.path());
    let whole = dir.path().join("whole");
    shardloom::train(&run((2, "full"), &data, &whole, &["output.model=true"]), 2).unwrap();
    let (second, fourth) = (whole.join("checkpoints/step-000002"), whole.join("checkpoints/step-000004"));
    let refused = |resume: &Path, ranks: usize, words: &[&str]| {
        let run = run((ranks, "full"), &data, &dir.path().join("out"), &[]);
        let error = shardloom::train_from(&run, ranks, &Resume::From(resume.into())).unwrap_err();
        let text = error.to_string();
        words.iter().for_each(|word| assert!(text.contains(word), "{text:?} does not say {word:?}"));
        error
    };
    refused(&dir.path().join("nowhere"), 2, &["nowhere", "no checkpoint"]);
    refused(&whole.join("model"), 1, &["weights alone", "model.path"]);

    // A flipped bit is found by one rank, and by several of which none reads the whole of it.
    let file = second.join("model.safetensors");
    let sound = std::fs::read(&file).unwrap();
    let mut flipped = sound.clone();
    let at = flipped.len() - 100;
    flipped[at] ^= 4;
    std::fs::write(&file, &flipped).unwrap();
    for ranks in [1, 2, 3] {
        let error = refused(&second, ranks, &["model.safetensors", "weight: damaged"]);
        assert_ne!(error.exit_status(), 0);
    }
    let error = checkpoints::verify(&second).unwrap_err();
    assert!(
        matches!(&error, Error::Damaged { problems, .. } if problems.contains("model.safetensors")),
        "{error}"
    );
    std::fs::write(&file, &sound).unwrap();
    checkpoints::verify(&second).unwrap();

    // One that is cut is passed over for the one before it; alone it is refused.
    let file = fourth.join("optimizer.safetensors");
    std::fs::write(&file, &std::fs::read(&file).unwrap()[..1000]).unwrap();
    refused(&fourth, 2, &["optimizer.safetensors", "truncated"]);
    let out = dir.path().join("out");
    shardloom::train_from(&run((2, "full"), &data, &out, &[]), 2, &Resume::From(whole.clone())).unwrap();
    assert_eq!(curve(&out), curve(&whole)[2..]);

    // Another model's.
    let config = std::fs::read_to_string(root().join("tests/reference/llama3/config.json")).unwrap();
    let other = dir.path().join("config.json");
    std::fs::write(&other, config.replace("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2")).unwrap();
    let text = format!(
        "model = {{ config = \"{}\" }}\ndata = {{ kind = \"batches\", path = \"{}\" }}\ntrain = {{ steps = 4, global_batch = 12 }}\noutput.dir = \"{}\"\ndevice.kind = \"cpu\"",
        other.display(),
        data.display(),
        out.display()
    );
    let run = Run::parse(&text, &[]).unwrap();
    let error = shardloom::train_from(&run, 1, &Resume::From(second)).unwrap_err().to_string();
    assert!(error.contains("another model") && error.contains("model.layers.2."), "{error}");
}

#[test]
fn a_save_that_fails_in_the_background_ends_the_run_and_says_why() {
    for background in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        // Where the folder of checkpoints should be, there is a link that leads nowhere.
        std::os::unix::fs::symlink(dir.path().join("gone/far"), dir.path().join("checkpoints")).unwrap();
        let background = format!("checkpoint.background={background}");
        let args = [
            "--ranks",
            "2",
            "--set",
            "train.steps=1000000",
            "--set",
            "checkpoint.every=2",
            "--set",
            &background,
        ];
        let output = command(dir.path(), &args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        for word in ["checkpoint of step 2 was not saved", "rank 0: cannot create", "checkpoints/step-000002"]
        {
            assert!(text.contains(word), "{text}");
        }
    }
}

#[test]
fn the_command_looks_into_a_checkpoint_and_exports_it() {
    let dir = tempfile::tempdir().unwrap();
    let data = twelve_rows(dir.path());
    let whole = dir.path().join("whole");
    shardloom::train(&run((2, "full"), &data, &whole, &[]), 2).unwrap();
    let text = checkpoints::inspect(&whole, true, false).unwrap();
    for word in ["step        4", "2 ranks", "30 tensors", "F32", "model.norm.weight.exp_avg_sq"] {
        assert!(text.contains(word), "{text}");
    }
    let json: Value = serde_json::from_str(&checkpoints::inspect(&whole, false, true).unwrap()).unwrap();
    assert_eq!(
        (&json["step"], &json["state"]["run"]["train"]["global_batch"]),
        (&Value::from(4), &Value::from(12))
    );
    assert!(checkpoints::verify(&whole).unwrap().contains("whole"));

    let out = dir.path().join("exported");
    let mut export = checkpoints::Export::new(&whole, &out);
    (export.dtype, export.max_part_bytes) = (Some(device::Dtype::Bf16), 100_000);
    checkpoints::export(&export).unwrap();
    let exported = checkpoint::folder::Weights::open(&out).unwrap();
    let reader = checkpoint::Reader::open(whole.join("checkpoints/latest")).unwrap();
    for (name, info) in reader.weights() {
        let mut bytes = vec![0; info.num_bytes() as usize];
        reader.read(name, 0, &mut bytes).unwrap();
        let rounded = bytes
            .chunks_exact(4)
            .flat_map(|b| half::bf16::from_f32(f32::from_le_bytes([b[0], b[1], b[2], b[3]])).to_le_bytes());
        assert!(exported.read(name).unwrap() == rounded.collect::<Vec<_>>(), "{name}");
    }
    assert!(out.join("model.safetensors.index.json").exists() && !out.join("state.json").exists());
    let config: Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
    assert!(config["dtype"] == "bfloat16" || config["torch_dtype"] == "bfloat16");
    // What is in the way and was not written here stays.
    std::fs::create_dir(dir.path().join("mine")).unwrap();
    export.out = dir.path().join("mine");
    assert!(checkpoints::export(&export).unwrap_err().to_string().contains("--out"));
}

#[test]
fn the_checklist_before_a_long_run() {
    let dir = tempfile::tempdir().unwrap();
    let data = twelve_rows(dir.path());
    let out = dir.path().join("out");
    let run_file = dir.path().join("run.toml");
    let toml = format!(
        "model.path = \"{}\"\ndata = {{ kind = \"batches\", path = \"{}\" }}\ntrain = {{ steps = 4, global_batch = 12 }}\n\
         optimizer.lr = 1e-3\ndevice.kind = \"cpu\"\noutput.dir = \"{}\"\n",
        root().join("tests/reference/llama3").display(),
        data.display(),
        out.display()
    );
    std::fs::write(&run_file, toml).unwrap();
    for group in ["local", "shm"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shardloom"));
        command.arg("check").arg(&run_file).args([
            "--ranks",
            "2",
            "--set",
            &format!("device.group=\"{group}\""),
        ]);
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        for word in ["4 made, every loss", "2 agree on loss", "the same bits", "planned", "tokens/s"] {
            assert!(text.contains(word), "{group}: {text}");
        }
        assert!(!out.join("check").exists());
    }
}
