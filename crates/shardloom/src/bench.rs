//! `bench`: how fast this machine trains, and beside which ceiling.

mod checkpoint;

pub use checkpoint::{CheckpointBench, checkpoint};

use crate::ranks::{self, Launched, Seat};
use crate::run::{DeviceChoice, Run};
use crate::source::Seeded;
use crate::{Error, Result, show};
use device::timed::{KernelTime, Timed};
use device::{Device, Dtype, Gemm, Matrix, Role};
use fsdp::{Engine, Field, HostBatch, Hyper, Plan};
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;
use tensor::models::Config;

/// Llama shapes by name: hidden, intermediate, layers, heads, key-value heads, vocabulary.
const SIZES: [(&str, [usize; 6]); 6] = [
    ("tiny", [256, 688, 4, 8, 4, 4096]),
    ("60m", [512, 1376, 8, 8, 8, 32000]),
    ("350m", [1024, 4096, 16, 16, 8, 32000]),
    ("1b", [2048, 8192, 16, 32, 8, 128_256]),
    ("3b", [3072, 8192, 28, 24, 8, 128_256]),
    ("8b", [4096, 14336, 32, 32, 8, 128_256]),
];

/// What to measure.
#[derive(Clone, Debug)]
pub struct StepBench {
    pub size: String,
    pub seq: usize,
    pub rows: usize,
    pub steps: usize,
    /// Steps before the clock starts.
    pub warm_up: usize,
    pub ranks: usize,
    pub dtype: Dtype,
    /// Of master weights and moments.
    pub master: Dtype,
    pub device: DeviceChoice,
    /// Further keys of the run, as in `shard.strategy=none`.
    pub set: Vec<String>,
    /// Whether to tell kernels' times apart.
    pub kernels: bool,
}

fn config(size: &str, seq: usize) -> Result<String> {
    let Some((_, [hidden, intermediate, layers, heads, kv_heads, vocab])) =
        SIZES.iter().find(|(name, _)| *name == size)
    else {
        let names: Vec<&str> = SIZES.iter().map(|(name, _)| *name).collect();
        return Err(Error::Config(format!("there is no size {size:?}; there are {}", names.join(", "))));
    };
    let config = json!({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab, "rope_theta": 500000.0,
        "max_position_embeddings": seq, "rms_norm_eps": 1e-6,
    });
    Ok(config.to_string())
}

impl StepBench {
    fn run(&self) -> Result<Run> {
        let kind = match self.device {
            DeviceChoice::Auto => "auto",
            DeviceChoice::Cpu => "cpu",
            DeviceChoice::Cuda => "cuda",
        };
        let config: serde_json::Value =
            serde_json::from_str(&config(&self.size, self.seq)?).map_err(|e| Error::Config(e.to_string()))?;
        let table = json!({
            "model": {"config": config, "init_seed": 0},
            "data": {"kind": "batches", "path": "random"},
            "train": {"steps": 1, "global_batch": self.rows * self.ranks, "micro_batch": self.rows},
            "optimizer": {"lr": 1e-4, "state": self.master.name()},
            "precision": {
                "compute": self.dtype.name(), "master": self.master.name(),
                "reduce": self.master.name(), "grad": self.master.name(),
            },
            "device": {"kind": kind},
            "output": {"dir": "unused"},
        });
        let text = toml::to_string(&table).map_err(|e| Error::Config(e.to_string()))?;
        Run::parse(&text, &self.set)
    }

    fn plan(&self, run: &Run, model: &Arc<tensor::Model>, profile: device::Profile) -> Result<Plan> {
        let fields = Field::tokens(self.rows, self.seq);
        let settings = run.settings(self.ranks, fields, 1, profile);
        Ok(Plan::new(model, settings, profile)?)
    }
}

/// Trains a model of random weights on random tokens and prints one JSON object: tokens/s, time of a step (the
/// median), FLOP/s counted as 6·N of the matrices plus causal attention, memory, and the ratio to a bare matrix
/// product measured in the same run.
pub fn step(bench: &StepBench) -> Result<()> {
    let run = bench.run()?;
    let launched = Launched::from_env()?;
    let model = Arc::new(run.model(bench.seq)?);
    ranks::start(&run, bench.ranks, launched, |seat| one_rank(bench, &run, &model, seat))
}

