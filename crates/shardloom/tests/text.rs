//! Training on text, by the same path `shardloom train` takes.

use shardloom::checkpoint::safetensors::{Layout, Writer};
use shardloom::data::pack::Rows;
use shardloom::data::{self, Cursor, Data, Loader, Reader, Share, Stream};
use shardloom::{Error, Run};
use std::path::Path;
use std::sync::Arc;

/// Documents of quite different lengths, none of them empty.
fn documents(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("{i} {}", "weft and warp; ".repeat(i * i % 7)).trim().to_string()).collect()
}

fn write_jsonl(path: &Path, documents: &[String]) {
    let lines: Vec<String> = documents.iter().map(|d| serde_json::json!({ "text": d }).to_string()).collect();
    std::fs::write(path, lines.join("\n")).unwrap();
}

/// A small byte model on `data.jsonl` of a folder.
fn run(dir: &Path, set: &[&str]) -> shardloom::Result<Run> {
    let text = format!(
        r#"
        [model]
        config = {{ model_type = "llama", vocab_size = 257, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2, initializer_range = 0.2 }}
        init_seed = 3
        [data]
        kind = "text"
        path = "{dir}/data.jsonl"
        seq_len = 24
        seed = 5
        [train]
        global_batch = 8
        [optimizer]
        lr = 1e-2
        [device]
        kind = "cpu"
        timeout_s = 60
        [output]
        dir = "{dir}/out"
        model = false
        [log]
        sinks = ["jsonl"]
        "#,
        dir = dir.display()
    );
    let mut set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
    if !set.iter().any(|s| s.starts_with("train.epochs")) {
        set.push("train.steps=6".into());
    }
    Run::parse(&text, &set)
}

