//! `plan`: what each rank will hold and send, before anything is allocated; whether that fits; and if not, the
//! cheapest change that would make it fit.

mod change;

pub use change::{Attempt, Change};

use crate::run::{DataSource, DocumentSource};
use crate::train::Job;
use crate::{Error, Result, Run, checkpoints, data, ranks};
use device::Profile;
use fsdp::Plan;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;

/// The plan of a run as text.
pub fn plan(run: &Run, ranks: usize) -> Result<String> {
    Ok(Sheet::new(run, ranks, None)?.text())
}

/// A run as far as a plan needs it. Text that is not on this machine is no obstacle, since rows are
/// `data.seq_len` long whatever they hold; then the second value says so.
pub fn load(path: &Path, overrides: &[String]) -> Result<(Run, Option<String>)> {
    let missing = match Run::load(path, overrides) {
        Ok(run) => return Ok((run, None)),
        Err(missing) => missing,
    };
    let text = std::fs::read_to_string(path).map_err(|e| Error::file(path, e))?;
    let mut table: toml::Table = text.parse().unwrap_or_default();
    if let Some(data) = table.get_mut("data").and_then(toml::Value::as_table_mut) {
        data.remove("tokenizer");
    }
    let about_text = |set: &&String| {
        ["data.kind=", "data.path=", "data.tokenizer="].iter().any(|key| set.starts_with(key))
    };
    let is_text = |set: &String| set.starts_with("data.kind=") && set.contains("text");
    let kind = table.get("data").and_then(|data| data.get("kind")).and_then(toml::Value::as_str);
    let (Ok(text), true) = (toml::to_string(&table), kind == Some("text") || overrides.iter().any(is_text))
    else {
        return Err(missing);
    };
    let mut set: Vec<String> = overrides.iter().filter(|set| !about_text(set)).cloned().collect();
    set.extend(["data.kind=\"tokens\"".into(), "data.path=\"absent\"".into()]);
    match Run::parse(&text, &set) {
        Ok(run) => Ok((run, Some(format!("planned from data.seq_len alone: {missing}")))),
        // Data that is not here was not the only thing wrong.
        Err(Error::Config(what)) => Err(Error::Config(format!("{}: {what}", path.display()))),
        Err(other) => Err(other),
    }
}

/// The memory of this machine's first GPU, where the run would train on one.
pub fn gpu_bytes(run: &Run) -> Option<usize> {
    if ranks::profile(run) == Profile::Cpu || device::cuda::present().is_err() {
        return None;
    }
    // The driver's own tool answers without a context, which would take a second and some of that memory.
    let asked = ["--query-gpu=memory.total", "--format=csv,noheader,nounits"];
    let said = std::process::Command::new("nvidia-smi").args(asked).output().ok()?;
    let mebibytes: usize = String::from_utf8(said.stdout).ok()?.lines().next()?.trim().parse().ok()?;
    Some(mebibytes << 20)
}

/// "80GiB", "141 GB" or plain bytes.
pub fn parse_bytes(text: &str) -> std::result::Result<usize, String> {
    let digits = text.trim().find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.trim().len());
    let (number, unit) = text.trim().split_at(digits);
    let size = match unit.trim() {
        "" | "B" => 1.0,
        "KiB" => 1024f64,
        "MiB" => 1024f64.powi(2),
        "GiB" => 1024f64.powi(3),
        "TiB" => 1024f64.powi(4),
        "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        other => return Err(format!("{other:?} is no unit; use KiB, MiB, GiB, TiB, KB, MB, GB or TB")),
    };
    match number.parse::<f64>() {
        Ok(number) if number > 0.0 && number * size < 1e18 => Ok((number * size) as usize),
        _ => Err("expected a size such as 80GiB".into()),
    }
}

/// Everything `plan` shows.
#[derive(Clone, Debug)]
pub struct Sheet {
    pub ranks: usize,
    pub params: usize,
    pub plan: Plan,
    pub constant_bytes: usize,
    pub peak_bytes: usize,
    /// What a rank copies to host memory when it saves a checkpoint.
    pub snapshot_bytes: usize,
    pub fit: Option<Fit>,
    pub notes: Vec<String>,
}

