//! What groups of processes have in common: calls are numbered when they are issued, run on their streams, and
//! one at a time, in the order of their numbers, whatever stream each is on. So the processes meet in the same
//! order everywhere and a backend has to do one call after another only.
//!
//! This cannot lock up: a call waits only for calls that were issued before it, on this rank and on others.

use crate::call::Job;
use crate::group::agree_on_split;
use crate::ticket::{Ticket, Ticketed, Who};
use crate::{Error, Group, Result};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often one who waits for his turn looks whether the group has failed meanwhile.
const LOOK: Duration = Duration::from_millis(50);

/// A backend: carries out one call at a time.
pub(crate) trait Engine: Send + Sync + 'static {
    fn who(&self) -> Who<'_>;

    /// Carries out this rank's part of a call; the answers of an exchange. Who fails has told the peers.
    fn run(&self, job: &Job) -> Result<Vec<Vec<u8>>>;

    /// Ends the group for everyone, unless it had ended already; the first failure.
    fn fail(&self, error: Error) -> Error;
    fn failure(&self) -> Option<Error>;

    /// A name that no other group of the store has or had.
    fn scope(&self) -> &str;

    /// Joins the sub-group of these ranks under a scope of its own.
    fn join(&self, ranks: &[usize], rank: usize, scope: &str, name: &str) -> Result<Arc<dyn Group>>;

    /// The handle was dropped; calls that were issued may still be running.
    fn leaving(&self, why: &'static str);
}

/// One rank's handle on a group that a backend carries.
pub(crate) struct Queued<E: Engine> {
    turns: Arc<Turns<E>>,
    splits: AtomicU64,
}

struct Turns<E: Engine> {
    engine: E,
    /// How many calls this rank has issued: the number of the next one.
    issued: AtomicU64,
    /// How many have run.
    done: Mutex<u64>,
    changed: Condvar,
}

impl<E: Engine> Turns<E> {
    fn done(&self) -> MutexGuard<'_, u64> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost_myself(&self, job: &Job, why: &str) -> Error {
        let Who { rank, name, .. } = self.engine.who();
        let group = name.to_string();
        let (op, what) = (job.call.op(rank), job.what.clone());
        Error::PeerLost { rank, group, op, what, seconds: 0.0, peer: rank, why: why.to_string() }
    }
}

/// A call that waits for its turn.
pub(crate) struct QueuedTicket<E: Engine> {
    turns: Arc<Turns<E>>,
    number: u64,
    job: Option<Job>,
}

impl<E: Engine> Ticket for QueuedTicket<E> {
    fn run(mut self) -> Result<Vec<Vec<u8>>> {
        let Some(job) = self.job.take() else { return Ok(Vec::new()) };
        let turns = &self.turns;
        let mut done = turns.done();
        while *done != self.number {
            if let Some(error) = turns.engine.failure() {
                return Err(error);
            }
            done = turns.changed.wait_timeout(done, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(done);
        let turn = Turn { turns, job: &job };
        let result = turns.engine.run(&job);
        drop(turn);
        result
    }
}

impl<E: Engine> Drop for QueuedTicket<E> {
    fn drop(&mut self) {
        let Some(job) = self.job.take() else { return };
        self.turns.engine.fail(self.turns.lost_myself(&job, "its stream had failed before"));
    }
}

/// A call that runs. However it ends, the next one may.
struct Turn<'a, E: Engine> {
    turns: &'a Turns<E>,
    job: &'a Job,
}

impl<E: Engine> Drop for Turn<'_, E> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.turns.engine.fail(self.turns.lost_myself(self.job, "its thread panicked"));
        }
        *self.turns.done() += 1;
        self.turns.changed.notify_all();
    }
}

impl<E: Engine> Queued<E> {
    pub fn new(engine: E) -> Self {
        let turns = Turns { engine, issued: AtomicU64::new(0), done: Mutex::new(0), changed: Condvar::new() };
        Queued { turns: Arc::new(turns), splits: AtomicU64::new(0) }
    }
}

impl<E: Engine> Ticketed for Queued<E> {
    type Ticket = QueuedTicket<E>;

    fn who(&self) -> Who<'_> {
        self.turns.engine.who()
    }

    fn ticket(&self, job: Job) -> Result<QueuedTicket<E>> {
        if let Some(error) = self.turns.engine.failure() {
            return Err(error);
        }
        let number = self.turns.issued.fetch_add(1, Ordering::Relaxed);
        Ok(QueuedTicket { turns: self.turns.clone(), number, job: Some(job) })
    }

    fn part(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn Group>>> {
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let Some(rank) = agree_on_split(self, ranks, name)? else { return Ok(None) };
        let scope = format!("{}/split {number} at {}", self.turns.engine.scope(), ranks[0]);
        self.turns.engine.join(ranks, rank, &scope, name).map(Some)
    }
}

impl<E: Engine> Drop for Queued<E> {
    fn drop(&mut self) {
        let why = if std::thread::panicking() { "its thread panicked" } else { "its handle was dropped" };
        self.turns.engine.leaving(why);
    }
}

impl<E: Engine> fmt::Debug for Queued<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.who())
    }
}
