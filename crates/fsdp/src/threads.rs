//! Ranks as threads of this process.

use crate::{Groups, Result};
use comm::{Group, Solo};
use device::{Device, cpu::Cpu};
use std::sync::Arc;
use std::time::Duration;

/// How long a rank waits for one that does not come to a collective.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Runs `body` as each of `ranks` threads, with a CPU device and groups of its own, and returns what each gave, by
/// rank. This is the shortest way to sharded training: `body` plans, makes its [`crate::Engine`] and steps. A rank that
/// fails leaves its groups, which ends the others; its error is the one returned.
pub fn on_threads<T: Send>(
    ranks: usize,
    body: impl Fn(usize, Arc<dyn Device>, Groups) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    if ranks == 1 {
        let device: Arc<dyn Device> = Arc::new(Cpu::new());
        let solo: Arc<dyn Group> = Arc::new(Solo::new("solo", device.clone()));
        return Ok(vec![body(0, device, Groups::all(solo))?]);
    }
    let group = |name: &str| comm::local::group(name, ranks, TIMEOUT);
    let pairs = group("gather").into_iter().zip(group("reduce"));
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let threads: Vec<_> = pairs
            .enumerate()
            .map(|(rank, (gather, reduce))| {
                let body = &body;
                scope.spawn(move || body(rank, Arc::new(Cpu::new()), Groups::pair(gather, reduce)))
            })
            .collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.collect()
    });
    // The others' errors are only that somebody left.
    let echo =
        |result: &Result<T>| matches!(result, Err(error) if error.to_string().contains("left the group"));
    match results.iter().position(|result| result.is_err() && !echo(result)) {
        Some(cause) => {
            results.into_iter().nth(cause).map(|result| result.map(|value| vec![value])).expect("it is there")
        }
        None => results.into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn ranks_give_their_results_in_order_and_the_first_cause_of_a_failure() {
        for ranks in [1, 3] {
            let sums = on_threads(ranks, |rank, _, groups| Ok((rank, groups.world.size()))).unwrap();
            assert_eq!(sums, (0..ranks).map(|rank| (rank, ranks)).collect::<Vec<_>>());
        }
        let failed = on_threads(3, |rank, _, groups| match rank {
            1 => Err(Error::Settings("rank 1 cannot".into())),
            _ => Ok(groups.world.exchange(&[], "nothing").map(drop)?),
        });
        assert!(failed.unwrap_err().to_string().contains("rank 1 cannot"));
    }
}
