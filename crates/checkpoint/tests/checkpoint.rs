//! Checkpoints: written by many, read by others, broken in every way.

mod made;

use checkpoint::{Dtype, Manifest, Plan, Reader, Receipt, Series, Writer};
use made::{bytes_of, disk, load, save};
use std::path::Path;

#[test]
fn written_by_any_number_read_by_any_other() {
    let dir = tempfile::tempdir().unwrap();
    for writers in 1..=4 {
        let path = dir.path().join(format!("by-{writers}"));
        save(&disk(), &path, writers as u64, writers).unwrap();
        for readers in 1..=5 {
            assert_eq!(load(&path, readers).unwrap(), writers as u64);
        }
        let reader = Reader::open(&path).unwrap();
        assert!(reader.verify().is_empty());
        assert_eq!(
            (reader.manifest().ranks, reader.weights().count(), reader.optimizer().count()),
            (writers, 4, 8)
        );
        assert_eq!(reader.plain("additional_chat_templates/x.jinja").unwrap(), b"hello");
    }
    // It is a Hugging Face folder too.
    let weights = checkpoint::folder::Weights::open(dir.path().join("by-3")).unwrap();
    assert_eq!(weights.tensors().len(), 4);
    assert_eq!(weights.read("b").unwrap(), bytes_of(3, "b", 6));
}

#[test]
fn a_checkpoint_that_is_saved_again_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("again");
    for step in [1, 2] {
        save(&disk(), &path, step, 2).unwrap();
        assert_eq!(load(&path, 3).unwrap(), step);
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// Commits one tensor of eight bytes that was written as these ranges.
fn commit_of(ranges: &[(u64, u64)]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    let plan = Plan::new(&path, [("some.weight", Dtype::U8, &[8usize][..])], [], 99).unwrap();
    let writer = Writer::create(disk(), &path, plan).unwrap();
    for &(start, end) in ranges {
        writer.write("some.weight", start, &vec![0; (end - start) as usize]).unwrap();
    }
    assert!(writer.write("some.weight", 4, &[0; 5]).is_err());
    assert!(writer.write("other", 0, &[0]).is_err());
    let (receipt, draft) = writer.finish().unwrap();
    let result = draft.commit([receipt], &[], checkpoint::Label::now(1, 1));
    assert_eq!(result.is_ok(), path.exists());
    result.map_or_else(|error| error.to_string(), |()| "whole".into())
}

#[test]
fn a_writer_that_does_not_see_the_others_files_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    let text = Writer::join(disk(), &path, made::plan(&path)).unwrap_err().to_string();
    assert!(text.contains("x.partial") && text.contains("share"), "{text}");
}

#[test]
fn what_was_not_written_exactly_once_is_no_checkpoint() {
    assert_eq!(commit_of(&[(4, 8), (0, 3), (3, 4)]), "whole");
    for (ranges, said) in [
        (&[(0, 3), (4, 8)][..], "bytes 3..4 were not written"),
        (&[(0, 8), (2, 4)], "bytes 2..8 were written twice"),
        (&[(0, 4), (0, 4), (4, 8)], "bytes 0..4 were written twice"),
        (&[(0, 7)], "bytes 7..8 were not written"),
        (&[], "bytes 0..8 were not written"),
    ] {
        let text = commit_of(ranges);
        assert!(text.contains(said) && text.contains("some.weight"), "{ranges:?}: {text}");
    }
}

#[test]
fn what_was_not_read_exactly_once_is_not_proved() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    save(&disk(), &path, 1, 3).unwrap();
    let reader = Reader::open(&path).unwrap();
    let sizes: Vec<(String, u64)> =
        reader.tensors().map(|(name, info, _)| (name.to_string(), info.num_bytes())).collect();
    let read = |skip: u64, twice: bool| {
        for (name, bytes) in &sizes {
            let len = if name == "c" { bytes - skip } else { *bytes };
            reader.read(name, 0, &mut vec![0; len as usize]).unwrap();
            if twice && name == "b" {
                reader.read(name, 2, &mut [0; 2]).unwrap();
            }
        }
        reader.prove([reader.receipt()])
    };
    read(0, false).unwrap();
    let text = read(3, false).unwrap_err().to_string();
    assert!(text.contains(": c: bytes 4221..4224 were not read"), "{text}");
    let text = read(0, true).unwrap_err().to_string();
    assert!(text.contains(": b: bytes ") && text.contains("read twice"), "{text}");
    assert!(Receipt::from_bytes(&[0; 25]).is_none());
}

