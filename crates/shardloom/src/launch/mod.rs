//! `shardloom launch`: starts one process per rank on this node, watches them, and says whose failure was first.
//!
//! [`flags`] make a [`Job`]; [`rendezvous`] finds this node's place in it; [`worker`]s are started in an
//! environment ([`env`]) with [`logs`] and cores ([`machine`]); [`watch`] waits for how they end. CUDA is never
//! touched.

mod env;
pub mod error_file;
mod flags;
mod logs;
mod machine;
mod rendezvous;
mod watch;
mod worker;

pub use flags::Flags;
pub(crate) use machine::host_name;

use crate::{Error, Result};
use flags::{Affinity, Job, signal_name};
use logs::RunLogs;
use rendezvous::Rendezvous;
use std::ffi::OsString;
use std::sync::mpsc::{Receiver, Sender, channel};
use watch::{Event, Outcome, Watch};
use worker::{Failure, Starter};

/// Runs a command as the ranks of this node.
pub fn launch(flags: Flags) -> Result<()> {
    run(&flags.resolve()?)
}

/// Runs `command` as `num_ranks` ranks of this machine, with nothing to choose.
pub(crate) fn on_this_machine(num_ranks: usize, command: Vec<OsString>) -> Result<()> {
    run(&Job::on_this_machine(num_ranks, command)?)
}

fn run(job: &Job) -> Result<()> {
    // Until here a signal simply ends this process: there are no workers yet to pass it on to.
    let rendezvous = Rendezvous::meet(job)?;
    let logs = RunLogs::create(&job.logs, &job.run_id)?;
    let (sender, events) = channel();
    watch::forward_signals(&job.signals, sender.clone())?;
    rendezvous.watch_peers(job.monitor_interval, sender.clone())?;
    let launcher = Launcher { job, logs, rendezvous, sender, events };
    let result = launcher.attempts();
    launcher.rendezvous.leave();
    result
}

#[derive(Debug)]
struct Launcher<'a> {
    job: &'a Job,
    logs: RunLogs,
    rendezvous: Rendezvous,
    sender: Sender<Event>,
    events: Receiver<Event>,
}

impl Launcher<'_> {
    /// Until one attempt succeeds, or there are no more.
    fn attempts(&self) -> Result<()> {
        let num_restarts = self.job.max_restarts;
        for attempt in 0.. {
            let outcome = match self.attempt(attempt) {
                Ok(Outcome::Done) => self.rendezvous.done(attempt, &self.events),
                outcome => outcome,
            };
            let (error, hopeless) = match outcome {
                Ok(Outcome::Done) => return Ok(()),
                Ok(Outcome::Failed(failures)) => (self.first_of(&failures, attempt), false),
                Ok(Outcome::PeerFailed(what)) => (Error::Launch(what), false),
                // The other nodes notice by themselves, and this one may be unable to tell them.
                Ok(Outcome::PeerLost(what)) => return Err(Error::Launch(what)),
                Ok(Outcome::Signal(signal)) => {
                    let what = format!("{} ended the job on {}", signal_name(signal), self.job.host);
                    (Error::Launch(what), true)
                }
                Err(error) => (error, true),
            };
            let last = hopeless || attempt == num_restarts;
            self.rendezvous.report(attempt, error.to_string(), last);
            if last {
                return Err(error);
            }
            eprintln!(
                "shardloom: {error}\nshardloom: all ranks start again, {} of {num_restarts}",
                attempt + 1
            );
            self.rendezvous.restart(attempt + 1, &self.events)?;
        }
        unreachable!("the last attempt returns")
    }

    fn attempt(&self, attempt: u32) -> Result<Outcome> {
        let Launcher { job, logs, rendezvous, sender: events, .. } = self;
        let starter = Starter { job, place: &rendezvous.place, logs, attempt, events };
        let cores = match job.affinity {
            Affinity::Divided => machine::divided_cores(job.num_local),
            Affinity::Free => vec![Vec::new(); job.num_local],
        };
        let mut workers = Vec::with_capacity(job.num_local);
        for (local_rank, cores) in cores.iter().enumerate() {
            match starter.start(local_rank, cores) {
                Ok(worker) => workers.push(worker),
                Err(error) => {
                    workers.iter_mut().for_each(worker::Worker::reap);
                    return Err(error);
                }
            }
        }
        Ok(Watch { workers, events: &self.events, attempt, grace: job.grace }.run())
    }

    /// The first failure in full, the others by name.
    fn first_of(&self, failures: &[Failure], attempt: u32) -> Error {
        let Some((first, others)) = failures.split_first() else { unreachable!("there is one at least") };
        let mut what = first.describe(&self.job.host, attempt);
        if !others.is_empty() {
            let others: Vec<String> = others.iter().map(Failure::brief).collect();
            what += &format!("\n  after it: {}", others.join("; "));
        }
        Error::Rank { rank: first.rank, what }
    }
}
