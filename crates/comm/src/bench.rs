//! How fast a group is, counted as `benches/gloo_collectives.py` counts PyTorch's.

use crate::{Group, Reduction, Result};
use device::{Device, Dtype, Role};
use std::sync::Arc;
use std::time::Instant;

/// Of the whole buffer, in bytes: a small one for the time a call takes at least, then large ones.
pub const SIZES: [usize; 4] = [4 << 10, 1 << 20, 16 << 20, 64 << 20];

/// The mean time of one call on one rank.
#[derive(Clone, Debug)]
pub struct Measurement {
    pub op: &'static str,
    pub ranks: usize,
    /// Of the whole buffer: what an all-gather yields, and what a reduce-scatter takes, on each rank.
    pub bytes: usize,
    pub seconds: f64,
}

impl Measurement {
    pub fn gigabytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds / 1e9
    }
}

/// All-gather, reduce-scatter and all-reduce of f32 buffers of these sizes. Every rank of the group calls it.
pub fn collectives(group: &dyn Group, device: &Arc<dyn Device>, sizes: &[usize]) -> Result<Vec<Measurement>> {
    let stream = device.stream("bench", Role::Compute)?;
    let ranks = group.size();
    let mut measurements = Vec::new();
    for &bytes in sizes {
        let len = bytes / 4 / ranks * ranks;
        let full = device.alloc_buffer(Dtype::F32, len, "bench")?;
        let part = device.alloc_buffer(Dtype::F32, len / ranks, "bench")?;
        device.fill(&stream, &full, 0.0)?;
        device.fill(&stream, &part, 0.0)?;
        let times = if bytes < 100_000 { 1000 } else { 10 };
        type Call<'a> = (&'static str, &'a dyn Fn() -> Result<()>);
        let calls: [Call<'_>; 3] = [
            ("all_gather", &|| group.all_gather(&stream, &part, &full, "bench")),
            ("reduce_scatter", &|| group.reduce_scatter(&stream, &full, &part, "bench")),
            ("all_reduce", &|| group.all_reduce(&stream, &full, Reduction::Sum, "bench")),
        ];
        for (op, call) in calls {
            for _ in 0..3 {
                call()?;
            }
            stream.synchronize()?;
            group.barrier("bench")?;
            let started = Instant::now();
            for _ in 0..times {
                call()?;
            }
            stream.synchronize()?;
            let seconds = started.elapsed().as_secs_f64() / f64::from(times);
            measurements.push(Measurement { op, ranks, bytes: len * 4, seconds });
        }
    }
    Ok(measurements)
}

/// Bytes per second, in 10⁹, of a plain copy within this process: what any collective is measured against.
pub fn copy_gigabytes_per_second(bytes: usize) -> f64 {
    let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
    to.copy_from_slice(&from);
    let started = Instant::now();
    for _ in 0..10 {
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
    }
    bytes as f64 * 10.0 / started.elapsed().as_secs_f64() / 1e9
}
