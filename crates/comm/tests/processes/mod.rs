//! Ranks that are processes: a test starts itself once more as each of them.

// Every test file that includes this uses a part of it.
#![allow(dead_code)]

use crate::conformance::Rank;
use comm::store::Store;
use comm::{Error, Reduction};
use device::Dtype;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const RANK: &str = "COMM_TEST_RANK";
const SIZE: &str = "COMM_TEST_SIZE";
const STORE: &str = "COMM_TEST_STORE";

/// This process, when it is a rank.
pub struct Me {
    pub rank: usize,
    pub size: usize,
    pub store: Arc<Store>,
}

pub fn me() -> Option<Me> {
    let number = |name: &str| std::env::var(name).ok()?.parse().ok();
    let (rank, size) = (number(RANK)?, number(SIZE)?);
    let store = Store::connect(&std::env::var(STORE).unwrap(), Duration::from_secs(30)).unwrap();
    Some(Me { rank, size, store: Arc::new(store) })
}

/// Starts `size` ranks of the test with this name, with more in their environment.
pub fn start(test: &str, size: usize, address: &str, more: &[(&str, &str)]) -> Vec<Child> {
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads", "1"])
            .env(RANK, rank.to_string())
            .env(SIZE, size.to_string())
            .env(STORE, address)
            .envs(more.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    (0..size).map(start).collect()
}

/// Waits for the ranks and shows what those that failed said.
pub fn finish(children: Vec<Child>) {
    let outputs: Vec<Output> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    for (rank, output) in outputs.iter().enumerate() {
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "rank {rank}: {}\n{out}\n{err}", output.status);
    }
}

/// As many ranks, from start to end, of the test with this name.
pub fn run(test: &str, size: usize, more: &[(&str, &str)]) {
    let server = Store::serve("127.0.0.1:0").unwrap();
    finish(start(test, size, &server.address().to_string(), more));
}

/// That nobody has waited for a timeout of a minute, however busy the machine is.
pub fn quick(started: Instant) {
    assert!(started.elapsed() < Duration::from_secs(30), "took {:?}", started.elapsed());
}

/// One of three ranks brings another size.
pub fn mismatch(rank: &Rank) {
    let started = Instant::now();
    let buffer = rank.zeros(Dtype::F32, if rank.group.rank() == 1 { 500_000 } else { 4 });
    let error = rank.group.all_reduce(&rank.compute, &buffer, Reduction::Sum, "layers.3").unwrap_err();
    let Error::Mismatch { group, mine, theirs, .. } = &error else { panic!("{error}") };
    assert_eq!(group, "world");
    let both = format!("{mine} {theirs}");
    assert!(both.contains("of 4 f32") && both.contains("500000 f32") && both.contains("layers.3"), "{both}");
    // The group stays broken, with the same story.
    let again = rank.group.exchange(&[], "after").unwrap_err();
    assert_eq!(again.to_string(), error.to_string());
    quick(started);
}

/// Rank 2 of three is killed between two calls.
pub fn killed(rank: &Rank) {
    let buffer = rank.zeros(Dtype::F32, 1 << 20);
    rank.group.barrier("start").unwrap();
    rank.group.all_reduce(&rank.compute, &buffer, Reduction::Sum, "layers.0").unwrap();
    if rank.group.rank() == 2 {
        // SAFETY: ends this process, at once.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    let started = Instant::now();
    let error = rank.group.all_reduce(&rank.compute, &buffer, Reduction::Sum, "layers.1").unwrap_err();
    quick(started);
    let text = error.to_string();
    assert!(matches!(error, Error::PeerLost { peer: 2, .. }), "{text}");
    assert!(text.contains("all_reduce of layers.1 in group world"), "{text}");
    assert!(rank.group.barrier("after").is_err());
}

/// Rank 2 of three is killed at some point of a large call.
pub fn killed_midway(rank: &Rank) {
    let buffer = rank.zeros(Dtype::F32, 4 << 20);
    rank.group.barrier("start").unwrap();
    if rank.group.rank() == 2 {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(200));
            // SAFETY: ends this process, at once.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        });
    }
    let mut started = Instant::now();
    let error = loop {
        started = match rank.group.all_reduce(&rank.compute, &buffer, Reduction::Sum, "grads") {
            Ok(()) => Instant::now(),
            Err(error) => break error,
        };
    };
    quick(started);
    assert!(matches!(error, Error::PeerLost { peer: 2, .. }), "{error}");
}

/// Three ranks of the test with this name, of which the last does not survive.
pub fn run_killed(test: &str, more: &[(&str, &str)]) {
    let server = Store::serve("127.0.0.1:0").unwrap();
    let mut children = start(test, 3, &server.address().to_string(), more);
    let victim = children.remove(2);
    finish(children);
    assert!(!victim.wait_with_output().unwrap().status.success());
}

impl Me {
    /// [`timeout`], with the store to say what has happened.
    pub fn timeout(&self, rank: &Rank) {
        let given_up = || self.store.set("given up", b"").unwrap();
        timeout(rank, given_up, || self.store.wait(&["given up"], Duration::from_secs(60)).unwrap());
    }
}

/// For which [`timeout`] waits: long enough for processes to start on a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// Ranks 1 and 2 come when rank 0, which waits for them no longer than [`TIMEOUT`], has given up.
pub fn timeout(rank: &Rank, given_up: impl Fn(), wait_until_given_up: impl Fn()) {
    rank.group.barrier("start").unwrap();
    if rank.group.rank() != 0 {
        wait_until_given_up();
        let late = rank.group.barrier("late").unwrap_err();
        assert!(matches!(late, Error::Timeout { .. }), "{late}");
        return;
    }
    let text = rank.group.barrier("grads").unwrap_err().to_string();
    given_up();
    assert!(text.contains("rank 0 waited ") && text.contains("in barrier of grads in group world"), "{text}");
    assert!(text.contains("ranks 1, 2 did not come"), "{text}");
}
