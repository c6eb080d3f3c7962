//! `bench checkpoint`: saving and loading beside a plain sequential write and read of as many bytes on the same disk.

use super::StepBench;
use crate::checkpoints::{Resumed, Saver, What};
use crate::ranks::{self, Launched, Seat};
use crate::run::{DeviceChoice, Run};
use crate::source::Seeded;
use crate::{Error, Result};
use checkpoint::State;
use comm::Group;
use device::Dtype;
use fsdp::Engine;
use serde_json::json;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

/// Bytes a plain write or read takes at once.
const BLOCK: usize = 1 << 20;

/// What to measure.
#[derive(Clone, Debug)]
pub struct CheckpointBench {
    pub size: String,
    pub ranks: usize,
    /// Where checkpoints and the plain file go; what the bench wrote there is removed again.
    pub dir: PathBuf,
    pub rounds: usize,
}

/// Seconds of each round.
#[derive(Debug, Default)]
struct Times {
    plain_write: Vec<f64>,
    save: Vec<f64>,
    /// What training waits for where the save goes on in the background.
    pause: Vec<f64>,
    plain_read: Vec<f64>,
    load: Vec<f64>,
}

/// Prints one JSON object: means of writes and medians of the rest over `rounds` rounds, each of a plain write, a save, a save in the background, a plain
/// read and a load, all with caches of the files dropped where the system lets us, and what memory they took.
pub fn checkpoint(bench: &CheckpointBench) -> Result<()> {
    let dir = bench.dir.join("shardloom-bench-checkpoint");
    let step = StepBench {
        size: bench.size.clone(),
        seq: 16,
        rows: 1,
        steps: 1,
        warm_up: 0,
        ranks: bench.ranks,
        dtype: Dtype::F32,
        master: Dtype::F32,
        device: DeviceChoice::Cpu,
        set: vec!["device.group=shm".into(), format!("output.dir={:?}", dir.display().to_string())],
        kernels: false,
    };
    let run = step.run()?;
    let model = Arc::new(run.model(step.seq)?);
    ranks::start(&run, bench.ranks, Launched::from_env()?, |seat| {
        let rank = seat.rank;
        let measured = one_rank(bench, &step, &run, &model, seat);
        if rank == 0 {
            let _ = std::fs::remove_dir_all(&dir);
        }
        measured
    })
}

fn one_rank(
    bench: &CheckpointBench,
    step: &StepBench,
    run: &Run,
    model: &Arc<tensor::Model>,
    seat: Seat,
) -> Result<()> {
    let Seat { rank, ranks, device, groups, saving, .. } = seat;
    let world = groups.world.clone();
    std::fs::create_dir_all(&run.output).map_err(|e| Error::file(&run.output, e))?;
    let plan = Arc::new(step.plan(run, model, device.profile())?);
    let mut engine = Engine::new(device, plan, model.clone(), groups.clone())?;
    let source = Arc::new(Seeded::new(0, model));
    engine.fill(&*source)?;
    let saver = |background: bool| {
        let mut run = run.clone();
        run.checkpoint.background = background;
        Saver::new(&run, model, source.clone(), saving.clone())
    };
    let (mut in_front, mut behind) = (saver(false)?, saver(true)?);
    let what = What { checkpoint: true, model: false };
    let (path, plain) = (run.output.join("checkpoints/step-000001"), run.output.join("plain"));
    let (mut times, mut memory) = (Times::default(), Memory::default());
    let total = in_front.total_bytes();
    for round in 0..bench.rounds {
        // In turn first and second: many disks are faster for the first gigabytes after a rest.
        for plainly in [round % 2 == 0, round % 2 != 0] {
            if plainly {
                times.plain_write.push(alone(&*world, || write_plain(&plain, total))?);
                continue;
            }
            memory.start();
            times.save.push(together(&*world, || in_front.save(&engine, State::at(1), what).map(drop))?);
            memory.saved();
        }
        times.pause.push(together(&*world, || behind.save(&engine, State::at(1), what).map(drop))?);
        behind.wait()?;
        alone(&*world, || drop_caches(&path, &plain))?;
        times.plain_read.push(alone(&*world, || read_plain(&plain))?);
        alone(&*world, || drop_caches(&path, &plain))?;
        memory.start();
        times.load.push(together(&*world, || Resumed::open(&path, model)?.restore(&mut engine, &groups))?);
        memory.loaded();
    }
    // Of all ranks, the one that took most.
    let snapshot = in_front.snapshot_bytes() as u64;
    let mine: Vec<u8> = [memory.save, memory.load, snapshot].iter().flat_map(|n| n.to_le_bytes()).collect();
    let all = world.exchange(&mine, "memory")?;
    let most = |at: usize| {
        let number =
            |bytes: &Vec<u8>| u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().unwrap_or_default());
        all.iter().map(number).max().unwrap_or(0)
    };
    if rank == 0 {
        let rate = |seconds: f64| total as f64 / seconds / 1e9;
        let Times { plain_write, save, pause, plain_read, load } = times;
        let first_pause = pause[0];
        let [plain_write, save, pause, plain_read, load] =
            [mean(&plain_write), mean(&save), median(pause), median(plain_read), median(load)];
        let report = json!({
            "size": bench.size, "params": model.num_params(), "ranks": ranks, "bytes": total, "rounds": bench.rounds,
            "plain_write_gb_per_s": rate(plain_write), "save_gb_per_s": rate(save), "save_of_plain": plain_write / save,
            "plain_read_gb_per_s": rate(plain_read), "load_gb_per_s": rate(load), "load_of_plain": plain_read / load,
            "save_s": save, "pause_s": pause, "first_pause_s": first_pause, "pause_of_save": pause / save,
            "rank_bytes": most(2), "save_memory_bytes": most(0), "load_memory_bytes": most(1),
        });
        println!("{report}");
    }
    Ok(world.barrier("shown")?)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Seconds that all ranks take for `work`.
