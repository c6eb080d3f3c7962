//! `devices`: what this machine offers, and what is missing.

use crate::show;
use device::cuda::{self, GpuReport, LibraryReport};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;

/// What was found.
#[derive(Clone, Debug)]
pub struct Inventory {
    pub cores: usize,
    pub simd: Vec<&'static str>,
    pub memory_bytes: Option<usize>,
    pub gpus: Vec<GpuReport>,
    pub libraries: Vec<LibraryReport>,
}

impl Inventory {
    pub fn take() -> Self {
        let mut libraries = cuda::libraries();
        libraries.push(nccl());
        Inventory {
            cores: std::thread::available_parallelism().map_or(1, |cores| cores.get()),
            simd: simd(),
            memory_bytes: memory_bytes(),
            gpus: cuda::gpus(),
            libraries,
        }
    }

    pub fn text(&self) -> String {
        let mut out = String::new();
        let simd = if self.simd.is_empty() { "no SIMD known".to_string() } else { self.simd.join(", ") };
        let memory = self.memory_bytes.map_or(String::new(), |bytes| format!(", {} of memory", size(bytes)));
        let _ = writeln!(out, "cpu       {} cores, {simd}{memory}", self.cores);
        for gpu in &self.gpus {
            let what = match &gpu.state {
                Ok(gpu) => format!(
                    "{}, sm_{}, {} multiprocessors, {} of {} free",
                    gpu.name,
                    gpu.arch,
                    gpu.multiprocessors,
                    size(gpu.free_bytes),
                    size(gpu.total_bytes)
                ),
                Err(why) => format!("cannot be used: {why}"),
            };
            let _ = writeln!(out, "cuda:{:<4} {what}", gpu.ordinal);
        }
        if self.gpus.is_empty() {
            let _ = writeln!(out, "cuda      no GPU");
        }
        let _ = writeln!(out, "\nlibraries");
        for library in &self.libraries {
            let _ = match (&library.version, &library.path) {
                (Ok(version), Some(path)) => {
                    writeln!(out, "  {:<12} {version:<10} {}", library.name, path.display())
                }
                (Ok(version), None) => writeln!(out, "  {:<12} {version}", library.name),
                (Err(why), _) => {
                    let _ = writeln!(out, "  {:<12} missing: {why}", library.name);
                    writeln!(out, "  {:<12} so {}", "", library.without)
                }
            };
        }
        out
    }

    pub fn json(&self) -> Value {
        let gpu = |gpu: &GpuReport| match &gpu.state {
            Ok(found) => json!({
                "ordinal": gpu.ordinal, "name": found.name, "arch": found.arch,
                "multiprocessors": found.multiprocessors, "free_bytes": found.free_bytes,
                "total_bytes": found.total_bytes,
            }),
            Err(why) => json!({"ordinal": gpu.ordinal, "error": why}),
        };
        let library = |library: &LibraryReport| match &library.version {
            Ok(version) => {
                let path = library.path.as_ref().map(|path| path.display().to_string());
                json!({"name": library.name, "version": version, "path": path})
            }
            Err(why) => json!({"name": library.name, "error": why, "without": library.without}),
        };
        json!({
            "cpu": {"cores": self.cores, "simd": self.simd, "memory_bytes": self.memory_bytes},
            "gpus": self.gpus.iter().map(gpu).collect::<Vec<_>>(),
            "libraries": self.libraries.iter().map(library).collect::<Vec<_>>(),
        })
    }
}

fn size(bytes: usize) -> String {
    show::bytes(bytes).trim().to_string()
}

fn nccl() -> LibraryReport {
    let version = comm::nccl::version().map(|(major, minor, patch)| format!("{major}.{minor}.{patch}"));
    LibraryReport {
        name: "NCCL",
        version: version.map_err(|error| error.to_string()),
        path: cuda::loaded_from("libnccl.so"),
        without: "a run has one GPU",
    }
}

/// Vector instructions that the CPU's kernels have a use for.
fn simd() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    let found = [
        ("AVX2", is_x86_feature_detected!("avx2")),
        ("FMA", is_x86_feature_detected!("fma")),
        ("F16C", is_x86_feature_detected!("f16c")),
        ("AVX-512", is_x86_feature_detected!("avx512f")),
        ("AVX-512 BF16", is_x86_feature_detected!("avx512bf16")),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    let found: [(&'static str, bool); 0] = [];
    found.into_iter().filter(|(_, there)| *there).map(|(name, _)| name).collect()
}

/// The machine's memory, or what a container leaves of it.
fn memory_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let limit = PathBuf::from("/sys/fs/cgroup/memory.max");
    let limit = std::fs::read_to_string(limit).ok().and_then(|text| text.trim().parse().ok());
    Some((kib * 1024).min(limit.unwrap_or(usize::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Holds with GPUs and without.
    #[test]
    fn everything_that_was_looked_for_is_told_found_or_missing() {
        let inventory = Inventory::take();
        let (text, json) = (inventory.text(), inventory.json());
        assert_eq!(json["cpu"]["cores"], inventory.cores);
        let libraries = json["libraries"].as_array().unwrap();
        let names = ["CUDA driver", "NVRTC", "cuBLASLt", "cuDNN", "NCCL"];
        assert_eq!(
            libraries.iter().map(|library| library["name"].as_str().unwrap()).collect::<Vec<_>>(),
            names
        );
        for library in libraries {
            let name = library["name"].as_str().unwrap();
            assert!(text.contains(name));
            match library["error"].as_str() {
                None => assert!(library["version"].as_str().unwrap().contains('.'), "{library}"),
                Some(why) => assert!(text.contains(&format!("{name:<12} missing: {why}")), "{text}"),
            }
        }
        assert_eq!(text.contains("no GPU\n"), inventory.gpus.is_empty());
    }
}
