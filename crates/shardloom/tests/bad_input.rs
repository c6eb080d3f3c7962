//! What users get wrong: a clear error, exit status 2 for what can be mended before the run and 1 for what fails in
//! it, and nothing half-written.

use std::path::{Path, PathBuf};
use std::process::Command;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A folder with a copy of a reference model, to be spoiled.
fn model_copy() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(repository().join("tests/reference/llama3").join(file), dir.path().join(file)).unwrap();
    }
    dir
}

/// Runs `train` on the first-run example with overrides; (exit status, standard error, output folder).
fn train(set: &[String]) -> (i32, String, tempfile::TempDir) {
    let out = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardloom"));
    command.current_dir(repository()).args(["train", "examples/first-run/RUN.toml"]);
    command.arg("--set").arg(format!("output.dir={}/out", out.path().display()));
    command.args(["--set", "device.kind=cpu"]);
    for set in set {
        command.arg("--set").arg(set);
    }
    let output = command.output().unwrap();
    (output.status.code().unwrap_or(-1), String::from_utf8_lossy(&output.stderr).into_owned(), out)
}

/// The run fails with this status, its error says all of `words`, nobody panicked, and there is no model.
fn refused(set: &[String], status: i32, words: &[&str]) {
    let (code, error, out) = train(set);
    assert_eq!(code, status, "{set:?}: {error}");
    assert!(!error.contains("panicked"), "{error}");
    for word in words {
        assert!(error.contains(word), "{set:?}: {error:?} does not say {word:?}");
    }
    assert!(!out.path().join("out/model/model.safetensors").exists());
}

fn path_set(dir: &tempfile::TempDir) -> String {
    format!("model.path={}", dir.path().display())
}

#[test]
fn files_that_are_missing_or_broken() {
    refused(&["model.path=/nowhere".into()], 2, &["/nowhere/config.json"]);
    refused(&["data.path=/nowhere.safetensors".into()], 2, &["/nowhere.safetensors"]);

    let dir = model_copy();
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    refused(&[path_set(&dir)], 2, &["model.safetensors"]);

    let dir = model_copy();
    let file = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 1000]).unwrap();
    refused(&[path_set(&dir)], 2, &["model.safetensors"]);
    std::fs::write(&file, b"not a file of weights at all").unwrap();
    refused(&[path_set(&dir)], 2, &["model.safetensors"]);
}

#[test]
fn models_that_do_not_fit() {
    let spoil = |from: &str, to: &str| {
        let dir = model_copy();
        let file = dir.path().join("config.json");
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains(from), "{from} is not in the configuration");
        std::fs::write(&file, text.replace(from, to)).unwrap();
        dir
    };
    let dir = spoil("\"intermediate_size\": 176", "\"intermediate_size\": 180");
    refused(&[path_set(&dir)], 2, &["mlp.", "shape", "[176, 64]"]);
    let dir = spoil("\"model_type\": \"llama\"", "\"model_type\": \"mamba\"");
    refused(&[path_set(&dir)], 2, &["mamba"]);
    let dir = spoil("\"rope_type\": \"default\"", "\"rope_type\": \"longrope\"");
    refused(&[path_set(&dir)], 2, &["longrope"]);
    let dir = spoil("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 4");
    refused(&[path_set(&dir)], 2, &["model.layers.3."]);
    let dir = spoil("{", "{,");
    refused(&[path_set(&dir)], 2, &["model configuration"]);
}

#[test]
fn settings_that_do_not_come_out() {
    refused(&["train.global_batch=3".into()], 2, &["global_batch"]);
    refused(&["train.micro_batch=3".into()], 2, &["micro_batch"]);
    refused(&["train.steps=13".into()], 2, &["13", "12"]);
    refused(&["shard.wrap={kinds=[\"GPT2Block\"]}".into()], 2, &["GPT2Block", "LlamaDecoderLayer"]);
    refused(&["optimizer.learning_rate=1".into()], 2, &["learning_rate"]);
    refused(&["output.dir=/proc/nowhere".into()], 2, &["/proc/nowhere"]);
    refused(&["device.group=smoke".into()], 2, &["smoke", "shm, tcp, mpi"]);
    #[cfg(not(feature = "mpi"))]
    refused(&["device.group=mpi".into()], 2, &["has no MPI", "--features mpi"]);
}

#[test]
fn tokens_outside_the_vocabulary() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("batches.safetensors");
    let tensors = [("input_ids", 515i64), ("labels", 3)].map(|(name, value)| (name, vec![value; 4 * 8]));
    let shape = [1usize, 4, 8];
    let list = tensors.iter().map(|(name, _)| (*name, checkpoint::Dtype::I64, &shape[..]));
    let layout = checkpoint::safetensors::Layout::new(&path, list).unwrap();
    let writer = checkpoint::safetensors::Writer::create(&path, layout).unwrap();
    for (name, values) in &tensors {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        writer.write_range(name, 0, &bytes).unwrap();
    }
    writer.finish().unwrap();
    let set = [format!("data.path={}", path.display()), "train.steps=1".into()];
    let (code, error, _out) = train(&set);
    assert!(code == 1 || code == 2, "{error}");
    assert!(error.contains("515") && error.contains("vocabulary"), "{error}");
}

#[test]
fn a_loss_that_is_no_number_stops_the_run_and_says_when() {
    // A step so large that the second one overflows.
    let set = ["optimizer.lr=1e38".into(), "train.clip_norm=0".into()];
    let (code, error, out) = train(&set);
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("step 2") && error.contains("loss"), "{error}");
    let metrics = std::fs::read_to_string(out.path().join("out/metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count(), 1, "{metrics}");
    assert!(!out.path().join("out/model").exists());
}
