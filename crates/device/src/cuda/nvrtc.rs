//! Compiling kernels for the GPU at hand, and remembering the result on disk.

use super::library;
use crate::{Error, Result};
use cudarc::nvrtc::sys::{self, nvrtcResult};
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

const PRELUDE: &str = include_str!("kernels/prelude.cu");

/// One source of kernels.
#[derive(Debug)]
pub(super) struct Program {
    pub name: &'static str,
    text: &'static str,
    options: &'static [&'static str],
}

/// Rounding happens where the source says: products are not fused into sums behind its back.
const AS_WRITTEN: &[&str] = &["--fmad=false"];

/// One type and size of heads a program: most runs need one of them.
macro_rules! flash {
    ($dtype:literal, $head_dim:literal) => {
        [concat!("--define-macro=FLASH_TYPE=", $dtype), concat!("--define-macro=FLASH_HEAD_DIM=", $head_dim)]
    };
}

macro_rules! programs {
    ($($constant:ident = $name:literal, $($file:literal)+, $options:expr;)*) => {
        $(pub(super) static $constant: Program = Program {
            name: $name,
            text: concat!($(include_str!(concat!("kernels/", $file))),+),
            options: $options,
        };)*

        #[cfg(test)]
        static ALL: &[&Program] = &[$(&$constant),*];
    };
}
programs! {
    ACTIVATION = "activation", "activation.cu", AS_WRITTEN;
    ADAMW = "adamw", "adamw.cu", AS_WRITTEN;
    ATTENTION_F32 = "attention_f32", "attention_shape.cu" "attention.cu", &["--define-macro=ATTENTION_F32"];
    ATTENTION_BF16 = "attention_bf16", "attention_shape.cu" "attention.cu", &["--define-macro=ATTENTION_BF16"];
    ATTENTION_F16 = "attention_f16", "attention_shape.cu" "attention.cu", &["--define-macro=ATTENTION_F16"];
    BIAS = "bias", "bias.cu", AS_WRITTEN;
    CACHE = "cache", "cache.cu", &[];
    DOCUMENTS = "documents", "documents.cu", &[];
    ELEMENTWISE = "elementwise", "elementwise.cu", AS_WRITTEN;
    EMBEDDING = "embedding", "embedding.cu", AS_WRITTEN;
    FLASH_BF16_64 = "flash_bf16_64", "attention_shape.cu" "tensor_cores.cu" "flash.cu", &flash!("bf16", "64");
    FLASH_BF16_80 = "flash_bf16_80", "attention_shape.cu" "tensor_cores.cu" "flash.cu", &flash!("bf16", "80");
    FLASH_BF16_96 = "flash_bf16_96", "attention_shape.cu" "tensor_cores.cu" "flash.cu", &flash!("bf16", "96");
    FLASH_BF16_128 = "flash_bf16_128", "attention_shape.cu" "tensor_cores.cu" "flash.cu", &flash!("bf16", "128");
    FLASH_F16_64 = "flash_f16_64", "attention_shape.cu" "tensor_cores.cu" "flash.cu", &flash!("f16", "64");
    FLASH_F16_80 = "flash_f16_80", "attention_shape.cu" "tensor_cores.cu" "flash.cu", &flash!("f16", "80");
    FLASH_F16_96 = "flash_f16_96", "attention_shape.cu" "tensor_cores.cu" "flash.cu", &flash!("f16", "96");
    FLASH_F16_128 = "flash_f16_128", "attention_shape.cu" "tensor_cores.cu" "flash.cu", &flash!("f16", "128");
    HEAD_NORM = "head_norm", "head_norm.cu", AS_WRITTEN;
    LAYER_NORM = "layer_norm", "layer_norm.cu", AS_WRITTEN;
    LOSS = "loss", "loss.cu", AS_WRITTEN;
    NORM = "norm", "norm.cu", AS_WRITTEN;
    POINTWISE = "pointwise", "pointwise.cu", AS_WRITTEN;
    REDUCE = "reduce", "reduce.cu", AS_WRITTEN;
}

/// What a program is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Target {
    /// Machine code for exactly this architecture.
    Machine(u32),
    /// PTX that the driver translates, for GPUs newer than the compiler.
    Virtual(u32),
}

impl Target {
    /// The best this NVRTC can do for an architecture.
    pub fn for_arch(arch: u32) -> Result<Self> {
        let supported = supported_archs()?;
        if supported.contains(&arch) {
            return Ok(Target::Machine(arch));
        }
        let older = supported.into_iter().filter(|&other| other < arch).max();
        older.map(Target::Virtual).ok_or_else(|| Error::Unavailable {
            library: "NVRTC",
            what: format!("this version compiles nothing that runs on sm_{arch}"),
        })
    }

