//! `shardloom plan`, as a program: nothing but a configuration is needed.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

const LLAMA_405B: &str = r#"
    [model.config]
    model_type = "llama"
    hidden_size = 16384
    intermediate_size = 53248
    num_hidden_layers = 126
    num_attention_heads = 128
    num_key_value_heads = 8
    vocab_size = 128256
    [data]
    kind = "tokens"
    path = "nowhere.bin"
    seq_len = 8192
    [train]
    steps = 10
    global_batch = 1024
    micro_batch = 1
    [precision]
    compute = "bf16"
    [device]
    kind = "cuda"
    [output]
    dir = "unused"
"#;

fn plan(toml: &str, dir: &Path, args: &[&str]) -> Output {
    let path = dir.join("run.toml");
    std::fs::write(&path, toml).unwrap();
    Command::new(env!("CARGO_BIN_EXE_shardloom")).arg("plan").arg(path).args(args).output().unwrap()
}

fn json(toml: &str, args: &[&str]) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let out = plan(toml, dir.path(), &[args, &["--json"]].concat());
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("standard output is one JSON object and nothing else")
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number")) as usize
}

#[test]
fn a_405b_model_on_512_ranks_is_planned_at_once() {
    let start = Instant::now();
    let sheet = json(LLAMA_405B, &["--ranks", "512"]);
    println!("planned in {:.2} s", start.elapsed().as_secs_f64());
    let params = number(&sheet["parameters"]);
    assert!((405_000_000_000..406_500_000_000).contains(&params), "{params}");
    assert_eq!(sheet["units"].as_array().unwrap().len(), 128);
    let regions = sheet["regions"].as_array().unwrap();
    let sum: usize = regions.iter().map(|region| number(&region["bytes"])).sum();
    assert_eq!(sum, number(&sheet["peak_bytes"]));
    // In each of two micro-batches every unit is gathered twice, but for the last and the one before it, which stays as
    // the turn's next.
    assert_eq!(number(&sheet["collectives"][0]["count"]), 2 * (128 + 126));
}

#[test]
fn json_has_what_the_text_has() {
    let dir = tempfile::tempdir().unwrap();
    let text = plan(LLAMA_405B, dir.path(), &["--ranks", "512", "--device-memory", "80GiB"]);
    let text = String::from_utf8(text.stdout).unwrap();
    let sheet = json(LLAMA_405B, &["--ranks", "512", "--device-memory", "80GiB"]);
    for region in sheet["regions"].as_array().unwrap() {
        assert!(text.contains(region["name"].as_str().unwrap()), "{region} is not in {text}");
    }
    assert!(text.contains(&sheet["parameters"].to_string()) && text.contains("host memory"));
    assert!(number(&sheet["step_peak"]["activations"]) > 0 && number(&sheet["host_bytes"]) > 0);
    let device = number(&sheet["fit"]["device_bytes"]);
    assert_eq!(device, 80 << 30);
    assert_eq!(sheet["fit"]["fits"], number(&sheet["peak_bytes"]) <= device);
}

const SMALL: &str = r#"
    [model.config]
    model_type = "llama"
    hidden_size = 256
    intermediate_size = 688
    num_hidden_layers = 8
    num_attention_heads = 8
    vocab_size = 4096
    [data]
    kind = "text"
    path = "no/such/folder.jsonl"
    seq_len = 256
    [train]
    steps = 10
    global_batch = 16
    micro_batch = 4
    [shard]
    strategy = "grad"
    [device]
    kind = "cpu"
    [output]
    dir = "unused"
"#;

#[test]
fn what_does_not_fit_comes_with_the_cheapest_change() {
    let sheet = json(SMALL, &["--ranks", "2"]);
    assert!(sheet["notes"][0].as_str().unwrap().contains("data.seq_len alone"), "{}", sheet["notes"]);
    let peak = number(&sheet["peak_bytes"]);
    let ask =
        |bytes: usize| json(SMALL, &["--ranks", "2", "--device-memory", &bytes.to_string()])["fit"].clone();
    assert_eq!(ask(peak)["fits"], true);
    let fit = ask(peak - 1);
    assert_eq!((&fit["fits"], number(&fit["missing_bytes"])), (&Value::Bool(false), 1));
    let attempts = fit["attempts"].as_array().unwrap();
    let keys: Vec<String> = attempts.iter().map(|attempt| attempt["set"].to_string()).collect();
    assert_eq!(
        keys,
        [
            r#"{"recompute.mode":"cheap"}"#,
            r#"{"recompute.mode":"full"}"#,
            r#"{"train.micro_batch":2}"#,
            r#"{"shard.strategy":"full"}"#,
            r#"{"optimizer.state":"bf16"}"#,
            r#"{"shard.offload":"all"}"#,
            r#"{"--ranks":4}"#,
        ]
    );
    assert_eq!(fit["cheapest"], attempts[0]);
    // What an attempt promises is what a plan of it says.
    for attempt in attempts {
        let set: Vec<(String, String)> = attempt["set"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(key, value)| (key.clone(), value.to_string()))
            .collect();
        let mut args = vec!["--ranks".to_string(), "2".into()];
        for (key, value) in &set {
            match key.as_str() {
                "--ranks" => args[1] = value.clone(),
                key => args.extend(["--set".into(), format!("{key}={value}")]),
            }
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        assert_eq!(json(SMALL, &args)["peak_bytes"], attempt["peak_bytes"], "{set:?}");
    }
    // Where no single change is enough, several together are.
    let least = attempts.iter().map(|attempt| number(&attempt["peak_bytes"])).min().unwrap();
    let fit = ask(least - 1);
    assert!(fit["cheapest"]["set"].as_object().unwrap().len() > 1, "{fit:#}");
    assert!(number(&fit["cheapest"]["peak_bytes"]) < least);
    assert_eq!(ask(1)["cheapest"], Value::Null);
}

#[test]
fn the_text_says_plainly_that_it_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let out = plan(SMALL, dir.path(), &["--device-memory", "20MiB"]);
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(0), "a plan is no failure");
    assert!(text.contains("DOES NOT FIT on a device of 20.00 MiB"), "{text}");
    assert!(text.contains("recompute.mode = \"full\""), "{text}");
    let out = plan(SMALL, dir.path(), &["--device-memory", "80G"]);
    assert_eq!(out.status.code(), Some(2));
    let out = plan(&SMALL.replace("strategy = \"grad\"", "strategy = \"gard\""), dir.path(), &[]);
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&out.stderr).contains("gard"));
}

#[test]
fn batches_are_planned_from_the_header_or_from_seq_len() {
    let absent = SMALL.replace("kind = \"text\"", "kind = \"batches\"");
    assert!(number(&json(&absent, &[])["peak_bytes"]) > 0);
    let dir = tempfile::tempdir().unwrap();
    let out = plan(&absent.replace("seq_len = 256", ""), dir.path(), &[]);
    assert_eq!(out.status.code(), Some(2), "without a length the file is needed");
}
