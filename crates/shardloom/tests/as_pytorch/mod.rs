//! The runs whose numbers PyTorch has computed.

use shardloom::Run;
use std::path::{Path, PathBuf};

pub fn reference(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference").join(case)
}

/// The run of a case as PyTorch ran it, with overrides.
pub fn run(case: &str, set: &[&str], out: &Path) -> Run {
    let dir = reference(case);
    let text = format!(
        r#"
        [model]
        path = "{dir}"
        [data]
        kind = "batches"
        path = "{dir}/io.safetensors"
        [train]
        steps = 12
        global_batch = 4
        [optimizer]
        lr = 1e-3
        weight_decay = 0.1
        decay = "all"
        [device]
        kind = "cpu"
        timeout_s = 60
        [output]
        dir = "{out}"
        [log]
        sinks = ["jsonl"]
        "#,
        dir = dir.display(),
        out = out.display()
    );
    let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
    Run::parse(&text, &set).unwrap()
}