/// Whether a plan fits on a device of a given size.
#[derive(Clone, Debug)]
pub struct Fit {
    pub device_bytes: usize,
    /// What else was planned, in order of cost, where the run itself does not fit. The first that fits is the
    /// cheapest; where no single change does, the last one is several together.
    pub attempts: Vec<Attempt>,
}

impl Sheet {
    pub fn new(run: &Run, ranks: usize, device_bytes: Option<usize>) -> Result<Sheet> {
        let run = without_files(run);
        let profile = ranks::profile(&run);
        let job = Job::new(&run, ranks)?;
        let plan = job.plan(profile)?;
        let peak_bytes = plan.peak_bytes(&job.model);
        let fit = device_bytes.map(|device_bytes| {
            let fits = peak_bytes <= device_bytes;
            let attempts = if fits { vec![] } else { change::search(&run, ranks, peak_bytes, device_bytes) };
            Fit { device_bytes, attempts }
        });
        let notes = match profile {
            Profile::Cuda { .. } => {
                vec!["the driver's context and NCCL's buffers come on top (about 1 GiB)".into()]
            }
            Profile::Cpu => vec![],
        };
        let (params, constant_bytes) = (job.model.num_params(), Plan::constant_bytes(&job.model));
        let snapshot_bytes = checkpoints::snapshot_bytes(&run, &plan);
        Ok(Sheet { ranks, params, plan, constant_bytes, peak_bytes, snapshot_bytes, fit, notes })
    }

    /// Whether it fits, where a size was given.
    pub fn fits(&self) -> Option<bool> {
        self.fit.as_ref().map(|fit| self.peak_bytes <= fit.device_bytes)
    }

    /// For people.
    pub fn text(&self) -> String {
        let Sheet { ranks, params, plan, .. } = self;
        let mut out = String::new();
        let (units, device) = (plan.layout.units.len(), plan.profile.name());
        let _ = writeln!(out, "{params} parameters in {units} units on {ranks} ranks ({device})");
        unit_lines(&mut out, plan);
        let _ = writeln!(out, "\nmemory of each rank");
        for region in plan.regions() {
            let _ = writeln!(out, "  {:<18} {}", region.name, bytes(region.bytes));
            if region.name == "step" {
                for (kind, size) in plan.step_peak_by_kind().into_iter().filter(|(_, size)| *size > 0) {
                    let _ = writeln!(out, "    {:<16} {} at the fullest moment", kind.name(), bytes(size));
                }
            }
        }
        let _ = writeln!(out, "  {:<18} {}", "constants", bytes(self.constant_bytes));
        let _ = writeln!(out, "  {:<18} {}", "peak", bytes(self.peak_bytes));
        let _ = writeln!(out, "  {:<18} {}", "host memory", bytes(plan.host_bytes()));
        for region in plan.host_regions() {
            let _ = writeln!(out, "    {:<16} {}", region.name, bytes(region.bytes));
        }
        let _ = writeln!(out, "  {:<18} {} while one is saved", "checkpoint", bytes(self.snapshot_bytes));
        let _ = writeln!(out, "\ntraffic of one step");
        for (name, count, size) in plan.traffic() {
            let _ = writeln!(out, "  {name:<18} {count} of {} in all", bytes(size).trim_start());
        }
        if let Some(fit) = &self.fit {
            fit_lines(&mut out, fit, self.peak_bytes);
        }
        for note in &self.notes {
            let _ = writeln!(out, "\nnote: {note}");
        }
        out
    }