/// Losses and norms of all steps.
fn train(dir: &Path, ranks: usize, set: &[&str]) -> [Vec<f64>; 2] {
    shardloom::train(&run(dir, set).unwrap(), ranks).unwrap();
    let text = std::fs::read_to_string(dir.join("out/metrics.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    ["loss", "grad_norm"].map(|key| lines.iter().map(|line| line[key].as_f64().unwrap()).collect())
}

fn assert_close(what: &str, ours: &[f64], theirs: &[f64]) {
    assert_eq!(ours.len(), theirs.len());
    for (a, b) in ours.iter().zip(theirs) {
        assert!((a / b - 1.0).abs() <= 1e-5, "{what}: {ours:?} against {theirs:?}");
    }
}

fn folder(documents: &[String]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_jsonl(&dir.path().join("data.jsonl"), documents);
    dir
}

fn stream(run: &Run) -> Arc<Stream> {
    Data::open(run).unwrap().stream(run).unwrap()
}

#[test]
fn packed_documents_do_not_see_each_other() {
    let documents = documents(6);
    let dir = folder(&documents);
    // One row that holds all of them, and a row for each: the same targets, so the same loss and gradient.
    let tokens: usize = documents.iter().map(|document| document.len() + 1).sum();
    let seq = format!("data.seq_len={tokens}");
    let one = train(dir.path(), 1, &[&seq, "train.global_batch=1"]);
    let apart = train(dir.path(), 1, &[&seq, "train.global_batch=6", "data.pack=false"]);
    for (what, (one, apart)) in ["loss", "norm"].iter().zip(one.iter().zip(&apart)) {
        assert_close(what, one, apart);
    }
    // And they would see each other, were they one document.
    write_jsonl(&dir.path().join("data.jsonl"), &[documents.join("\n")]);
    let joined = train(dir.path(), 1, &[&seq, "train.global_batch=1"]);
    assert!((joined[0][0] / one[0][0] - 1.0).abs() > 1e-3, "{joined:?} {one:?}");
}

#[test]
fn any_number_of_ranks_trains_on_the_same_rows() {
    let dir = folder(&documents(60));
    for packing in ["data.pack=true", "data.pack=false"] {
        let one = train(dir.path(), 1, &[packing]);
        for (ranks, micro) in [(1, 2), (2, 4), (2, 1), (4, 2)] {
            let several = train(dir.path(), ranks, &[packing, &format!("train.micro_batch={micro}")]);
            assert_close(&format!("{packing}, {ranks} ranks"), &several[0], &one[0]);
        }
    }
}

/// The ids of the batches of `steps` steps from `cursor` on, as `ranks` ranks see them.
fn ids(stream: &Arc<Stream>, ranks: usize, global_batch: usize, cursor: Cursor, steps: u64) -> Vec<u8> {
    let mut loaders: Vec<Loader> = (0..ranks)
        .map(|rank| {
            let share = Share { rank, ranks, global_batch, micro_batch: 1 };
            Loader::start(stream.clone(), share, cursor, steps).unwrap()
        })
        .collect();
    let mut all = vec![];
    for _ in 0..steps {
        for loader in &mut loaders {
            loader.next_step().unwrap().into_iter().for_each(|batch| all.extend(&batch.fields[0]));
        }
    }
    assert!(matches!(loaders[0].next_step(), Err(Error::Loader)), "there is nothing after the last step");
    all
}

#[test]
fn a_cursor_goes_on_where_it_was_with_any_ranks_and_batch() {
    let dir = folder(&documents(40));
    let stream = stream(&run(dir.path(), &[]).unwrap());
    let steps = 2 * stream.rows() / 8 + 3;
    let whole = ids(&stream, 1, 8, Cursor::default(), steps);
    let epoch = stream.rows() as usize * 24 * 4;
    assert_ne!(whole[..epoch], whole[epoch..2 * epoch], "epochs are shuffled anew");
    for done in [1, steps / 2, steps - 1] {
        let text = serde_json::to_string(&Cursor::default().advanced(done * 8, stream.rows())).unwrap();
        let cursor: Cursor = serde_json::from_str(&text).unwrap();
        let rest = &whole[done as usize * 8 * 24 * 4..];
        for (ranks, global_batch) in [(1, 8), (2, 8), (4, 8), (2, 4)] {
            let resumed = ids(&stream, ranks, global_batch, cursor, (steps - done) * 8 / global_batch as u64);
            assert_eq!(resumed, rest, "{done} steps done, {ranks} ranks, {global_batch} rows");
        }
    }
}

#[test]
fn epochs_are_steps_and_what_is_left_out_is_said() {
    let dir = folder(&documents(40));
    let both = run(dir.path(), &["train.epochs=2", "train.steps=3"]).unwrap_err().to_string();
    assert!(both.contains("either train.steps or train.epochs"), "{both}");
    let two = run(dir.path(), &["train.epochs=2"]).unwrap();
    let stream = stream(&two);
    let rows = stream.rows();
    assert_eq!(stream.steps(two.length, 8), 2 * rows / 8);
    let left = 2 * rows % 8;
    let said = stream.summary_of_run(two.length, 8);
    assert_eq!(said.contains(&format!("the last {left} rows")), left > 0, "{said}");
    let [losses, _] = train(dir.path(), 2, &["train.epochs=2"]);
    assert_eq!(losses.len() as u64, 2 * rows / 8);
}

#[test]
fn packed_token_files_train_as_their_text_does() {
    let dir = folder(&documents(40));
    let text = train(dir.path(), 1, &[]);
    let file = dir.path().join("tokens.safetensors");
    let input = dir.path().join("data.jsonl").display().to_string();
    let said = data::tokenize(&[input], "bytes", &file).unwrap();
    assert!(said.contains("40 documents"), "{said}");
    let path = format!("data.path=\"{}\"", file.display());
    let tokens = train(dir.path(), 2, &["data.kind=tokens", &path]);
    assert_close("tokens", &tokens[0], &text[0]);
    let small = run(dir.path(), &["data.kind=tokens", &path, "model.config.vocab_size=256"]).unwrap();
    let error = shardloom::train(&small, 1).unwrap_err();
    assert!(error.to_string().contains("token 256 is outside") && error.exit_status() == 2, "{error}");
}

#[test]
fn a_tokenizer_of_ones_own_is_used_and_goes_along_with_the_model() {
    let dir = folder(&vec!["the cat. the the hat.".into(); 40]);
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer");
    let tokenizer = format!("data.tokenizer=\"{}\"", tokenizer.display());
    let set = [&tokenizer, "model.config.vocab_size=13", "model.config.eos_token_id=0", "data.pack=false"];
    let resolved = run(dir.path(), &set).unwrap();
    let Rows { ids, labels, .. } = Reader::new(stream(&resolved)).rows(Cursor::default(), 1).unwrap();
    // the, Ġ c a t ., Ġthe, Ġthe, Ġ h a t ., <end>, and what fills the row.
    let document = [10, 8, 5, 4, 2, 7, 12, 12, 8, 3, 4, 2, 7, 0];
    assert_eq!(ids[..14], document);
    assert_eq!((&labels[..13], labels[13]), (&document[1..], -100));
    let shown = data::inspect(&resolved, 2, 1).unwrap();
    assert!(shown.contains("the cat. the the hat."), "{shown}");
    train(dir.path(), 1, &[&set[..], &["output.model=true"]].concat());
    assert!(dir.path().join("out/model/tokenizer.json").is_file());
}

#[test]
fn inspect_shows_documents_and_ignored_labels() {
    let dir = folder(&documents(40));
    let shown = data::inspect(&run(dir.path(), &[]).unwrap(), 1, 2).unwrap();
    for part in ["40 documents", "step 1: epoch 0", "labels ignored", "row 1", "weft"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let error = data::inspect(&run(dir.path(), &[]).unwrap(), 7, 2).unwrap_err();
    assert!(error.to_string().contains("6 steps"), "{error}");
}

#[test]
fn bad_data_is_refused_before_anything_is_written() {
    let error = |dir: &Path, set: &[&str]| {
        let error = run(dir, set).and_then(|run| shardloom::train(&run, 2)).unwrap_err();
        assert_eq!(error.exit_status(), 2, "{error}");
        assert!(!dir.join("out").exists());
        error.to_string()
    };
    let few = folder(&documents(3));
    assert!(error(few.path(), &[]).contains("fewer rows than train.global_batch = 8"));
    assert!(error(few.path(), &["data.path=nowhere/*.txt"]).contains("no file matches"));
    assert!(error(few.path(), &["data.seq_len=0"]).contains("data.seq_len"));
    assert!(error(few.path(), &["model.config.vocab_size=200"]).contains("256"));
    assert!(error(few.path(), &["data.tokenizer=nowhere"]).contains("no tokenizer.json"));
    assert!(error(few.path(), &["data.kind=tokens"]).contains("not a safetensors file"));
    let empty = folder(&vec![String::new(); 20]);
    assert!(error(empty.path(), &[]).contains("nothing to train on"));
    let broken = folder(&documents(20));
    std::fs::write(broken.path().join("data.jsonl"), "{\"text\": \"a\"}\n{\"txt\": \"b\"}").unwrap();
    let text = error(broken.path(), &[]);
    assert!(text.contains("data.jsonl") && text.contains("line 2"), "{text}");
}

#[test]
fn what_fails_in_the_loader_reaches_the_trainer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("batches.safetensors");
    let shape = [6, 8, 24];
    let tensors = ["input_ids", "labels"].map(|name| (name, checkpoint::Dtype::I32, &shape[..]));
    let writer = Writer::create(&path, Layout::new(&path, tensors).unwrap()).unwrap();
    // A token that does not exist, in the fourth step.
    writer.write_range("input_ids", 3 * 8 * 24 * 4, &999i32.to_le_bytes()).unwrap();
    writer.finish().unwrap();
    let path = format!("data.path=\"{}\"", path.display());
    for ranks in [1, 2] {
        let run = run(dir.path(), &["data.kind=batches", &path]).unwrap();
        let error = shardloom::train(&run, ranks).unwrap_err().to_string();
        assert!(error.contains("token 999") && error.contains("row 24"), "{error}");
        let steps = std::fs::read_to_string(dir.path().join("out/metrics.jsonl")).unwrap().lines().count();
        assert_eq!(steps, 3);
    }
}

#[test]
fn ranks_with_different_data_do_not_start() {
    let dirs = [folder(&documents(40)), folder(&documents(41))];
    let groups = shardloom::comm::local::group("control", 2, std::time::Duration::from_secs(20));
    let errors = std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .zip(&dirs)
            .map(|(group, dir)| {
                scope.spawn(move || {
                    let run = run(dir.path(), &[]).unwrap();
                    stream(&run).agree(&run, &*group).unwrap_err().to_string()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    for error in errors {
        assert!(error.contains("40 documents") && error.contains("41 documents"), "{error}");
    }
}

#[test]
fn a_loader_that_is_dropped_early_ends() {
    let dir = folder(&documents(40));
    let stream = stream(&run(dir.path(), &[]).unwrap());
    let share = Share { rank: 0, ranks: 1, global_batch: 8, micro_batch: 8 };
    let mut loader = Loader::start(stream.clone(), share, Cursor::default(), u64::MAX).unwrap();
    loader.next_step().unwrap();
    drop(loader);
    assert_eq!(Arc::strong_count(&stream), 1, "its thread is gone");
}
