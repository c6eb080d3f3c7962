//! Watches over a library that only pretends, in worlds that are real.

use super::super::flight::Point;
use super::*;
use crate::store::{self, Exchange};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

const LONG: Duration = Duration::from_secs(60);
const REMOTE_ERROR: Code = 6;

/// What the library below knows of a communicator.
#[derive(Debug, Default)]
struct Fake {
    state: AtomicU32,
    abort_hangs: AtomicBool,
    aborted: AtomicBool,
    finalized: AtomicBool,
    destroyed: AtomicBool,
}

fn fake<'a>(comm: ncclComm_t) -> &'a Fake {
    // SAFETY: tests make communicators of these, and never free them.
    unsafe { &*comm.cast::<Fake>() }
}

extern "C" fn async_error(comm: ncclComm_t, into: *mut Code) -> Code {
    // SAFETY: as NCCL's own.
    unsafe { *into = fake(comm).state.load(Ordering::SeqCst) };
    SUCCESS
}

extern "C" fn abort(comm: ncclComm_t) -> Code {
    while fake(comm).abort_hangs.load(Ordering::SeqCst) {
        std::thread::sleep(LOOK);
    }
    fake(comm).aborted.store(true, Ordering::SeqCst);
    SUCCESS
}

/// Takes a moment, during which the communicator is in progress.
extern "C" fn finalize(comm: ncclComm_t) -> Code {
    let comm = fake(comm);
    comm.state.store(IN_PROGRESS, Ordering::SeqCst);
    std::thread::spawn(|| {
        std::thread::sleep(LOOK);
        comm.finalized.store(true, Ordering::SeqCst);
        comm.state.store(SUCCESS, Ordering::SeqCst);
    });
    IN_PROGRESS
}

extern "C" fn destroy(comm: ncclComm_t) -> Code {
    fake(comm).destroyed.store(true, Ordering::SeqCst);
    SUCCESS
}

extern "C" fn no_text<T>(_: T) -> *const c_char {
    std::ptr::null()
}

/// A library of which only what a watch calls may be called.
fn library() -> &'static Api {
    use cudarc::nccl::sys::{cudaStream_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
    type Type = ncclDataType_t;
    extern "C" fn zero() -> Code {
        unreachable!()
    }
    extern "C" fn one<A>(_: A) -> Code {
        unreachable!()
    }
    extern "C" fn five<A, B, C, D, E>(_: A, _: B, _: C, _: D, _: E) -> Code {
        unreachable!()
    }
    extern "C" fn six<A, B, C, D, E, F>(_: A, _: B, _: C, _: D, _: E, _: F) -> Code {
        unreachable!()
    }
    extern "C" fn seven<A, B, C, D, E, F, G>(_: A, _: B, _: C, _: D, _: E, _: F, _: G) -> Code {
        unreachable!()
    }
    type Comm = ncclComm_t;
    Box::leak(Box::new(Api {
        get_version: one::<*mut c_int>,
        get_unique_id: one::<*mut ncclUniqueId>,
        get_error_string: no_text::<c_uint>,
        get_last_error: no_text::<Comm>,
        comm_init_rank_config: five::<*mut Comm, c_int, ncclUniqueId, c_int, *mut super::super::Config>,
        comm_finalize: finalize,
        comm_destroy: destroy,
        comm_abort: abort,
        comm_get_async_error: async_error,
        all_gather: six::<*const c_void, *mut c_void, usize, Type, Comm, cudaStream_t>,
        reduce_scatter: seven::<*const c_void, *mut c_void, usize, Type, ncclRedOp_t, Comm, cudaStream_t>,
        all_reduce: seven::<*const c_void, *mut c_void, usize, Type, ncclRedOp_t, Comm, cudaStream_t>,
        broadcast: seven::<*const c_void, *mut c_void, usize, Type, c_int, Comm, cudaStream_t>,
        send: six::<*const c_void, usize, Type, c_int, Comm, cudaStream_t>,
        receive: six::<*mut c_void, usize, Type, c_int, Comm, cudaStream_t>,
        group_start: zero,
        group_end: zero,
        _library: None,
    }))
}

/// One rank's store and its watched communicator.
struct Rank {
    store: Arc<Store>,
    fake: &'static Fake,
    watched: Arc<Watched>,
}

