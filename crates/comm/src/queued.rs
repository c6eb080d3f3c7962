//! What groups of processes have in common: calls are numbered when they are issued, run on their streams, and
//! one at a time, in the order of their numbers, whatever stream each is on. So the processes meet in the same
//! order everywhere and a backend has to do one call after another only.
//!
//! This cannot lock up: a call waits only for calls that were issued before it, on this rank and on others.

use crate::call::{Call, Job, Payload};
use crate::group::{agree_on_split, check_all_to_all, check_parts, check_peer, check_root};
use crate::{Error, Group, Reduction, Result, reduce};
use device::{Buffer, Stream};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// How often one who waits for his turn looks whether the group has failed meanwhile.
const LOOK: Duration = Duration::from_millis(50);

/// A backend: carries out one call at a time.
pub(crate) trait Engine: Send + Sync + 'static {
    fn kind(&self) -> &'static str;
    fn name(&self) -> &str;
    fn rank(&self) -> usize;
    fn size(&self) -> usize;

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

    fn ticket(self: &Arc<Self>, job: Job) -> Result<Ticket<E>> {
        if let Some(error) = self.engine.failure() {
            return Err(error);
        }
        let number = self.issued.fetch_add(1, Ordering::Relaxed);
        Ok(Ticket { turns: self.clone(), number, job: Some(job) })
    }

    fn lost_myself(&self, job: &Job, why: &str) -> Error {
        let (rank, group) = (self.engine.rank(), self.engine.name().to_string());
        let (op, what) = (job.call.op(rank), job.what.clone());
        Error::PeerLost { rank, group, op, what, seconds: 0.0, peer: rank, why: why.to_string() }
    }
}

/// A call that was issued and has not run. If its stream drops it unrun, the peers must not wait for it.
struct Ticket<E: Engine> {
    turns: Arc<Turns<E>>,
    number: u64,
    job: Option<Job>,
}

impl<E: Engine> Ticket<E> {
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

impl<E: Engine> Drop for Ticket<E> {
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

    fn issue(&self, stream: &Stream, call: Call, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        let Stream::Cpu(stream) = stream else {
            let (op, kind) = (call.op(self.rank()), self.turns.engine.kind());
            let what = format!("{what}: a {kind} group works on CPU streams only");
            return Err(Error::Argument { op, what });
        };
        let payload = Payload::Buffers(src.clone(), dst.clone());
        let ticket = self.turns.ticket(Job { call, what: what.to_string(), payload })?;
        // On an inline stream the call has failed by the time `submit` returns, and the caller hears the
        // error itself; on a worker it travels through the stream as text.
        let failure = Arc::new(OnceLock::new());
        let (reported, name) = (failure.clone(), stream.name().to_string());
        let task = move || {
            ticket.run().map(|_| ()).map_err(|error| {
                let what = error.to_string();
                let _ = reported.set(error);
                device::Error::Stream { stream: name, what }
            })
        };
        let result = stream.submit(task);
        result.map_err(|error| failure.get().cloned().unwrap_or(Error::Device(error)))
    }

    fn agree(&self, call: Call, bytes: &[u8], what: &str) -> Result<Vec<Vec<u8>>> {
        let payload = Payload::Bytes(bytes.to_vec());
        self.turns.ticket(Job { call, what: what.to_string(), payload })?.run()
    }
}

impl<E: Engine> Group for Queued<E> {
    fn name(&self) -> &str {
        self.turns.engine.name()
    }

    fn rank(&self) -> usize {
        self.turns.engine.rank()
    }

    fn size(&self) -> usize {
        self.turns.engine.size()
    }

    fn all_gather(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        check_parts("all_gather", what, src, dst, self)?;
        let call = Call::AllGather { dtype: src.dtype(), part: src.len() };
        self.issue(stream, call, src, dst, what)
    }

    fn reduce_scatter(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        reduce::supports("reduce_scatter", src.dtype())?;
        check_parts("reduce_scatter", what, dst, src, self)?;
        let call = Call::ReduceScatter { dtype: dst.dtype(), part: dst.len() };
        self.issue(stream, call, src, dst, what)
    }

    fn all_reduce(&self, stream: &Stream, buffer: &Buffer, reduction: Reduction, what: &str) -> Result<()> {
        reduce::supports("all_reduce", buffer.dtype())?;
        let call = Call::AllReduce { dtype: buffer.dtype(), len: buffer.len(), reduction };
        self.issue(stream, call, buffer, buffer, what)
    }

    fn broadcast(&self, stream: &Stream, buffer: &Buffer, root: usize, what: &str) -> Result<()> {
        check_root("broadcast", what, root, self)?;
        let call = Call::Broadcast { dtype: buffer.dtype(), len: buffer.len(), root };
        self.issue(stream, call, buffer, buffer, what)
    }

    fn all_to_all(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        check_all_to_all(what, src, dst, self)?;
        let call = Call::AllToAll { dtype: src.dtype(), part: src.len() / self.size() };
        self.issue(stream, call, src, dst, what)
    }

    fn send(&self, stream: &Stream, src: &Buffer, to: usize, what: &str) -> Result<()> {
        check_peer("send", what, to, self)?;
        let call = Call::Transfer { dtype: src.dtype(), len: src.len(), from: self.rank(), to };
        self.issue(stream, call, src, src, what)
    }

    fn receive(&self, stream: &Stream, dst: &Buffer, from: usize, what: &str) -> Result<()> {
        check_peer("receive", what, from, self)?;
        let call = Call::Transfer { dtype: dst.dtype(), len: dst.len(), from, to: self.rank() };
        self.issue(stream, call, dst, dst, what)
    }

    fn exchange(&self, bytes: &[u8], what: &str) -> Result<Vec<Vec<u8>>> {
        self.agree(Call::Exchange, bytes, what)
    }

    fn barrier(&self, what: &str) -> Result<()> {
        self.agree(Call::Barrier, &[], what).map(|_| ())
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn Group>>> {
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
        let (kind, name) = (self.turns.engine.kind(), self.name());
        write!(f, "{kind}({name}, rank {} of {})", self.rank(), self.size())
    }
}
