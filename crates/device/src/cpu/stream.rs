//! Streams on the host: the compute stream runs inline, side streams are worker threads.

use crate::{Error, Result, Role};
use std::fmt;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

type Task = Box<dyn FnOnce() -> Result<()> + Send>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic inside a task is turned into an error before it can poison anything that matters.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A handle to a host stream.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    /// None: inline.
    queue: Option<Sender<Task>>,
    /// The first thing that failed. Once set, tasks are skipped and every event carries it.
    failed: Arc<Mutex<Option<Error>>>,
}

/// A point in a host stream's work: done or not, and whether the stream had failed by then.
#[derive(Clone)]
pub struct Event {
    state: Arc<(Mutex<Option<Result<()>>>, Condvar)>,
}

impl Event {
    fn pending() -> Self {
        Event { state: Arc::new((Mutex::new(None), Condvar::new())) }
    }

    fn done(result: Result<()>) -> Self {
        Event { state: Arc::new((Mutex::new(Some(result)), Condvar::new())) }
    }

    fn complete(&self, result: Result<()>) {
        *lock(&self.state.0) = Some(result);
        self.state.1.notify_all();
    }

    /// Sleeps until the point is reached.
    pub fn wait(&self) -> Result<()> {
        let mut state = lock(&self.state.0);
        loop {
            if let Some(result) = &*state {
                return result.clone();
            }
            state = self.state.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Stream {
    pub fn new(name: &str, role: Role) -> Result<Self> {
        let failed = Arc::new(Mutex::new(None));
        let queue = match role {
            Role::Compute => None,
            Role::Side => Some(spawn_worker(name, failed.clone())?),
        };
        Ok(Stream { inner: Arc::new(Inner { name: name.to_string(), queue, failed }) })
    }

    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Issues work: now on the inline stream, in turn on a worker. What fails on a worker is reported by
    /// whoever waits for it.
    pub fn submit(&self, task: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        self.status()?;
        match &self.inner.queue {
            None => task(),
            Some(queue) => {
                let failed = self.inner.failed.clone();
                let unless_failed = move || if lock(&failed).is_some() { Ok(()) } else { task() };
                self.send(queue, Box::new(unless_failed))
            }
        }
    }

    /// Runs borrowed work in stream order and returns when it has run.
    pub fn run(&self, task: impl FnOnce() -> Result<()>) -> Result<()> {
        self.synchronize()?;
        task()
    }

    pub fn record(&self) -> Result<Event> {
        let Some(queue) = &self.inner.queue else { return Ok(Event::done(self.status())) };
        let event = Event::pending();
        let (reached, failed) = (event.clone(), self.inner.failed.clone());
        let mark: Task = Box::new(move || {
            reached.complete(lock(&failed).clone().map_or(Ok(()), Err));
            Ok(())
        });
        self.send(queue, mark)?;
        Ok(event)
    }

    pub fn wait(&self, event: &Event) -> Result<()> {
        match &self.inner.queue {
            None => event.wait(),
            Some(queue) => {
                let event = event.clone();
                self.send(queue, Box::new(move || event.wait()))
            }
        }
    }

    pub fn synchronize(&self) -> Result<()> {
        if self.inner.queue.is_none() {
            return self.status();
        }
        self.record()?.wait()
    }

    fn status(&self) -> Result<()> {
        lock(&self.inner.failed).clone().map_or(Ok(()), Err)
    }

    fn send(&self, queue: &Sender<Task>, task: Task) -> Result<()> {
        queue.send(task).map_err(|_| Error::Stream {
            stream: self.inner.name.clone(),
            what: "its worker thread has ended".into(),
        })
    }
}

/// The worker ends when the last handle to its stream is gone and the queue is empty. It is not joined: a
/// task may be waiting for a peer, and what it touches it owns.
fn spawn_worker(name: &str, failed: Arc<Mutex<Option<Error>>>) -> Result<Sender<Task>> {
    let (sender, tasks) = channel::<Task>();
    let stream = name.to_string();
    let body = move || {
        for task in tasks {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(task)).unwrap_or_else(|_| {
                Err(Error::Stream { stream: stream.clone(), what: "a task panicked".into() })
            });
            if let Err(error) = result {
                lock(&failed).get_or_insert(error);
            }
        }
    };
    std::thread::Builder::new().name(name.to_string()).spawn(body).map_err(|e| Error::Stream {
        stream: name.to_string(),
        what: format!("cannot start its thread: {e}"),
    })?;
    Ok(sender)
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cpu::Stream({})", self.inner.name)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cpu::Event(reached: {})", lock(&self.state.0).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_worker_runs_in_order_and_an_event_orders_two_streams() {
        let (a, b) = (Stream::new("a", Role::Side).unwrap(), Stream::new("b", Role::Side).unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let gate = Event::pending();
        a.wait(&gate).unwrap();
        for i in 0..3 {
            let log = log.clone();
            a.submit(move || {
                lock(&log).push(i);
                Ok(())
            })
            .unwrap();
        }
        b.wait(&a.record().unwrap()).unwrap();
        let last = log.clone();
        b.submit(move || {
            lock(&last).push(9);
            Ok(())
        })
        .unwrap();
        assert!(lock(&log).is_empty());
        gate.complete(Ok(()));
        b.synchronize().unwrap();
        assert_eq!(*lock(&log), [0, 1, 2, 9]);
    }

    #[test]
    fn a_failure_reaches_everyone_who_waits_and_skips_what_follows() {
        let (a, b) = (Stream::new("a", Role::Side).unwrap(), Stream::new("b", Role::Compute).unwrap());
        let ran = Arc::new(AtomicUsize::new(0));
        let gate = Event::pending();
        a.wait(&gate).unwrap();
        a.submit(|| Err(Error::argument("test", "broken"))).unwrap();
        let count = ran.clone();
        let ran_anyway = move || {
            count.fetch_add(1, Ordering::SeqCst);
            Ok(())
        };
        a.submit(ran_anyway).unwrap();
        let event = a.record().unwrap();
        gate.complete(Ok(()));
        assert!(b.wait(&event).unwrap_err().to_string().contains("broken"));
        assert!(a.submit(|| Ok(())).is_err());
        assert!(a.synchronize().is_err());
        assert_eq!(ran.load(Ordering::SeqCst), 0);
    }
}
