//! What a step came to, and where that goes.

use crate::{Error, Result};
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, IsTerminal, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Instant;

/// One line of metrics.jsonl.
#[derive(Clone, Debug, Serialize)]
pub struct StepDone {
    pub step: u64,
    pub loss: f64,
    pub grad_norm: f64,
    pub lr: f64,
    /// Of the step, over all ranks.
    pub tokens: usize,
    pub tokens_per_s: f64,
    pub step_ms: f64,
    /// Device memory rank 0 has taken for the plan's regions.
    pub peak_bytes: usize,
    /// What the device says is in use, everything on it included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_bytes: Option<usize>,
    /// With f16: the scale of the loss after the step, and how many steps have been skipped so far. The norm of a step
    /// that was skipped is null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped_steps: Option<u64>,
    /// How long steps waited for checkpoints since the last line, where one was saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_wait_ms: Option<f64>,
}

/// Something that wants to hear of steps.
pub trait Sink {
    fn step(&mut self, event: &StepDone) -> Result<()>;

    fn finish(&mut self) -> Result<()> {
        Ok(())
    }
}

/// `metrics.jsonl`: one object a step.
#[derive(Debug)]
pub struct Jsonl {
    file: File,
    path: std::path::PathBuf,
}

impl Jsonl {
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).map_err(|e| Error::file(path, e))?;
        Ok(Jsonl { file, path: path.to_path_buf() })
    }

    /// Goes on with a file after `step`: lines past it are dropped, and so is one that was cut short.
    pub fn resume(path: &Path, step: u64) -> Result<Self> {
        let mut file = match OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Self::create(path),
            Err(e) => return Err(Error::file(path, e)),
        };
        let kept = bytes_until(&file, step).map_err(|e| Error::file(path, e))?;
        file.set_len(kept).and_then(|()| file.seek(SeekFrom::End(0))).map_err(|e| Error::file(path, e))?;
        Ok(Jsonl { file, path: path.to_path_buf() })
    }
}

/// The bytes of the lines up to a step.
fn bytes_until(file: &File, step: u64) -> std::io::Result<u64> {
    let (mut lines, mut kept, mut line) = (BufReader::new(file), 0, Vec::new());
    loop {
        line.clear();
        let len = lines.read_until(b'\n', &mut line)?;
        let parsed = serde_json::from_slice::<serde_json::Value>(&line).ok();
        let of_step = parsed.and_then(|line| line["step"].as_u64());
        if !line.ends_with(b"\n") || of_step.is_none_or(|of_step| of_step > step) {
            return Ok(kept);
        }
        kept += len as u64;
    }
}

impl Sink for Jsonl {
    fn step(&mut self, event: &StepDone) -> Result<()> {
        let mut line = serde_json::to_vec(event).map_err(|e| Error::file(&self.path, e))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(|e| Error::file(&self.path, e))
    }
}

/// A line on standard error: rewritten in place on a terminal, one per step elsewhere.
#[derive(Debug)]
pub struct Progress {
    /// Those made before this run went on.
    before: u64,
    steps: u64,
    start: Instant,
    in_place: bool,
}

impl Progress {
    pub fn new(before: u64, steps: u64) -> Self {
        Progress { before, steps, start: Instant::now(), in_place: std::io::stderr().is_terminal() }
    }
}

impl Sink for Progress {
    fn step(&mut self, event: &StepDone) -> Result<()> {
        let seconds = self.start.elapsed().as_secs_f64() / (event.step - self.before) as f64;
        let left = seconds * (self.steps - event.step) as f64;
        let mut line = format!(
            "step {}/{}  loss {:.4}  norm {:.3}  lr {:.2e}  {:.0} tokens/s  {} left",
            event.step,
            self.steps,
            event.loss,
            event.grad_norm,
            event.lr,
            event.tokens_per_s,
            clock(left)
        );
        if let (Some(scale), Some(skipped)) = (event.loss_scale, event.skipped_steps) {
            line += &format!("  scale {scale}, {skipped} skipped");
        }
        let mut err = std::io::stderr().lock();
        // A closed standard error is no reason to stop training.
        let _ = if self.in_place { write!(err, "\r\x1b[2K{line}") } else { writeln!(err, "{line}") };
        let _ = err.flush();
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        if self.in_place {
            let _ = writeln!(std::io::stderr());
        }
        Ok(())
    }
}

fn clock(seconds: f64) -> String {
    let s = seconds.round() as u64;
    if s >= 3600 {
        format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
    } else {
        format!("{}:{:02}", s / 60, s % 60)
    }
}
