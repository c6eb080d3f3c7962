//! `check`: the checklist before a long run, by doing a little of it.

use crate::checkpoints::Resume;
use crate::ranks::{self, Launched, Seat};
use crate::run::{Length, Run};
use crate::train::Job;
use crate::{Error, Result, show};
use fsdp::Report;
use std::fmt::Write;
use std::path::Path;

/// How far apart losses may be, relatively, where a device does not promise the same bits.
const ROUNDING: f64 = 1e-2;

/// A line of metrics that is looked at.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize)]
struct Line {
    step: u64,
    loss: f64,
    step_ms: f64,
    tokens_per_s: f64,
    peak_bytes: usize,
    checkpoint_wait_ms: Option<f64>,
}

/// Trains the first `steps` steps of a run, saves in the middle, trains the second half once more from there, and says
/// what it found. Everything is written under the run's output folder and removed again.
pub fn check(run: &Run, num_ranks: usize, steps: u64) -> Result<()> {
    let dir = run.output.join("check");
    let steps = match run.length {
        Length::Steps(all) => steps.min(all),
        Length::Epochs(_) => steps,
    };
    // Saved once: twice as many steps are not made.
    let middle = steps / 2 + 1;
    let short = |name: &str| {
        let mut run = run.clone();
        run.output = dir.join(name);
        run.stop_after = Some(steps);
        (run.write_model, run.progress, run.jsonl, run.log_every) = (false, false, true, 1);
        (run.checkpoint.every, run.checkpoint.at_end) = (middle, false);
        run
    };
    let (first, second) = (short("first"), short("second"));
    let launched = Launched::from_env()?;
    let num_ranks = launched.as_ref().map_or(num_ranks, |launched| launched.world);
    let (whole, again) = (Job::new(&first, num_ranks)?, Job::new(&second, num_ranks)?);
    ranks::start(run, num_ranks, launched, |seat| {
        let rank = seat.rank;
        let done = one_rank(&whole, &again, &seat, middle);
        let said = done.and_then(|reports| summary(run, &whole, &seat, &reports, [&first, &second]));
        if rank == 0 {
            let _ = std::fs::remove_dir_all(&dir);
        }
        if let (0, text) = (rank, said?) {
            print!("{text}");
        }
        Ok(())
    })
}

/// Both runs; the last step of each.
fn one_rank(whole: &Job<'_>, again: &Job<'_>, seat: &Seat, middle: u64) -> Result<[Option<Report>; 2]> {
    let first = whole.rank(seat.clone(), &Resume::No)?;
    let saved = whole.run().output.join(format!("checkpoints/step-{middle:06}"));
    let second = if saved.exists() { again.rank(seat.clone(), &Resume::From(saved))? } else { None };
    Ok([first, second])
}

/// What was found, for people; an error where it is not as it should be. Every rank comes here.
fn summary(
    run: &Run,
    job: &Job<'_>,
    seat: &Seat,
    reports: &[Option<Report>; 2],
    runs: [&Run; 2],
) -> Result<String> {
    let mine: Vec<u8> = reports
        .iter()
        .flatten()
        .flat_map(|report| [report.loss, report.grad_norm].map(f64::to_le_bytes).concat())
        .collect();
    let all = seat.groups.world.exchange(&mine, "what the last steps came to")?;
    if let Some(other) = all.iter().position(|theirs| *theirs != all[0]) {
        return failed(format!("rank 0 and rank {other} do not have the same loss after the same step"));
    }
    if seat.rank != 0 {
        return Ok(String::new());
    }
    let [lines, again] = runs.map(|run| read_lines(&run.output));
    let (lines, again) = (lines?, again?);
    let (Some(first), Some(last)) = (lines.first(), lines.last()) else {
        return failed("the run has no steps".into());
    };
    let mut text = String::new();
    let mut item = |state: &str, name: &str, said: String| {
        let _ = writeln!(text, "{state:<5} {name:<8} {said}");
    };
    item("ok", "steps", format!("{} made, every loss and gradient finite", lines.len()));
    let falls = last.loss < first.loss;
    let fall =
        format!("{:.4} after step {}, {:.4} after step {}", first.loss, first.step, last.loss, last.step);
    match falls {
        true => item("ok", "loss", fall),
        false => {
            item("look", "loss", format!("{fall}: it does not fall. Is the learning rate still warming up?"))
        }
    }
    item("ok", "ranks", format!("{} agree on loss and gradient norm to the last bit", seat.ranks));
    match compare(&lines, &again) {
        Compared::Same(from, to) => {
            item("ok", "resume", format!("steps {from} to {to} once more from a checkpoint: the same bits"));
        }
        Compared::Off(from, to, off) if off <= ROUNDING && !same_bits(run, seat) => {
            let said = format!("steps {from} to {to} once more from a checkpoint: within {off:.1e}");
            item("ok", "resume", format!("{said} (device.deterministic = true gives the same bits)"));
        }
        Compared::Off(from, to, off) => {
            return failed(format!("steps {from} to {to} once more from a checkpoint are off by {off:.1e}"));
        }
        Compared::Nothing => item("look", "resume", "too few steps to go on from the middle".into()),
    }
    if let Some(wait) = again.iter().chain(&lines).find_map(|line| line.checkpoint_wait_ms) {
        item("", "saving", format!("a step waits {wait:.1} ms for a checkpoint"));
    }
    let (state, memory) = memory(run, job, seat, last.peak_bytes)?;
    item(state, "memory", memory);
    // The first steps warm up.
    let steady = &lines[lines.len() / 2..];
    let fastest = steady.iter().min_by(|a, b| a.step_ms.total_cmp(&b.step_ms)).unwrap_or(last);
    item("", "speed", format!("{:.0} tokens/s, {:.1} ms a step", fastest.tokens_per_s, fastest.step_ms));
    Ok(text)
}

