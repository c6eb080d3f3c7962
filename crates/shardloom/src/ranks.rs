//! How the ranks of a run come to be: threads of this process on the CPU, one process each on GPUs, or whatever a
//! launcher, or an MPI, has started.

mod launched;
mod meeting;

pub use launched::Launched;

use crate::run::{DeviceChoice, GroupChoice};
use crate::{Error, Result, Run, launch};
use comm::store::{self, Store};
use comm::{Group, Solo, nccl::Nccl};
use device::cuda::{self, Cuda, Sums};
use device::{Device, Dtype, Profile, Role, cpu::Cpu};
use fsdp::Groups;
use std::sync::Arc;
use std::time::Duration;

/// One rank's place: which it is, its device, and whom it works with.
#[derive(Clone, Debug)]
pub struct Seat {
    pub rank: usize,
    pub ranks: usize,
    pub device: Arc<dyn Device>,
    pub groups: Groups,
    /// All ranks once more, for the threads that save checkpoints beside training.
    pub saving: Arc<dyn Group>,
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

/// Runs `body` as every rank that this process is to be, on the device the run asks for.
pub fn start(
    run: &Run,
    ranks: usize,
    launched: Option<Launched>,
    body: impl Fn(Seat) -> Result<()> + Sync,
) -> Result<()> {
    let gpu = on_gpu(run.device, "device.kind = \"cuda\"")?;
    let world = launched.as_ref().map_or(ranks, |launched| launched.world);
    if gpu && world > 1 && !matches!(run.group, GroupChoice::Auto | GroupChoice::Nccl) {
        let what = format!("device.group = {:?} does not serve ranks on GPUs; use auto", run.group);
        return Err(Error::Config(what));
    }
    match (gpu, launched) {
        (true, Some(launched)) if launched.world > 1 => on_own_gpu(run, &launched, body),
        (true, _) if ranks == 1 => body(alone(Arc::new(Cuda::open(0, sums(run))?))),
        (true, _) => spawn(ranks),
        (false, _) if run.group == GroupChoice::Mpi => on_mpi(run, world, body),
        (false, Some(launched)) if launched.world > 1 => on_own_cores(run, &launched, body),
        (false, _) if ranks > 1 && !matches!(run.group, GroupChoice::Auto | GroupChoice::Local) => {
            spawn(ranks)
        }
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

fn sums(run: &Run) -> Sums {
    if run.deterministic { Sums::Ordered } else { Sums::Fastest }
}

/// One rank of several processes, each with a GPU; ranks share GPUs where there are fewer. What the driver and NCCL
/// take is measured between meetings, when nobody allocates.
fn on_own_gpu(run: &Run, launched: &Launched, body: impl Fn(Seat) -> Result<()>) -> Result<()> {
    let Launched { rank, world: ranks, local_rank, local_world, .. } = *launched;
    comm::nccl::on_stuck(end_stuck);
    let gpus = cuda::device_count().max(1);
    let device: Arc<Cuda> = Arc::new(Cuda::open(local_rank % gpus, sums(run))?);
    device.make_current()?;
    let store = joined(run, launched)?;
    let meeting = store::Exchange::new(store.clone(), "start", rank, ranks, run.timeout);
    let sharing = local_world.div_ceil(gpus);
    let held = || {
        let ours = sharing * device.memory_use().current_bytes;
        device.measured_bytes().map(|all| all.saturating_sub(ours))
    };
    meeting.exchange(&[], "devices opened")?;
    let context = held();
    meeting.exchange(&[], "contexts measured")?;
    let groups = grid(run, rank, ranks, |name, members| {
        Ok(Nccl::join(store.clone(), name, place(members, rank), members.len(), run.timeout)?)
    })?;
    warm_up(&*device, &groups)?;
    meeting.exchange(&[], "groups joined")?;
    let overhead = context.zip(held()).map(|(context_bytes, both)| Overhead {
        sharing,
        context_bytes,
        nccl_bytes: both.saturating_sub(context_bytes),
    });
    meeting.exchange(&[], "groups measured")?;
    let saving = saving(run, launched, &store)?;
    body(Seat { rank, ranks, device, groups, saving, overhead })?;
    Ok(store.finish(run.timeout)?)
}

/// Says why and ends this process, of which a thread hangs in a library.
fn end_stuck(error: &comm::Error) {
    launch::error_file::write(&error.to_string());
    eprintln!("shardloom: {error}");
    comm::process::end_now(1);
}

/// One rank of several processes on CPUs: over shared memory on one machine, over sockets on several.
fn on_own_cores(run: &Run, launched: &Launched, body: impl Fn(Seat) -> Result<()>) -> Result<()> {
    let Launched { rank, world: ranks, local_world, .. } = *launched;
    let store = joined(run, launched)?;
    let over_sockets = match run.group {
        GroupChoice::Shm => false,
        GroupChoice::Tcp => true,
        GroupChoice::Auto => local_world < ranks,
        other => {
            let what =
                format!("device.group = {other:?} does not serve ranks that are processes on CPUs; use auto");
            return Err(Error::Config(what));
        }
    };
    let groups = grid(run, rank, ranks, |name, members| {
        let join = if over_sockets { comm::tcp::join } else { comm::shm::join };
        Ok(join(store.clone(), name, place(members, rank), members.len(), run.timeout)?)
    })?;
    let saving = saving(run, launched, &store)?;
    body(Seat { rank, ranks, device: Arc::new(Cpu::new()), groups, saving, overhead: None })?;
    Ok(store.finish(run.timeout)?)
}

/// One rank of an MPI that has as many as the run.
#[cfg(feature = "mpi")]
fn on_mpi(run: &Run, ranks: usize, body: impl Fn(Seat) -> Result<()>) -> Result<()> {
    let mpi = comm::mpi::World::init()?;
    let (rank, size) = (mpi.rank(), mpi.size());
    if size != ranks {
        return Err(Error::Config(format!(
            "device.group = \"mpi\": MPI has started {size} ranks and not {ranks}; start the ranks with \
             mpirun, or with srun --mpi"
        )));
    }
    let groups = grid(run, rank, ranks, |name, members| Ok(mpi.join(name, members, run.timeout)?))?;
    let world = groups.world.clone();
    let timeout = run.timeout.max(SAVING_TIMEOUT);
    let saving = mpi.join("checkpoints", &(0..ranks).collect::<Vec<_>>(), timeout)?;
    body(Seat { rank, ranks, device: Arc::new(Cpu::new()), groups, saving, overhead: None })?;
    world.barrier("the end")?;
    mpi.finish();
    Ok(())
}

#[cfg(not(feature = "mpi"))]
fn on_mpi(_run: &Run, _ranks: usize, _body: impl Fn(Seat) -> Result<()>) -> Result<()> {
    let what = "device.group = \"mpi\": this build has no MPI; build it where the site's MPI and libclang are \
                installed, with cargo build --release --features mpi";
    Err(Error::Config(what.into()))
}

/// The store of a world whose ranks have all come.
fn joined(run: &Run, launched: &Launched) -> Result<Arc<Store>> {
    let Launched { rank, world, .. } = *launched;
    let store = Arc::new(store::join(rank, world, launched.meeting_point()?, run.timeout)?);
    meeting::meet(&store, rank, world, run.timeout)?;
    Ok(store)
}

/// How long ranks wait for each other's disks at least. One that has died is noticed at once all the same.
const SAVING_TIMEOUT: Duration = Duration::from_secs(3600);

/// The ranks of several processes once more, on the host.
fn saving(run: &Run, launched: &Launched, store: &Arc<Store>) -> Result<Arc<dyn Group>> {
    let Launched { rank, world, local_world, .. } = *launched;
    let over_sockets = run.group == GroupChoice::Tcp || local_world < world;
    let join = if over_sockets { comm::tcp::join } else { comm::shm::join };
    Ok(join(store.clone(), "checkpoints", rank, world, run.timeout.max(SAVING_TIMEOUT))?)
}

/// A rank's groups in a grid of `replicate` rows, a unit being divided among the ranks of a row. `join` is given a
/// group's name and the ranks that are in it, this one among them.
fn grid(
    run: &Run,
    rank: usize,
    ranks: usize,
    join: impl Fn(&str, &[usize]) -> Result<Arc<dyn Group>>,
) -> Result<Groups> {
    // A grid that does not come out is refused by the plan, in better words.
    let shards = ranks / if ranks.is_multiple_of(run.replicate) { run.replicate } else { 1 };
    let (row, at) = (rank / shards, rank % shards);
    let in_row: Vec<usize> = (row * shards..(row + 1) * shards).collect();
    let gather = join(&format!("gather {row}"), &in_row)?;
    let reduce = join(&format!("reduce {row}"), &in_row)?;
    if shards == ranks {
        // One row is the world, and groups take memory: the two share one.
        return Ok(Groups { world: reduce.clone(), gather, replicate: reduce.clone(), reduce });
    }
    let world = join("world", &(0..ranks).collect::<Vec<_>>())?;
    let in_column: Vec<usize> = (at..ranks).step_by(shards).collect();
    Ok(Groups { world, gather, reduce, replicate: join(&format!("replicate {at}"), &in_column)? })
}

/// A rank's number in a group of these.
fn place(members: &[usize], rank: usize) -> usize {
    members.iter().take_while(|&&member| member != rank).count()
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
    let groups = local_groups(run, ranks)?.into_iter();
    let saving = comm::local::group("checkpoints", ranks, run.timeout.max(SAVING_TIMEOUT));
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = groups
            .zip(saving)
            .enumerate()
            .map(|(rank, (groups, saving))| {
                let body = &body;
                let device = || Arc::new(Cpu::new());
                let seat = move || Seat { rank, ranks, device: device(), groups, saving, overhead: None };
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

/// The groups of every rank of a grid of threads. Each group is made once, and each rank takes its handle.
fn local_groups(run: &Run, ranks: usize) -> Result<Vec<Groups>> {
    let made = std::cell::RefCell::new(std::collections::HashMap::<String, Vec<Arc<dyn Group>>>::new());
    let take = |rank: usize, name: &str, members: &[usize]| {
        let mut made = made.borrow_mut();
        let make = || comm::local::group(name, members.len(), run.timeout);
        Ok(made.entry(name.to_string()).or_insert_with(make)[place(members, rank)].clone())
    };
    (0..ranks).map(|rank| grid(run, rank, ranks, |name, members| take(rank, name, members))).collect()
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
    let solo: Arc<dyn Group> = Arc::new(Solo::new("solo", device.clone()));
    Seat { rank: 0, ranks: 1, device, groups: Groups::all(solo.clone()), saving: solo, overhead }
}

/// Of several ranks' failures, the one that is not only the echo of another's end.
fn first_cause(results: Vec<Result<()>>) -> Result<()> {
    let mut failures: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
    let echo = |error: &Error| error.to_string().contains("left the group");
    let cause = failures.iter().position(|error| !echo(error)).unwrap_or(0);
    if failures.is_empty() { Ok(()) } else { Err(failures.swap_remove(cause)) }
}
