//! Ranks that an MPI has started: tests/launchers/mpi.sh runs this under mpirun. Elsewhere it does nothing.
#![cfg(feature = "mpi")]

mod conformance;
mod processes;

use comm::mpi::World;
use conformance::Rank;
use device::cpu::Cpu;
use std::sync::Arc;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

#[test]
fn every_call_at_every_size() {
    if ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].iter().all(|name| std::env::var_os(name).is_none()) {
        return;
    }
    let world = World::init().unwrap();
    let everyone: Vec<usize> = (0..world.size()).collect();
    let join = |timeout| world.join("world", &everyone, timeout).unwrap();
    let rank = |timeout| Rank::new(join(timeout), Arc::new(Cpu::new()));
    let whole = rank(LONG);
    conformance::all(&whole);
    conformance::large(&whole);
    (0..3).for_each(|seed| conformance::random(&whole, seed, 60));
    if world.size() == 8 {
        conformance::mesh(whole.group.clone());
    }
    if world.size() == 3 {
        processes::mismatch(&rank(LONG));
        whole.group.barrier("between failures").unwrap();
        // Nobody has a store here; but twice the time is enough.
        let late = || std::thread::sleep(2 * processes::TIMEOUT);
        processes::timeout(&rank(processes::TIMEOUT), || {}, late);
        whole.group.barrier("after failures").unwrap();
        nobody_joins(&world);
    }
    whole.group.barrier("the end").unwrap();
    println!("rank {} of {} conforms", world.rank(), world.size());
    world.finish();
}

/// Rank 0 waits for rank 2, which does not come to this group.
fn nobody_joins(world: &World) {
    if world.rank() == 0 {
        let text = world.join("pair", &[0, 2], Duration::from_millis(300)).unwrap_err().to_string();
        assert!(text.contains("barrier of joining in group pair: rank 2 did not come"), "{text}");
    }
    assert!(world.join("none", &[world.size()], LONG).is_err());
}
