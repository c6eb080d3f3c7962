//! Compiled programs in a context, and launching their kernels.

use super::driver::{Context, check};
use super::library;
use super::nvrtc::{Program, Target};
use super::stream::Stream;
use crate::{Buffer, Error, Result};
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ffi::{CString, c_uint, c_void};
use std::sync::{Arc, Mutex, PoisonError};

/// Shared memory that needs no permission.
const FREE_SHARED_BYTES: usize = 48 << 10;

/// One kernel argument, in the eight bytes it travels in. Kernels take pointers, i64, float and double only.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arg {
    bits: u64,
    bytes: usize,
}

impl Arg {
    fn wide(bits: u64) -> Self {
        Arg { bits, bytes: 8 }
    }
}

impl From<&Buffer> for Arg {
    fn from(buffer: &Buffer) -> Self {
        Arg::wide(buffer.address() as u64)
    }
}

impl From<Option<&Buffer>> for Arg {
    fn from(buffer: Option<&Buffer>) -> Self {
        buffer.map_or(Arg::wide(0), Arg::from)
    }
}

impl From<usize> for Arg {
    fn from(value: usize) -> Self {
        Arg::wide(value as u64)
    }
}

impl From<bool> for Arg {
    fn from(value: bool) -> Self {
        Arg::wide(value as u64)
    }
}

impl From<f64> for Arg {
    fn from(value: f64) -> Self {
        Arg::wide(value.to_bits())
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        // A kernel reads the first four bytes of the eight; the hosts of GPUs are little-endian.
        Arg { bits: value.to_bits() as u64, bytes: 4 }
    }
}

/// The arguments of a kernel, in its order.
macro_rules! args {
    ($($arg:expr),* $(,)?) => { &[$($crate::cuda::module::Arg::from($arg)),*] };
}
pub(super) use args;

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    pub grid: [usize; 2],
    /// Threads of a block: a multiple of 32, as the block-wide sums assume.
    pub block: usize,
    pub shared_bytes: usize,
}

impl Launch {
    pub fn new(grid: usize, block: usize) -> Self {
        Launch { grid: [grid, 1], block, shared_bytes: 0 }
    }
}

/// A loaded image, unloaded when dropped.
struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: modules may be used from any thread in which their context is current.
unsafe impl Send for Module {}

impl Module {
    /// `image` is a cubin, or PTX with its terminating zero.
    fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self> {
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the image is whole: it came from the compiler, or from a file renamed into place after it
        // was written; the driver checks its header and copies it.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut raw, image.as_ptr().cast()) })?;
        Ok(Module { context: context.clone(), raw })
    }

    /// From the cache where it holds a usable image, else compiled.
    fn open(context: &Arc<Context>, program: &'static Program) -> Result<Self> {
        let target = Target::for_arch(context.arch)?;
        if let Some(module) = program.cached(target).and_then(|image| Module::load(context, &image).ok()) {
            return Ok(module);
        }
        Module::load(context, &program.compile_and_keep(target)?)
    }

    fn function(&self, name: &str) -> Result<Function> {
        self.context.enter()?;
        let terminated =
            CString::new(name).map_err(|_| Error::argument("kernel", "a name holds a zero byte"))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module lives and the name is terminated.
        let answer = unsafe { sys::cuModuleGetFunction(&mut raw, self.raw, terminated.as_ptr()) };
        check("cuModuleGetFunction", answer)
            .map_err(|error| Error::argument("kernel", format!("{name}: {error}")))?;
        Ok(Function { raw, params: parameter_sizes(raw).map(Arc::from) })
    }
}

