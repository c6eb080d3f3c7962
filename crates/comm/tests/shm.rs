//! Ranks as processes of this machine, over memory in common.

mod conformance;
mod processes;

use comm::{Group, Mesh, Reduction, shm};
use conformance::Rank;
use device::cpu::Cpu;
use processes::{Me, me, run, run_killed};
use std::sync::Arc;
use std::time::Duration;

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
            if conformance::ranks(&[2]).contains(&me.size) {
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
        None => {
            let sizes = conformance::ranks(&[2, 3, 5]);
            sizes.into_iter().for_each(|size| run("random_calls_on_random_sub_groups", size, &[]));
        }
    }
}

#[test]
fn a_mismatch_is_an_error_on_every_rank() {
    let Some(me) = me() else { return run("a_mismatch_is_an_error_on_every_rank", 3, &[]) };
    processes::mismatch(&on_cpu(join(&me, LONG)));
}

#[test]
fn a_killed_rank_fails_the_others_long_before_the_timeout() {
    let Some(me) = me() else {
        return run_killed("a_killed_rank_fails_the_others_long_before_the_timeout", &[]);
    };
    processes::killed(&on_cpu(join(&me, LONG)));
}

#[test]
fn a_rank_killed_midway_fails_the_others_too() {
    let Some(me) = me() else { return run_killed("a_rank_killed_midway_fails_the_others_too", &[]) };
    processes::killed_midway(&on_cpu(join(&me, LONG)));
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
    me.timeout(&on_cpu(join(&me, processes::TIMEOUT)));
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
    let error = shm::join(me.store.clone(), "world", me.rank, size, processes::TIMEOUT).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("it counts 2 ranks, rank 1 counts 3") || text.contains("rank 2 did not come"),
        "{text}"
    );
}

#[test]
fn a_mesh_has_a_group_per_axis() {
    let Some(me) = me() else { return run("a_mesh_has_a_group_per_axis", 8, &[]) };
    let world = join(&me, LONG);
    conformance::mesh(world.clone());
    // Each axis is a group to work with.
    let mesh = Mesh::new(world, &[("replicate", 2), ("shard", 4)]).unwrap();
    conformance::random(&on_cpu(mesh.axis("shard").unwrap().clone()), 5, 20);
}
