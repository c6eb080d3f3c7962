//! The training loop of one rank.

use crate::data::{Cursor, Data, Loader, Share};
use crate::metrics::{Jsonl, Progress, Sink, StepDone};
use crate::ranks::{self, Overhead, Seat};
use crate::run::{ModelSource, Run};
use crate::source::{Folder, Seeded};
use crate::{Error, Result, save, show};
use device::Profile;
use fsdp::{Engine, Hyper, Plan, Settings, Source};
use std::sync::Arc;
use std::time::Instant;
use tensor::Model;

/// Trains as `ranks` ranks on this machine, or as one of those a launcher has started.
pub fn train(run: &Run, num_ranks: usize) -> Result<()> {
    let launched = ranks::Launched::from_env()?;
    let num_ranks = launched.as_ref().map_or(num_ranks, |launched| launched.world);
    let job = Job::new(run, num_ranks)?;
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
    data: Data,
    pub model: Arc<Model>,
    micro_batch: usize,
    micro_batches: usize,
    ranks: usize,
}

impl<'a> Job<'a> {
    /// Opens data and model and finds out what does not fit together, before anything runs.
    pub fn new(run: &'a Run, ranks: usize) -> Result<Self> {
        let data = Data::open(run)?;
        let (micro_batches, micro_batch) = run.micro_batches(ranks)?;
        let model = Arc::new(run.model(data.seq)?);
        Ok(Job { run, data, model, micro_batch, micro_batches, ranks })
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
            fields: self.data.fields(self.micro_batch),
            micro_batches: self.micro_batches,
            keep: run.keep,
            accumulate: run.accumulate,
            loss_chunk: run.loss_chunk(profile),
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
        let stream = self.data.stream(run)?;
        stream.agree(run, &*seat.groups.reduce)?;
        let steps = stream.steps(run.length, run.global_batch);
        std::fs::create_dir_all(&run.output).map_err(|e| Error::file(&run.output, e))?;
        let source = self.source()?;
        let plan = Arc::new(self.plan(seat.device.profile())?);
        let planned_bytes = plan.peak_bytes(&self.model);
        let Seat { rank, ranks, device, groups, overhead } = seat;
        let control = groups.world.clone();
        let mut engine = Engine::new(device, plan, self.model.clone(), groups)
            .map_err(|error| show::explain_no_room(run, self.ranks, error))?;
        engine.fill(&*source)?;
        if rank == 0 && run.progress {
            eprintln!("data: {}", stream.summary_of_run(run.length, run.global_batch));
        }
        let mut sinks = self.sinks(rank, steps)?;
        let share = Share { rank, ranks, global_batch: run.global_batch, micro_batch: self.micro_batch };
        let mut loader = Loader::start(stream, share, Cursor::default(), steps)?;
        let (mut start, mut reported) = (Instant::now(), 0);
        for step in 1..=steps {
            let batches = loader.next_step()?;
            let lr = run.lr.lr(step, steps);
            engine.step(&batches, &Hyper { adamw: run.adamw, lr, clip_norm: run.clip_norm, step })?;
            if step % run.log_every != 0 && step != steps {
                continue;
            }
            let report = engine.report()?;
            if !report.loss.is_finite() {
                return Err(Error::NotFinite { step, loss: report.loss });
            }
            // The steps since the last report were issued together: what one of them took is their mean.
            let seconds = start.elapsed().as_secs_f64() / (step - reported) as f64;
            (start, reported) = (Instant::now(), step);
            let tokens = run.global_batch * self.data.seq;
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
        save::final_model(run, &self.model, &engine, &*source, &*control)
    }

    /// Rank 0 reports for all.
    fn sinks(&self, rank: usize, steps: u64) -> Result<Vec<Box<dyn Sink>>> {
        let mut sinks: Vec<Box<dyn Sink>> = Vec::new();
        if rank == 0 && self.run.progress {
            sinks.push(Box::new(Progress::new(steps)));
        }
        if rank == 0 && self.run.jsonl {
            sinks.push(Box::new(Jsonl::create(&self.run.output.join("metrics.jsonl"))?));
        }
        Ok(sinks)
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
