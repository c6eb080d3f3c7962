//! Decoding against PyTorch's logits on the reference folders, and `generate` as a command.

use checkpoint::safetensors::File;
use device::{Dtype, Profile, cpu::Cpu};
use fsdp::{DecodePlan, Decoder, Decoding};
use shardloom::generate::Sampling;
use shardloom::run::DeviceChoice;
use shardloom::source::Folder;
use shardloom::{Generate, generate};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use tensor::models::{Config, build};

const CASES: [&str; 2] = ["llama3", "llama31-tied"];
/// Of the reference batches.
const SEQ: usize = 48;
const ROWS: usize = 4;
const VOCAB: usize = 515;

fn reference(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference").join(case)
}

fn decoder(case: &str, rows: usize, max_len: usize, chunk: usize, compute: Dtype) -> Decoder {
    let dir = reference(case);
    let config = Config::parse(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap();
    let model = Arc::new(build(&config, max_len).unwrap());
    let decoding = Decoding { rows, max_len, chunk, vocab: config.vocab, compute };
    let plan = DecodePlan::new(&model, decoding, Profile::Cpu).unwrap();
    let source = Folder::open(&dir, &model).unwrap();
    Decoder::new(Arc::new(Cpu::new()), plan, model, &source).unwrap()
}

/// The first batch's ids and PyTorch's logits for them.
fn first_batch(case: &str) -> (Vec<i32>, Vec<f32>) {
    let file = File::open(reference(case).join("io.safetensors")).unwrap();
    let ids = file.read("input_ids").unwrap();
    let ids = ids.chunks_exact(8).take(ROWS * SEQ).map(|c| i64::from_le_bytes(c.try_into().unwrap()) as i32);
    let logits = file.read("logits").unwrap();
    let logits = logits.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap()));
    (ids.collect(), logits.collect())
}

/// Columns `start..end` of every row.
fn columns<T: Copy>(values: &[T], width: usize, start: usize, end: usize) -> Vec<T> {
    values.chunks_exact(SEQ * width).flat_map(|row| row[start * width..end * width].to_vec()).collect()
}

/// ‖a − b‖ / ‖b‖
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let apart: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    (apart / b.iter().map(|b| square(f64::from(*b))).sum::<f64>()).sqrt()
}

/// Feeds the batch in passes of the given lengths and compares the logits after each.
fn teacher_forced(case: &str, passes: &[usize], chunk: usize, compute: Dtype, bound: f64) {
    let (ids, logits) = first_batch(case);
    let mut decoder = decoder(case, ROWS, SEQ, chunk, compute);
    let mut at = 0;
    for pass in passes {
        let got = decoder.feed(&columns(&ids, 1, at, at + pass)).unwrap();
        at += pass;
        let want = columns(&logits, VOCAB, at - 1, at);
        let off = distance(&got, &want);
        assert!(off <= bound, "{case}, passes {passes:?}, chunk {chunk}: off by {off:e} after {at} tokens");
    }
    assert_eq!(at, decoder.len());
}

#[test]
fn decoding_gives_the_logits_of_the_full_forward() {
    for case in CASES {
        teacher_forced(case, &[1; SEQ], 1, Dtype::F32, 1e-5);
        for prompt in [7, 40] {
            let passes: Vec<usize> = [prompt].into_iter().chain(vec![1; SEQ - prompt]).collect();
            teacher_forced(case, &passes, prompt, Dtype::F32, 1e-5);
        }
        teacher_forced(case, &[SEQ], SEQ, Dtype::F32, 1e-5);
        // Prompts of several chunks, of which the last is not full.
        teacher_forced(case, &[20, 1, 27], 8, Dtype::F32, 1e-5);
    }
}

#[test]
fn decoding_in_bf16_stays_near() {
    for case in CASES {
        teacher_forced(case, &[30, 1, 1, 16], 30, Dtype::Bf16, 2e-2);
    }
}

