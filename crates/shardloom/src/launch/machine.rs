//! What this machine offers to ranks: its name, its GPUs (counted without touching CUDA), its cores and how
//! they are divided.

use crate::{Error, Result};
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;

/// `bytes` random bytes in hexadecimal.
pub fn random_hex(bytes: usize) -> Result<String> {
    let path = "/dev/urandom";
    let mut random = vec![0; bytes];
    let read = fs::File::open(path).and_then(|mut file| file.read_exact(&mut random));
    read.map_err(|e| Error::file(path, e))?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

pub fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "this node".to_string(),
        name => name.to_string(),
    }
}

/// Ranks that --nproc-per-node asks for.
pub fn num_ranks(text: &str) -> std::result::Result<usize, String> {
    let wrong = |what: &str| Err(format!("--nproc-per-node {text}: {what}"));
    let count = match text {
        "cpu" => num_cores(),
        "gpu" => num_gpus(),
        "auto" => Some(num_gpus()).filter(|gpus| *gpus > 0).unwrap_or_else(num_cores),
        _ => match text.parse() {
            Ok(count) => count,
            Err(_) => return wrong("it is a number, auto, gpu or cpu"),
        },
    };
    match count {
        0 if text == "gpu" => wrong("this machine shows no NVIDIA GPU"),
        0 => wrong("there must be one at least"),
        count => Ok(count),
    }
}

fn num_cores() -> usize {
    comm::process::allowed_cores().map_or(1, |cores| cores.len())
}

/// GPUs that the driver shows, or as many of them as CUDA_VISIBLE_DEVICES leaves.
fn num_gpus() -> usize {
    let names = |dir: &str| -> Vec<String> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let shown = match names("/proc/driver/nvidia/gpus").len() {
        0 => {
            let number =
                |name: &String| name.strip_prefix("nvidia").is_some_and(|n| n.parse::<u32>().is_ok());
            names("/dev").iter().filter(|name| number(name)).count()
        }
        count => count,
    };
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(visible) => visible.split(',').filter(|id| !matches!(id.trim(), "" | "-1")).count().min(shown),
        Err(_) => shown,
    }
}

/// The cores of each of `num_ranks` ranks, and nothing where there are too few to divide.
pub fn divided_cores(num_ranks: usize) -> Vec<Vec<usize>> {
    let cores = comm::process::allowed_cores().unwrap_or_default();
    let mut nodes: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    let numa = numa_nodes();
    for core in cores {
        nodes.entry(numa.get(&core).copied().unwrap_or(0)).or_default().push(core);
    }
    for cores in nodes.values_mut() {
        // Threads of one core side by side, so that they go to the same rank.
        cores.sort_by_key(|core| (first_sibling(*core), *core));
    }
    divide(&Vec::from_iter(nodes.into_values()), num_ranks)
}

/// Divides cores, given by NUMA node, so that no rank's cores span nodes where there are as many ranks as nodes.
fn divide(nodes: &[Vec<usize>], num_ranks: usize) -> Vec<Vec<usize>> {
    let num_cores: usize = nodes.iter().map(Vec::len).sum();
    if num_ranks < 2 || num_cores < num_ranks {
        return vec![Vec::new(); num_ranks];
    }
    if num_ranks < nodes.len() {
        let of_rank = |rank: usize| {
            let first = (rank * nodes.len()).div_ceil(num_ranks);
            nodes[first..((rank + 1) * nodes.len()).div_ceil(num_ranks)].concat()
        };
        return (0..num_ranks).map(of_rank).collect();
    }
    let mut shares = Vec::with_capacity(num_ranks);
    for (number, cores) in nodes.iter().enumerate() {
        let first = number * num_ranks / nodes.len();
        let here = (number + 1) * num_ranks / nodes.len() - first;
        for i in 0..here {
            // Nodes may differ in size: ranks of one with too few cores share them all.
            let range = i * cores.len() / here..(i + 1) * cores.len() / here;
            shares.push(if cores.len() < here { cores.clone() } else { cores[range].to_vec() });
        }
    }
    shares
}

/// NUMA node by core.
fn numa_nodes() -> BTreeMap<usize, usize> {
    let mut nodes = BTreeMap::new();
    for entry in fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(number) = name.strip_prefix("node").and_then(|n| n.parse::<usize>().ok()) else { continue };
        let list = fs::read_to_string(entry.path().join("cpulist")).unwrap_or_default();
        nodes.extend(core_list(&list).into_iter().map(|core| (core, number)));
    }
    nodes
}

fn first_sibling(core: usize) -> usize {
    let path = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
    let list = fs::read_to_string(path).unwrap_or_default();
    core_list(&list).first().copied().unwrap_or(core)
}

/// The kernel's "0-3,8".
fn core_list(text: &str) -> Vec<usize> {
    let mut cores = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            cores.extend(first..=last);
        }
    }
    cores
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_divided_evenly_and_within_nodes() {
        let one = [vec![0, 1, 2, 3, 4]];
        assert_eq!(divide(&one, 2), [vec![0, 1], vec![2, 3, 4]]);
        // One rank has all cores, and more ranks than cores share them.
        assert_eq!(divide(&one, 1), vec![Vec::<usize>::new()]);
        assert_eq!(divide(&one, 6), vec![Vec::<usize>::new(); 6]);
        let two = [vec![0, 1, 2, 3], vec![4, 5, 6, 7]];
        assert_eq!(divide(&two, 4), [vec![0, 1], vec![2, 3], vec![4, 5], vec![6, 7]]);
        assert_eq!(divide(&two, 3), [vec![0, 1, 2, 3], vec![4, 5], vec![6, 7]]);
        let four = [vec![0], vec![1], vec![2], vec![3]];
        assert_eq!(divide(&four, 2), [vec![0, 1], vec![2, 3]]);
        assert_eq!(divide(&four, 3), [vec![0, 1], vec![2], vec![3]]);
        let uneven = [vec![0], vec![1, 2, 3]];
        assert_eq!(divide(&uneven, 4), [vec![0], vec![0], vec![1], vec![2, 3]]);
    }

    #[test]
    fn lists_of_cores() {
        assert_eq!(core_list("0-2,5\n"), [0, 1, 2, 5]);
        assert!(core_list("").is_empty());
    }
}
