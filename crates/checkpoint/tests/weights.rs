//! Reading and writing safetensors files and Hugging Face folders, sound and broken.

use checkpoint::Dtype;
use checkpoint::folder::{Plan, Weights};
use checkpoint::safetensors::{File, Layout, Writer};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

fn reference(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference").join(name)
}

/// A file of a header, given as text, and `data` bytes.
fn file_with(dir: &Path, header: &str, data: usize) -> PathBuf {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 7);
    let path = dir.join("odd.safetensors");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Opening fails, and the text names the file and each of `parts`.
fn refused(path: &Path, parts: &[&str]) {
    let text = File::open(path).unwrap_err().to_string();
    assert!(text.contains("odd.safetensors"), "{text}");
    for part in parts {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
}

#[test]
fn real_files_read_as_the_safetensors_crate_reads_them() {
    for name in ["llama3/model.safetensors", "llama3/io.safetensors", "llama31-tied/model.safetensors"] {
        let path = reference(name);
        let bytes = std::fs::read(&path).unwrap();
        let theirs = SafeTensors::deserialize(&bytes).unwrap();
        let ours = File::open(&path).unwrap();
        assert_eq!(ours.tensors().len(), theirs.len());
        for (name, view) in theirs.iter() {
            let info = ours.info(name).unwrap();
            assert_eq!(info.shape, view.shape());
            assert_eq!(info.dtype.name(), format!("{:?}", view.dtype()));
            assert_eq!(ours.read(name).unwrap(), view.data());
        }
    }
}

#[test]
fn ranges_of_a_tensor() {
    let file = File::open(reference("llama3/model.safetensors")).unwrap();
    let name = "model.embed_tokens.weight";
    let whole = file.read(name).unwrap();
    let mut part = [0; 100];
    file.read_range(name, 37, &mut part).unwrap();
    assert_eq!(part, whole[37..137]);
    file.read_range(name, whole.len() as u64, &mut []).unwrap();
    for start in [whole.len() as u64 - 99, u64::MAX - 1] {
        let text = file.read_range(name, start, &mut part).unwrap_err().to_string();
        assert!(text.contains(name) && text.contains("leave it"), "{text}");
    }
    assert!(file.read_range("nothing", 0, &mut part).unwrap_err().to_string().contains("no tensor nothing"));
}

#[test]
fn a_sharded_folder_is_one_set_of_weights() {
    let weights = Weights::open(reference("qwen3")).unwrap();
    let total: u64 = weights.tensors().map(|(_, info)| info.num_bytes()).sum();
    assert_eq!(total, 966656);
    for (name, info) in weights.tensors() {
        assert_eq!(weights.read(name).unwrap().len() as u64, info.num_bytes());
    }
    let text = weights.info("embed_tokens.weight").unwrap_err().to_string();
    assert!(text.contains("but there is model.embed_tokens.weight"), "{text}");
    assert!(weights.get("nothing").is_none());

    let single = Weights::open(reference("llama3")).unwrap();
    assert_eq!(single.info("model.norm.weight").unwrap().dtype, Dtype::F32);
}

#[test]
fn broken_folders_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |parts: &[&str]| {
        let text = Weights::open(dir.path()).unwrap_err().to_string();
        parts.iter().for_each(|part| assert!(text.contains(part), "{text:?} lacks {part:?}"));
    };
    refused(&["no model.safetensors", "Hugging Face"]);
    std::fs::write(dir.path().join("pytorch_model.bin"), b"").unwrap();
    refused(&["safe_serialization"]);

    let index = dir.path().join("model.safetensors.index.json");
    for broken in ["", "[]", "{}", "{\"weight_map\": {\"a\": 3}}"] {
        std::fs::write(&index, broken).unwrap();
        refused(&["index.json", "not an index"]);
    }
    let index_of = |part: &str| {
        let json = format!("{{\"weight_map\": {{\"some.weight\": {part:?}}}}}");
        std::fs::write(&index, json).unwrap();
    };
    for outside in ["../x.safetensors", "/etc/passwd", "..", "", "a/b"] {
        index_of(outside);
        refused(&["some.weight", "not the name of a file"]);
    }
    index_of("part.safetensors");
    refused(&["some.weight", "part.safetensors is missing"]);
    let layout = Layout::new(Path::new("x"), [("other", Dtype::F32, &[2usize][..])]).unwrap();
    Writer::create(dir.path().join("part.safetensors"), layout).unwrap().finish().unwrap();
    refused(&["some.weight", "does not have it"]);
    assert!(Weights::open(dir.path().join("nowhere")).unwrap_err().to_string().contains("not a folder"));
}