fn together(world: &dyn Group, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    world.barrier("ready")?;
    let start = Instant::now();
    work()?;
    world.barrier("done")?;
    Ok(start.elapsed().as_secs_f64())
}

/// Seconds that rank 0 takes for `work` while the others wait.
fn alone(world: &dyn Group, work: impl FnOnce() -> std::io::Result<()>) -> Result<f64> {
    together(world, || match world.rank() {
        0 => work().map_err(|e| Error::file("the plain file", e)),
        _ => Ok(()),
    })
}

/// One file, from its start to its end, and synced.
fn write_plain(path: &Path, bytes: u64) -> std::io::Result<()> {
    let block: Vec<u8> = (0..BLOCK).map(|at| ((at * 7919) >> 5) as u8).collect();
    let mut file = File::create(path)?;
    let mut left = bytes;
    while left > 0 {
        let len = left.min(BLOCK as u64);
        file.write_all(&block[..len as usize])?;
        left -= len;
    }
    file.sync_all()
}

fn read_plain(path: &Path) -> std::io::Result<()> {
    let (mut file, mut block) = (File::open(path)?, vec![0; BLOCK]);
    while file.read(&mut block)? > 0 {}
    Ok(())
}

/// Asks the system to forget what it has in memory of these files, by way of dd, so that reading means the disk. Where
/// that fails, both reads are from memory.
fn drop_caches(dir: &Path, plain: &Path) -> std::io::Result<()> {
    let files = std::fs::read_dir(dir)?.map(|entry| entry.map(|entry| entry.path()));
    for path in files.chain([Ok(plain.to_path_buf())]) {
        let path = path?;
        let mut dd = Command::new("dd");
        dd.arg(format!("if={}", path.display())).args(["iflag=nocache", "count=0"]);
        let _ = dd.stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
    Ok(())
}

/// By how many bytes this process grew at most, where the system says.
#[derive(Debug, Default)]
struct Memory {
    before: u64,
    save: u64,
    load: u64,
}

impl Memory {
    fn start(&mut self) {
        // Resets the highest mark.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        self.before = resident("VmRSS:");
    }

    fn saved(&mut self) {
        self.save = self.save.max(resident("VmHWM:").saturating_sub(self.before));
    }

    fn loaded(&mut self) {
        self.load = self.load.max(resident("VmHWM:").saturating_sub(self.before));
    }
}

fn resident(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) << 10
}