/// Bytes of each parameter of a kernel, where the driver can tell (from CUDA 12.4 on).
fn parameter_sizes(function: sys::CUfunction) -> Option<Vec<usize>> {
    if !library::driver_has("cuFuncGetParamInfo") {
        return None;
    }
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function lives and the pointers are to locals; past the last parameter it answers with an
        // error, which ends the loop.
        let answer = unsafe { sys::cuFuncGetParamInfo(function, sizes.len(), &mut offset, &mut size) };
        if answer != sys::CUresult::CUDA_SUCCESS {
            // Every kernel here has parameters: none means that the driver would not say.
            return Some(sizes).filter(|sizes| !sizes.is_empty());
        }
        sizes.push(size);
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // Kernels of the module may still be running.
        if self.context.synchronize().is_ok() {
            // SAFETY: loaded by `cuModuleLoadData`, unloaded once, nothing of it runs.
            let _ = unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

#[derive(Clone)]
struct Function {
    raw: sys::CUfunction,
    /// None where the driver cannot tell.
    params: Option<Arc<[usize]>>,
}

impl Function {
    /// The driver reads as many arguments as the kernel has parameters, so their number and widths must fit.
    fn check(&self, name: &str, args: &[Arg]) -> Result<()> {
        let Some(params) = &self.params else { return Ok(()) };
        if args.iter().map(|arg| arg.bytes).eq(params.iter().copied()) {
            return Ok(());
        }
        let given: Vec<usize> = args.iter().map(|arg| arg.bytes).collect();
        Err(Error::argument(
            "kernel",
            format!("{name} takes parameters of {params:?} bytes, given {given:?}"),
        ))
    }
}

// SAFETY: functions may be launched from any thread in which their context is current.
unsafe impl Send for Function {}

/// The programs of a device, each loaded when first used.
pub(super) struct Modules {
    context: Arc<Context>,
    loaded: Mutex<Loaded>,
}

#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, Module>,
    functions: HashMap<String, Function>,
}

impl Modules {
    pub fn new(context: &Arc<Context>) -> Self {
        Modules { context: context.clone(), loaded: Mutex::default() }
    }

    fn function(&self, program: &'static Program, name: &str) -> Result<Function> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = loaded.functions.get(name) {
            return Ok(function.clone());
        }
        if !loaded.modules.contains_key(program.name) {
            let module = Module::open(&self.context, program)?;
            loaded.modules.insert(program.name, module);
        }
        let function = loaded.modules[program.name].function(name)?;
        loaded.functions.insert(name.to_string(), function.clone());
        Ok(function)
    }

    /// Issues a kernel. Whoever calls this has checked that the buffers are as long as the kernel assumes:
    /// a mistake would spoil the device's memory or its context, never the host's.
    pub fn launch(
        &self,
        stream: &Stream,
        program: &'static Program,
        name: &str,
        launch: Launch,
        args: &[Arg],
    ) -> Result<()> {
        let function = self.function(program, name)?;
        function.check(name, args)?;
        self.context.enter()?;
        if launch.shared_bytes > FREE_SHARED_BYTES {
            self.allow_shared(&function, name, launch.shared_bytes)?;
        }
        let dim = |n: usize| {
            c_uint::try_from(n).map_err(|_| Error::argument("kernel", format!("{name}: {n} blocks")))
        };
        let (x, y, block) = (dim(launch.grid[0])?, dim(launch.grid[1])?, dim(launch.block)?);
        let mut values: Vec<u64> = args.iter().map(|arg| arg.bits).collect();
        let mut pointers: Vec<*mut c_void> =
            values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        // SAFETY: the driver reads one value per parameter of the kernel, each at most eight bytes, before it
        // returns; context, function and stream live.
        let answer = unsafe {
            sys::cuLaunchKernel(
                function.raw,
                x,
                y,
                1,
                block,
                1,
                1,
                launch.shared_bytes as c_uint,
                stream.handle(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", answer).map_err(|error| Error::Driver {
            call: "cuLaunchKernel",
            what: format!("{name} with {launch:?}: {error}"),
        })
    }

    fn allow_shared(&self, function: &Function, name: &str, bytes: usize) -> Result<()> {
        if bytes > self.context.max_shared_bytes {
            let most = self.context.max_shared_bytes;
            return Err(Error::argument(
                "kernel",
                format!("{name} needs {bytes} bytes of shared memory of {most}"),
            ));
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function lives.
        let answer = unsafe { sys::cuFuncSetAttribute(function.raw, attribute, bytes as i32) };
        check("cuFuncSetAttribute", answer)
    }
}

impl std::fmt::Debug for Modules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Modules")
    }
}
