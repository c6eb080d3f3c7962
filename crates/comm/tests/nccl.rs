//! NCCL where there may be none: presence is asked for, and absence is an error that reaches every rank. Where there
//! are GPUs: every collective between processes, and what becomes of ranks whose peers die or stay away.

mod conformance;

use comm::nccl::{self, Nccl};
use comm::{Reduction, store};
use device::Dtype;
use device::cuda::{self, Cuda, Sums};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
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
    // Not by waiting for somebody.
    assert!(started.elapsed() < Duration::from_secs(30));
}

const RANK: &str = "NCCL_TEST_RANK";
const SIZE: &str = "NCCL_TEST_SIZE";
const STORE: &str = "NCCL_TEST_STORE";
const VICTIM: &str = "NCCL_TEST_VICTIM";
const LONG: Duration = Duration::from_secs(120);

/// This process, when it is a rank.
struct Me {
    rank: usize,
    size: usize,
    /// Who will not live to see the end.
    victim: Option<usize>,
    device: Arc<Cuda>,
    store: Arc<store::Store>,
}

fn me() -> Option<Me> {
    let number = |name: &str| std::env::var(name).ok()?.parse().ok();
    let (rank, size) = (number(RANK)?, number(SIZE)?);
    let device = Arc::new(Cuda::open(rank % cuda::device_count(), Sums::Ordered).unwrap());
    device.make_current().unwrap();
    let store = Arc::new(store::join(rank, size, &std::env::var(STORE).unwrap(), LONG).unwrap());
    store.stand_for(rank).unwrap();
    Some(Me { rank, size, victim: number(VICTIM), device, store })
}

impl Me {
    fn join(&self, timeout: Duration) -> conformance::Rank {
        let group = Nccl::join(self.store.clone(), "world", self.rank, self.size, timeout).unwrap();
        let mut rank = conformance::Rank::new(group, self.device.clone());
        rank.sums = conformance::Sums::AnyOrder;
        rank
    }
}

/// Whether as many ranks can be here: each has a GPU, or they share one (NCCL 2.30 on allows that when asked to).
fn possible(ranks: usize) -> bool {
    let version = nccl::version();
    if let Err(why) = cuda::present() {
        println!("skipped: {why}");
        false
    } else if cuda::device_count() < ranks && !version.as_ref().is_ok_and(|version| *version >= (2, 30, 0)) {
        println!("skipped: {} GPUs, and NCCL is not 2.30 or newer but {version:?}", cuda::device_count());
        false
    } else {
        version.is_ok()
    }
}

/// Starts the test with this name once more as each of the ranks; all but the victim must end well.
fn start(test: &str, ranks: usize, victim: Option<usize>) {
    if !possible(ranks) {
        return;
    }
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = |rank: usize| -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture", "--test-threads", "1"]);
        command.env(RANK, rank.to_string()).env(SIZE, ranks.to_string()).env(STORE, &address);
        command.envs(victim.map(|victim| (VICTIM, victim.to_string())));
        command.env("NCCL_MULTI_RANK_GPU_ENABLE", "1").stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let children: Vec<Child> = (0..ranks).map(start).collect();
    for (rank, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        out.lines().filter(|line| line.contains("heard")).for_each(|line| println!("{line}"));
        assert_eq!(
            output.status.success(),
            Some(rank) != victim,
            "rank {rank}: {}\n{out}\n{err}",
            output.status
        );
    }
}

#[test]
fn processes_agree_with_the_reference() {
    const TEST: &str = "processes_agree_with_the_reference";
    let Some(me) = me() else { return [2, 4].into_iter().for_each(|ranks| start(TEST, ranks, None)) };
    let rank = me.join(LONG);
    conformance::all(&rank);
    drop(rank);
    me.store.finish(LONG).unwrap();
}