#[test]
fn another_models_checkpoint_is_named_as_such() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    save(&disk(), &path, 1, 1).unwrap();
    let reader = Reader::open(&path).unwrap();
    let mut wanted: Vec<(String, Vec<usize>)> =
        reader.tensors().map(|(name, info, _)| (name.to_string(), info.shape.clone())).collect();
    let expect = |wanted: &[(String, Vec<usize>)]| {
        reader.expect(wanted.iter().map(|(name, shape)| (name.as_str(), &shape[..])))
    };
    expect(&wanted).unwrap();
    wanted.push(("new.weight".into(), vec![1]));
    wanted.retain(|(name, _)| name != "none");
    wanted[0].1 = vec![5, 7];
    let text = expect(&wanted).unwrap_err().to_string();
    for said in ["another model", "new.weight is missing", "none is not wanted", "[7, 5], not [5, 7]"] {
        assert!(text.contains(said), "{text}");
    }
}

/// Every file below a folder, and its bytes.
fn files(dir: &Path) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => all.extend(files(&path)),
            false => all.push((path.clone(), std::fs::read(&path).unwrap())),
        }
    }
    all
}

/// What opening and verifying say.
fn complaints(dir: &Path) -> String {
    match Reader::open(dir) {
        Err(error) => error.to_string(),
        Ok(reader) => reader.verify().iter().map(|error| format!("{error}\n")).collect(),
    }
}

#[test]
fn cut_and_flipped_files_are_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    save(&disk(), &path, 1, 2).unwrap();
    assert_eq!(complaints(&path), "");
    for (file, whole) in files(&path) {
        let name = file.file_name().unwrap().to_str().unwrap();
        let named = |text: String, what: &str| assert!(text.contains(name), "{name}, {what}: {text:?}");
        for len in [0, 1, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&file, &whole[..len]).unwrap();
            named(complaints(&path), &format!("cut to {len}"));
            assert!(load(&path, 2).is_err());
        }
        std::fs::write(&file, [&whole[..], b"x"].concat()).unwrap();
        named(complaints(&path), "longer");
        for at in (0..whole.len()).step_by(1 + whole.len() / 97) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            std::fs::write(&file, bytes).unwrap();
            named(complaints(&path), &format!("byte {at} flipped"));
        }
        std::fs::remove_file(&file).unwrap();
        named(complaints(&path), "removed");
        std::fs::write(&file, &whole).unwrap();
    }
    assert_eq!(complaints(&path), "");
}

#[test]
fn a_flipped_weight_is_found_by_those_who_read_parts_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    save(&disk(), &path, 1, 1).unwrap();
    let reader = Reader::open(&path).unwrap();
    let (_, _, file) = reader.tensors().find(|(name, ..)| *name == "c").unwrap();
    let mut bytes = std::fs::read(file.path()).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(file.path(), bytes).unwrap();
    for (name, info, _) in reader.tensors() {
        // Two halves: neither is the piece that was written.
        let half = info.num_bytes() / 2;
        reader.read(name, 0, &mut vec![0; half as usize]).unwrap();
        reader.read(name, half, &mut vec![0; (info.num_bytes() - half) as usize]).unwrap();
    }
    let text = reader.prove([reader.receipt()]).unwrap_err().to_string();
    assert!(text.contains(": c: damaged") && text.contains("model"), "{text}");
}

