//! A communicator and the thread that watches it.
//!
//! Whoever is in a call of NCCL's, or waits for a stream with one on it, cannot look around. So every group has a
//! thread that does: it asks NCCL for errors, looks how long the group's calls have been running, and hears from
//! the store whether a rank has ended or given up. When something is wrong it aborts the communicator, which ends its
//! kernels and thereby everyone's wait, and before that declares what the GPU computes void, so that whoever waited
//! hears why. All groups of a rank abort when one does, each in its own thread: the end of one communicator
//! waits for kernels of the others.

#[cfg(test)]
mod tests;

use super::flight::{AnyPoint, Flights, Issued};
use super::library::{Api, Code, IN_PROGRESS, SUCCESS};
use crate::error::{Place, list_ranks};
use crate::store::Store;
use crate::{Error, Result};
use cudarc::nccl::sys::ncclComm_t;
use device::cuda::Stream;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How often the thread looks at the communicator, and how often it asks the store.
const LOOK: Duration = Duration::from_millis(100);
const ASK: Duration = Duration::from_millis(500);
/// How long an answer of the store may take, and how long it may be out of reach.
const ANSWER: Duration = Duration::from_secs(2);
const OUT_OF_REACH: Duration = Duration::from_secs(15);
/// After so long a rank says in the store which call it waits for, should it come to naming who does not.
const LONG: Duration = Duration::from_secs(1);
/// How long an abort, or a farewell, may take.
const END: Duration = Duration::from_secs(5);
/// How often one who waits for NCCL yields before it begins to sleep.
const YIELDS: u32 = 500;
const NAP: Duration = Duration::from_micros(50);

static LAST_RESORT: OnceLock<fn(&Error)> = OnceLock::new();

/// What to do when a communicator cannot even be aborted, so that threads of this process may hang for ever: to say
/// why, and to end the process. The first to say so is believed.
pub fn on_stuck(act: fn(&Error)) {
    let _ = LAST_RESORT.set(act);
}

/// One rank of a communicator.
pub(super) struct Watched {
    pub name: String,
    pub rank: usize,
    pub size: usize,
    pub timeout: Duration,
    pub api: &'static Api,
    /// Where the group's keys are in the store.
    pub scope: String,
    state: Mutex<State>,
    changed: Condvar,
}

pub(super) struct State {
    /// Null once it has been given up or destroyed.
    comm: Comm,
    /// The first failure; the communicator is of no use after it.
    pub failed: Option<Error>,
    pub flights: Flights<AnyPoint>,
    /// Any stream of the GPU.
    pub stream: Option<Stream>,
    /// It was destroyed, or has been aborted: there is nothing to watch any more.
    ended: bool,
}

#[derive(Clone, Copy)]
struct Comm(ncclComm_t);

// SAFETY: a communicator may be used from any thread, by one at a time: it is behind a mutex, or was taken from it.
unsafe impl Send for Comm {}

impl State {
    pub fn comm(&self) -> ncclComm_t {
        self.comm.0
    }

    fn take(&mut self) -> Comm {
        std::mem::replace(&mut self.comm, Comm(std::ptr::null_mut()))
    }
}

impl Watched {
    /// Takes over a communicator that was asked to begin.
    pub fn new(
        (api, comm): (&'static Api, ncclComm_t),
        (name, scope): (&str, &str),
        rank: usize,
        size: usize,
        timeout: Duration,
    ) -> Self {
        let state =
            State { comm: Comm(comm), failed: None, flights: Flights::new(), stream: None, ended: false };
        let (name, scope, changed) = (name.to_string(), scope.to_string(), Condvar::new());
        Watched { name, rank, size, timeout, api, scope, state: Mutex::new(state), changed }
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first failure stays; the thread does the rest.
    pub fn fail(&self, error: Error) -> Error {
        let first = self.lock().failed.get_or_insert(error).clone();
        self.changed.notify_all();
        first
    }

    pub fn nccl_error(&self, state: &State, call: &'static str, what: &str, code: Code) -> Error {
        let what = format!("{what}: {}", self.api.explain(code, state.comm()));
        Error::Nccl { call, rank: self.rank, group: self.name.clone(), what }
    }

    /// What NCCL says of the communicator.
    fn progress(&self, state: &State) -> Code {
        let mut pending = SUCCESS;
        // SAFETY: the communicator is alive while `failed` is none and it was not taken; one number is written.
        // The call also tidies up, which is why it is made by one thread at a time.
        match unsafe { (self.api.comm_get_async_error)(state.comm(), &mut pending) } {
            SUCCESS => pending,
            code => code,
        }
    }

    /// Waits until the communicator is done with what `call` asked of it.
    pub fn settle<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        (call, op, what): (&'static str, &'static str, &str),
        code: Code,
    ) -> Result<MutexGuard<'a, State>> {
        let (started, mut looks, mut code) = (Instant::now(), 0, code);
        loop {
            if code == SUCCESS || code == IN_PROGRESS {
                code = self.progress(&state);
            }
            match code {
                SUCCESS => return Ok(state),
                IN_PROGRESS => drop(state),
                code => {
                    let error = self.nccl_error(&state, call, what, code);
                    drop(state);
                    return Err(self.fail(error));
                }
            }
            if started.elapsed() > self.timeout {
                let (rank, group, what) = (self.rank, self.name.clone(), what.to_string());
                let (seconds, missing) = (started.elapsed().as_secs_f64(), "another rank".to_string());
                return Err(self.fail(Error::Timeout { rank, group, op, what, seconds, missing }));
            }
            looks += 1;
            if looks < YIELDS {
                std::thread::yield_now()
            } else {
                std::thread::sleep(NAP)
            }
            state = self.lock();
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
        }
    }