fn one_rank(bench: &StepBench, run: &Run, model: &Arc<tensor::Model>, seat: Seat) -> Result<()> {
    let Seat { rank, ranks, device, groups, .. } = seat;
    let timed = bench.kernels.then(|| Arc::new(Timed::new(device.clone())));
    let used: Arc<dyn Device> = timed.as_ref().map_or(device.clone(), |timed| timed.clone());
    let plan = Arc::new(bench.plan(run, model, device.profile())?);
    let world = groups.world.clone();
    let gemm_rate = bare_gemm(&*device, bench.dtype)?;
    let copy_rate = if bench.kernels { bare_copy(&*device)? } else { 0.0 };
    let mut engine = Engine::new(used, plan, model.clone(), groups)?;
    engine.fill(&Repeated::new(model)?)?;
    let mut times = Vec::new();
    let (mut first_loss, mut loss, mut kernels) = (f64::NAN, f64::NAN, vec![]);
    for step in 1..=(bench.warm_up + bench.steps) as u64 {
        let batch = random_batch(bench, &run.config, step * ranks as u64 + rank as u64)?;
        world.exchange(&[], "step start")?;
        if let Some(timed) = &timed {
            kernels = timed.take()?;
        }
        let start = Instant::now();
        let hyper = Hyper { adamw: run.adamw, lr: run.lr.lr(1, 1), clip_norm: run.clip_norm, step };
        engine.step(&[batch], &hyper)?;
        loss = engine.report()?.loss;
        if step == 1 {
            first_loss = loss;
        }
        if step > bench.warm_up as u64 {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    if rank != 0 {
        return Ok(());
    }
    times.sort_by(f64::total_cmp);
    let seconds = times[times.len() / 2];
    let tokens = bench.rows * bench.seq;
    let rate = flops_per_token(&run.config, model, bench.seq) * tokens as f64 / seconds;
    if let Some(timed) = &timed {
        // The last step's kernels; the ones before were taken as steps began.
        let last = timed.take()?;
        let ceilings = Ceilings { flops: gemm_rate, bytes: copy_rate };
        print_kernels(if last.is_empty() { &kernels } else { &last }, seconds * 1e3, &ceilings);
    }
    let report = json!({
        "device": device.name(), "size": bench.size, "params": model.num_params(), "ranks": ranks, "seq": bench.seq,
        "rows": bench.rows, "compute": bench.dtype.name(), "master": bench.master.name(), "step_ms": seconds * 1e3,
        "tokens_per_s": (tokens * ranks) as f64 / seconds, "gflops_a_rank": rate / 1e9,
        "bare_gemm_gflops": gemm_rate / 1e9, "ratio_to_bare_gemm": rate / gemm_rate,
        "peak_bytes": device.memory_use().peak_bytes, "first_loss": first_loss, "last_loss": loss,
    });
    println!("{report}");
    Ok(())
}

/// Normal numbers, drawn once and given over and over: a large model's weights in seconds rather than a minute.
struct Repeated {
    few: Vec<f32>,
    seeded: Seeded,
}

/// Normal numbers that are drawn; odd, so that they fall differently into each row.
const DRAWN: usize = (4 << 20) - 1;

impl Repeated {
    fn new(model: &tensor::Model) -> Result<Self> {
        let seeded = Seeded::new(0, model);
        let matrix =
            model.items.iter().flat_map(|item| &item.members).max_by_key(|member| member.shape.numel());
        let mut few = vec![0.0; DRAWN];
        if let Some(matrix) = matrix {
            fsdp::Source::read(&seeded, &matrix.name, 0, &mut few)?;
        }
        Ok(Repeated { few, seeded })
    }
}

impl fsdp::Source for Repeated {
    fn read(&self, name: &str, start: usize, out: &mut [f32]) -> fsdp::Result<()> {
        // Norms and biases are not random, and short.
        if out.len() < 1 << 16 {
            return self.seeded.read(name, start, out);
        }
        let first =
            name.bytes().fold(start, |sum, byte| sum.wrapping_mul(31).wrapping_add(usize::from(byte)));
        let mut at = first % self.few.len();
        let mut left = out;
        while !left.is_empty() {
            let len = left.len().min(self.few.len() - at);
            let (now, rest) = left.split_at_mut(len);
            now.copy_from_slice(&self.few[at..at + len]);
            (left, at) = (rest, 0);
        }
        Ok(())
    }
}

/// 6 per weight of a matrix product, and attention's scores and sums, halved for the causal mask.
fn flops_per_token(config: &Config, model: &tensor::Model, seq: usize) -> f64 {
    let in_products = model.num_params() - config.vocab * config.hidden;
    6.0 * in_products as f64 + 6.0 * (config.layers * config.hidden * seq) as f64
}

fn random_batch(bench: &StepBench, config: &Config, seed: u64) -> Result<HostBatch> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut ids = |count: usize| -> Vec<i32> {
        let next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % config.vocab as u64) as i32
        };
        std::iter::repeat_with(next).take(count).collect()
    };
    let (inputs, labels) = (ids(bench.rows * bench.seq), ids(bench.rows * bench.seq));
    Ok(HostBatch::tokens(&inputs, &labels, bench.seq, config.vocab)?)
}

