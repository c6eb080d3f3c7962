//! Ranks that have found the same store see whether they are one world: everybody's number once, everybody's
//! count the same. Otherwise each of them would wait for ranks that never come.

use crate::launch::host_name;
use crate::{Error, Result};
use comm::store::Store;
use std::time::{Duration, Instant};

/// "met", or what is wrong.
const VERDICT: &str = "world/verdict";
const MET: &[u8] = b"met";

/// Returns when all ranks have come, or one has found that they do not fit together.
pub fn meet(store: &Store, rank: usize, world: usize, timeout: Duration) -> Result<()> {
    let who = format!("{} (pid {})", host_name(), std::process::id());
    if store.add(&format!("world/claims/{rank}"), 1)? > 1 {
        let other = String::from_utf8_lossy(&store.get(&seat(rank), timeout)?).into_owned();
        return refuse(store, world, format!("two processes are rank {rank}: {other} and {who}"));
    }
    // The seat is this process's, so its end is the rank's.
    store.stand_for(rank)?;
    store.set(&seat(rank), who.as_bytes())?;
    if store.add("world/first", 1)? == 1 {
        store.set("world/size", format!("{world} on rank {rank}").as_bytes())?;
    }
    let theirs = String::from_utf8_lossy(&store.get("world/size", timeout)?).into_owned();
    if theirs.split(' ').next() != Some(world.to_string().as_str()) {
        return refuse(store, world, format!("WORLD_SIZE differs: {theirs}, {world} on rank {rank}"));
    }
    if store.add("world/came", 1)? == world as i64 {
        store.set(VERDICT, MET)?;
    }
    let waited = Instant::now();
    match store.get(VERDICT, timeout) {
        Ok(verdict) if verdict == MET => Ok(()),
        Ok(verdict) => Err(wrong(store, world, &String::from_utf8_lossy(&verdict))),
        Err(error) if waited.elapsed() < timeout => Err(error.into()),
        Err(error) => Err(missing(store, rank, world, timeout).unwrap_or(error.into())),
    }
}

fn seat(rank: usize) -> String {
    format!("world/seat/{rank}")
}

/// How long the one who serves the store waits for the others to have read the verdict.
const FAREWELL: Duration = Duration::from_secs(3);

fn wrong(store: &Store, world: usize, what: &str) -> Error {
    let heard = store.add("world/heard", 1);
    if store.server().is_some() && heard.is_ok() {
        let seated = (0..world).filter(|rank| store.check(&[&seat(*rank)]).unwrap_or(false)).count() as i64;
        let started = Instant::now();
        while started.elapsed() < FAREWELL && store.add("world/heard", 0).is_ok_and(|heard| heard < seated) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Error::Launch(format!("the ranks that meet at {} are not one job: {what}", store.address()))
}

/// Tells the others, who would wait in vain; a world that has met already goes on.
fn refuse(store: &Store, world: usize, what: String) -> Result<()> {
    if !store.check(&[VERDICT])? {
        store.set(VERDICT, what.as_bytes())?;
    }
    Err(wrong(store, world, &what))
}

/// Who did not come, where the store can still be asked.
fn missing(store: &Store, rank: usize, world: usize, timeout: Duration) -> Option<Error> {
    let absent = (0..world).filter(|other| matches!(store.check(&[&seat(*other)]), Ok(false)));
    let absent: Vec<String> = absent.map(|other| other.to_string()).collect();
    let seconds = timeout.as_secs_f64();
    (!absent.is_empty()).then(|| {
        Error::Launch(format!(
            "rank {rank} waited {seconds:.1} s at {} for rank {} of {world}",
            store.address(),
            absent.join(", ")
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each of these (rank, world) hears.
    fn hears(processes: &[(usize, usize)], timeout: Duration) -> Vec<std::result::Result<(), String>> {
        let server = Store::serve("127.0.0.1:0").unwrap();
        let address = server.address().to_string();
        std::thread::scope(|scope| {
            let threads: Vec<_> = processes
                .iter()
                .map(|&(rank, world)| {
                    let address = &address;
                    scope.spawn(move || {
                        let store = Store::connect(address, Duration::from_secs(60)).unwrap();
                        meet(&store, rank, world, timeout).map_err(|e| e.to_string())
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn a_world_meets() {
        let long = Duration::from_secs(60);
        assert!(hears(&[(2, 3), (0, 3), (1, 3)], long).iter().all(std::result::Result::is_ok));
    }

    #[test]
    fn worlds_that_do_not_fit_are_told_at_once() {
        let long = Duration::from_secs(60);
        for (processes, word) in [(vec![(0, 2), (1, 3)], "WORLD_SIZE differs"), (vec![(1, 3), (1, 3)], "two")]
        {
            for heard in hears(&processes, long) {
                let text = heard.unwrap_err();
                assert!(text.contains(word), "{text}");
            }
        }
    }

    #[test]
    fn who_did_not_come_is_named() {
        let heard = hears(&[(0, 3), (2, 3)], Duration::from_secs(3));
        for text in heard.into_iter().map(std::result::Result::unwrap_err) {
            assert!(text.contains("for rank 1 of 3") && text.contains("3.0 s"), "{text}");
        }
    }

    #[test]
    fn who_dies_while_the_others_are_still_coming_is_named_at_once() {
        let long = Duration::from_secs(60);
        let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let store = comm::store::join(0, 3, &address, long).unwrap();
        std::thread::scope(|scope| {
            // Rank 1 takes its seat and ends; rank 2 never comes.
            scope.spawn(|| {
                let store = comm::store::join(1, 3, &address, long).unwrap();
                store.add("world/claims/1", 1).unwrap();
                store.stand_for(1).unwrap();
            });
            let text = meet(&store, 0, 3, long).unwrap_err().to_string();
            assert!(text.contains("rank 1 of the job (process ") && text.contains(" has ended"), "{text}");
        });
    }
}
