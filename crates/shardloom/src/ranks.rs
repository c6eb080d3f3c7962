//! How the ranks of a run come to be: threads of this process on the CPU.

use crate::{Error, Result, Run};
use comm::Solo;
use device::{Device, cpu::Cpu};
use fsdp::Groups;
use std::sync::Arc;

/// One rank's place: which it is, its device, and whom it works with.
#[derive(Debug)]
pub struct Seat {
    pub rank: usize,
    pub ranks: usize,
    pub device: Arc<dyn Device>,
    pub groups: Groups,
}

/// Runs `body` as `ranks` threads, each with a CPU device of its own, and returns the first failure.
pub fn on_threads(run: &Run, ranks: usize, body: impl Fn(Seat) -> Result<()> + Sync) -> Result<()> {
    if ranks == 1 {
        let device: Arc<dyn Device> = Arc::new(Cpu::new());
        return body(alone(device));
    }
    let gather = comm::local::group("gather", ranks, run.timeout);
    let reduce = comm::local::group("reduce", ranks, run.timeout);
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = gather
            .into_iter()
            .zip(reduce)
            .enumerate()
            .map(|(rank, (gather, reduce))| {
                let body = &body;
                scope.spawn(move || {
                    let device = Arc::new(Cpu::new());
                    body(Seat { rank, ranks, device, groups: Groups { gather, reduce } })
                })
            })
            .collect();
        let joined = threads.into_iter().enumerate().map(|(rank, thread)| {
            thread
                .join()
                .unwrap_or_else(|_| Err(Error::Rank { rank, what: "it panicked (see above)".into() }))
        });
        joined.collect()
    });
    first_cause(results)
}

/// A rank that works alone.
pub fn alone(device: Arc<dyn Device>) -> Seat {
    let solo = Solo::new("solo", device.clone());
    Seat { rank: 0, ranks: 1, device, groups: Groups { gather: solo.clone(), reduce: solo } }
}

/// Of several ranks' failures, the one that is not only the echo of another's end.
fn first_cause(results: Vec<Result<()>>) -> Result<()> {
    let mut failures: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
    let echo = |error: &Error| error.to_string().contains("left the group");
    let cause = failures.iter().position(|error| !echo(error)).unwrap_or(0);
    if failures.is_empty() { Ok(()) } else { Err(failures.swap_remove(cause)) }
}