#[test]
fn manifests_that_lie_are_caught() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    save(&disk(), &path, 1, 2).unwrap();
    let honest = Manifest::open(&path).unwrap();
    let tell = |lie: &dyn Fn(&mut Manifest), said: &[&str]| {
        let mut manifest = honest.clone();
        lie(&mut manifest);
        std::fs::write(path.join("manifest.json"), manifest.to_json(&path).unwrap()).unwrap();
        let text = load(&path, 2).unwrap_err().to_string();
        said.iter().for_each(|said| assert!(text.contains(said), "{said}: {text}"));
    };
    let model = honest.files.iter().find(|(_, entry)| entry.tensors.contains_key("c")).unwrap().0.clone();
    let entry = |manifest: &mut Manifest, change: &dyn Fn(&mut checkpoint::manifest::Entry)| {
        change(manifest.files.get_mut(&model).unwrap());
    };
    tell(&|m| m.step = 7, &["state.json", "step 1", "7"]);
    tell(&|m| entry(m, &|e| e.bytes += 1), &[&model, "truncated"]);
    tell(&|m| entry(m, &|e| e.crc32 ^= 1), &[&model, "header"]);
    tell(&|m| entry(m, &|e| drop(e.tensors.remove("c"))), &[&model, "c: the manifest does not have it"]);
    tell(&|m| entry(m, &|e| drop(e.tensors.insert("d".into(), vec![]))), &[&model, "d: the manifest has it"]);
    tell(
        &|m| entry(m, &|e| e.tensors.get_mut("c").unwrap()[0].bytes -= 1),
        &[&model, "c: the manifest's pieces"],
    );
    tell(&|m| entry(m, &|e| e.tensors.get_mut("c").unwrap()[0].bytes = u64::MAX), &["c: ", "too many"]);
    tell(&|m| entry(m, &|e| e.tensors.get_mut("c").unwrap()[0].crc32 ^= 1), &[&model, "c: damaged"]);
    tell(&|m| drop(m.files.remove("state.json")), &["state.json", "weights alone"]);
    tell(&|m| drop(m.files.insert("gone.json".into(), m.files["config.json"].clone())), &["gone.json"]);
    tell(&|m| drop(m.files.insert("../x".into(), m.files["config.json"].clone())), &["../x", "not the name"]);
}

#[test]
fn changed_bytes_of_a_manifest_never_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    save(&disk(), &path, 1, 2).unwrap();
    let whole = std::fs::read(path.join("manifest.json")).unwrap();
    let mut random = 7u64;
    let mut next = |below: usize| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (random >> 33) as usize % below
    };
    for _ in 0..4000 {
        let mut bytes = whole.clone();
        for _ in 0..1 + next(4) {
            let at = next(bytes.len());
            match next(3) {
                0 => bytes[at] = next(256) as u8,
                1 => drop(bytes.remove(at)),
                _ => bytes.insert(at, b"0123456789\"[]{},:-"[next(18)]),
            }
        }
        if bytes != whole {
            let same = |manifest: Manifest| manifest == Manifest::parse(&path, &whole).unwrap();
            assert!(Manifest::parse(&path, &bytes).map_or(true, same));
        }
    }
}

#[test]
fn the_last_of_a_series() {
    let dir = tempfile::tempdir().unwrap();
    let series = Series::new(dir.path().join("checkpoints"), disk());
    assert!(series.latest().unwrap().path.is_none());
    for step in [5, 10, 15] {
        save(&disk(), &series.path(step), step, 2).unwrap();
        series.point(step).unwrap();
        assert_eq!(series.latest().unwrap().path, Some(series.path(step)));
    }
    assert_eq!(load(&series.dir().join("latest"), 1).unwrap(), 15);
    // Saved again, it is the last.
    std::thread::sleep(std::time::Duration::from_millis(2));
    save(&disk(), &series.path(10), 10, 1).unwrap();
    assert_eq!(series.latest().unwrap().path, Some(series.path(10)));
    // Even where the clock has gone back, the next is later than all.
    let saved = Manifest::open(&series.path(10)).unwrap().saved_unix_ms;
    let manifest = series.path(15).join("manifest.json");
    let honest = std::fs::read(&manifest).unwrap();
    let mut early = Manifest::open(&series.path(15)).unwrap();
    early.saved_unix_ms = saved + 3_600_000;
    std::fs::write(&manifest, early.to_json(&manifest).unwrap()).unwrap();
    assert_eq!(series.label(20, 1).unwrap().saved_unix_ms, saved + 3_600_001);
    std::fs::write(&manifest, honest).unwrap();
    // One that is broken is passed over, and named.
    let manifest = series.path(10).join("manifest.json");
    let whole = std::fs::read(&manifest).unwrap();
    std::fs::write(&manifest, b"{").unwrap();
    let latest = series.latest().unwrap();
    assert_eq!(latest.path, Some(series.path(15)));
    assert!(latest.broken[0].to_string().contains("step-000010/manifest.json"), "{:?}", latest.broken);
    // It neither counts as kept nor is removed.
    series.prune(2).unwrap();
    assert_eq!(load(&series.path(5), 1).unwrap(), 5);
    std::fs::write(&manifest, whole).unwrap();
    series.prune(0).unwrap();
    assert_eq!(load(&series.path(5), 1).unwrap(), 5);
    series.prune(2).unwrap();
    assert!(!series.path(5).exists() && series.path(15).exists());
    series.prune(1).unwrap();
    assert_eq!(load(&series.path(10), 1).unwrap(), 10);
    assert!(!series.path(15).exists());
}
