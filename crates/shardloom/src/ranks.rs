//! How the ranks of a run come to be: threads of this process on the CPU, one process each on GPUs.

use crate::run::DeviceChoice;
use crate::{Error, Result, Run};
use comm::{Group, Solo, nccl::Nccl, store};
use device::cuda::{self, Cuda, Sums};
use device::{Device, Dtype, Profile, Role, cpu::Cpu};
use fsdp::Groups;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

/// One rank's place: which it is, its device, and whom it works with.
#[derive(Debug)]
pub struct Seat {
    pub rank: usize,
    pub ranks: usize,
    pub device: Arc<dyn Device>,
    pub groups: Groups,
    /// What the device holds beside our own regions, where it can tell.
    pub overhead: Option<Overhead>,
}

/// Device memory that no plan can know, measured when the ranks meet.
#[derive(Clone, Copy, Debug)]
pub struct Overhead {
    /// Ranks whose memory the device counts together, because they share it.
    pub sharing: usize,
    /// Of the driver, for all who share the device.
    pub context_bytes: usize,
    /// Of NCCL, likewise.
    pub nccl_bytes: usize,
}

/// What a launcher (ours, torchrun's) says in the environment of the process it starts for a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    pub rank: usize,
    pub world: usize,
    local_rank: usize,
    local_world: usize,
    address: String,
}

impl Launched {
    pub fn from_env() -> Result<Option<Self>> {
        Self::from(|name| std::env::var(name).ok())
    }

    fn from(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let (Some(rank), Some(world)) = (variable("RANK"), variable("WORLD_SIZE")) else { return Ok(None) };
        let number = |name: &str, text: &str| {
            let wrong = |_| Error::Config(format!("environment: {name} = {text:?} is not a number"));
            text.trim().parse::<usize>().map_err(wrong)
        };
        let (rank, world) = (number("RANK", &rank)?, number("WORLD_SIZE", &world)?);
        if rank >= world {
            let what = format!("environment: RANK = {rank} does not lie below WORLD_SIZE = {world}");
            return Err(Error::Config(what));
        }
        let local_rank = variable("LOCAL_RANK").map_or(Ok(rank), |text| number("LOCAL_RANK", &text))?;
        let local_world =
            variable("LOCAL_WORLD_SIZE").map_or(Ok(world), |text| number("LOCAL_WORLD_SIZE", &text))?;
        let host = variable("MASTER_ADDR").unwrap_or_else(|| "127.0.0.1".into());
        let port = variable("MASTER_PORT").unwrap_or_else(|| "29500".into());
        Ok(Some(Launched { rank, world, local_rank, local_world, address: format!("{host}:{port}") }))
    }
}

/// Runs `body` as every rank that this process is to be, on the device the run asks for.
pub fn start(
    run: &Run,
    ranks: usize,
    launched: Option<Launched>,
    body: impl Fn(Seat) -> Result<()> + Sync,
) -> Result<()> {
    match (on_gpu(run.device, "device.kind = \"cuda\"")?, launched) {
        (true, Some(launched)) if launched.world > 1 => joined(run, &launched, body),
        (true, _) if ranks == 1 => body(alone(Arc::new(Cuda::open(0, sums(run))?))),
        (true, _) => spawn(ranks),
        (false, Some(launched)) if launched.world > 1 => Err(Error::Config(
            "ranks in processes of their own need GPUs so far; on the CPU use --ranks N, which runs them as threads"
                .into(),
        )),
        (false, _) => on_threads(run, ranks, body),
    }
}

/// The one device of a command that has no ranks.
pub fn open_device(choice: DeviceChoice) -> Result<Arc<dyn Device>> {
    match on_gpu(choice, "--device cuda")? {
        true => Ok(Arc::new(Cuda::open(0, Sums::Fastest)?)),
        false => Ok(Arc::new(Cpu::new())),
    }
}

