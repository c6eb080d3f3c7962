//! `checkpoint inspect|verify|export`.

use super::contents::MAX_PART_BYTES;
use super::resume::find_in;
use crate::floats::{decode, encode, file_dtype, is_float};
use crate::{Error, Result, show};
use checkpoint::safetensors::TensorInfo;
use checkpoint::storage::Disk;
use checkpoint::{Dtype, Label, Plan, Reader, State, Writer};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Numbers converted at once.
const CHUNK: usize = 1 << 20;

/// What is inside a checkpoint, for people or as one JSON object.
pub fn inspect(dir: &Path, tensors: bool, json: bool) -> Result<String> {
    let reader = Reader::open(find_in(dir)?)?;
    let state =
        if reader.plain_names().any(|name| name == State::FILE) { Some(reader.state()?) } else { None };
    if json {
        return Ok(format!("{:#}\n", as_json(&reader, state.as_ref(), tensors)));
    }
    let manifest = reader.manifest();
    let column = |bytes: u64| show::bytes(bytes as usize).trim().to_string();
    let mut text = format!("{}\n", reader.dir().display());
    let mut line = |key: &str, value: String| {
        let _ = writeln!(text, "  {key:<12}{value}");
    };
    line("step", manifest.step.to_string());
    line(
        "written by",
        format!("{}, {} ranks, {}", manifest.writer, manifest.ranks, date(manifest.saved_unix_ms)),
    );
    line("size", format!("{} in {} files", column(manifest.total_bytes()), manifest.files.len()));
    line("weights", summary(reader.weights()));
    line("optimizer", summary(reader.optimizer()));
    if let Some(state) = &state {
        if let Some(data) = state.data {
            line("data", format!("row {} of epoch {} is next", data.row, data.epoch));
        }
        if let Some(scaler) = state.scaler {
            line("loss scale", scaler.scale.to_string());
        }
    }
    for (name, entry) in &manifest.files {
        let _ = writeln!(text, "  {} {name}", show::bytes(entry.bytes as usize));
    }
    if tensors {
        for (name, info, file) in reader.tensors() {
            let file = file.path().file_name().unwrap_or_default().to_string_lossy();
            let _ = writeln!(text, "  {:<5} {:<20} {name} ({file})", info.dtype, format!("{:?}", info.shape));
        }
    }
    Ok(text)
}

fn as_json(reader: &Reader, state: Option<&State>, tensors: bool) -> Value {
    let manifest = reader.manifest();
    let count = |all: &mut dyn Iterator<Item = (&str, &TensorInfo)>| {
        let (mut tensors, mut elements, mut bytes) = (0u64, 0, 0);
        let mut dtypes = BTreeMap::new();
        for (_, info) in all {
            (tensors, elements, bytes) =
                (tensors + 1, elements + info.num_elements(), bytes + info.num_bytes());
            *dtypes.entry(info.dtype.name()).or_insert(0u64) += 1;
        }
        json!({"tensors": tensors, "elements": elements, "bytes": bytes, "dtypes": dtypes})
    };
    let mut object = json!({
        "path": reader.dir(),
        "step": manifest.step,
        "writer": manifest.writer,
        "ranks": manifest.ranks,
        "saved_unix_ms": manifest.saved_unix_ms,
        "bytes": manifest.total_bytes(),
        "weights": count(&mut reader.weights()),
        "optimizer": count(&mut reader.optimizer()),
        "files": manifest.files.iter().map(|(name, entry)| (name.clone(), json!(entry.bytes))).collect::<serde_json::Map<_, _>>(),
        "state": state,
    });
    if tensors {
        let list = reader.tensors().map(|(name, info, _)| {
            (name.to_string(), json!({"dtype": info.dtype.name(), "shape": info.shape}))
        });
        object["tensors"] = Value::Object(list.collect());
    }
    object
}

/// "12 tensors, 1.24 G parameters, BF16, 2.3 GiB".
fn summary<'a>(tensors: impl Iterator<Item = (&'a str, &'a TensorInfo)>) -> String {
    let (mut count, mut elements, mut bytes) = (0, 0, 0);
    let mut dtypes = std::collections::BTreeSet::new();
    for (_, info) in tensors {
        count += 1;
        elements += info.num_elements();
        bytes += info.num_bytes();
        dtypes.insert(info.dtype.name());
    }
    if count == 0 {
        return "none".into();
    }
    let dtypes: Vec<&str> = dtypes.into_iter().collect();
    let size = show::bytes(bytes as usize);
    format!("{count} tensors, {elements} numbers, {}, {}", dtypes.join(" and "), size.trim())
}

