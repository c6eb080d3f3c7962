//! NVIDIA GPUs, loaded at run time.
//!
//! The binary links no CUDA library: the driver, NVRTC and cuBLASLt are found when a device is opened, and
//! [`present`] says what is missing. Kernels are the `.cu` files beside this one; they include no headers, are
//! compiled by NVRTC for the GPU at hand when first used, and are cached on disk.
//!
//! Foreign code has three levels here: `cudarc`'s raw bindings, the checked and owned handles of [`driver`],
//! [`stream`], [`nvrtc`] and [`module`], and the safe kernels above them.

mod attention;
mod choice;
pub mod cudnn;
mod device;
mod driver;
mod flash;
mod flat;
mod gemm;
mod inventory;
mod library;
mod module;
mod norms;
mod nvrtc;
mod rows;
mod search;
mod staging;
mod stream;
#[cfg(test)]
mod tests;

pub use attention::AttentionKernels;
pub use device::{Cuda, Sums};
pub use inventory::{Gpu, GpuReport, LibraryReport, gpus, libraries};
pub use library::{device_count, present};
pub use search::{load_library, loaded_from};
pub use stream::{Event, Stream, TimedEvent};
