//! Ranks as processes of this machine, over memory in common.

mod conformance;
mod processes;

use comm::{Error, Group, Reduction, shm};
use conformance::Rank;
use device::Dtype;
use device::cpu::Cpu;
use processes::{Me, me, quick, run};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

fn join(me: &Me, timeout: Duration) -> Arc<dyn Group> {
    shm::join(me.store.clone(), "world", me.rank, me.size, timeout).unwrap()
}

fn on_cpu(group: Arc<dyn Group>) -> Rank {
    Rank::new(group, Arc::new(Cpu::new()))
}

#[test]
fn every_call_at_every_size() {
    match me() {
        Some(me) => {
            let rank = on_cpu(join(&me, LONG));
            conformance::all(&rank);
            if me.size == 2 {
                conformance::large(&rank);
            }
        }
        None => {
            for size in [1, 2, 3, 4, 5, 8] {
                run("every_call_at_every_size", size, &[]);
            }
        }
    }
}

#[test]
fn random_calls_on_random_sub_groups() {
    match me() {
        Some(me) => {
            let rank = on_cpu(join(&me, LONG));
            (0..3).for_each(|seed| conformance::random(&rank, seed, 60));
        }
        None => [2, 3, 5].iter().for_each(|&size| run("random_calls_on_random_sub_groups", size, &[])),
    }
}

#[test]
fn a_mismatch_is_an_error_on_every_rank() {
    let Some(me) = me() else { return run("a_mismatch_is_an_error_on_every_rank", 3, &[]) };
    let (rank, started) = (on_cpu(join(&me, LONG)), Instant::now());
    let buffer = rank.zeros(Dtype::F32, if me.rank == 1 { 500_000 } else { 4 });
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

#[test]
fn a_killed_rank_fails_the_others_within_a_second() {
    let Some(me) = me() else {
        let server = comm::store::Store::serve("127.0.0.1:0").unwrap();
        let address = server.address().to_string();
        let children = processes::start("a_killed_rank_fails_the_others_within_a_second", 3, &address, &[]);
        let mut outputs: Vec<_> =
            children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        assert!(!outputs.remove(2).status.success());
        for output in outputs {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        return;
    };
    let rank = on_cpu(join(&me, LONG));
    let buffer = rank.zeros(Dtype::F32, 1 << 20);
    rank.group.barrier("start").unwrap();
    if me.rank == 2 {
        rank.group.all_reduce(&rank.compute, &buffer, Reduction::Sum, "layers.0").unwrap();
        // SAFETY: ends this process, at once.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    rank.group.all_reduce(&rank.compute, &buffer, Reduction::Sum, "layers.0").unwrap();
    let started = Instant::now();
    let error = rank.group.all_reduce(&rank.compute, &buffer, Reduction::Sum, "layers.1").unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    let text = error.to_string();
    assert!(matches!(error, Error::PeerLost { peer: 2, .. }), "{text}");
    assert!(text.contains("all_reduce of layers.1 in group world") && text.contains("has ended"), "{text}");
    assert!(rank.group.barrier("after").is_err());
}

#[test]
fn a_dropped_handle_and_an_early_end_are_told_apart() {
    let Some(me) = me() else { return run("a_dropped_handle_and_an_early_end_are_told_apart", 2, &[]) };
    let rank = on_cpu(join(&me, LONG));
    let buffer = rank.buffer_of(&[1.0f32]);
    rank.group.all_reduce(&rank.side, &buffer, Reduction::Sum, "last").unwrap();
    if me.rank == 1 {
        // Issued, and the handle gone before it has run.
        let Rank { group, side, .. } = rank;
        drop(group);
        return side.synchronize().unwrap();
    }
    rank.side.synchronize().unwrap();
    assert_eq!(rank.values::<f32>(&buffer), [2.0]);
    let text = rank.group.barrier("one too many").unwrap_err().to_string();
    assert!(text.contains("barrier of one too many") && text.contains("rank 1 left the group"), "{text}");
}

#[test]
fn a_timeout_names_who_is_missing() {
    let Some(me) = me() else { return run("a_timeout_names_who_is_missing", 3, &[]) };
    let rank = on_cpu(join(&me, Duration::from_millis(700)));
    rank.group.barrier("start").unwrap();
    if me.rank != 0 {
        std::thread::sleep(Duration::from_secs(2));
        let late = rank.group.barrier("late").unwrap_err();
        assert!(matches!(late, Error::Timeout { .. }), "{late}");
        return;
    }
    let text = rank.group.barrier("grads").unwrap_err().to_string();
    assert!(
        text.contains("rank 0 waited 0.") && text.contains("in barrier of grads in group world"),
        "{text}"
    );
    assert!(text.contains("ranks 1, 2 did not come"), "{text}");
}

#[test]
fn two_processes_of_one_rank_are_refused() {
    let Some(me) = me() else { return run("two_processes_of_one_rank_are_refused", 2, &[]) };
    // Both say that they are rank 0.
    let text = match shm::join(me.store.clone(), "world", 0, 2, Duration::from_millis(500)) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("joined"),
    };
    assert!(text.contains("two ranks 0") || text.contains("rank 1 did not come"), "{text}");
}

#[test]
fn a_disagreement_over_the_number_of_ranks_is_an_error() {
    let Some(me) = me() else {
        return run("a_disagreement_over_the_number_of_ranks_is_an_error", 2, &[]);
    };
    let size = 2 + me.rank;
    let error = shm::join(me.store.clone(), "world", me.rank, size, Duration::from_secs(1)).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("it counts 2 ranks, rank 1 counts 3") || text.contains("rank 2 did not come"),
        "{text}"
    );
}