    fn option(self) -> String {
        match self {
            Target::Machine(arch) => format!("--gpu-architecture=sm_{arch}"),
            Target::Virtual(arch) => format!("--gpu-architecture=compute_{arch}"),
        }
    }
}

fn check(call: &'static str, answer: nvrtcResult) -> Result<()> {
    if answer == nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    Err(Error::Driver { call, what: format!("{answer:?}") })
}

fn supported_archs() -> Result<Vec<u32>> {
    library::nvrtc_ready()?;
    let mut count: c_int = 0;
    // SAFETY: the pointer is to a local.
    check("nvrtcGetNumSupportedArchs", unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) })?;
    let mut archs = vec![0 as c_int; count.max(0) as usize];
    // SAFETY: there is room for as many as it said.
    check("nvrtcGetSupportedArchs", unsafe { sys::nvrtcGetSupportedArchs(archs.as_mut_ptr()) })?;
    Ok(archs.into_iter().map(|arch| arch as u32).collect())
}

pub(super) fn version() -> Result<(c_int, c_int)> {
    library::nvrtc_ready()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the pointers are to locals.
    check("nvrtcVersion", unsafe { sys::nvrtcVersion(&mut major, &mut minor) })?;
    Ok((major, minor))
}

/// A program of NVRTC, destroyed when dropped.
struct Handle(sys::nvrtcProgram);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created by `nvrtcCreateProgram`, destroyed once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

impl Handle {
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program lives and the pointer is to a local.
        let sized = unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut size) };
        let mut log = vec![0u8; size];
        // SAFETY: there is room for as many bytes as it said.
        let read = unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        if sized != nvrtcResult::NVRTC_SUCCESS || read != nvrtcResult::NVRTC_SUCCESS {
            return "no log".into();
        }
        String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_string()
    }

    fn image(&self, target: Target) -> Result<Vec<u8>> {
        let mut size = 0;
        let machine = matches!(target, Target::Machine(_));
        // SAFETY: the program lives and was compiled; the pointer is to a local.
        let sized = unsafe {
            if machine {
                sys::nvrtcGetCUBINSize(self.0, &mut size)
            } else {
                sys::nvrtcGetPTXSize(self.0, &mut size)
            }
        };
        check("nvrtcGetCUBINSize", sized)?;
        let mut image = vec![0u8; size];
        let to = image.as_mut_ptr().cast::<c_char>();
        // SAFETY: there is room for as many bytes as it said.
        let read =
            unsafe { if machine { sys::nvrtcGetCUBIN(self.0, to) } else { sys::nvrtcGetPTX(self.0, to) } };
        check("nvrtcGetCUBIN", read)?;
        Ok(image)
    }
}

impl Program {
    fn source(&self) -> String {
        format!("{PRELUDE}\n#line 1 \"{}.cu\"\n{}", self.name, self.text)
    }

    fn all_options(&self, target: Target) -> Vec<String> {
        let fixed = ["--std=c++17".to_string(), target.option()];
        fixed.into_iter().chain(self.options.iter().map(|option| option.to_string())).collect()
    }