#[test]
fn a_greedy_continuation_does_not_depend_on_how_the_prompt_came() {
    for case in CASES {
        let (ids, _) = first_batch(case);
        let prompt = &ids[..20];
        let continued = |decoder: &mut Decoder, mut logits: Vec<f32>| -> Vec<i32> {
            let mut next = |position| {
                let id = Sampling::GREEDY.choose(&logits, position).unwrap();
                logits = decoder.feed(&[id]).unwrap();
                id
            };
            (0..40).map(&mut next).collect()
        };
        let mut decoder = decoder(case, 1, 60, 20, Dtype::F32);
        let logits = decoder.feed(prompt).unwrap();
        let at_once = continued(&mut decoder, logits);
        decoder.rewind(0);
        let logits = prompt.iter().fold(vec![], |_, id| decoder.feed(&[*id]).unwrap());
        assert_eq!(decoder.len(), 20);
        assert_eq!(continued(&mut decoder, logits), at_once);
        // Going back to the end of the prompt's first half.
        decoder.rewind(10);
        let logits = decoder.feed(&prompt[10..]).unwrap();
        assert_eq!(continued(&mut decoder, logits), at_once);
        assert!(decoder.feed(&[0]).unwrap_err().to_string().contains("more than the 60 planned"));
        assert!(decoder.feed(&[VOCAB as i32]).unwrap_err().to_string().contains("vocabulary"));
    }
}

#[test]
fn the_devices_peak_is_the_decoders_plan() {
    for (rows, chunk, compute) in [(1, 16, Dtype::F32), (3, 5, Dtype::Bf16)] {
        let mut decoder = decoder("llama3", rows, 32, chunk, compute);
        decoder.feed(&vec![7; rows * 16]).unwrap();
        decoder.feed(&vec![9; rows]).unwrap();
        let dir = reference("llama3");
        let config = Config::parse(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap();
        let planned = decoder.plan().regions(&build(&config, 32).unwrap());
        let planned: usize = planned.iter().map(|region| region.bytes).sum();
        assert_eq!(decoder.device().memory_use().peak_bytes, planned);
    }
}

fn ask(model: PathBuf, prompt: &str) -> Generate {
    Generate {
        model,
        prompt: prompt.into(),
        max_tokens: 24,
        sampling: Sampling::GREEDY,
        device: DeviceChoice::Cpu,
        dtype: None,
    }
}

fn text(args: &Generate) -> Vec<u8> {
    let mut out = vec![];
    let done = generate(args, &mut out).unwrap();
    assert!(done.new_tokens <= args.max_tokens);
    out
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let warm = |seed| {
        let sampling = Sampling { temperature: 0.9, top_k: 100, top_p: 0.95, seed };
        text(&Generate { sampling, ..ask(reference("llama3"), "abc") })
    };
    assert_eq!(warm(1), warm(1));
    assert_ne!(warm(1), warm(2));
    assert_eq!(text(&ask(reference("llama3"), "abc")), text(&ask(reference("llama3"), "abc")));
}

#[test]
fn generation_stops_where_positions_end() {
    // 256 positions: the token after the last of them can still be told.
    let prompt = "x".repeat(250);
    let args = Generate { max_tokens: 1000, ..ask(reference("llama3"), &prompt) };
    let done = generate(&args, &mut vec![]).unwrap();
    assert!(done.prompt_tokens == 250 && done.new_tokens <= 7, "{done:?}");
    let full = generate(&ask(reference("llama3"), &"x".repeat(256)), &mut vec![]).unwrap();
    assert!(full.new_tokens <= 1);
}

/// A copy of a reference folder whose configuration has some words replaced.
fn copy(case: &str, from: &str, to: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(reference(case).join(name), dir.path().join(name)).unwrap();
    }
    let path = dir.path().join("config.json");
    let config = std::fs::read_to_string(&path).unwrap();
    assert!(config.contains(from));
    std::fs::write(path, config.replace(from, to)).unwrap();
    dir
}

fn shardloom(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shardloom")).args(args).output().unwrap()
}

#[test]
fn the_command_prints_text_and_nothing_else() {
    let dir = reference("llama31-tied");
    let args = ["generate", "--model", dir.to_str().unwrap(), "--prompt", "Grüße", "--max-tokens", "24"];
    let output = shardloom(&[&args[..], &["--device", "cpu"]].concat());
    assert!(output.status.success());
    assert_eq!(output.stdout, text(&ask(dir.clone(), "Grüße")));
    assert!(String::from_utf8(output.stdout).unwrap().ends_with('\n'));
    assert!(String::from_utf8_lossy(&output.stderr).contains("tokens/s"));
    let warm = ["--temperature", "1.5", "--top-k", "40", "--top-p", "0.9", "--seed", "3", "--dtype", "bf16"];
    assert!(shardloom(&[&args[..], &warm].concat()).status.success());
}

