//! Measures collectives between processes of this machine:
//! `cargo run --release -p comm --example collectives -- [RANKS] [shm|tcp]`.

use comm::store::Store;
use comm::{bench, shm, tcp};
use device::Device;
use device::cpu::Cpu;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const RANK: &str = "COLLECTIVES_RANK";
const STORE: &str = "COLLECTIVES_STORE";

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let ranks: usize = arguments.next().map_or(Ok(2), |ranks| ranks.parse())?;
    let backend = arguments.next().unwrap_or("shm".into());
    match std::env::var(RANK) {
        Ok(rank) => measure(rank.parse()?, ranks, &backend),
        Err(_) => start(ranks, &backend),
    }
}

/// Starts this program once more as each of the ranks.
fn start(ranks: usize, backend: &str) -> Result<()> {
    println!("copy {:.2} GB/s", bench::copy_gigabytes_per_second(64 << 20));
    let server = Store::serve("127.0.0.1:0")?;
    let start = |rank: usize| {
        Command::new(std::env::current_exe()?)
            .args([ranks.to_string().as_str(), backend])
            .env(RANK, rank.to_string())
            .env(STORE, server.address().to_string())
            .spawn()
    };
    let children = (0..ranks).map(start).collect::<std::io::Result<Vec<_>>>()?;
    for mut child in children {
        if !child.wait()?.success() {
            return Err("a rank failed".into());
        }
    }
    Ok(())
}

fn measure(rank: usize, ranks: usize, backend: &str) -> Result<()> {
    let timeout = Duration::from_secs(60);
    let store = Arc::new(Store::connect(&std::env::var(STORE)?, timeout)?);
    let group = match backend {
        "shm" => shm::join(store, "bench", rank, ranks, timeout)?,
        "tcp" => tcp::join(store, "bench", rank, ranks, timeout)?,
        other => return Err(format!("there is no backend {other}").into()),
    };
    let device: Arc<dyn Device> = Arc::new(Cpu::new());
    let measurements = bench::collectives(&*group, &device, &bench::SIZES)?;
    for measurement in measurements.iter().filter(|_| rank == 0) {
        println!("{backend} {measurement}");
    }
    Ok(())
}
