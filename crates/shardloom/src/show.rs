//! `plan`: what each rank will hold and send, before anything is allocated.

use crate::train::Job;
use crate::{Result, Run, ranks};
use fsdp::Plan;
use std::fmt::Write;

/// The plan of a run as text.
pub fn plan(run: &Run, ranks: usize) -> Result<String> {
    let profile = ranks::profile(run);
    let job = Job::new(run, ranks)?;
    let plan = job.plan(profile)?;
    let mut out = String::new();
    let params = job.model.num_params();
    let _ = writeln!(
        out,
        "{params} parameters in {} units on {ranks} ranks ({})",
        plan.layout.units.len(),
        profile.name()
    );
    units(&mut out, &plan);
    let _ = writeln!(out, "\nmemory of each rank");
    for region in plan.regions() {
        let _ = writeln!(out, "  {:<18} {}", region.name, bytes(region.bytes));
        if region.name == "step" {
            for (kind, size) in plan.step_peak_by_kind().into_iter().filter(|(_, size)| *size > 0) {
                let _ = writeln!(out, "    {:<16} {} at the fullest moment", kind.name(), bytes(size));
            }
        }
    }
    let _ = writeln!(out, "  {:<18} {}", "constants", bytes(Plan::constant_bytes(&job.model)));
    let _ = writeln!(out, "  {:<18} {}", "peak", bytes(plan.peak_bytes(&job.model)));
    let _ = writeln!(out, "\ncollectives of one step");
    for (name, count, size) in plan.traffic() {
        let _ = writeln!(out, "  {name:<18} {count} of {} in all", bytes(size).trim_start());
    }
    Ok(out)
}

/// Runs of units of the same size in one line.
fn units(out: &mut String, plan: &Plan) {
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
