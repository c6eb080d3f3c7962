//! Watches the workers of one attempt until all have ended, and ends them when one fails, another node does, or
//! a signal comes.

use super::flags::signal_name;
use super::worker::{Failure, Worker};
use crate::{Error, Result};
use signal_hook::consts::{SIGCONT, SIGKILL, SIGTERM};
use std::process::ExitStatus;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant, SystemTime};

/// What the launcher wakes up for.
#[derive(Clone, Debug)]
pub enum Event {
    Ended { attempt: u32, local_rank: usize, status: ExitStatus, at: SystemTime },
    Signal(i32),
    Peers { attempt: u32, news: News },
}

/// From the other nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// A rank failed there.
    Failed(String),
    /// A node is gone, or the way to it.
    Lost(String),
    /// Every rank of every node has succeeded.
    AllDone,
}

/// How an attempt ended on this node.
#[derive(Debug)]
pub enum Outcome {
    Done,
    /// In the order in which they failed; at least one.
    Failed(Vec<Failure>),
    PeerFailed(String),
    PeerLost(String),
    Signal(i32),
}

/// Why workers are being ended.
#[derive(Debug)]
struct Ending {
    why: Why,
    since: SystemTime,
    /// When those still there are killed.
    deadline: Instant,
}

#[derive(Debug)]
enum Why {
    Failure,
    News(News),
    Signal(i32),
}

#[derive(Debug)]
pub struct Watch<'a> {
    pub workers: Vec<Worker>,
    pub events: &'a Receiver<Event>,
    pub attempt: u32,
    pub grace: Duration,
}

impl Watch<'_> {
    /// Until every worker has ended and been reaped.
    pub fn run(mut self) -> Outcome {
        let mut ending: Option<Ending> = None;
        while self.workers.iter().any(Worker::is_running) {
            match (self.next(&ending), &ending) {
                (Some(Event::Ended { local_rank, status, at, .. }), _) => {
                    self.workers[local_rank].ended = Some((status, at));
                    if !status.success() && ending.is_none() {
                        ending = Some(self.end(SIGTERM, Why::Failure, at));
                    }
                }
                (Some(Event::Signal(signal)), None) => {
                    eprintln!("shardloom: {} is passed on to the workers", signal_name(signal));
                    ending = Some(self.end(signal, Why::Signal(signal), SystemTime::now()));
                }
                // Who asks twice does not want to wait.
                (Some(Event::Signal(_)), Some(Ending { why: Why::Signal(_), .. })) => self.signal(SIGKILL),
                (Some(Event::Signal(signal)), Some(_)) => self.signal(signal),
                (Some(Event::Peers { news: News::AllDone, .. }), _) => {}
                (Some(Event::Peers { news, .. }), None) => {
                    ending = Some(self.end(SIGTERM, Why::News(news), SystemTime::now()));
                }
                (Some(Event::Peers { .. }), Some(_)) => {}
                (None, _) => self.signal(SIGKILL),
            }
        }
        self.workers.iter_mut().for_each(Worker::reap);
        self.outcome(ending)
    }

    /// The next event of this attempt; nothing once the grace period is over.
    fn next(&self, ending: &Option<Ending>) -> Option<Event> {
        loop {
            let event = match ending {
                None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(ending) => {
                    // After the kill nothing is left but to wait, and to kill again should it be needed.
                    let left = ending.deadline.saturating_duration_since(Instant::now());
                    self.events.recv_timeout(left.max(Duration::from_millis(500)))
                }
            };
            match event {
                Ok(Event::Ended { attempt, .. } | Event::Peers { attempt, .. })
                    if attempt != self.attempt => {}
                Ok(event) => return Some(event),
                Err(RecvTimeoutError::Timeout) => return None,
                Err(RecvTimeoutError::Disconnected) => unreachable!("the launcher holds a sender"),
            }
        }
    }

    fn end(&self, signal: i32, why: Why, since: SystemTime) -> Ending {
        self.signal(signal);
        // One that is stopped hears it only when it goes on.
        self.signal(SIGCONT);
        Ending { why, since, deadline: Instant::now() + self.grace }
    }

    /// To the trees of all workers, also of those that ended and left children.
    fn signal(&self, signal: i32) {
        self.workers.iter().for_each(|worker| worker.signal(signal));
    }

    fn outcome(&self, ending: Option<Ending>) -> Outcome {
        let Some(Ending { why, since, .. }) = ending else { return Outcome::Done };
        let mut failures: Vec<Failure> =
            self.workers.iter().filter_map(|worker| worker.failure(since)).collect();
        failures.sort_by_key(|failure| failure.at);
        let clean =
            self.workers.iter().all(|worker| worker.ended.is_some_and(|(status, _)| status.success()));
        match why {
            // Asked to end, all did so of their own accord.
            Why::Signal(_) if clean => Outcome::Done,
            Why::Signal(signal) => Outcome::Signal(signal),
            // It failed here as well, only not to our knowledge yet: that says more than another's report.
            _ if !failures.is_empty() => Outcome::Failed(failures),
            Why::News(News::Lost(what)) => Outcome::PeerLost(what),
            Why::News(News::Failed(what)) => Outcome::PeerFailed(what),
            Why::Failure | Why::News(News::AllDone) => unreachable!("a failure has left no trace"),
        }
    }
}

/// Has `signals` arrive as events. Those that this process was started to ignore (nohup) stay ignored.
pub fn forward_signals(signals: &[i32], events: Sender<Event>) -> Result<()> {
    let failed = |e: std::io::Error| Error::Launch(format!("cannot handle signals: {e}"));
    let ignored = ignored_signals();
    let handled = signals.iter().filter(|signal| ignored >> (**signal - 1) & 1 == 0);
    let mut signals = signal_hook::iterator::Signals::new(handled).map_err(failed)?;
    let forward = move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(forward).map_err(failed)?;
    Ok(())
}

/// A bit for each, from signal 1.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
