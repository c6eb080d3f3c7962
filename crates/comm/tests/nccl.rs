//! NCCL where there may be none: presence is asked for, and absence is an error that reaches every rank.

mod conformance;

use comm::nccl::{self, Nccl};
use comm::store;
use device::cuda::{self, Cuda, Sums};
use std::net::TcpListener;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn without_nccl_every_rank_hears_why() {
    if let Ok(version) = nccl::version() {
        assert!(version >= (2, 0, 0), "{version:?}");
        return;
    }
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let started = Instant::now();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let address = &address;
            scope.spawn(move || {
                let timeout = Duration::from_secs(30);
                let store = Arc::new(store::join(rank, 2, address, timeout).unwrap());
                let text = Nccl::join(store.clone(), "world", rank, 2, timeout).unwrap_err().to_string();
                assert!(text.contains("NCCL is not available") && text.contains("libnccl.so.2"), "{text}");
                store.finish(timeout).unwrap();
            });
        }
    });
    assert!(started.elapsed() < Duration::from_secs(20));
}

const RANK: &str = "NCCL_TEST_RANK";
const STORE: &str = "NCCL_TEST_STORE";

/// Every collective between two processes, which may share one GPU (NCCL 2.30 on allows that when asked to).
#[test]
fn two_processes_agree_with_the_reference() {
    if let Err(why) = cuda::present() {
        return println!("skipped: {why}");
    }
    let version = nccl::version();
    if cuda::device_count() < 2 && !version.as_ref().is_ok_and(|version| *version >= (2, 30, 0)) {
        return println!("skipped: one GPU, and NCCL is not 2.30 or newer but {version:?}");
    }
    match std::env::var(RANK) {
        Ok(rank) => one_of_two(rank.parse().unwrap()),
        Err(_) => start_two(),
    }
}

/// Starts this test once more as each of the two ranks.
fn start_two() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = |rank: usize| -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "two_processes_agree_with_the_reference", "--nocapture"])
            .env(RANK, rank.to_string())
            .env(STORE, &address)
            .env("NCCL_MULTI_RANK_GPU_ENABLE", "1")
            .spawn()
            .unwrap()
    };
    for mut child in [start(0), start(1)] {
        assert!(child.wait().unwrap().success());
    }
}

fn one_of_two(rank: usize) {
    let timeout = Duration::from_secs(60);
    let device = Arc::new(Cuda::open(rank % cuda::device_count(), Sums::Ordered).unwrap());
    device.make_current().unwrap();
    let store = Arc::new(store::join(rank, 2, &std::env::var(STORE).unwrap(), timeout).unwrap());
    let group = Nccl::join(store.clone(), "world", rank, 2, timeout).unwrap();
    let mut rank = conformance::Rank::new(group, device);
    rank.sums = conformance::Sums::AnyOrder;
    conformance::all(&rank);
    drop(rank);
    store.finish(timeout).unwrap();
}