/// Milliseconds since 1970 as "2026-11-15 05:20:00 UTC".
fn date(unix_ms: u64) -> String {
    let (days, seconds) = (unix_ms / 86_400_000, unix_ms / 1000 % 86_400);
    // Counted from 1 March of year 0, leap days come last in a year and in its four hundred (Hinnant's algorithm).
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// Reads every byte of a checkpoint; what it found, or all that is wrong.
pub fn verify(dir: &Path) -> Result<String> {
    let dir = find_in(dir)?;
    let damaged = |problems: Vec<checkpoint::Error>| Error::Damaged {
        dir: dir.clone(),
        problems: problems.iter().map(|problem| format!("\n  {problem}")).collect(),
    };
    let reader = Reader::open(&dir).map_err(|error| damaged(vec![error]))?;
    let problems = reader.verify();
    if !problems.is_empty() {
        return Err(damaged(problems));
    }
    let (manifest, tensors) = (reader.manifest(), reader.tensors().len());
    let size = show::bytes(manifest.total_bytes() as usize);
    Ok(format!(
        "{}: whole. Step {}, {tensors} tensors, each byte of them covered once, {} in {} files as they were written",
        dir.display(),
        manifest.step,
        size.trim(),
        manifest.files.len()
    ))
}

/// What `checkpoint export` is to do.
#[derive(Clone, Debug)]
pub struct Export {
    pub dir: PathBuf,
    pub out: PathBuf,
    /// None: as the weights are.
    pub dtype: Option<device::Dtype>,
    pub max_part_bytes: u64,
}

impl Export {
    pub fn new(dir: impl Into<PathBuf>, out: impl Into<PathBuf>) -> Self {
        Export { dir: dir.into(), out: out.into(), dtype: None, max_part_bytes: MAX_PART_BYTES }
    }
}

/// Writes the weights of a checkpoint as a Hugging Face folder of their own, a few megabytes at a time.
pub fn export(export: &Export) -> Result<String> {
    let reader = Reader::open(find_in(&export.dir)?)?;
    let out = folder_to_write(&export.out)?;
    if let Some((name, info)) = reader.weights().find(|(_, info)| !is_float(info.dtype)) {
        return Err(Error::file(
            reader.dir(),
            format!("{name} is {}; F32, BF16 and F16 are written", info.dtype),
        ));
    }
    let dtype_of = |info: &TensorInfo| export.dtype.map_or(info.dtype, file_dtype);
    let specs = reader.weights().map(|(name, info)| (name, dtype_of(info), info.shape.as_slice()));
    let plan = Plan::new(&out, specs, [], export.max_part_bytes)?;
    let writer = Writer::create(Arc::new(Disk), &out, plan.clone())?;
    for (name, info) in reader.weights() {
        convert(&reader, name, info, dtype_of(info), &writer)?;
    }
    let mut plain = Vec::new();
    let left_out = |name: &str| name == State::FILE || name.ends_with(".safetensors.index.json");
    for name in reader.plain_names().filter(|name| !left_out(name)) {
        let bytes = reader.plain(name)?;
        match (name, export.dtype) {
            ("config.json", Some(dtype)) => plain.push((name.into(), with_dtype(&bytes, dtype))),
            _ => plain.push((name.to_string(), bytes)),
        }
    }
    let (receipt, draft) = writer.finish()?;
    draft.commit([receipt], &plain, Label::now(reader.manifest().step, 1))?;
    let size = show::bytes(plan.data_bytes() as usize);
    Ok(format!("wrote {}: {} in {} files of weights", export.out.display(), size.trim(), plan.parts().len()))
}

/// A folder that is not there yet, or one that was written here and will be replaced.
pub(super) fn folder_to_write(out: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(out).map_err(|e| Error::file(out, e))?;
    if path.exists() && !path.join(checkpoint::manifest::MANIFEST).exists() {
        let what = "it is there already, and is no folder that was written here; name a new one";
        return Err(Error::Config(format!("--out {}: {what}", out.display())));
    }
    Ok(path)
}

/// Copies one weight, in another dtype if need be.
fn convert(reader: &Reader, name: &str, info: &TensorInfo, to: Dtype, writer: &Writer) -> Result<()> {
    let (from, numel) = (info.dtype, info.num_elements() as usize);
    let (mut bytes, mut values, mut converted) = (vec![], vec![], vec![]);
    for start in (0..numel).step_by(CHUNK) {
        let len = CHUNK.min(numel - start);
        bytes.resize(len * from.bytes(), 0);
        reader.read(name, (start * from.bytes()) as u64, &mut bytes)?;
        if from == to {
            writer.write(name, (start * to.bytes()) as u64, &bytes)?;
            continue;
        }
        values.resize(len, 0.0);
        converted.resize(len * to.bytes(), 0);
        decode(from, &bytes, &mut values);
        encode(&values, to, &mut converted);
        writer.write(name, (start * to.bytes()) as u64, &converted)?;
    }
    Ok(())
}

/// A config.json that says in which dtype its weights are; one that cannot be read stays as it is.
fn with_dtype(config: &[u8], dtype: device::Dtype) -> Vec<u8> {
    let name = match dtype {
        device::Dtype::Bf16 => "bfloat16",
        device::Dtype::F16 => "float16",
        _ => "float32",
    };
    let Ok(Value::Object(mut object)) = serde_json::from_slice(config) else { return config.to_vec() };
    // Older programs read the one, newer ones the other.
    let key = if object.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
    object.insert(key.into(), name.into());
    serde_json::to_vec_pretty(&object).unwrap_or_else(|_| config.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_the_calendars() {
        for (unix, said) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59:59 UTC"),
            (1_794_719_081, "2026-11-15 05:04:41 UTC"),
        ] {
            assert_eq!(date(unix * 1000), said);
        }
    }
}
