//! What there is of CUDA on this machine: libraries with their files and versions, and GPUs. Never panics.

use super::driver::Context;
use super::{gemm, library, nvrtc, search};
use cudarc::driver::sys;
use std::ffi::c_int;
use std::path::PathBuf;

/// A library that was looked for.
#[derive(Clone, Debug)]
pub struct LibraryReport {
    pub name: &'static str,
    /// Its version, or why it cannot be used.
    pub version: Result<String, String>,
    /// The file it was loaded from.
    pub path: Option<PathBuf>,
    /// What the absence of it means.
    pub without: &'static str,
}

/// One GPU.
#[derive(Clone, Debug)]
pub struct GpuReport {
    pub ordinal: usize,
    /// Name, compute capability as in 90, multiprocessors, (free, total) bytes; or why it cannot be used.
    pub state: Result<Gpu, String>,
}

#[derive(Clone, Debug)]
pub struct Gpu {
    pub name: String,
    pub arch: u32,
    pub multiprocessors: u32,
    pub free_bytes: usize,
    pub total_bytes: usize,
}

/// The libraries of a GPU rank, NCCL aside.
pub fn libraries() -> Vec<LibraryReport> {
    let report = |name, stem, version: crate::Result<String>, without| LibraryReport {
        name,
        version: version.map_err(|error| error.to_string()),
        path: search::loaded_from(stem),
        without,
    };
    vec![
        report("CUDA driver", "libcuda.so", driver_version(), "no GPU can be used: the CPU computes"),
        report("NVRTC", "libnvrtc.so", nvrtc_version(), "no GPU can be used: kernels cannot be compiled"),
        report("cuBLASLt", "libcublasLt.so", cublaslt_version(), "no GPU can be used: there are no products"),
        report(
            "cuDNN",
            "libcudnn.so",
            cudnn_version(),
            "attention on GPUs is our own kernels', which are slower",
        ),
    ]
}

/// Every GPU that the driver shows.
pub fn gpus() -> Vec<GpuReport> {
    (0..library::device_count()).map(|ordinal| GpuReport { ordinal, state: gpu(ordinal) }).collect()
}

fn gpu(ordinal: usize) -> Result<Gpu, String> {
    let opened = Context::open(ordinal).and_then(|context| Ok((context.memory_info()?, context)));
    let ((free_bytes, total_bytes), context) = opened.map_err(|error| error.to_string())?;
    let (name, arch, multiprocessors) = (context.name.clone(), context.arch, context.multiprocessors);
    Ok(Gpu { name, arch, multiprocessors, free_bytes, total_bytes })
}

fn driver_version() -> crate::Result<String> {
    library::driver()?;
    let mut version: c_int = 0;
    if library::driver_has("cuDriverGetVersion") {
        // SAFETY: the pointer is to a local; the symbol is there.
        let answer = unsafe { sys::cuDriverGetVersion(&mut version) };
        super::driver::check("cuDriverGetVersion", answer)?;
    }
    Ok(format!("CUDA {}.{}", version / 1000, version % 1000 / 10))
}

fn nvrtc_version() -> crate::Result<String> {
    nvrtc::version().map(|(major, minor)| format!("{major}.{minor}"))
}

fn cublaslt_version() -> crate::Result<String> {
    library::cublaslt_ready()?;
    let version = gemm::library_version();
    Ok(format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100))
}

fn cudnn_version() -> crate::Result<String> {
    use cudarc::cudnn::sys;
    let missing = |what: &str| crate::Error::Unavailable { library: "cuDNN", what: what.into() };
    library::load_cudnn();
    // SAFETY: loading a library runs its initialisers, which is what the user's installation is for.
    if !unsafe { sys::is_culib_present() } {
        return Err(missing("no libcudnn found"));
    }
    // SAFETY: present, as just seen; the symbol is looked up before it is called, with the type cudnn.h declares.
    let version = unsafe {
        let symbol = sys::culib().get::<unsafe extern "C" fn() -> usize>(b"cudnnGetVersion\0");
        symbol.map(|version| version()).map_err(|_| missing("it has no cudnnGetVersion"))?
    };
    Ok(format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_library_is_reported_with_a_version_or_a_reason() {
        let libraries = libraries();
        assert_eq!(libraries.len(), 4);
        for library in libraries {
            match &library.version {
                Ok(version) => assert!(version.contains('.'), "{}: {version}", library.name),
                Err(why) => assert!(why.contains("not available") || why.contains("failed"), "{why}"),
            }
        }
        assert_eq!(gpus().len(), library::device_count());
    }
}