#[test]
fn broken_headers_are_refused_with_the_entry_named() {
    let dir = tempfile::tempdir().unwrap();
    let entry = |dtype: &str, shape: &str, from: u64, to: u64| {
        format!("{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":[{from},{to}]}}")
    };
    let check = |header: &str, data, parts: &[&str]| refused(&file_with(dir.path(), header, data), parts);
    check("", 0, &["does not start with {"]);
    check(" {}", 0, &["does not start with {"]);
    check("{", 0, &["cannot be read"]);
    check("{\"a\": 3}", 0, &["a:"]);
    check("{\"__metadata__\": {\"a\": 3}}", 0, &["cannot be read"]);
    let a = entry("F32", "[2]", 0, 8);
    check(&format!("{{\"a\":{a},\"a\":{a}}}"), 8, &["a occurs twice"]);
    check(&format!("{{\"a\":{a},\"b\":{a}}}"), 8, &["b: its bytes start at 0"]);
    check(&format!("{{\"a\":{a},\"b\":{}}}", entry("F32", "[1]", 12, 16)), 16, &["b: its bytes start at 12"]);
    check(&format!("{{\"a\":{}}}", entry("F32", "[1]", 4, 8)), 8, &["a: its bytes start at 4"]);
    check(&format!("{{\"a\":{}}}", entry("F32", "[1]", 8, 4)), 8, &["a: its bytes end at 4"]);
    check(&format!("{{\"a\":{}}}", entry("F32", "[3]", 0, 8)), 8, &["a: F32 [3] does not fit"]);
    check(&format!("{{\"a\":{}}}", entry("F99", "[2]", 0, 8)), 8, &["a: unknown variant `F99`"]);
    check(&format!("{{\"a\":{}}}", entry("F32", "[-2]", 0, 8)), 8, &["a:"]);
    let huge = format!("[{0},{0},{0}]", u64::MAX);
    check(&format!("{{\"a\":{}}}", entry("F32", &huge, 0, 8)), 8, &["a: F32", "does not fit"]);
    check(&format!("{{\"a\":{}}}", entry("U8", &format!("[{}]", u64::MAX), 0, u64::MAX)), 8, &["truncated"]);
    check(&format!("{{\"a\":{a}}}"), 7, &["truncated", "8 bytes of data, the file has 7"]);
    check(&format!("{{\"a\":{a}}}"), 9, &["too long"]);
}

#[test]
fn odd_but_sound_headers_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = File::open(file_with(dir.path(), "{}   ", 0)).unwrap();
    assert_eq!(file.tensors().len(), 0);
    // Entries out of order, an empty tensor between, a scalar, names that need escapes.
    let header = r#"{"b":{"dtype":"BF16","shape":[],"data_offsets":[4,6]},"__metadata__":{"format":"pt"},
        "a\n\"é":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},
        "none":{"dtype":"I64","shape":[3,0],"data_offsets":[4,4]}}"#;
    let file = File::open(file_with(dir.path(), header, 6)).unwrap();
    let names: Vec<&str> = file.tensors().map(|(name, _)| name).collect();
    assert_eq!(names, ["a\n\"é", "none", "b"]);
    assert_eq!(file.metadata()["format"], "pt");
    assert_eq!(file.read("b").unwrap(), [7, 7]);
    assert!(file.read("none").unwrap().is_empty());
}

#[test]
fn a_file_cut_anywhere_is_refused_and_a_changed_byte_never_panics() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("odd.safetensors");
    let whole = std::fs::read(reference("qwen3/model-00010-of-00010.safetensors")).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for len in (0..header + 8).step_by(3).chain([header + 8, whole.len() - 1]) {
        std::fs::write(&path, &whole[..len]).unwrap();
        refused(&path, &[]);
    }
    let short = &whole[..];
    for at in 0..header + 8 {
        for flip in [0x01, 0x80] {
            let mut bytes = short.to_vec();
            bytes[at] ^= flip;
            std::fs::write(&path, &bytes).unwrap();
            if let Ok(file) = File::open(&path) {
                let names: Vec<String> = file.tensors().map(|(name, _)| name.to_string()).collect();
                names.iter().for_each(|name| drop(file.read(name).unwrap()));
            }
        }
    }
    std::fs::write(&path, u64::MAX.to_le_bytes()).unwrap();
    refused(&path, &["not a safetensors file"]);
    assert!(File::open(dir.path()).is_err());
    assert!(File::open(dir.path().join("none")).is_err());
}