/// `asked` is how the user asked for a GPU.
fn on_gpu(choice: DeviceChoice, asked: &str) -> Result<bool> {
    match choice {
        DeviceChoice::Cpu => Ok(false),
        DeviceChoice::Auto => Ok(cuda::present().is_ok()),
        DeviceChoice::Cuda => {
            let missing = |why| Error::Config(format!("{asked}: {why}"));
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

/// One rank of several processes, each with a GPU; ranks share GPUs where there are fewer. What the driver and NCCL
/// take is measured between meetings, when nobody allocates.
fn joined(run: &Run, launched: &Launched, body: impl Fn(Seat) -> Result<()>) -> Result<()> {
    let (rank, ranks) = (launched.rank, launched.world);
    let gpus = cuda::device_count().max(1);
    let device: Arc<Cuda> = Arc::new(Cuda::open(launched.local_rank % gpus, sums(run))?);
    device.make_current()?;
    let store = Arc::new(store::join(rank, ranks, &launched.address, run.timeout)?);
    let meeting = store::Exchange::new(store.clone(), "start", rank, ranks, run.timeout);
    let sharing = launched.local_world.div_ceil(gpus);
    let held =
        || device.measured_bytes().map(|all| all.saturating_sub(sharing * device.memory_use().current_bytes));
    meeting.exchange(&[], "devices opened")?;
    let context = held();
    meeting.exchange(&[], "contexts measured")?;
    let groups = nccl_groups(run, &store, rank, ranks)?;
    warm_up(&*device, &groups)?;
    meeting.exchange(&[], "groups joined")?;
    let overhead = context.zip(held()).map(|(context_bytes, both)| Overhead {
        sharing,
        context_bytes,
        nccl_bytes: both.saturating_sub(context_bytes),
    });
    meeting.exchange(&[], "groups measured")?;
    body(Seat { rank, ranks, device, groups, overhead })?;
    Ok(store.finish(run.timeout)?)
}

/// This rank's place in a grid of `replicate` rows, each group a communicator of its own.
fn nccl_groups(run: &Run, store: &Arc<store::Store>, rank: usize, ranks: usize) -> Result<Groups> {
    let shards = ranks / if ranks.is_multiple_of(run.replicate) { run.replicate } else { 1 };
    let (row, at) = (rank / shards, rank % shards);
    let join = |name: &str, rank, size| Nccl::join(store.clone(), name, rank, size, run.timeout);
    let gather = join(&format!("gather {row}"), at, shards)?;
    let reduce = join(&format!("reduce {row}"), at, shards)?;
    if shards == ranks {
        // One row is the world, and its communicators take memory: the two share one.
        return Ok(Groups { world: reduce.clone(), gather, replicate: reduce.clone(), reduce });
    }
    let world = join("world", rank, ranks)?;
    Ok(Groups { world, gather, reduce, replicate: join(&format!("replicate {at}"), row, ranks / shards)? })
}

/// One collective of each kind, so that NCCL takes its memory now and not in the first step.
fn warm_up(device: &dyn Device, groups: &Groups) -> Result<()> {
    let stream = device.stream("warm-up", Role::Side)?;
    for group in [&groups.world, &groups.gather, &groups.reduce, &groups.replicate] {
        let whole = device.alloc_buffer(Dtype::F32, 64 * group.size(), "warm-up")?;
        let part = device.alloc_buffer(Dtype::F32, 64, "warm-up")?;
        device.fill(&stream, &whole, 0.0)?;
        group.reduce_scatter(&stream, &whole, &part, "warm-up")?;
        group.all_gather(&stream, &part, &whole, "warm-up")?;
        group.all_reduce(&stream, &part, comm::Reduction::Sum, "warm-up")?;
        stream.synchronize()?;
    }
    Ok(())
}

fn sums(run: &Run) -> Sums {
    if run.deterministic { Sums::Ordered } else { Sums::Fastest }
}

/// Starts this command once more for each rank and waits; when one fails the others are ended.
fn spawn(ranks: usize) -> Result<()> {
    let failed = |what: String| Error::Config(format!("starting ranks: {what}"));
    let exe = std::env::current_exe().map_err(|e| failed(e.to_string()))?;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(|e| failed(e.to_string()))?;
    let port = listener.local_addr().map_err(|e| failed(e.to_string()))?.port();
    drop(listener);
    let mut children: Vec<Child> = Vec::new();
    for rank in 0..ranks {
        let child = Command::new(&exe)
            .args(std::env::args_os().skip(1))
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("LOCAL_WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .spawn();
        match child {
            Ok(child) => children.push(child),
            Err(e) => {
                end(&mut children);
                return Err(failed(e.to_string()));
            }
        }
    }
    watch(children)
}

fn watch(mut children: Vec<Child>) -> Result<()> {
    let mut running = children.len();
    let mut done = vec![false; children.len()];
    while running > 0 {
        for rank in 0..children.len() {
            let status = match children[rank].try_wait() {
                Ok(Some(status)) if !done[rank] => status,
                _ => continue,
            };
            (done[rank], running) = (true, running - 1);
            if !status.success() {
                end(&mut children);
                return Err(Error::Rank {
                    rank,
                    what: format!("its process ended with {status}; see its message above"),
                });
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Ends and reaps processes; those that are gone already are no matter.
fn end(children: &mut [Child]) {
    for child in children.iter_mut() {
        let _ = child.kill();
    }
    for child in children {
        let _ = child.wait();
    }
}

/// Runs `body` as `ranks` threads, each with a CPU device of its own, and returns the first failure.
fn on_threads(run: &Run, ranks: usize, body: impl Fn(Seat) -> Result<()> + Sync) -> Result<()> {
    if ranks == 1 {
        return body(alone(Arc::new(Cpu::new())));
    }
    let groups = local_groups(ranks, run.replicate, run.timeout);
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = groups
            .into_iter()
            .enumerate()
            .map(|(rank, groups)| {
                let body = &body;
                let seat = move || Seat { rank, ranks, device: Arc::new(Cpu::new()), groups, overhead: None };
                scope.spawn(move || body(seat()))
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

/// The groups of every rank: a grid of `replicate` rows, a unit divided among the ranks of a row.
fn local_groups(ranks: usize, replicate: usize, timeout: Duration) -> Vec<Groups> {
    // A grid that does not come out is refused by the plan, in better words.
    let replicate = if ranks.is_multiple_of(replicate) { replicate } else { 1 };
    let shards = ranks / replicate;
    let world = comm::local::group("world", ranks, timeout);
    let rows = |name: &str| -> Vec<Vec<Arc<dyn Group>>> {
        (0..replicate).map(|row| comm::local::group(&format!("{name} {row}"), shards, timeout)).collect()
    };
    let (gather, reduce) = (rows("gather"), rows("reduce"));
    let columns: Vec<Vec<Arc<dyn Group>>> =
        (0..shards).map(|at| comm::local::group(&format!("replicate {at}"), replicate, timeout)).collect();
    let of = |rank: usize| Groups {
        world: world[rank].clone(),
        gather: gather[rank / shards][rank % shards].clone(),
        reduce: reduce[rank / shards][rank % shards].clone(),
        replicate: columns[rank % shards][rank / shards].clone(),
    };
    (0..ranks).map(of).collect()
}

/// A rank that works alone.
fn alone(device: Arc<dyn Device>) -> Seat {
    let overhead = match (device.profile(), device.measured_bytes()) {
        (Profile::Cuda { .. }, Some(bytes)) => {
            let context_bytes = bytes.saturating_sub(device.memory_use().current_bytes);
            Some(Overhead { sharing: 1, context_bytes, nccl_bytes: 0 })
        }
        _ => None,
    };
    let groups = Groups::all(Arc::new(Solo::new("solo", device.clone())));
    Seat { rank: 0, ranks: 1, device, groups, overhead }
}

/// Of several ranks' failures, the one that is not only the echo of another's end.
fn first_cause(results: Vec<Result<()>>) -> Result<()> {
    let mut failures: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
    let echo = |error: &Error| error.to_string().contains("left the group");
    let cause = failures.iter().position(|error| !echo(error)).unwrap_or(0);
    if failures.is_empty() { Ok(()) } else { Err(failures.swap_remove(cause)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launchers_environment_is_read_and_checked() {
        let env = |pairs: &'static [(&str, &str)]| {
            Launched::from(move |name| {
                pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string())
            })
        };
        assert_eq!(env(&[("RANK", "0")]).unwrap(), None);
        let full = env(&[("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("MASTER_PORT", "7")]);
        let full = full.unwrap().unwrap();
        assert_eq!((full.rank, full.world, full.local_rank, full.address.as_str()), (3, 4, 1, "127.0.0.1:7"));
        assert!(env(&[("RANK", "4"), ("WORLD_SIZE", "4")]).unwrap_err().to_string().contains("WORLD_SIZE"));
        assert!(env(&[("RANK", "x"), ("WORLD_SIZE", "4")]).unwrap_err().to_string().contains("RANK"));
    }
}