#[test]
fn bad_input_is_a_clear_error() {
    let dir = reference("llama3");
    let dir = dir.to_str().unwrap();
    let empty = tempfile::tempdir().unwrap();
    let shape = copy("llama3", "\"vocab_size\": 515", "\"vocab_size\": 300");
    let kind = copy("llama3", "\"model_type\": \"llama\"", "\"model_type\": \"mamba\"");
    let long = "x".repeat(257);
    let path = |dir: &tempfile::TempDir| dir.path().to_str().unwrap().to_string();
    for (model, prompt, more, named) in [
        ("/no/such/folder", "a", vec![], "/no/such/folder"),
        (&path(&empty), "a", vec![], "config.json"),
        (&path(&shape), "a", vec![], "model.embed_tokens.weight"),
        (&path(&kind), "a", vec![], "mamba"),
        (dir, "", vec![], "prompt is empty"),
        (dir, &long, vec![], "257 tokens; the model has 256 positions"),
        (dir, "a", vec!["--temperature=-1"], "--temperature"),
        (dir, "a", vec!["--temperature=nan"], "--temperature"),
        (dir, "a", vec!["--top-p=0"], "--top-p"),
        (dir, "a", vec!["--max-tokens=0"], "--max-tokens"),
        (dir, "a", vec!["--device=gpu"], "cuda"),
        (dir, "a", vec!["--dtype=i8"], "bf16"),
    ] {
        let args = [&["generate", "--device=cpu", "--model", model, "--prompt", prompt], &more[..]].concat();
        let args: Vec<&str> = match more.first() {
            Some(word) if word.starts_with("--device") => {
                args.into_iter().filter(|arg| *arg != "--device=cpu").collect()
            }
            _ => args,
        };
        let output = shardloom(&args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
        assert!(error.contains(named), "{args:?}: {error}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn an_empty_prompt_begins_with_the_models_own_token() {
    let dir = copy("llama3", "\"bos_token_id\": 1", "\"bos_token_id\": 300");
    let done = generate(&ask(dir.path().into(), ""), &mut vec![]).unwrap();
    assert_eq!(done.prompt_tokens, 1);
}

const RHYME: &str = "Der Mond ist aufgegangen, die goldnen Sternlein prangen am Himmel hell und klar. ";

/// Ready-made batches of a text that goes round, one byte a token.
fn write_batches(path: &Path, steps: usize, rows: usize, seq: usize) {
    let mut round = RHYME.bytes().cycle().map(i32::from);
    let tokens: Vec<i32> = round.by_ref().take(steps * rows * seq + 1).collect();
    let bytes = |tokens: &[i32]| tokens.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    let shape = [steps, rows, seq];
    let tensors = ["input_ids", "labels"].map(|name| (name, checkpoint::Dtype::I32, &shape[..]));
    let layout = checkpoint::safetensors::Layout::new(path, tensors).unwrap();
    let writer = checkpoint::safetensors::Writer::create(path, layout).unwrap();
    writer.write_range("input_ids", 0, &bytes(&tokens[..steps * rows * seq])).unwrap();
    writer.write_range("labels", 0, &bytes(&tokens[1..])).unwrap();
    writer.finish().unwrap();
}

#[test]
fn a_model_says_what_it_was_trained_on() {
    let dir = tempfile::tempdir().unwrap();
    let batches = dir.path().join("batches.safetensors");
    write_batches(&batches, 60, 8, 50);
    let text = format!(
        r#"
        [model]
        config = {{ model_type = "llama", vocab_size = 257, hidden_size = 64, intermediate_size = 128,
            num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2,
            max_position_embeddings = 128 }}
        init_seed = 1
        [data]
        kind = "batches"
        path = "{}"
        [train]
        steps = 60
        global_batch = 8
        [optimizer]
        lr = 5e-3
        [device]
        kind = "cpu"
        [output]
        dir = "{}"
        [log]
        sinks = []
        "#,
        batches.display(),
        dir.path().display()
    );
    shardloom::train(&shardloom::Run::parse(&text, &[]).unwrap(), 1).unwrap();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let args = Generate { dtype: Some(dtype), ..ask(dir.path().join("model"), &RHYME[..20]) };
        assert_eq!(String::from_utf8(self::text(&args)).unwrap(), RHYME[20..44].to_string() + "\n");
    }
}