#[test]
fn a_file_is_written_by_ranges_and_read_by_others() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let source = File::open(reference("llama3/model.safetensors")).unwrap();
    let entries = || source.tensors().map(|(name, info)| (name, info.dtype, info.shape.as_slice()));
    let layout = Layout::new(&path, entries()).unwrap();
    assert!(layout.header().len().is_multiple_of(8));
    let writer = Writer::create(&path, layout.clone()).unwrap();
    for (name, _) in source.tensors() {
        let bytes = source.read(name).unwrap();
        let cut = bytes.len() / 3;
        writer.write_range(name, cut as u64, &bytes[cut..]).unwrap();
        writer.write_range(name, 0, &bytes[..cut]).unwrap();
        assert!(writer.write_range(name, 1, &bytes).is_err());
    }
    assert!(writer.write_range("nothing", 0, &[]).is_err());
    assert!(!path.exists(), "the name appears only when the file is complete");
    writer.finish().unwrap();

    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, layout.file_bytes());
    let theirs = SafeTensors::deserialize(&bytes).unwrap();
    for (name, _) in source.tensors() {
        assert_eq!(theirs.tensor(name).unwrap().data(), source.read(name).unwrap());
    }
    assert_eq!(File::open(&path).unwrap().metadata()["format"], "pt");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn impossible_layouts_are_refused() {
    let of = |tensors: Vec<(&str, Vec<usize>)>| {
        let entries: Vec<_> = tensors.iter().map(|(name, shape)| (*name, Dtype::F32, &shape[..])).collect();
        Layout::new(Path::new("x"), entries).map(drop)
    };
    assert!(of(vec![("a", vec![]), ("a", vec![])]).is_err());
    assert!(of(vec![("__metadata__", vec![])]).is_err());
    assert!(of(vec![("a", vec![usize::MAX, 2])]).is_err());
    assert!(of(vec![("a", vec![usize::MAX / 8]), ("b", vec![usize::MAX / 5])]).is_err());
}

#[test]
fn a_folder_is_split_into_parts_and_read_back() {
    let source = Weights::open(reference("qwen3")).unwrap();
    let entries = || source.tensors().map(|(name, info)| (name, info.dtype, info.shape.as_slice()));
    for limit in [1, 100_000, u64::MAX] {
        let dir = tempfile::tempdir().unwrap();
        let plan = Plan::new(dir.path(), "model", entries(), limit).unwrap();
        let fits = |layout: &Layout| layout.data_bytes() <= limit || layout.tensors().len() == 1;
        assert!(plan.parts().all(|(_, layout)| fits(layout)));
        for (file, layout) in plan.parts() {
            let writer = Writer::create(dir.path().join(file), layout.clone()).unwrap();
            for (name, _) in layout.tensors() {
                writer.write_range(name, 0, &source.read(name).unwrap()).unwrap();
            }
            writer.finish().unwrap();
        }
        assert_eq!(plan.index().is_none(), plan.parts().len() == 1);
        if let Some((file, index)) = plan.index() {
            let text = String::from_utf8(index).unwrap();
            assert!(text.contains("\"total_size\": 966656") && text.contains("\"total_parameters\": 241664"));
            std::fs::write(dir.path().join(file), text).unwrap();
        }
        let back = Weights::open(dir.path()).unwrap();
        assert!(back.tensors().map(|(name, _)| name).eq(source.tensors().map(|(name, _)| name)));
        for (name, _) in source.tensors() {
            assert_eq!(back.read(name).unwrap(), source.read(name).unwrap());
        }
    }
    let twice = [("a", Dtype::F32, &[1usize][..]), ("a", Dtype::F32, &[1usize][..])];
    assert!(Plan::new(Path::new("x"), "model", twice, 4).is_ok(), "they lie in parts of their own");
    assert!(Plan::new(Path::new("x"), "model", twice, 8).is_err());
}
