//! PyTorch's distributed checkpoints, imported, gone on from and exported.

mod as_pytorch;

use as_pytorch::{reference, run};
use checkpoint::dcp::Checkpoint;
use checkpoint::safetensors::File;
use checkpoint::{Reader, moment_names};
use serde_json::Value;
use shardloom::Resume;
use shardloom::checkpoints::{DcpExport, DcpImport, export_dcp, import_dcp};
use std::path::{Path, PathBuf};

/// Relative bound on every step's loss.
const LOSS: f64 = 2e-5;

fn import(dir: PathBuf, model: PathBuf, out: &Path) -> shardloom::Result<String> {
    import_dcp(&DcpImport { dir, model, out: out.to_path_buf(), weights_only: false })
}

/// The losses of steps 7 to 12, gone on with from a checkpoint.
fn go_on(checkpoint: &Path, ranks: usize, out: &Path, set: &[&str]) -> Vec<f64> {
    shardloom::train_from(&run("llama3", set, out), ranks, &Resume::From(checkpoint.to_path_buf())).unwrap();
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let (steps, losses): (Vec<u64>, Vec<f64>) =
        lines.map(|line| (line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap())).unzip();
    assert_eq!(steps, [7, 8, 9, 10, 11, 12]);
    losses
}

fn pytorchs_losses() -> Vec<f64> {
    let text = std::fs::read_to_string(reference("llama3/curve.json")).unwrap();
    let curve = &serde_json::from_str::<Value>(&text).unwrap()["curves"]["clip1"]["loss"];
    curve.as_array().unwrap()[6..].iter().map(|loss| loss.as_f64().unwrap()).collect()
}

#[test]
fn a_run_goes_on_from_pytorchs_checkpoint_as_pytorch_did() {
    let dir = tempfile::tempdir().unwrap();
    let imported = dir.path().join("imported");
    import(reference("llama3/dcp-step6"), reference("llama3"), &imported).unwrap();
    assert!(Reader::open(&imported).unwrap().verify().is_empty());
    for (ranks, strategy) in [(1, "full"), (2, "full"), (2, "none"), (4, "grad")] {
        let out = dir.path().join(format!("{ranks}-{strategy}"));
        let losses = go_on(&imported, ranks, &out, &[&format!("shard.strategy={strategy}")]);
        let off: Vec<f64> = losses.iter().zip(pytorchs_losses()).map(|(a, b)| (a / b - 1.0).abs()).collect();
        println!("{ranks} ranks, {strategy}: within {:.1e}", off.iter().copied().fold(0.0, f64::max));
        for (step, (ours, theirs)) in losses.iter().zip(pytorchs_losses()).enumerate() {
            assert!(
                off[step] <= LOSS,
                "{ranks} ranks, {strategy}, step {}: {ours} against {theirs}",
                step + 7
            );
        }
    }
}

#[test]
fn what_is_exported_is_what_was_imported() {
    let dir = tempfile::tempdir().unwrap();
    let (imported, exported) = (dir.path().join("imported"), dir.path().join("exported"));
    let source = Checkpoint::open(reference("llama3/dcp-step6")).unwrap();
    import(source.dir().to_path_buf(), reference("llama3"), &imported).unwrap();
    let export = DcpExport { dir: imported, out: exported.clone(), files: Some(3) };
    export_dcp(&export).unwrap();
    let back = Checkpoint::open(&exported).unwrap();
    let keys = |checkpoint: &Checkpoint| checkpoint.metadata().items.keys().cloned().collect::<Vec<_>>();
    let extra = "optimizer.param_groups.0.initial_lr";
    assert_eq!(keys(&back).into_iter().filter(|key| key != extra).collect::<Vec<_>>(), keys(&source));
    for (key, item) in &source.metadata().items {
        match item {
            checkpoint::dcp::Item::Tensor(_) => {
                back.verify(key).unwrap();
                assert_eq!(back.read(key).unwrap(), source.read(key).unwrap(), "{key}");
            }
            // The order of weights within their group is our own.
            _ if key.ends_with(".params") => {}
            _ => assert_eq!(back.object(key).unwrap(), source.object(key).unwrap(), "{key}"),
        }
    }
    let again = export_dcp(&export).unwrap_err().to_string();
    assert!(again.contains("name a new folder"), "{again}");
}

/// The tiny Llama that torch, accelerate and torchtitan each have saved in their way.
#[test]
fn every_programs_checkpoint_becomes_the_same() {
    let dir = tempfile::tempdir().unwrap();
    for (case, expected) in
        [("accelerate", "expected"), ("torchtitan", "expected"), ("app-tied", "expected-tied")]
    {
        let out = dir.path().join(case);
        let config = reference("dcp").join(format!("{expected}-config.json"));
        let said = import(reference("dcp").join(case), config, &out).unwrap();
        assert!(said.contains("after step 2"), "{said}");
        let reader = Reader::open(&out).unwrap();
        let expected = File::open(reference("dcp").join(format!("{expected}.safetensors"))).unwrap();
        assert_eq!(reader.tensors().len(), expected.tensors().len());
        for (name, info, file) in reader.tensors() {
            assert_eq!(info.shape, expected.info(name).unwrap().shape, "{name}");
            for (a, b) in
                floats(&file.read(name).unwrap()).into_iter().zip(floats(&expected.read(name).unwrap()))
            {
                assert!((a - b).abs() <= 1e-6 * b.abs().max(1e-3), "{case}: {name}: {a} against {b}");
            }
        }
        let state = reader.state().unwrap();
        let optimizer = &state.run["optimizer"];
        assert_eq!(
            (state.step, optimizer["lr"].as_f64(), &optimizer["decay"]),
            (2, Some(1e-2), &"all".into())
        );
        let exported = dir.path().join(format!("{case}-exported"));
        export_dcp(&DcpExport { dir: out, out: exported.clone(), files: None }).unwrap();
        let back = Checkpoint::open(exported).unwrap();
        let [mean, _] = moment_names("model.norm.weight");
        let key = format!("optimizer.state.{mean}");
        assert_eq!(back.read(&key).unwrap().len(), 32);
        // A tied head is there under both names, as in torch.
        assert_eq!(back.read("model.lm_head.weight").unwrap().len(), 11 * 8 * 4);
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn what_cannot_be_imported_is_refused_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let refused = |from: PathBuf, model: PathBuf| import(from, model, &out).unwrap_err().to_string();
    let other = refused(reference("llama3/dcp-step6"), reference("qwen3"));
    assert!(other.contains("q_norm") || other.contains("shape"), "{other}");
    let weights =
        refused(reference("dcp/accelerate/pytorch_model_fsdp_0"), reference("dcp/expected-config.json"));
    assert!(weights.contains("--weights-only"), "{weights}");
    let nothing = refused(dir.path().to_path_buf(), reference("llama3"));
    assert!(nothing.contains(".metadata"), "{nothing}");
    // A damaged number is found before anything is taken for a checkpoint.
    let damaged = dir.path().join("damaged");
    std::fs::create_dir(&damaged).unwrap();
    for name in [".metadata", "__0_0.distcp", "__1_0.distcp"] {
        std::fs::copy(reference("llama3/dcp-step6").join(name), damaged.join(name)).unwrap();
    }
    let path = damaged.join("__1_0.distcp");
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let text = refused(damaged, reference("llama3"));
    assert!(text.contains("damaged") && text.contains("__1_0.distcp"), "{text}");
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["damaged"]);
}