    /// For programs: one object, with all that the text has.
    pub fn json(&self) -> String {
        let plan = &self.plan;
        let units: Vec<Value> = (0..plan.layout.units.len())
            .map(|index| {
                let unit = &plan.layout.units[index];
                let elements = plan.layout.unit_len(index);
                json!({"name": unit.name, "elements": elements, "elements_a_rank": unit.shard_len})
            })
            .collect();
        let mut regions: Vec<Value> =
            plan.regions().iter().map(|region| json!({"name": region.name, "bytes": region.bytes})).collect();
        let host_regions: Vec<Value> = plan
            .host_regions()
            .iter()
            .map(|region| json!({"name": region.name, "bytes": region.bytes}))
            .collect();
        regions.push(json!({"name": "constants", "bytes": self.constant_bytes}));
        let step_peak: serde_json::Map<String, Value> =
            plan.step_peak_by_kind().iter().map(|(kind, bytes)| (kind.name().into(), json!(bytes))).collect();
        let collectives: Vec<Value> = plan
            .traffic()
            .iter()
            .map(|(name, count, bytes)| json!({"name": name, "count": count, "bytes": bytes}))
            .collect();
        let sheet = json!({
            "parameters": self.params, "ranks": self.ranks, "device": plan.profile.name(), "units": units,
            "regions": regions, "step_peak": step_peak, "peak_bytes": self.peak_bytes,
            "host_bytes": plan.host_bytes(), "host_regions": host_regions,
            "snapshot_bytes": self.snapshot_bytes, "collectives": collectives,
            "fit": self.fit.as_ref().map(|fit| fit.json(self.peak_bytes)), "notes": self.notes,
        });
        format!("{sheet:#}\n")
    }
}

impl Fit {
    /// The cheapest change that makes it fit, if any does.
    pub fn cheapest(&self) -> Option<&Attempt> {
        self.attempts.iter().find(|attempt| attempt.peak_bytes <= self.device_bytes)
    }

    fn json(&self, peak_bytes: usize) -> Value {
        let attempt = |attempt: &Attempt| {
            let set: serde_json::Map<String, Value> =
                attempt.changes.iter().map(|change| (change.key().into(), change.value())).collect();
            let fits = attempt.peak_bytes <= self.device_bytes;
            json!({"set": set, "peak_bytes": attempt.peak_bytes, "fits": fits})
        };
        json!({
            "device_bytes": self.device_bytes,
            "fits": peak_bytes <= self.device_bytes,
            "missing_bytes": peak_bytes.saturating_sub(self.device_bytes),
            "attempts": self.attempts.iter().map(attempt).collect::<Vec<_>>(),
            "cheapest": self.cheapest().map(attempt),
        })
    }
}

/// Ready-made batches that are not here, but whose length the run says.
fn without_files(run: &Run) -> Run {
    let mut run = run.clone();
    if let DataSource::Batches { path, seq_len: Some(seq_len) } = &run.data
        && !path.exists()
    {
        let source = DocumentSource::Tokens { path: path.clone() };
        let packing = data::pack::Packing::Padded;
        run.data = DataSource::Documents { source, seq_len: *seq_len, packing, seed: 0 };
    }
    run
}

/// Runs of units of the same size in one line.
fn unit_lines(out: &mut String, plan: &Plan) {
    let _ = writeln!(out, "\nunits");
    let units = &plan.layout.units;
    let mut first = 0;
    while first < units.len() {
        let same = units[first..].iter().take_while(|unit| unit.shard_len == units[first].shard_len).count();
        let len = plan.layout.unit_len(first);
        let name = match same {
            1 => units[first].name.clone(),
            _ => format!("{} … {}", units[first].name, units[first + same - 1].name),
        };
        let _ = writeln!(out, "  {name}: {same} × {len} elements, {} a rank", units[first].shard_len);
        first += same;
    }
}