/// The ranks of a world, in one process.
fn world(size: usize, timeout: Duration) -> Vec<Rank> {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let rank = |rank: usize| {
        let store = Arc::new(store::join(rank, size, &address, LONG).unwrap());
        store.stand_for(rank).unwrap();
        let fake: &'static Fake = Box::leak(Box::default());
        let comm = (&raw const *fake).cast_mut().cast();
        let watched = Watched::new((library(), comm), ("world", "nccl world"), rank, size, timeout);
        let watched = Arc::new(watched);
        Watch::start(watched.clone(), store.clone()).unwrap();
        Rank { store, fake, watched }
    };
    (0..size).map(rank).collect()
}

fn eventually(what: &str, is: impl Fn() -> bool) {
    let started = Instant::now();
    while !is() {
        assert!(started.elapsed() < LONG, "{what} has not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Rank {
    /// The failure, when the communicator has been aborted for it.
    fn failure(&self) -> String {
        eventually("an abort", || self.watched.lock().ended);
        assert!(self.fake.aborted.load(Ordering::SeqCst) && !self.fake.destroyed.load(Ordering::SeqCst));
        self.watched.lock().failed.as_ref().unwrap().to_string()
    }

    /// Issues a call to which the stream has come, and which does not end.
    fn issue(&self, what: &str) {
        struct Passed(bool);
        impl Point for Passed {
            fn has_passed(&self) -> device::Result<bool> {
                Ok(self.0)
            }
        }
        let (before, after) = (Box::new(Passed(true)), Box::new(Passed(false)));
        self.watched.lock().flights.add("all_gather", what, None, before, after);
    }
}

#[test]
fn the_normal_end_is_a_farewell() {
    for rank in world(2, LONG) {
        rank.watched.end();
        let Fake { aborted, finalized, destroyed, .. } = rank.fake;
        let all = [aborted, finalized, destroyed].map(|flag| flag.load(Ordering::SeqCst));
        assert_eq!(all, [false, true, true]);
    }
}

#[test]
fn a_rank_that_ends_has_the_others_abort() {
    let mut ranks = world(3, LONG);
    ranks[0].issue("layers.3");
    let gone = ranks.remove(2);
    // Its process ends: its connection to the store does.
    gone.watched.end();
    drop(gone);
    let text = ranks[0].failure();
    assert!(text.starts_with("rank 0, all_gather of layers.3 in group world, after "), "{text}");
    assert!(text.contains("s: rank 2 of the job (process ") && text.ends_with(" has ended"), "{text}");
    assert!(ranks[1].failure().contains("rank 2 of the job"));
    // And so do waits that have nothing to do with NCCL.
    let exchange = Exchange::new(ranks[1].store.clone(), "plan", 1, 3, LONG);
    assert!(exchange.exchange(b"", "hash").unwrap_err().to_string().contains("rank 2 of the job"));
    ranks[0].watched.end();
}

#[test]
fn the_end_of_the_store_is_the_end() {
    let mut ranks = world(2, LONG);
    let Rank { store, watched, .. } = ranks.remove(0);
    watched.end();
    drop((watched, store));
    let text = ranks[0].failure();
    assert!(text.contains("who serves the store") && text.ends_with("has ended"), "{text}");
}

#[test]
fn an_error_of_nccl_reaches_all_ranks() {
    let ranks = world(2, LONG);
    ranks[1].issue("layers.1");
    ranks[1].fake.state.store(REMOTE_ERROR, Ordering::SeqCst);
    let text = ranks[1].failure();
    assert!(text.contains("failed on rank 1 of group world: layers.1") && text.contains("code 6"), "{text}");
    assert!(ranks[0].failure().contains("failed on rank 1 of group world: layers.1"));
}

#[test]
fn a_call_that_does_not_end_names_who_did_not_come() {
    let ranks = world(3, Duration::from_secs(4));
    for rank in [0, 2] {
        ranks[rank].issue("layers.0");
    }
    let text = ranks[0].failure();
    assert!(text.contains("s in all_gather of layers.0 in group world: rank 1 did not come"), "{text}");
    // The first to give up is believed by all.
    let texts = [1, 2].map(|rank| ranks[rank].failure());
    assert!(texts.iter().all(|text| text.contains("rank 1 did not come")), "{texts:?}");
}

#[test]
fn a_communicator_that_cannot_be_aborted_is_left_to_the_last_resort() {
    static SAID: OnceLock<String> = OnceLock::new();
    on_stuck(|error| SAID.set(error.to_string()).unwrap());
    let ranks = world(1, LONG);
    ranks[0].fake.abort_hangs.store(true, Ordering::SeqCst);
    ranks[0].fake.state.store(REMOTE_ERROR, Ordering::SeqCst);
    eventually("the last resort", || SAID.get().is_some());
    assert!(SAID.get().unwrap().contains("code 6"));
    ranks[0].fake.abort_hangs.store(false, Ordering::SeqCst);
}
