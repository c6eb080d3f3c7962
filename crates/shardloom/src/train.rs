//! The training loop of one rank.

use crate::data::Batches;
use crate::metrics::{Jsonl, Progress, Sink, StepDone};
use crate::ranks::{self, Overhead, Seat};
use crate::run::{ModelSource, Run};
use crate::source::{Folder, Seeded};
use crate::{Error, Result, save, show};
use device::Profile;
use fsdp::{Engine, Field, Hyper, Plan, Settings, Source};
use std::sync::Arc;
use std::time::Instant;
use tensor::Model;

/// Trains as `ranks` ranks on this machine, or as one of those a launcher has started.
pub fn train(run: &Run, num_ranks: usize) -> Result<()> {
    let launched = ranks::Launched::from_env()?;
    let num_ranks = launched.as_ref().map_or(num_ranks, |launched| launched.world);
    let job = Job::new(run, num_ranks)?;
    std::fs::create_dir_all(&run.output).map_err(|e| Error::file(&run.output, e))?;
    ranks::start(run, num_ranks, launched, |seat| job.rank(seat))
}

/// The plan of a run on `num_ranks` ranks of such devices. Allocates nothing.
pub fn make_plan(run: &Run, num_ranks: usize, profile: Profile) -> Result<Plan> {
    Job::new(run, num_ranks)?.plan(profile)
}

/// What all ranks of a run share.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    run: &'a Run,
    batches: Batches,
    pub model: Arc<Model>,
    micro_batch: usize,
    micro_batches: usize,
    ranks: usize,
}

impl<'a> Job<'a> {
    /// Opens data and model and finds out what does not fit together, before anything runs.
    pub fn new(run: &'a Run, ranks: usize) -> Result<Self> {
        let batches = Batches::open(&run.batches)?;
        if batches.rows != run.global_batch {
            let what = format!(
                "train.global_batch = {}, but {} has {} rows a step",
                run.global_batch,
                run.batches.display(),
                batches.rows
            );
            return Err(Error::Config(what));
        }
        if run.steps > batches.steps {
            let what = format!(
                "train.steps = {}, but {} has {} steps",
                run.steps,
                run.batches.display(),
                batches.steps
            );
            return Err(Error::Config(what));
        }
        if run.seq_len.is_some_and(|seq_len| seq_len != batches.seq) {
            let what = format!(
                "data.seq_len differs from the {} tokens a row of {}",
                batches.seq,
                run.batches.display()
            );
            return Err(Error::Config(what));
        }
        let (micro_batches, micro_batch) = run.micro_batches(ranks)?;
        let model = Arc::new(tensor::models::build(&run.config, batches.seq)?);
        Ok(Job { run, batches, model, micro_batch, micro_batches, ranks })
    }

    pub fn plan(&self, profile: Profile) -> Result<Plan> {
        let run = self.run;
        let settings = Settings {
            ranks: self.ranks,
            strategy: run.strategy,
            replicate: run.replicate,
            wrap: run.wrap.clone(),
            prefetch: run.prefetch,
            precision: run.precision,
            fields: Field::tokens(self.micro_batch, self.batches.seq),
            micro_batches: self.micro_batches,
            keep: run.keep,
            accumulate: run.accumulate,
            loss_chunk: loss_chunk(profile),
        };
        Ok(Plan::new(&self.model, settings, profile)?)
    }

    fn source(&self) -> Result<Box<dyn Source>> {
        Ok(match &self.run.source {
            ModelSource::Folder(dir) => Box::new(Folder::open(dir, &self.model)?),
            ModelSource::Seed(seed) => Box::new(Seeded::new(*seed, &self.model)),
        })
    }

    /// One rank, from empty shards to the final folder.
    pub fn rank(&self, seat: Seat) -> Result<()> {
        let run = self.run;
        let source = self.source()?;
        let plan = Arc::new(self.plan(seat.device.profile())?);
        let planned_bytes = plan.peak_bytes(&self.model);
        let Seat { rank, ranks, device, groups, overhead } = seat;
        let control = groups.world.clone();
        let mut engine = Engine::new(device, plan, self.model.clone(), groups)?;
        engine.fill(&*source)?;
        let mut sinks = self.sinks(rank)?;
        for step in 1..=run.steps {
            let start = Instant::now();
            let batches = self.batches.step(step - 1, rank, ranks, self.micro_batch, run.config.vocab)?;
            let lr = run.lr.lr(step);
            engine.step(&batches, &Hyper { adamw: run.adamw, lr, clip_norm: run.clip_norm, step })?;
            if step % run.log_every != 0 && step != run.steps {
                continue;
            }
            let report = engine.report()?;
            if !report.loss.is_finite() {
                return Err(Error::NotFinite { step, loss: report.loss });
            }
            let seconds = start.elapsed().as_secs_f64();
            let tokens = self.batches.rows * self.batches.seq;
            let event = StepDone {
                step,
                loss: report.loss,
                grad_norm: report.grad_norm,
                lr,
                tokens,
                tokens_per_s: tokens as f64 / seconds,
                step_ms: seconds * 1e3,
                peak_bytes: engine.device().memory_use().peak_bytes,
                device_bytes: engine.device().measured_bytes(),
            };
            sinks.iter_mut().try_for_each(|sink| sink.step(&event))?;
        }
        sinks.iter_mut().try_for_each(|sink| sink.finish())?;
        if rank == 0 && run.progress {
            say_memory(planned_bytes, overhead, &engine);
        }
        if !run.write_model {
            return Ok(());
        }
        save::final_model(run, &self.model, &engine, &*control)
    }

    /// Rank 0 reports for all.
    fn sinks(&self, rank: usize) -> Result<Vec<Box<dyn Sink>>> {
        let mut sinks: Vec<Box<dyn Sink>> = Vec::new();
        if rank == 0 && self.run.progress {
            sinks.push(Box::new(Progress::new(self.run.steps)));
        }
        if rank == 0 && self.run.jsonl {
            sinks.push(Box::new(Jsonl::create(&self.run.output.join("metrics.jsonl"))?));
        }
        Ok(sinks)
    }
}

/// Enough rows to keep the device busy with one product of the head, few enough that logits stay small.
pub(crate) fn loss_chunk(profile: Profile) -> usize {
    match profile {
        Profile::Cpu => 128,
        Profile::Cuda { .. } => 2048,
    }
}

/// What was planned, what was taken, and what the device itself says, context and libraries apart.
fn say_memory(planned_bytes: usize, overhead: Option<Overhead>, engine: &Engine) {
    let taken = engine.device().memory_use().peak_bytes;
    let column = |bytes: usize| show::bytes(bytes).trim_start().to_string();
    let mut line = format!("memory: planned {}, taken {}", column(planned_bytes), column(taken));
    if let (Some(overhead), Some(measured)) = (overhead, engine.device().measured_bytes()) {
        let Overhead { sharing, context_bytes, nccl_bytes } = overhead;
        let rest = measured.saturating_sub(context_bytes + nccl_bytes + sharing * taken);
        line += &format!(
            "; the device says {}: {sharing} × {}, context {}, NCCL {}, rest {}",
            column(measured),
            column(taken),
            column(context_bytes),
            column(nccl_bytes),
            column(rest)
        );
    }
    eprintln!("{line}");
}