    /// Compiles, whatever the cache holds.
    fn compile(&self, target: Target) -> Result<Vec<u8>> {
        library::nvrtc_ready()?;
        let text =
            |s: String| CString::new(s).map_err(|_| Error::argument("nvrtc", "a source holds a zero byte"));
        let (source, name) = (text(self.source())?, text(format!("{}.cu", self.name))?);
        let options = self.all_options(target).into_iter().map(text).collect::<Result<Vec<_>>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the strings are terminated and outlive the program; there are no headers.
        let created = unsafe {
            let none = std::ptr::null();
            sys::nvrtcCreateProgram(&mut raw, source.as_ptr(), name.as_ptr(), 0, none, none)
        };
        check("nvrtcCreateProgram", created)?;
        let program = Handle(raw);
        // SAFETY: the program lives; there are as many options as said.
        let answer =
            unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as c_int, pointers.as_ptr()) };
        if answer != nvrtcResult::NVRTC_SUCCESS {
            let what = format!("{answer:?} in {}.cu for {target:?}: {}", self.name, program.log());
            return Err(Error::Driver { call: "nvrtcCompileProgram", what });
        }
        program.image(target)
    }

    /// What this process or an earlier one has compiled.
    pub fn cached(&self, target: Target) -> Option<Arc<[u8]>> {
        if let Some(image) = images().get(&(self.name, target)) {
            return Some(image.clone());
        }
        std::fs::read(self.cache_path(target)?).ok().filter(|image| looks_whole(image)).map(Arc::from)
    }

    /// Compiles, unless this process has done so meanwhile. Threads wait for each other here, rather than
    /// compile the same program side by side.
    pub fn compile_and_keep(&self, target: Target) -> Result<Arc<[u8]>> {
        let mut images = images();
        if let Some(image) = images.get(&(self.name, target)) {
            return Ok(image.clone());
        }
        let image: Arc<[u8]> = self.compile(target)?.into();
        images.insert((self.name, target), image.clone());
        if let Some(path) = self.cache_path(target) {
            store(&path, &image);
        }
        Ok(image)
    }

    /// Where the compiled program is kept: named by everything that decides its contents. None where there is
    /// no place for a cache.
    fn cache_path(&self, target: Target) -> Option<PathBuf> {
        let (major, minor) = version().ok()?;
        let key = format!("{}\n{}\n{major}.{minor}", self.source(), self.all_options(target).join(" "));
        cache_path(self.name, &key, "bin")
    }
}

/// A file of the cache, named by everything that decides its contents. None where there is no place for a cache.
pub(super) fn cache_path(name: &str, key: &str, extension: &str) -> Option<PathBuf> {
    Some(cache_folder()?.join(format!("{name}-{:016x}{:016x}.{extension}", hash(key, 0), hash(key, 1))))
}

type Images = HashMap<(&'static str, Target), Arc<[u8]>>;

/// What this process has compiled.
fn images() -> MutexGuard<'static, Images> {
    static IMAGES: LazyLock<Mutex<Images>> = LazyLock::new(Mutex::default);
    IMAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A cubin is an ELF file; PTX ends with a zero.
fn looks_whole(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF") || image.ends_with(b"\0")
}

fn cache_folder() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = from("XDG_CACHE_HOME").or_else(|| Some(from("HOME")?.join(".cache")))?;
    Some(base.join("shardloom"))
}

/// FNV-1a: stable across builds and machines, which the standard hasher does not promise to be.
fn hash(text: &str, seed: u64) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325_u64 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    text.bytes().fold(start, |h, byte| (h ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Keeps bytes for the next process. A cache that cannot be written is no error: it costs seconds.
pub(super) fn store(path: &Path, image: &[u8]) {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let unique = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let temporary = path.with_extension(format!("{unique}.tmp"));
    let written = path
        .parent()
        .map_or(Ok(()), std::fs::create_dir_all)
        .and_then(|()| std::fs::write(&temporary, image))
        .and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs NVRTC but no GPU.
    #[test]
    fn every_program_compiles_for_ampere_hopper_and_blackwell() {
        if let Err(error) = library::nvrtc_ready() {
            println!("skipped: {error}");
            return;
        }
        for arch in [80, 90, 100] {
            for program in ALL {
                // Attentions are few sources for many types and sizes, and slow to compile: all of them for
                // one GPU is enough, and f16, which differs in its instructions alone, in one size.
                let other = |one: &Program| program.text == one.text && program.name != one.name;
                let f16 = program.name.starts_with("flash_f16") && program.name != FLASH_F16_128.name;
                if f16 || arch != 90 && (other(&ATTENTION_BF16) || other(&FLASH_BF16_128)) {
                    continue;
                }
                let image = program.compile(Target::Machine(arch)).unwrap();
                assert!(image.starts_with(b"\x7fELF"), "{} for sm_{arch} is not a cubin", program.name);
            }
        }
        let ptx = REDUCE.compile(Target::Virtual(80)).unwrap();
        assert!(String::from_utf8_lossy(&ptx).contains("sum_partials"));
    }

    #[test]
    fn an_architecture_beyond_the_compiler_gets_ptx() {
        if library::nvrtc_ready().is_err() {
            println!("skipped: no NVRTC");
            return;
        }
        assert_eq!(Target::for_arch(90).unwrap(), Target::Machine(90));
        assert!(matches!(Target::for_arch(9990).unwrap(), Target::Virtual(arch) if arch >= 90));
    }

    #[test]
    fn a_cache_without_a_folder_is_no_error() {
        store(Path::new("/proc/no/such/place.bin"), b"x");
        assert_ne!(hash("a", 0), hash("a", 1));
        assert_ne!(hash("a", 0), hash("b", 0));
    }
}