/// What the machine can do at most: a bare product and a bare copy, in FLOP/s and bytes/s, read and written.
struct Ceilings {
    flops: f64,
    bytes: f64,
}

/// One line a kernel: its time, its rate (of operations where it is a product or attention, else of bytes that must
/// move), and that as a share of the ceiling.
fn print_kernels(kernels: &[KernelTime], step_ms: f64, ceilings: &Ceilings) {
    println!(
        "{:<34} {:>6} {:>10} {:>7} {:>15} {:>11}",
        "kernel", "calls", "ms", "share", "rate", "of ceiling"
    );
    for KernelTime { name, calls, total_ms, work } in kernels {
        let (share, seconds) = (100.0 * total_ms / step_ms, total_ms / 1e3);
        let (amount, unit, ceiling) = match work.flops {
            0 => (work.bytes as f64, "B/s", ceilings.bytes),
            flops => (flops as f64, "FLOP/s", ceilings.flops),
        };
        let (rate, of_ceiling) = (per_second(amount / seconds, unit), 100.0 * amount / seconds / ceiling);
        println!("{name:<34} {calls:>6} {total_ms:>10.3} {share:>6.1}% {rate:>15} {of_ceiling:>10.0}%");
    }
    let sum: f64 = kernels.iter().map(|kernel| kernel.total_ms).sum();
    println!("{:<34} {:>6} {sum:>10.3} {:>6.1}%", "all kernels", "", 100.0 * sum / step_ms);
    let (flops, bytes) = (per_second(ceilings.flops, "FLOP/s"), per_second(ceilings.bytes, "B/s"));
    println!("ceilings: a bare product {flops}, a bare copy {bytes}");
}

/// A rate in the largest unit that it fills.
fn per_second(rate: f64, unit: &str) -> String {
    let (size, prefix) = if rate >= 1e12 { (1e12, 'T') } else { (1e9, 'G') };
    format!("{:.2} {prefix}{unit}", rate / size)
}

/// Bytes a second, read and written, of one large copy, the best of several.
fn bare_copy(device: &dyn Device) -> Result<f64> {
    let len = match device.profile() {
        device::Profile::Cpu => 16 << 20,
        device::Profile::Cuda { .. } => 256 << 20,
    };
    let stream = device.stream("bench", Role::Compute)?;
    let (from, to) =
        (device.alloc_buffer(Dtype::F32, len, "bench")?, device.alloc_buffer(Dtype::F32, len, "bench")?);
    device.fill(&stream, &from, 1.0)?;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        stream.synchronize()?;
        let start = Instant::now();
        device.copy(&stream, &from, &to)?;
        stream.synchronize()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok((2 * from.num_bytes()) as f64 / best)
}

/// FLOP/s of one large product, the best of several.
fn bare_gemm(device: &dyn Device, dtype: Dtype) -> Result<f64> {
    let side = match device.profile() {
        device::Profile::Cpu => 1024,
        device::Profile::Cuda { .. } => 8192,
    };
    gemm_rate(device, dtype, [side; 3], 10)
}

/// FLOP/s of an m × n × k product, the best of `times`.
fn gemm_rate(device: &dyn Device, dtype: Dtype, [m, n, k]: [usize; 3], times: usize) -> Result<f64> {
    let stream = device.stream("bench", Role::Compute)?;
    let random = |len: usize, seed: usize| -> Result<device::Buffer> {
        let buffer = device.alloc_buffer(dtype, len, "bench")?;
        let plain = device.alloc_buffer(Dtype::F32, len, "bench")?;
        let value = |i: usize| ((i * 7919 + seed) % 1021) as f32 / 510.0 - 1.0;
        device.write_slice(&stream, &(0..len).map(value).collect::<Vec<f32>>(), &plain)?;
        match dtype {
            Dtype::F32 => device.copy(&stream, &plain, &buffer)?,
            _ => device.cast(&stream, &plain, &buffer)?,
        }
        Ok(buffer)
    };
    let (a, b, c) = (random(m * k, 1)?, random(n * k, 2)?, device.alloc_buffer(dtype, m * n, "bench")?);
    let args =
        Gemm { a: Matrix::new(&a, m, k), b: Matrix::new(&b, n, k).t(), c: Matrix::new(&c, m, n), beta: 0.0 };
    let mut best = f64::INFINITY;
    for _ in 0..times + 2 {
        stream.synchronize()?;
        let start = Instant::now();
        device.gemm(&stream, &args)?;
        stream.synchronize()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * (m * n * k) as f64 / best)
}