    /// Takes leave of the peers, when nothing has failed; otherwise sees the abort through. Waits in neither case for
    /// longer than a while.
    pub fn end(&self) {
        if std::thread::panicking() {
            let (rank, group, why) = (self.rank, self.name.clone(), "its thread panicked".to_string());
            let (op, what) = ("drop", "the group".to_string());
            self.fail(Error::PeerLost { rank, group, op, what, seconds: 0.0, peer: rank, why });
        }
        if self.finalize().is_ok() {
            let mut state = self.lock();
            let comm = state.take();
            state.ended = true;
            drop(state);
            self.changed.notify_all();
            within(END, "nccl end", comm, self.api.comm_destroy);
            return;
        }
        let started = Instant::now();
        let mut state = self.lock();
        while !state.ended && started.elapsed() < END + Duration::from_secs(1) {
            state = self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn finalize(&self) -> Result<()> {
        let state = self.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        // SAFETY: the communicator is alive, and done with what came before.
        let code = unsafe { (self.api.comm_finalize)(state.comm()) };
        self.settle(state, ("ncclCommFinalize", "drop", "the group"), code).map(|_| ())
    }

    /// What is wrong with the communicator, or the call that has run for longest and the last one that was issued.
    fn look(&self, state: &mut State) -> Result<(Option<Issued>, Option<Issued>)> {
        let code = self.progress(state);
        if code != SUCCESS && code != IN_PROGRESS {
            let what = state.flights.last().map_or("the group".to_string(), |last| last.what.clone());
            return Err(self.nccl_error(state, "ncclCommGetAsyncError", &what, code));
        }
        let longest = state.flights.look(Instant::now())?;
        Ok((longest, state.flights.last().cloned()))
    }
}

/// Calls one of NCCL's last functions in a thread of its own; whether it came back in time.
fn within(
    time: Duration,
    name: &str,
    comm: Comm,
    function: unsafe extern "C" fn(ncclComm_t) -> Code,
) -> bool {
    let (done, ended) = channel();
    let call = move || {
        // The whole of it, and not only the pointer in it, which may not change threads.
        let comm = comm;
        // SAFETY: the communicator was taken from where others find it: this is its last use. What NCCL answers no
        // longer matters to anyone.
        unsafe { function(comm.0) };
        let _ = done.send(());
    };
    // Without a thread it is left as it is; the process ends soon.
    let spawned = std::thread::Builder::new().name(name.to_string()).spawn(call);
    spawned.is_ok() && !matches!(ended.recv_timeout(time), Err(RecvTimeoutError::Timeout))
}

/// The thread of one group.
pub(super) struct Watch {
    watched: Arc<Watched>,
    store: Arc<Store>,
    /// A connection of its own: in the shared one others may be waiting.
    news: Store,
    asked: Instant,
    /// Since when the store has been out of reach.
    silent: Option<Instant>,
    /// The number of the call that this rank has said it waits for.
    said: u64,
}

impl Watch {
    pub fn start(watched: Arc<Watched>, store: Arc<Store>) -> Result<()> {
        let (rank, group) = (watched.rank, watched.name.clone());
        let news = store.another(ANSWER)?;
        let watch = Watch { watched, store, news, asked: Instant::now(), silent: None, said: 0 };
        let spawned = std::thread::Builder::new().name(format!("nccl {group}")).spawn(move || watch.run());
        let what = |e| format!("no thread to watch it: {e}");
        spawned.map(|_| ()).map_err(|e| Error::System { rank, group, what: what(e) })
    }

    fn run(mut self) {
        let watched = self.watched.clone();
        loop {
            let mut state = watched.lock();
            if !state.ended && state.failed.is_none() {
                state = watched.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.ended {
                return;
            }
            if let Some(error) = state.failed.clone() {
                let (comm, stream) = (state.take(), state.stream.clone());
                drop(state);
                self.give_up(&error, comm, stream);
                return;
            }
            let looked = watched.look(&mut state);
            drop(state);
            if let Err(error) = looked.and_then(|(longest, last)| self.look_around(longest, last)) {
                watched.fail(error);
            }
        }
    }

    /// Fails when a call takes too long, or the world has failed.
    fn look_around(&mut self, longest: Option<Issued>, last: Option<Issued>) -> Result<()> {
        let watched = self.watched.clone();
        let Watched { name, rank, timeout, .. } = &*watched;
        let at = longest.as_ref().or(last.as_ref());
        let place = Place {
            rank: *rank,
            group: name,
            op: at.map_or("join", |at| at.op),
            what: at.map_or("the group", |at| &at.what),
            started: at.map_or(self.asked, |at| at.since),
        };
        if let Some(failure) = self.store.known_failure() {
            return Err(Error::of_failure(failure, &place));
        }
        if self.asked.elapsed() > ASK {
            self.asked = Instant::now();
            if let Some(failure) = self.ask() {
                return Err(Error::of_failure(&failure, &place));
            }
        }
        let Some(longest) = longest.filter(|longest| longest.since.elapsed() > LONG) else { return Ok(()) };
        if self.said < longest.number {
            self.said = longest.number;
            let key = waits_key(&self.watched.scope, *rank);
            // Who cannot say so is named wrongly, no more.
            let _ = self.news.set(&key, longest.number.to_string().as_bytes());
        }
        if longest.since.elapsed() < *timeout {
            return Ok(());
        }
        let (seconds, missing) = (longest.since.elapsed().as_secs_f64(), self.missing(&longest));
        let (rank, group, what) = (*rank, name.clone(), longest.what);
        Err(Error::Timeout { rank, group, op: longest.op, what, seconds, missing })
    }

    /// The failure of the world, as the store has it, or that there is no store any more.
    fn ask(&mut self) -> Option<String> {
        let error = match self.news.failure() {
            Ok(failure) => {
                self.silent = None;
                return failure;
            }
            Err(error) => error,
        };
        let silent = *self.silent.get_or_insert_with(Instant::now);
        if self.store.is_abandoned() || silent.elapsed() > OUT_OF_REACH {
            return Some(Error::ended(&format!("who serves the store ({error})")));
        }
        if let Ok(again) = self.store.another(ANSWER) {
            self.news = again;
        }
        None
    }

    /// Who has not come to a call, as far as can be told: who waits for it, or for a later one, has said so.
    fn missing(&self, call: &Issued) -> String {
        if let Some(peer) = call.peer {
            return list_ranks([peer]);
        }
        let waits = |peer: &usize| {
            let key = waits_key(&self.watched.scope, *peer);
            let said = match self.news.check(&[&key]) {
                Ok(true) => self.news.get_now(&key).unwrap_or_default(),
                _ => return false,
            };
            std::str::from_utf8(&said).is_ok_and(|said| said.parse::<u64>().is_ok_and(|n| n >= call.number))
        };
        let peers = (0..self.watched.size).filter(|&peer| peer != self.watched.rank);
        let absent: Vec<usize> = peers.filter(|peer| !waits(peer)).collect();
        // All of them wait: it is the connection between them that does not work.
        if absent.is_empty() { "bytes of the others, who are all there,".into() } else { list_ranks(absent) }
    }

    fn give_up(&self, error: &Error, comm: Comm, stream: Option<Stream>) {
        let text = error.encode();
        self.store.note(&text);
        if let Some(stream) = stream {
            stream.declare_void(&error.to_string());
        }
        // Told before the abort, which may take a while; but not waited for, if the store is out of reach.
        if self.silent.is_none() {
            let _ = self.news.report(&text);
        }
        let aborted = within(END, "nccl abort", comm, self.watched.api.comm_abort);
        self.watched.lock().ended = true;
        self.watched.changed.notify_all();
        if !aborted && let Some(act) = LAST_RESORT.get() {
            act(error);
        }
    }
}

fn waits_key(scope: &str, rank: usize) -> String {
    format!("{scope}/waits/{rank}")
}
