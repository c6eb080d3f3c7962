//! The training loop of one rank.

use crate::checkpoints::{Resume, Resumed, Saver, SharedSource, What, agree_on};
use crate::data::{Cursor, Data, Loader, Share, Stream};
use crate::metrics::{Jsonl, Progress, Sink, StepDone};
use crate::ranks::{self, Overhead, Seat};
use crate::run::{ModelSource, Run};
use crate::source::{Folder, Seeded, Supply};
use crate::{Error, Result, show};
use checkpoint::{Position, State};
use comm::Group;
use device::Profile;
use fsdp::{Engine, Hyper, Plan, Report};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use tensor::Model;

/// A loss scale that has fallen this far does not come back: gradients are not finite at any scale.
const MIN_LOSS_SCALE: f64 = 1.0 / 65536.0;

/// Trains as `ranks` ranks on this machine, or as one of those a launcher has started.
pub fn train(run: &Run, num_ranks: usize) -> Result<()> {
    train_from(run, num_ranks, &Resume::No)
}

/// As [`train`], going on from a checkpoint.
pub fn train_from(run: &Run, num_ranks: usize, resume: &Resume) -> Result<()> {
    let launched = ranks::Launched::from_env()?;
    let num_ranks = launched.as_ref().map_or(num_ranks, |launched| launched.world);
    let job = Job::new(run, num_ranks)?;
    ranks::start(run, num_ranks, launched, |seat| job.rank(seat, resume).map(drop))
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

    pub fn run(&self) -> &Run {
        self.run
    }

    pub fn plan(&self, profile: Profile) -> Result<Plan> {
        let fields = self.data.fields(self.micro_batch);
        let settings = self.run.settings(self.ranks, fields, self.micro_batches, profile);
        Ok(Plan::new(&self.model, settings, profile)?)
    }

    fn supply(&self, resumed: Option<&Resumed>, ranks: &dyn Group) -> Result<Supply> {
        let own = |source: SharedSource| Supply { source, from_first: false };
        match (resumed, &self.run.source) {
            (Some(resumed), _) => Ok(own(Arc::new(Folder::open(resumed.dir(), &self.model)?))),
            (None, ModelSource::Folder(dir)) => Supply::agree(self.run.load, dir, &self.model, ranks),
            (None, ModelSource::Seed(seed)) => Ok(own(Arc::new(Seeded::new(*seed, &self.model)))),
        }
    }

    /// One rank, from empty shards to the final folder. What the last step came to, if one was made.
    pub fn rank(&self, seat: Seat, resume: &Resume) -> Result<Option<Report>> {
        let run = self.run;
        let stream = self.data.stream(run)?;
        stream.agree(run, &*seat.groups.reduce)?;
        std::fs::create_dir_all(&run.output).map_err(|e| Error::file(&run.output, e))?;
        let found = agree_on(resume, run, &*seat.groups.world)?;
        let resumed = found.map(|dir| Resumed::open(&dir, &self.model)).transpose()?;
        let Supply { source, from_first } = self.supply(resumed.as_ref(), &*seat.groups.world)?;
        let plan = Arc::new(self.plan(seat.device.profile())?);
        let planned_bytes = plan.peak_bytes(&self.model);
        let Seat { rank, ranks, device, groups, saving, overhead } = seat;
        let mut engine = Engine::new(device, plan, self.model.clone(), groups.clone())
            .map_err(|error| show::explain_no_room(run, self.ranks, error))?;
        engine.set_seed(run.seed);
        let fingerprint = stream.fingerprint();
        let (mut before, mut cursor) = (0, Cursor::default());
        match &resumed {
            Some(resumed) => {
                resumed.restore(&mut engine, &groups)?;
                before = resumed.state.step;
                cursor = resumed.cursor(&stream, fingerprint, run.global_batch)?;
            }
            None if from_first => engine.fill_from_first((rank == 0).then_some(&*source))?,
            None => engine.fill(&*source)?,
        }
        let steps = stream.steps_from(before, cursor, run.length, run.global_batch);
        let last = run.stop_after.map_or(steps, |stop| steps.min(stop));
        let saver = Saver::new(run, &self.model, source, saving)?;
        if rank == 0 {
            self.say_start(resume, resumed.as_ref(), last);
            if run.progress {
                eprintln!("data: {}", stream.summary_of_run(run.length, run.global_batch));
            }
        }
        drop(resumed);
        let share = Share { rank, ranks, global_batch: run.global_batch, micro_batch: self.micro_batch };
        let sinks = self.sinks(rank, before, last)?;
        let way = Way { stream, share, fingerprint, cursor, before, last, steps };
        let report = self.steps(&mut engine, way, sinks, saver)?;
        if rank == 0 && run.progress {
            say_memory(planned_bytes, overhead, &engine);
        }
        Ok(report)
    }

    fn steps(
        &self,
        engine: &mut Engine,
        way: Way,
        mut sinks: Vec<Box<dyn Sink>>,
        mut saver: Saver,
    ) -> Result<Option<Report>> {
        let run = self.run;
        let Way { ref stream, share, mut cursor, before, last, steps, .. } = way;
        let mut loader = Loader::start(stream.clone(), share, cursor, last.saturating_sub(before))?;
        let scaled = engine.plan().settings.loss_scale().is_some();
        let (mut clock, mut reported, mut latest) = (Instant::now(), before, None);
        for step in before + 1..=last {
            self.say(share.rank, saver.poll()?);
            let batches = loader.next_step()?;
            let lr = run.lr.lr(step, steps);
            engine.step(&batches, &Hyper { adamw: run.adamw, lr, clip_norm: run.clip_norm, step })?;
            cursor = cursor.advanced(run.global_batch as u64, stream.rows());
            let what = What {
                checkpoint: run.checkpoint.is_due(step, last),
                model: run.write_model && step == last,
            };
            let logs = step % run.log_every == 0 || step == last;
            if !logs && !what.is_something() {
                continue;
            }
            let report = engine.report()?;
            if report.ended_at.is_some() || report.loss_scale < MIN_LOSS_SCALE {
                return Err(engine.blame(report.ended_at.unwrap_or(step))?.into());
            }
            if !report.loss.is_finite() {
                return Err(Error::NotFinite { step, loss: report.loss });
            }
            latest = Some(report);
            if logs {
                // The steps since the last report were issued together: what one of them took is their mean.
                let seconds = clock.elapsed().as_secs_f64() / (step - reported) as f64;
                (clock, reported) = (Instant::now(), step);
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
                    loss_scale: scaled.then_some(report.loss_scale),
                    skipped_steps: scaled.then_some(report.skipped_steps),
                    checkpoint_wait_ms: saver.take_waited().map(|waited| waited.as_secs_f64() * 1e3),
                };
                sinks.iter_mut().try_for_each(|sink| sink.step(&event))?;
            }
            // After its line: a run that goes on from here finds all lines up to here.
            if what.is_something() {
                let state = self.state(engine, &way, step, cursor)?;
                self.say(share.rank, saver.save(engine, state, what)?);
            }
        }
        if before >= last && run.write_model {
            // It may have been killed between its last checkpoint and its model.
            let (state, what) = (State::at(before), What { checkpoint: false, model: true });
            self.say(share.rank, saver.save(engine, state, what)?);
        }
        sinks.iter_mut().try_for_each(|sink| sink.finish())?;
        self.say(share.rank, saver.wait()?);
        Ok(latest)
    }

    /// Where the run stands after `step`.
    fn state(&self, engine: &Engine, way: &Way, step: u64, cursor: Cursor) -> Result<State> {
        let (Cursor { epoch, row }, scaler) = (cursor, engine.scaler()?);
        let scaled = engine.plan().settings.loss_scale().is_some();
        Ok(State {
            optimizer_step: step.saturating_sub(scaler.skipped_steps),
            data: Some(Position { epoch, row, fingerprint: way.fingerprint }),
            scaler: scaled
                .then_some(checkpoint::Scaler { scale: scaler.scale, good_steps: scaler.good_steps.into() }),
            run: self.run.given.clone(),
            versions: BTreeMap::from([("shardloom".into(), env!("CARGO_PKG_VERSION").into())]),
            ..State::at(step)
        })
    }

    /// Rank 0 reports for all.
    fn sinks(&self, rank: usize, before: u64, steps: u64) -> Result<Vec<Box<dyn Sink>>> {
        let mut sinks: Vec<Box<dyn Sink>> = Vec::new();
        if rank == 0 && self.run.progress {
            sinks.push(Box::new(Progress::new(before, steps)));
        }
        if rank == 0 && self.run.jsonl {
            let path = self.run.output.join("metrics.jsonl");
            let jsonl = if before == 0 { Jsonl::create(&path)? } else { Jsonl::resume(&path, before)? };
            sinks.push(Box::new(jsonl));
        }
        Ok(sinks)
    }

    /// Where a run starts, where that is a question.
    fn say_start(&self, resume: &Resume, resumed: Option<&Resumed>, steps: u64) {
        match (resumed, resume) {
            (Some(resumed), _) if resumed.state.step >= steps => {
                eprintln!("{} has all {steps} steps already: nothing is left to do", resumed.dir().display());
            }
            (Some(resumed), _) => {
                eprintln!("going on from {}, after step {}", resumed.dir().display(), resumed.state.step);
            }
            (None, Resume::Latest) => {
                let dir = self.run.output.join("checkpoints");
                eprintln!("there is no checkpoint in {} yet: starting from the beginning", dir.display());
            }
            _ => {}
        }
    }

    /// What a save has to say.
    fn say(&self, rank: usize, said: Option<String>) {
        if let (0, true, Some(said)) = (rank, self.run.progress, said) {
            // On a terminal the progress line is still there.
            eprintln!("\r{said}");
        }
    }
}

/// From where to where the loop goes, and on what.
#[derive(Debug)]
struct Way {
    stream: Arc<Stream>,
    share: Share,
    /// Of the data.
    fingerprint: u64,
    /// The next row.
    cursor: Cursor,
    /// Steps made before.
    before: u64,
    last: u64,
    /// Of the whole run: what the learning rate goes by.
    steps: u64,
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
