//! What could be changed so that a run fits, in order of what it costs, each really planned.

use crate::train::Job;
use crate::{Run, ranks};
use device::Dtype;
use fsdp::{Keep, Offload, Strategy};
use serde_json::{Value, json};

/// One change to a run, with its new value where that depends on the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Norms and SwiGLU run twice.
    RecomputeCheap,
    /// Every forward runs twice.
    RecomputeFull,
    /// More and smaller products; the global batch stays.
    MicroBatch(usize),
    /// Weights are gathered twice a step.
    StrategyFull,
    /// Coarser moments: the numbers change a little.
    Bf16Moments,
    /// State in host memory: it travels every step, and the host updates.
    Offload,
    /// More devices.
    Ranks(usize),
}

impl Change {
    /// What to set; for ranks, the flag.
    pub fn key(self) -> &'static str {
        match self {
            Change::RecomputeCheap | Change::RecomputeFull => "recompute.mode",
            Change::MicroBatch(_) => "train.micro_batch",
            Change::StrategyFull => "shard.strategy",
            Change::Bf16Moments => "optimizer.state",
            Change::Offload => "shard.offload",
            Change::Ranks(_) => "--ranks",
        }
    }

    pub fn value(self) -> Value {
        match self {
            Change::RecomputeCheap => json!("cheap"),
            Change::RecomputeFull | Change::StrategyFull => json!("full"),
            Change::MicroBatch(rows) => json!(rows),
            Change::Bf16Moments => json!("bf16"),
            Change::Offload => json!("all"),
            Change::Ranks(ranks) => json!(ranks),
        }
    }

    fn words(self) -> String {
        match self {
            Change::Ranks(ranks) => format!("--ranks {ranks}"),
            _ => format!("{} = {}", self.key(), self.value()),
        }
    }

    /// Makes the change, and what it brings with it. Returns all that is to be set.
    fn apply(self, run: &mut Run, ranks: &mut usize) -> Vec<Change> {
        match self {
            Change::RecomputeCheap => run.keep = Keep::Expensive,
            Change::RecomputeFull => run.keep = Keep::Nothing,
            Change::MicroBatch(rows) => run.micro_batch = rows,
            Change::StrategyFull => (run.strategy, run.replicate) = (Strategy::Full, 1),
            Change::Bf16Moments => run.precision.moments = Dtype::Bf16,
            Change::Offload => run.offload = Offload::ALL,
            Change::Ranks(more) => {
                *ranks = more;
                // A rank that is left with fewer rows than a micro-batch had takes them all at once.
                let rows = run.global_batch / more;
                if run.micro_batch > rows {
                    run.micro_batch = rows;
                    return vec![self, Change::MicroBatch(rows)];
                }
            }
        }
        vec![self]
    }
}

/// The changes a run is open to, cheapest first.
fn changes(run: &Run, ranks: usize) -> Vec<Change> {
    let Ok((_, rows)) = run.micro_batches(ranks) else { return vec![] };
    let mut changes = Vec::new();
    if run.keep == Keep::All {
        changes.push(Change::RecomputeCheap);
    }
    if run.keep != Keep::Nothing {
        changes.push(Change::RecomputeFull);
    }
    if rows.is_multiple_of(2) {
        changes.push(Change::MicroBatch(rows / 2));
    }
    if ranks > 1 && (run.strategy != Strategy::Full || run.replicate > 1) {
        changes.push(Change::StrategyFull);
    }
    if run.precision.moments == Dtype::F32 {
        changes.push(Change::Bf16Moments);
    }
    if run.offload != Offload::ALL {
        changes.push(Change::Offload);
    }
    if run.global_batch.is_multiple_of(2 * ranks) {
        changes.push(Change::Ranks(2 * ranks));
    }
    changes
}

/// A run with some changes, planned.
#[derive(Clone, Debug)]
pub struct Attempt {
    pub changes: Vec<Change>,
    pub peak_bytes: usize,
}

impl Attempt {
    pub fn words(&self) -> String {
        self.changes.iter().map(|change| change.words()).collect::<Vec<_>>().join(", ")
    }
}

/// Each change alone; where none of them fits, as many together as it takes, leaving out what does not help.
pub(super) fn search(run: &Run, ranks: usize, peak_bytes: usize, device_bytes: usize) -> Vec<Attempt> {
    let attempt = |change: Change| {
        let (mut run, mut ranks) = (run.clone(), ranks);
        let changes = change.apply(&mut run, &mut ranks);
        Some(Attempt { changes, peak_bytes: peak(&run, ranks)? })
    };
    let mut attempts: Vec<Attempt> = changes(run, ranks).into_iter().filter_map(attempt).collect();
    if !attempts.iter().any(|attempt| attempt.peak_bytes <= device_bytes) {
        attempts.extend(together(run.clone(), ranks, peak_bytes, device_bytes));
    }
    attempts
}

/// Adds change to change, again from the cheapest, while one of them helps and it does not fit yet.
fn together(mut run: Run, mut ranks: usize, peak_bytes: usize, device_bytes: usize) -> Option<Attempt> {
    let mut so_far = Attempt { changes: vec![], peak_bytes };
    while so_far.peak_bytes > device_bytes {
        let helps = |change: &Change| {
            let (mut run, mut ranks) = (run.clone(), ranks);
            change.apply(&mut run, &mut ranks);
            peak(&run, ranks).filter(|peak| *peak < so_far.peak_bytes)
        };
        let next = changes(&run, ranks).into_iter().find_map(|change| Some((change, helps(&change)?)));
        let Some((change, peak_bytes)) = next else { break };
        so_far.peak_bytes = peak_bytes;
        for made in change.apply(&mut run, &mut ranks) {
            so_far.changes.retain(|earlier| earlier.key() != made.key());
            so_far.changes.push(made);
        }
    }
    (so_far.changes.len() > 1).then_some(so_far)
}

/// The peak of a run; None where it cannot be planned.
fn peak(run: &Run, ranks: usize) -> Option<usize> {
    let job = Job::new(run, ranks).ok()?;
    Some(job.plan(ranks::profile(run)).ok()?.peak_bytes(&job.model))
}
