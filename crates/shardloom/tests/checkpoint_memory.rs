//! What saving and loading take of a rank's host memory: no more than what the rank saves or loads, and a little.
//!
//! `cargo test` measures a small model with a small allowance. A model of more than a gigabyte of weights, with the
//! allowance of 256 MB, takes some minutes and 10 GB of memory:
//!
//! ```sh
//! SHARDLOOM_MATRIX=all cargo test --release -p shardloom --test checkpoint_memory -- --nocapture
//! ```

use serde_json::Value;
use std::process::Command;

#[test]
fn a_rank_holds_what_it_saves_and_little_more() {
    let all = std::env::var("SHARDLOOM_MATRIX").is_ok_and(|value| value == "all");
    let (size, allowance) = if all { ("350m", 256e6) } else { ("tiny", 24e6) };
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardloom"));
    command
        .args(["bench", "checkpoint", "--ranks", "4", "--rounds", "1", "--size", size, "--dir"])
        .arg(dir.path());
    for name in ["RANK", "WORLD_SIZE", "SHARDLOOM_SECRET"] {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    println!("{text}");
    let report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let number = |key: &str| report[key].as_f64().unwrap_or_else(|| panic!("{key}: {text}"));
    // Shards are padded, and units do not divide evenly.
    let quarter = number("bytes") / 4.0;
    assert!(number("rank_bytes") < 1.05 * quarter + 1e6, "a rank saves more than its part: {text}");
    assert!(number("save_memory_bytes") <= number("rank_bytes") + allowance, "{text}");
    assert!(number("load_memory_bytes") <= number("rank_bytes") + allowance, "{text}");
    // The measurement sees a snapshot at all.
    assert!(number("save_memory_bytes") >= 0.9 * number("rank_bytes"), "{text}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the bench cleans up");
}
