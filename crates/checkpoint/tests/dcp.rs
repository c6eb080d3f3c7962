//! Distributed checkpoints of PyTorch: real ones are read as what they are, and what is written is read back.

use checkpoint::dcp::{self, Checkpoint, Item, Naming, Object, Part, State, Step, TensorSpec};
use checkpoint::safetensors::File;
use checkpoint::storage::Disk;
use checkpoint::{Dtype, Error};
use std::path::{Path, PathBuf};

fn reference(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference").join(name)
}

fn step6() -> PathBuf {
    reference("llama3/dcp-step6")
}

/// A copy of a checkpoint's folder, to be damaged.
fn copy(from: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

fn tensors(checkpoint: &Checkpoint) -> Vec<String> {
    let items = checkpoint.metadata().items.iter();
    items.filter(|(_, item)| matches!(item, Item::Tensor(_))).map(|(key, _)| key.clone()).collect()
}

#[test]
fn a_real_checkpoint_is_whole_and_any_range_is_a_part_of_it() {
    let checkpoint = Checkpoint::open(step6()).unwrap();
    let keys = tensors(&checkpoint);
    assert_eq!(keys.len(), 120);
    for key in &keys {
        checkpoint.verify(key).unwrap();
        let whole = checkpoint.read(key).unwrap();
        let elements = whole.len() / 4;
        for (start, len) in [(0, 1), (elements / 3, elements / 2), (elements - 1, 1), (elements, 0)] {
            let mut part = vec![0; len * 4];
            checkpoint.read_range(key, start as u64 * 4, &mut part).unwrap();
            assert_eq!(part, whole[start * 4..(start + len) * 4], "{key} {start} {len}");
        }
        assert!(checkpoint.read_range(key, whole.len() as u64, &mut [0; 4]).is_err());
    }
    assert_eq!(checkpoint.number("optimizer.state.lm_head.weight.step").unwrap(), 6.0);
    assert_eq!(checkpoint.number("optimizer.param_groups.0.lr").unwrap(), 1e-3);
    assert_eq!(checkpoint.number("optimizer.param_groups.0.weight_decay").unwrap(), 0.1);
    assert!(checkpoint.number("optimizer.param_groups.0.params").is_err());
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn boxes_of_columns_and_other_dtypes_are_put_together() {
    let checkpoint = Checkpoint::open(reference("dcp/boxes")).unwrap();
    let columns = checkpoint.read("columns").unwrap();
    let columns: Vec<f32> = columns
        .chunks_exact(2)
        .map(|two| f32::from_bits(u32::from(two[1]) << 24 | u32::from(two[0]) << 16))
        .collect();
    assert_eq!(columns, (0..42).map(|n| n as f32).collect::<Vec<_>>());
    let middle = checkpoint.read("middle").unwrap();
    let middle: Vec<i64> =
        middle.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(middle, (0..30).collect::<Vec<_>>());
    // Any range of it, element by element.
    for start in 0..30 {
        for end in start..=30 {
            let mut part = vec![0; (end - start) * 8];
            checkpoint.read_range("middle", start as u64 * 8, &mut part).unwrap();
            let expected: Vec<u8> = (start as i64..end as i64).flat_map(i64::to_le_bytes).collect();
            assert_eq!(part, expected, "{start}..{end}");
        }
    }
    assert_eq!(floats(&checkpoint.read("few").unwrap()), [0.0]);
    assert_eq!(checkpoint.dtype("eight").unwrap(), Dtype::F8E4m3);
    assert_eq!(checkpoint.read("eight").unwrap(), [0, 0x38, 0x40, 0x44, 0x48]);
    assert!(checkpoint.dtype("complex").is_err());
    assert_eq!(checkpoint.number("number").unwrap(), 12.0);
    let turned = checkpoint.read("turned").unwrap_err().to_string();
    assert!(turned.contains("strides") && turned.contains("turned"), "{turned}");
}

/// The tiny Llama of the reference checkpoints: names, shapes and values.
struct Expected {
    file: File,
    weights: Vec<(String, Vec<usize>)>,
}

impl Expected {
    fn open(name: &str) -> Self {
        let file = File::open(reference("dcp").join(name)).unwrap();
        let is_moment = |name: &str| name.ends_with(".exp_avg") || name.ends_with(".exp_avg_sq");
        let weights = file.tensors().filter(|(name, _)| !is_moment(name));
        let weights = weights.map(|(name, info)| (name.to_string(), info.shape.clone())).collect();
        Expected { file, weights }
    }

    fn state(&self, dir: &Path, namings: &[Naming]) -> checkpoint::Result<State> {
        let wanted: Vec<_> = self.weights.iter().map(|(name, shape)| (name.as_str(), &shape[..])).collect();
        State::open(dir, &wanted, namings)
    }

    fn own_naming(&self) -> Naming {
        let names = self.weights.iter().map(|(name, _)| name.clone()).collect();
        Naming { names, also: vec!["lm_head.weight".into()] }
    }

    /// Compares every part of every weight; `turn` brings what was read into our order.
    fn compare(&self, state: &State, turn: impl Fn(&str, Vec<f32>) -> Vec<f32>) {
        assert_eq!(state.step(), Some(2));
        let betas = Object::Tuple(vec![Object::Float(0.9), Object::Float(0.95)]);
        for (setting, value) in
            [("lr", Object::Float(1e-2)), ("betas", betas), ("weight_decay", Object::Float(0.1))]
        {
            assert_eq!(state.setting("model.norm.weight", setting).unwrap(), Some(value), "{setting}");
        }
        let parts = [(Part::Weight, ""), (Part::ExpAvg, ".exp_avg"), (Part::ExpAvgSq, ".exp_avg_sq")];
        for (name, _) in &self.weights {
            assert!(state.is_trained(name));
            for (part, suffix) in parts {
                let expected = floats(&self.file.read(&format!("{name}{suffix}")).unwrap());
                let mut bytes = vec![0; expected.len() * 4];
                state.verify(name, part).unwrap();
                state.read_range(name, part, 0, &mut bytes).unwrap();
                let found = turn(name, floats(&bytes));
                // Sharded gradients are averaged over ranks, which can round once more.
                for (a, b) in found.iter().zip(&expected) {
                    assert!((a - b).abs() <= 1e-6 * b.abs().max(1e-3), "{name}{suffix}: {a} against {b}");
                }
            }
        }
    }
}

#[test]
fn the_folders_of_torch_and_accelerate_are_told_apart_and_read() {
    let expected = Expected::open("expected.safetensors");
    let state = expected.state(&reference("dcp/accelerate"), &[expected.own_naming()]).unwrap();
    expected.compare(&state, |_, values| values);
    let tied = Expected::open("expected-tied.safetensors");
    let state = tied.state(&reference("dcp/app-tied"), &[tied.own_naming()]).unwrap();
    tied.compare(&state, |_, values| values);
}

fn titan_name(name: &str) -> String {
    let parts = [
        ("model.embed_tokens", "tok_embeddings"),
        ("model.layers", "layers"),
        ("model.norm", "norm"),
        ("self_attn.q_proj", "attention.qkv_linear.wq"),
        ("self_attn.k_proj", "attention.qkv_linear.wk"),
        ("self_attn.v_proj", "attention.qkv_linear.wv"),
        ("self_attn.o_proj", "attention.wo"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ];
    parts.iter().fold(name.to_string(), |name, (ours, theirs)| name.replace(ours, theirs))
}

#[test]
fn torchtitans_names_are_found_at_the_top() {
    let expected = Expected::open("expected.safetensors");
    let names = expected.weights.iter().map(|(name, _)| titan_name(name)).collect();
    let namings = [expected.own_naming(), Naming { names, also: Vec::new() }];
    let state = expected.state(&reference("dcp/torchtitan"), &namings).unwrap();
    assert_eq!(state.naming(), 1);
    // Within each head of eight rows, ours are first all even ones of theirs, then all odd ones.
    let turn = |name: &str, values: Vec<f32>| match name.contains("q_proj") || name.contains("k_proj") {
        true => (0..values.len() / 8)
            .flat_map(|row| {
                let theirs = row / 8 * 8 + [0, 2, 4, 6, 1, 3, 5, 7][row % 8];
                values[theirs * 8..][..8].to_vec()
            })
            .collect(),
        false => values,
    };
    expected.compare(&state, turn);
}

#[test]
fn a_checkpoint_of_another_model_is_refused_with_the_name() {
    let mut expected = Expected::open("expected.safetensors");
    let naming = expected.own_naming();
    let dir = reference("dcp/accelerate");
    let text = |expected: &Expected, naming: Naming| expected.state(&dir, &[naming]).unwrap_err().to_string();
    let shape = expected.weights[0].1.clone();
    expected.weights[0].1 = vec![3, 3];
    let wrong = text(&expected, naming.clone());
    assert!(wrong.contains(&expected.weights[0].0) && wrong.contains("[3, 3]"), "{wrong}");
    expected.weights[0].1 = shape;
    let gone = expected.weights.pop().unwrap().0;
    let extra = text(&expected, expected.own_naming());
    assert!(extra.contains(&gone) && extra.contains("the model has no such weight"), "{extra}");
    expected.weights.push(("model.layers.7.mlp.up_proj.weight".into(), vec![1]));
    let missing = text(&expected, expected.own_naming());
    assert!(missing.contains("layers.7") && missing.contains("there is no"), "{missing}");
}

#[test]
fn foreign_names_paths_and_damage_are_found() {
    let metadata = std::fs::read(step6().join(".metadata")).unwrap();
    let opened = |bytes: Vec<u8>| {
        let dir = copy(&step6());
        std::fs::write(dir.path().join(".metadata"), bytes).unwrap();
        Checkpoint::open(dir.path()).unwrap_err().to_string()
    };
    let replace = |from: &[u8], to: &[u8]| {
        let at = metadata.windows(from.len()).position(|window| window == from).unwrap();
        [&metadata[..at], to, &metadata[at + from.len()..]].concat()
    };
    // Named, though its result would be thrown away at once.
    let system = [&metadata[..2], b"cos\nsystem\n0", &metadata[2..]].concat();
    let text = opened(system);
    assert!(text.contains("os.system") && text.contains("not run") && text.contains(".metadata"), "{text}");
    let text = opened(replace(b"PosixPath", b"PosixPatH"));
    assert!(text.contains("pathlib.PosixPatH"), "{text}");
    let text = opened(replace(b"__0_0.distcp", b"../_0.distcp"));
    assert!(text.contains("not the name of a file in this folder"), "{text}");
    for len in [0, 1, 2, 100, metadata.len() / 2, metadata.len() - 1] {
        assert!(opened(metadata[..len].to_vec()).contains(".metadata"));
    }

    let dir = copy(&step6());
    let file = dir.path().join("__1_0.distcp");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    let text = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(text.contains("truncated") && text.contains("__1_0.distcp"), "{text}");
    std::fs::remove_file(&file).unwrap();
    assert!(matches!(Checkpoint::open(dir.path()), Err(Error::Io { path, .. }) if path == file));
    std::fs::remove_file(dir.path().join(".metadata")).unwrap();
    assert!(Checkpoint::open(dir.path()).unwrap_err().to_string().contains("interrupted"));
}

#[test]
fn a_flipped_bit_anywhere_in_a_tensor_is_found() {
    let checkpoint = Checkpoint::open(step6()).unwrap();
    let key = "model.model.norm.weight";
    let piece = checkpoint.metadata().tensor(key).unwrap().pieces[1].clone();
    let name = &checkpoint.metadata().files[piece.location.file];
    let dir = copy(&step6());
    let bytes = std::fs::read(dir.path().join(name)).unwrap();
    let region = piece.location.start as usize..(piece.location.start + piece.location.bytes) as usize;
    let tensor = dcp::Tensor::parse(Path::new(name), key, &bytes[region.clone()]).unwrap();
    let first = region.start + tensor.start as usize;
    for at in [first, first + 77, first + 127] {
        let mut flipped = bytes.clone();
        flipped[at] ^= 4;
        std::fs::write(dir.path().join(name), flipped).unwrap();
        let text = Checkpoint::open(dir.path()).unwrap().verify(key).unwrap_err().to_string();
        assert!(text.contains("damaged") && text.contains(key) && text.contains(name), "{text}");
    }
}

#[test]
fn what_is_written_is_read_back_from_any_number_of_files() {
    let specs = [
        (vec!["model".into(), "a.b".into()], Dtype::F32, vec![7, 3]),
        (vec!["model".into(), "c".into()], Dtype::Bf16, vec![5]),
        (vec!["optimizer".into(), "state".into(), "a.b".into(), "step".into()], Dtype::F32, vec![]),
    ];
    let specs = specs.map(|(path, dtype, shape)| TensorSpec { path, dtype, shape });
    let bytes: Vec<Vec<u8>> = [84, 10, 4].map(|len| (0..len).map(|at| (at * 7 + len) as u8).collect()).into();
    let group = |name: &str| vec!["optimizer".into(), "param_groups".into(), Step::Index(0), name.into()];
    let betas = Object::Tuple(vec![Object::Float(0.9), Object::Float(0.95)]);
    let objects =
        [(group("lr"), Object::Float(1e-3)), (group("betas"), betas), (group("fused"), Object::None)];
    for files in 1..=8 {
        let dir = tempfile::tempdir().unwrap();
        let read = |number: usize, start: u64, out: &mut [u8]| {
            out.copy_from_slice(&bytes[number][start as usize..][..out.len()]);
            Ok(())
        };
        let written = dcp::write(&Disk, dir.path(), files, &specs, &objects, read).unwrap();
        assert!(Checkpoint::open(dir.path()).is_err(), "it is not one before it is committed");
        written.commit().unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        for (key, bytes) in ["model.a.b", "model.c", "optimizer.state.a.b.step"].iter().zip(&bytes) {
            checkpoint.verify(key).unwrap();
            assert_eq!(checkpoint.read(key).unwrap(), *bytes, "{key} from {files} files");
        }
        assert_eq!(checkpoint.number("optimizer.param_groups.0.lr").unwrap(), 1e-3);
        assert_eq!(checkpoint.metadata().items.len(), 6);
        let again = dcp::write(&Disk, dir.path(), files, &specs, &objects, read).unwrap_err();
        assert!(again.to_string().contains("already"), "{again}");
    }
}
