//! Ranks that are processes: a test starts itself once more as each of them.

// Every test file that includes this uses a part of it.
#![allow(dead_code)]

use comm::store::Store;
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

pub fn quick(started: Instant) {
    assert!(started.elapsed() < Duration::from_secs(10), "took {:?}", started.elapsed());
}
