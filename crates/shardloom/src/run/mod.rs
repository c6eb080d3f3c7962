//! The run configuration: raw as the file has it, then resolved once. Nothing downstream checks again.

mod data;
mod raw;
mod resolve;

pub use data::{DataSource, DocumentSource};
pub(crate) use resolve::optimizer_at;
pub use resolve::{
    Checkpoints, DeviceChoice, GroupChoice, Length, Load, LrSchedule, ModelSource, Run, SavedAs,
};

use crate::{Error, Result};
use std::path::Path;

impl Run {
    /// Reads a RUN.toml, applies `--set key=value` overrides in order, and resolves it.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Run> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::file(path, e))?;
        Self::parse(&text, overrides).map_err(|error| match error {
            Error::Config(what) => Error::Config(format!("{}: {what}", path.display())),
            other => other,
        })
    }

    /// As [`Run::load`], from text. Relative paths are relative to the working directory.
    pub fn parse(text: &str, overrides: &[String]) -> Result<Run> {
        let mut table: toml::Table =
            text.parse().map_err(|e: toml::de::Error| Error::Config(e.to_string()))?;
        for assignment in overrides {
            set(&mut table, assignment)?;
        }
        let raw: raw::Raw =
            table.try_into().map_err(|e: toml::de::Error| Error::Config(explain(e.message())))?;
        Run::resolve(raw)
    }
}

/// Applies `a.b.c=value`. The value is TOML where it parses as such, else a string.
fn set(table: &mut toml::Table, assignment: &str) -> Result<()> {
    let wrong = || Error::Config(format!("--set {assignment}: expected key=value, as in train.steps=10"));
    let (key, value) = assignment.split_once('=').ok_or_else(wrong)?;
    let value = format!("x = {value}")
        .parse::<toml::Table>()
        .ok()
        .and_then(|mut parsed| parsed.remove("x"))
        .unwrap_or_else(|| toml::Value::String(value.to_string()));
    let mut path: Vec<&str> = key.trim().split('.').collect();
    let last = path.pop().filter(|last| !last.is_empty()).ok_or_else(wrong)?;
    let mut place = table;
    for part in path {
        let next = place.entry(part).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        place = next.as_table_mut().ok_or_else(wrong)?;
    }
    place.insert(last.to_string(), value);
    Ok(())
}

/// Adds the nearest known key to serde's message about an unknown one.
fn explain(message: &str) -> String {
    let quoted =
        |text: &str| -> Vec<String> { text.split('`').skip(1).step_by(2).map(String::from).collect() };
    let Some((unknown, known)) = message.split_once(", expected ") else { return message.to_string() };
    if !unknown.contains("unknown field") && !unknown.contains("unknown variant") {
        return message.to_string();
    }
    let Some(word) = quoted(unknown).pop() else { return message.to_string() };
    let nearest = quoted(known).into_iter().min_by_key(|candidate| distance(&word, candidate));
    match nearest {
        Some(nearest) if distance(&word, &nearest) <= 2 + word.len() / 3 => {
            format!("{message}. Did you mean `{nearest}`?")
        }
        _ => message.to_string(),
    }
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let here = if x == *y { diagonal } else { 1 + diagonal.min(row[j]).min(row[j + 1]) };
            diagonal = row[j + 1];
            row[j + 1] = here;
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = r#"
        [model]
        config = { model_type = "llama", vocab_size = 16, hidden_size = 8, intermediate_size = 16, num_hidden_layers = 1, num_attention_heads = 2 }
        init_seed = 1
        [data]
        kind = "batches"
        path = "x.safetensors"
        [train]
        steps = 3
        global_batch = 4
        micro_batch = 2
        [output]
        dir = "out"
    "#;

    fn error(text: &str, overrides: &[&str]) -> String {
        let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
        Run::parse(text, &overrides).unwrap_err().to_string()
    }

    #[test]
    fn a_minimal_run_resolves_and_overrides_win() {
        let run = Run::parse(MINIMAL, &["train.steps=7".into(), "output.dir=elsewhere".into()]).unwrap();
        assert_eq!(run.length, Length::Steps(7));
        assert_eq!(run.output, Path::new("elsewhere"));
    }

    #[test]
    fn unknown_keys_name_the_nearest_one() {
        assert!(error(MINIMAL, &["train.step=7"]).contains("Did you mean `steps`?"));
        assert!(error(MINIMAL, &["optimiser.lr=7"]).contains("Did you mean `optimizer`?"));
        assert!(error(MINIMAL, &["shard.strategy=\"ful\""]).contains("full"));
        assert!(error(MINIMAL, &["train"]).contains("key=value"));
    }

    #[test]
    fn values_are_checked_before_work_starts() {
        for (set, named) in [
            ("train.steps=0", "train.steps"),
            ("train.micro_batch=0", "train.micro_batch"),
            ("optimizer.lr=-1", "optimizer.lr"),
            ("optimizer.betas=[0.9, 1.0]", "optimizer.betas"),
            ("train.clip_norm=-2", "train.clip_norm"),
            ("precision.compute=\"i8\"", "i8"),
            ("shard.tensor=2", "shard.tensor"),
            ("data.kind=\"chat\"", "not supported yet"),
            ("data.kind=\"test\"", "text"),
            ("data.pack=true", "data.pack"),
            ("data.kind=\"text\"", "data.seq_len"),
            ("train.epochs=2", "train.epochs"),
        ] {
            let error = error(MINIMAL, &[set]);
            assert!(error.contains(named), "{set}: {error}");
        }
        let text = ["data.kind=\"text\"", "data.seq_len=8"];
        assert!(error(MINIMAL, &text).contains("no such file"));
        let files = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
        let empty = error(MINIMAL, &[&text[..], &[&format!("data.path=\"{files}\"")]].concat());
        assert!(empty.contains("no .txt or .jsonl"), "{empty}");
    }
}
