//! How the ranks of a run come to be: threads of this process on the CPU, one process each on GPUs, or whatever a
//! launcher has started.

mod launched;
mod meeting;

pub use launched::Launched;

use crate::run::DeviceChoice;
use crate::{Error, Result, Run, launch};
use comm::store::{self, Store};
use comm::{Group, Solo, nccl::Nccl};
use device::cuda::{self, Cuda, Sums};
use device::{Device, Profile, cpu::Cpu};
use fsdp::Groups;
use std::sync::Arc;
use std::time::Duration;

/// One rank's place: which it is, its device, and whom it works with.
#[derive(Debug)]
pub struct Seat {
    pub rank: usize,
    pub ranks: usize,
    pub device: Arc<dyn Device>,
    pub groups: Groups,
    /// What the device held once opened, our own regions apart: the driver's context.
    pub context_bytes: Option<usize>,
}

/// Runs `body` as every rank that this process is to be, on the device the run asks for.
pub fn start(
    run: &Run,
    ranks: usize,
    launched: Option<Launched>,
    body: impl Fn(Seat) -> Result<()> + Sync,
) -> Result<()> {
    match (on_gpu(run)?, launched) {
        (true, Some(launched)) if launched.world > 1 => on_own_gpu(run, &launched, body),
        (true, _) if ranks == 1 => body(alone(Arc::new(Cuda::open(0, sums(run))?))),
        (true, _) => spawn(ranks),
        (false, Some(launched)) if launched.world > 1 => on_own_cores(run, &launched, body),
        (false, _) => on_threads(run, ranks, body),
    }
}

fn on_gpu(run: &Run) -> Result<bool> {
    match run.device {
        DeviceChoice::Cpu => Ok(false),
        DeviceChoice::Auto => Ok(cuda::present().is_ok()),
        DeviceChoice::Cuda => {
            let missing = |why| Error::Config(format!("device.kind = \"cuda\": {why}"));
            cuda::present().map_err(missing).map(|()| true)
        }
    }
}

/// The sizes of the device a run would take, whether it is here or not.
pub fn profile(run: &Run) -> Profile {
    match run.device {
        DeviceChoice::Cuda => Profile::Cuda { deterministic: run.deterministic },
        DeviceChoice::Auto if cuda::present().is_ok() => Profile::Cuda { deterministic: run.deterministic },
        _ => Profile::Cpu,
    }
}

/// One rank of several processes, each with a GPU; ranks share GPUs where there are fewer.
fn on_own_gpu(run: &Run, launched: &Launched, body: impl Fn(Seat) -> Result<()>) -> Result<()> {
    let Launched { rank, world, local_rank, .. } = *launched;
    let device = Arc::new(Cuda::open(local_rank % cuda::device_count().max(1), sums(run))?);
    let context_bytes = context_bytes(&*device);
    device.make_current()?;
    let store = joined(run, launched)?;
    let join = |name| Nccl::join(store.clone(), name, rank, world, run.timeout);
    let groups = Groups { gather: join("gather")?, reduce: join("reduce")? };
    body(Seat { rank, ranks: world, device, groups, context_bytes })?;
    Ok(store.finish(run.timeout)?)
}

/// One rank of several processes on CPUs.
fn on_own_cores(run: &Run, launched: &Launched, body: impl Fn(Seat) -> Result<()>) -> Result<()> {
    let Launched { rank, world, .. } = *launched;
    let store = joined(run, launched)?;
    let groups = cpu_groups(store.clone(), rank, world, run.timeout)?;
    body(Seat { rank, ranks: world, device: Arc::new(Cpu::new()), groups, context_bytes: None })?;
    Ok(store.finish(run.timeout)?)
}

/// The store of a world whose ranks have all come.
fn joined(run: &Run, launched: &Launched) -> Result<Arc<Store>> {
    let Launched { rank, world, address, .. } = launched;
    let store = Arc::new(store::join(*rank, *world, address, run.timeout)?);
    meeting::meet(&store, *rank, *world, run.timeout)?;
    Ok(store)
}

/// Groups of CPU ranks in processes of their own.
fn cpu_groups(_store: Arc<Store>, _rank: usize, _world: usize, _timeout: Duration) -> Result<Groups> {
    Err(Error::Config(
        "ranks in processes of their own need GPUs so far; on the CPU use --ranks N, which runs them as threads"
            .into(),
    ))
}

fn sums(run: &Run) -> Sums {
    if run.deterministic { Sums::Ordered } else { Sums::Fastest }
}

fn context_bytes(device: &dyn Device) -> Option<usize> {
    device.measured_bytes().map(|bytes| bytes.saturating_sub(device.memory_use().current_bytes))
}

/// Starts this command once more for each rank, and watches.
fn spawn(ranks: usize) -> Result<()> {
    let exe = std::env::current_exe().map_err(|e| Error::Launch(format!("starting ranks: {e}")))?;
    let command = std::iter::once(exe.into_os_string()).chain(std::env::args_os().skip(1));
    launch::on_this_machine(ranks, command.collect())
}

/// Runs `body` as `ranks` threads, each with a CPU device of its own, and returns the first failure.
fn on_threads(run: &Run, ranks: usize, body: impl Fn(Seat) -> Result<()> + Sync) -> Result<()> {
    if ranks == 1 {
        return body(alone(Arc::new(Cpu::new())));
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
                    let (device, groups) = (Arc::new(Cpu::new()), Groups { gather, reduce });
                    body(Seat { rank, ranks, device, groups, context_bytes: None })
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
fn alone(device: Arc<dyn Device>) -> Seat {
    let context_bytes = match device.profile() {
        Profile::Cuda { .. } => context_bytes(&*device),
        Profile::Cpu => None,
    };
    let solo: Arc<dyn Group> = Arc::new(Solo::new("solo", device.clone()));
    Seat { rank: 0, ranks: 1, device, groups: Groups { gather: solo.clone(), reduce: solo }, context_bytes }
}

/// Of several ranks' failures, the one that is not only the echo of another's end.
fn first_cause(results: Vec<Result<()>>) -> Result<()> {
    let mut failures: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
    let echo = |error: &Error| error.to_string().contains("left the group");
    let cause = failures.iter().position(|error| !echo(error)).unwrap_or(0);
    if failures.is_empty() { Ok(()) } else { Err(failures.swap_remove(cause)) }
}