fn failed<T>(what: String) -> Result<T> {
    Err(Error::Check(what))
}

/// Whether the same run gives the same bits on this device.
fn same_bits(run: &Run, seat: &Seat) -> bool {
    run.deterministic || matches!(seat.device.profile(), device::Profile::Cpu)
}

fn read_lines(output: &Path) -> Result<Vec<Line>> {
    let path = output.join("metrics.jsonl");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
        Err(e) => return Err(Error::file(path, e)),
    };
    text.lines().map(|line| serde_json::from_str(line).map_err(|e| Error::file(&path, e))).collect()
}

/// How a resumed run's steps stand to the same steps of the whole one: from which to which, and how far off.
#[derive(Debug, PartialEq)]
enum Compared {
    Same(u64, u64),
    Off(u64, u64, f64),
    Nothing,
}

fn compare(lines: &[Line], again: &[Line]) -> Compared {
    let pairs: Vec<(&Line, &Line)> = again
        .iter()
        .filter_map(|line| Some((line, lines.iter().find(|other| other.step == line.step)?)))
        .collect();
    let (Some(first), Some(last)) = (pairs.first(), pairs.last()) else { return Compared::Nothing };
    let off = pairs.iter().map(|(a, b)| (a.loss / b.loss - 1.0).abs()).fold(0.0, f64::max);
    match pairs.iter().all(|(a, b)| a.loss == b.loss) {
        true => Compared::Same(first.0.step, last.0.step),
        false => Compared::Off(first.0.step, last.0.step, off),
    }
}

fn memory(run: &Run, job: &Job<'_>, seat: &Seat, taken: usize) -> Result<(&'static str, String)> {
    let planned = job.plan(seat.device.profile())?.peak_bytes(&job.model);
    let column = |bytes: usize| show::bytes(bytes).trim().to_string();
    let said = format!("{} a rank, {} planned", column(taken), column(planned));
    let Some(room) = show::gpu_bytes(run) else { return Ok(("", said)) };
    let free = 100.0 * (1.0 - taken as f64 / room as f64);
    let state = if free < 5.0 { "look" } else { "ok" };
    Ok((state, format!("{said}; {free:.0} % of {} are left", column(room))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_are_compared_step_by_step() {
        let line = |step: u64, loss: f64| {
            let (step_ms, tokens_per_s, peak_bytes) = (1.0, 1.0, 1);
            Line { step, loss, step_ms, tokens_per_s, peak_bytes, checkpoint_wait_ms: None }
        };
        let whole = [line(1, 4.0), line(2, 3.0), line(3, 2.0), line(4, 1.0)];
        assert_eq!(compare(&whole, &whole[2..]), Compared::Same(3, 4));
        assert_eq!(compare(&whole, &[line(3, 2.0), line(4, 1.5)]), Compared::Off(3, 4, 0.5));
        assert_eq!(compare(&whole, &[]), Compared::Nothing);
    }
}