/// Rank 2 dies in the midst of collectives; and then rank 0, which serves the store.
#[test]
fn a_killed_rank_ends_the_others_within_seconds() {
    const TEST: &str = "a_killed_rank_ends_the_others_within_seconds";
    let Some(me) = me() else { return [2, 0].into_iter().for_each(|victim| start(TEST, 3, Some(victim))) };
    let rank = me.join(LONG);
    let buffer = rank.zeros(Dtype::F32, 16 << 20);
    let round = || {
        // Several in flight on two streams, as in training.
        for stream in [&rank.side, &rank.compute, &rank.side, &rank.compute] {
            rank.group.all_reduce(stream, &buffer, Reduction::Sum, "grads").map_err(|e| e.to_string())?;
        }
        rank.side.synchronize().and(rank.compute.synchronize()).map_err(|e| e.to_string())
    };
    (0..5).for_each(|_| round().unwrap());
    if me.victim == Some(me.rank) {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            comm::process::end_now(9);
        });
    }
    let mut last = Instant::now();
    let error = loop {
        match round() {
            Ok(()) => last = Instant::now(),
            Err(error) => break error,
        }
    };
    println!("rank {} heard after {:.1} s: {error}", me.rank, last.elapsed().as_secs_f64());
    assert!(last.elapsed() < Duration::from_secs(10), "{:?}", last.elapsed());
    let named = format!("rank {} of the job", me.victim.unwrap());
    let who = if me.victim == Some(0) { "who serves the store" } else { &named };
    assert!(error.contains("all_reduce of grads in group world") && error.contains(who), "{error}");
    assert!(error.contains(" has ended"), "{error}");
    // What was computed is void, and so is what comes.
    assert!(rank.compute.synchronize().is_err() && rank.group.barrier("after").is_err());
    let ending = Instant::now();
    drop(rank);
    assert!(ending.elapsed() < Duration::from_secs(10), "{:?}", ending.elapsed());
}

/// Rank 1 lives, and does not come.
#[test]
fn a_rank_that_does_not_come_is_named_at_the_timeout() {
    const TEST: &str = "a_rank_that_does_not_come_is_named_at_the_timeout";
    let Some(me) = me() else { return start(TEST, 3, None) };
    let rank = me.join(Duration::from_secs(6));
    let buffer = rank.zeros(Dtype::F32, 1000);
    rank.group.all_reduce(&rank.side, &buffer, Reduction::Sum, "first").unwrap();
    rank.side.synchronize().unwrap();
    let error = if me.rank == 1 {
        // Long enough to be missed; then it is told what the others were.
        std::thread::sleep(Duration::from_secs(10));
        rank.group.all_reduce(&rank.side, &buffer, Reduction::Sum, "second").unwrap_err().to_string()
    } else {
        rank.group.all_reduce(&rank.side, &buffer, Reduction::Sum, "second").unwrap();
        rank.side.synchronize().unwrap_err().to_string()
    };
    println!("rank {} heard: {error}", me.rank);
    assert!(error.contains("in all_reduce of second in group world: rank 1 did not come"), "{error}");
    assert!(error.contains("waited 6."), "{error}");
    drop(rank);
    // The store outlives those who still ask it.
    std::thread::sleep(Duration::from_secs(if me.rank == 0 { 8 } else { 0 }));
}

/// Rank 2 dies when the others are about to meet it.
#[test]
fn a_rank_that_dies_before_it_joins_ends_the_others_within_seconds() {
    const TEST: &str = "a_rank_that_dies_before_it_joins_ends_the_others_within_seconds";
    let Some(me) = me() else { return start(TEST, 3, Some(2)) };
    if me.victim == Some(me.rank) {
        std::thread::sleep(Duration::from_secs(2));
        comm::process::end_now(9);
    }
    let started = Instant::now();
    let error = Nccl::join(me.store.clone(), "world", me.rank, me.size, LONG).unwrap_err().to_string();
    println!("rank {} heard after {:.1} s: {error}", me.rank, started.elapsed().as_secs_f64());
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert!(error.contains("joining NCCL") && error.contains("rank 2 of the job"), "{error}");
    std::thread::sleep(Duration::from_secs(if me.rank == 0 { 2 } else { 0 }));
}