/// Collectives among `ranks` ranks of this machine over a group of this kind (`shm`, `tcp`, `local`, `mpi`), one line each:
/// bytes of the whole buffer, the mean time of a call, bytes / time, and that beside a plain copy in one process.
pub fn collectives(ranks: usize, group: &str) -> Result<()> {
    let bench = StepBench {
        size: "tiny".into(),
        seq: 16,
        rows: 1,
        steps: 1,
        warm_up: 0,
        ranks,
        dtype: Dtype::F32,
        master: Dtype::F32,
        device: DeviceChoice::Cpu,
        set: vec![format!("device.group={group}")],
        kernels: false,
    };
    ranks::start(&bench.run()?, ranks, Launched::from_env()?, |seat| {
        let world = &*seat.groups.world;
        let measurements = comm::bench::collectives(world, &seat.device, &comm::bench::SIZES)?;
        // The others are quiet while one copies.
        world.barrier("measured")?;
        if seat.rank == 0 {
            print!("{}", collectives_table(group, seat.ranks, &measurements));
        }
        Ok(world.barrier("shown")?)
    })
}

fn collectives_table(group: &str, ranks: usize, measurements: &[comm::bench::Measurement]) -> String {
    let mut table = format!("group {group}, {ranks} ranks, f32\n");
    table += &format!("{:<16} {:>12} {:>12} {:>9} {:>9}\n", "", "bytes", "us", "GB/s", "of a copy");
    let mut copy = (0, 0.0);
    for measurement in measurements {
        let comm::bench::Measurement { op, bytes, seconds, .. } = measurement;
        if copy.0 != *bytes {
            copy = (*bytes, comm::bench::copy_gigabytes_per_second(*bytes));
            let us = *bytes as f64 / copy.1 / 1e3;
            table += &format!("{:<16} {bytes:>12} {us:>12.1} {:>9.2}\n", "copy", copy.1);
        }
        let (us, rate) = (seconds * 1e6, measurement.gigabytes_per_second());
        table += &format!("{op:<16} {bytes:>12} {us:>12.1} {rate:>9.2} {:>9.2}\n", rate / copy.1);
    }
    let small = measurements.iter().find(|measurement| measurement.op == "all_reduce");
    if let Some(small) = small {
        let (bytes, us) = (small.bytes, small.seconds * 1e6);
        table += &format!("latency of an all_reduce of {bytes} bytes: {us:.1} us\n");
    }
    table
}

/// Products of the shapes a Llama has, one line each.
pub fn gemm(dtype: Dtype, device: DeviceChoice, tokens: usize, size: &str) -> Result<()> {
    let bench = StepBench {
        size: size.into(),
        seq: 128,
        rows: 1,
        steps: 1,
        warm_up: 0,
        ranks: 1,
        dtype,
        master: dtype,
        device,
        set: vec![],
        kernels: false,
    };
    let run = bench.run()?;
    let config = &run.config;
    ranks::start(&run, 1, None, |seat| {
        let qkv = (config.heads + 2 * config.kv_heads) * config.head_dim;
        let shapes = [
            ("qkv", qkv, config.hidden),
            ("o", config.hidden, config.heads * config.head_dim),
            ("gate and up", 2 * config.intermediate, config.hidden),
            ("down", config.hidden, config.intermediate),
            ("head", config.vocab, config.hidden),
        ];
        println!("{} {dtype}, {tokens} tokens", seat.device.name());
        for (name, out, inner) in shapes {
            let rate = gemm_rate(&*seat.device, dtype, [tokens, out, inner], 5)?;
            let size = show::bytes(out * inner * dtype.bytes());
            println!(
                "{name:<12} {out:>7} × {inner:<6} {:>9.1} GFLOP/s  weight {}",
                rate / 1e9,
                size.trim_start()
            );
        }
        Ok(())
    })
}