fn fit_lines(out: &mut String, fit: &Fit, peak_bytes: usize) {
    let short = |size: usize| bytes(size).trim_start().to_string();
    let device = short(fit.device_bytes);
    if peak_bytes <= fit.device_bytes {
        let _ = writeln!(
            out,
            "\nfits on a device of {device}, {} to spare",
            short(fit.device_bytes - peak_bytes)
        );
        return;
    }
    let _ = writeln!(
        out,
        "\nDOES NOT FIT on a device of {device}: {} are missing. Planned with one change each:",
        short(peak_bytes - fit.device_bytes)
    );
    for attempt in &fit.attempts {
        let verdict = if attempt.peak_bytes <= fit.device_bytes { "fits" } else { "does not fit" };
        let _ = writeln!(out, "  {}  {:<12}  {}", bytes(attempt.peak_bytes), verdict, attempt.words());
    }
    let _ = match fit.cheapest() {
        Some(attempt) => writeln!(out, "cheapest change that makes it fit: {}", attempt.words()),
        None => {
            writeln!(out, "nothing tried makes it fit; use a smaller model, shorter rows or larger devices")
        }
    };
}

/// An error about memory, with what the whole plan asks for and the cheapest change that would make it fit.
pub(crate) fn explain_no_room(run: &Run, ranks: usize, error: fsdp::Error) -> Error {
    let fsdp::Error::Device(source) = error else { return error.into() };
    let device::Error::OutOfMemory { held, free, .. } = &source else { return source.into() };
    // Context and libraries are there already: what is held and what is free is all a plan can have.
    let Ok(sheet) = Sheet::new(run, ranks, free.map(|free| held + free)) else { return source.into() };
    let short = |size: usize| bytes(size).trim_start().to_string();
    let regions: Vec<String> = sheet
        .plan
        .regions()
        .iter()
        .map(|region| format!("{} {}", region.name, short(region.bytes)))
        .collect();
    let mut advice = format!("The plan needs {}: {}", short(sheet.peak_bytes), regions.join(", "));
    advice += &match sheet.fit.as_ref().map(Fit::cheapest) {
        Some(Some(attempt)) => format!(". With {} it needs {}", attempt.words(), short(attempt.peak_bytes)),
        Some(None) if sheet.fits() == Some(false) => ". No setting tried makes it fit".into(),
        _ => String::new(),
    };
    let source = Box::new(source);
    Error::NoRoom { source, advice: advice + "; `shardloom plan` shows what else could be changed" }
}

/// Bytes for people, in a column.
pub fn bytes(bytes: usize) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 || unit == "TiB" {
            let digits = if unit == "B" { 0 } else { 2 };
            return format!("{value:>9.digits$} {unit}");
        }
        value /= 1024.0;
    }
    unreachable!("the last unit always fits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, bytes) in [("80GiB", 80 << 30), ("141 GB", 141_000_000_000), ("1.5KiB", 1536), ("7", 7)] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "80G", "-1GiB", "0", "1.2.3MB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn no_room_says_what_the_plan_needs_and_what_would_fit() {
        let text = r#"
            [model.config]
            model_type = "llama"
            hidden_size = 256
            intermediate_size = 688
            num_hidden_layers = 8
            num_attention_heads = 8
            vocab_size = 1000
            [data]
            kind = "tokens"
            path = "nowhere.bin"
            seq_len = 256
            [train]
            steps = 1
            global_batch = 8
            micro_batch = 8
            [output]
            dir = "unused"
        "#;
        let run = Run::parse(text, &[]).unwrap();
        let peak = Sheet::new(&run, 1, None).unwrap().peak_bytes;
        let refused = |free: usize| {
            let (device, what, hint) = ("cuda:0".to_string(), "step".to_string(), String::new());
            let source =
                device::Error::OutOfMemory { device, what, bytes: peak, held: 0, free: Some(free), hint };
            explain_no_room(&run, 1, source.into()).to_string()
        };
        let error = refused(peak - 1);
        for part in ["cuda:0: no room for step", "moments", "With recompute.mode = \"cheap\" it needs"] {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
        assert!(refused(1 << 20).contains("No setting tried makes it fit"), "{}", refused(1 << 20));
        // Another process took what was free when the plan was made: the plan is not to blame.
        assert!(!refused(peak).contains("it needs"), "{}", refused(peak));
        let other = explain_no_room(&run, 1, fsdp::Error::Settings("x".into()));
        assert_eq!(other.to_string(), "settings: x");
    }
}
