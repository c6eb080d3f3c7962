//! One GPU as a [`Device`].

use super::attention::AttentionKernels;
use super::cudnn::{Cudnn, QuerySum};
use super::driver::{Context, DeviceMemory, PinnedMemory, check};
use super::gemm::MatrixProducts;
use super::library;
use super::module::{Arg, Launch, Modules};
use super::nvrtc::Program;
use super::staging::Staging;
use super::stream::Stream;
use crate::cpu::memory::CopyCounters;
use crate::{
    Activation, ActivationGrad, AdamW, Attention, AttentionCached, AttentionGrad, Bias, BiasGrad, Buffer,
    Copied, CrossEntropy, Device, Dropout, Dtype, Embedding, EmbeddingGrad, Error, Gemm, HeadNorm,
    HeadNormGrad, Judge, Kernels, LayerNorm, LayerNormGrad, Memory, MemoryUse, ProductShape, Profile, Result,
    RmsNorm, RmsNormGrad, Role, Rope, SumLoss, Swiglu, SwigluGrad,
};
use cudarc::driver::sys;
use std::fmt;
use std::sync::Arc;

/// A GPU, opened by its ordinal.
pub struct Cuda {
    pub(super) context: Arc<Context>,
    products: MatrixProducts,
    modules: Modules,
    staging: Staging,
    pub(super) copies: CopyCounters,
    /// None where cuDNN is missing or too old.
    cudnn: Option<Cudnn>,
    attention: AttentionKernels,
    profile: Profile,
}

/// Whether a device may sum in whatever order is fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// The same inputs may give other bits from run to run, in the gradient of attention's queries.
    Fastest,
    /// The same inputs give the same bits.
    Ordered,
}

impl Cuda {
    /// Opens a GPU: its context, and the workspace of its matrix products. Kernels are compiled when first
    /// used. Says what is missing where there is no driver, GPU, NVRTC or cuBLASLt.
    pub fn open(ordinal: usize, sums: Sums) -> Result<Self> {
        library::driver()?;
        library::nvrtc_ready()?;
        library::cublaslt_ready()?;
        let context = Context::open(ordinal)?;
        context.enter()?;
        let profile = Profile::Cuda { deterministic: sums == Sums::Ordered };
        let workspace = DeviceMemory::new(&context, profile.workspace_bytes(), "the workspace of cuBLASLt")?;
        library::load_cudnn();
        let query_sum = if sums == Sums::Ordered { QuerySum::Ordered } else { QuerySum::Atomic };
        Ok(Cuda {
            cudnn: Cudnn::load().ok().map(|cudnn| cudnn.with_query_sum(query_sum)),
            attention: AttentionKernels::Any,
            profile,
            products: MatrixProducts::new(&context, workspace)?,
            modules: Modules::new(&context),
            staging: Staging::new(&context),
            copies: CopyCounters::default(),
            context,
        })
    }

    pub fn ordinal(&self) -> usize {
        self.context.ordinal
    }

    /// Compute capability as 10·major + minor: 90 for an H100.
    pub fn arch(&self) -> u32 {
        self.context.arch
    }

    /// The same with a choice of kernels for attention.
    pub fn with_attention(self, attention: AttentionKernels) -> Self {
        Cuda { attention, ..self }
    }

    pub(super) fn cudnn(&self) -> Option<&Cudnn> {
        self.cudnn.as_ref().filter(|_| self.attention == AttentionKernels::Any)
    }

    /// Whether attention may run on the tensor cores by our own kernels.
    pub(super) fn has_flash(&self) -> bool {
        self.attention != AttentionKernels::Plain
    }

    pub(super) fn products(&self) -> &MatrixProducts {
        &self.products
    }

    /// Makes the GPU's primary context the calling thread's, as libraries that issue work themselves expect.
    pub fn make_current(&self) -> Result<()> {
        self.context.enter()
    }

    /// The stream as this device's own.
    pub(super) fn stream_of<'a>(&self, op: &'static str, stream: &'a crate::Stream) -> Result<&'a Stream> {
        match stream {
            crate::Stream::Cuda(stream) if stream.belongs_to(&self.context) => Ok(stream),
            _ => Err(Error::argument(op, "the stream is another device's")),
        }
    }

    pub(super) fn launch(
        &self,
        stream: &Stream,
        program: &'static Program,
        name: &str,
        launch: Launch,
        args: &[Arg],
    ) -> Result<()> {
        self.modules.launch(stream, program, name, launch, args)
    }

    /// Sets the first `len` elements to zero bits.
    pub(super) fn zero(&self, stream: &Stream, dst: &Buffer, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        self.context.enter()?;
        let (address, bytes) = (dst.address() as sys::CUdeviceptr, len * dst.dtype().bytes());
        // SAFETY: the caller checked that the buffer is that long; the stream lives.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, 0, bytes, stream.handle()) })
    }
}

/// Fails unless `buffer` is of this dtype and at least this long.
pub(super) fn expect(op: &'static str, what: &str, buffer: &Buffer, dtype: Dtype, len: usize) -> Result<()> {
    if buffer.dtype() != dtype {
        return Err(Error::WrongDtype { op, expected: dtype, found: buffer.dtype() });
    }
    buffer.expect_len(op, what, len)
}

/// As [`expect`], for gradients that may be kept in f32 whatever the dtype of what they belong to.
pub(super) fn expect_or_f32(
    op: &'static str,
    what: &str,
    buffer: &Buffer,
    dtype: Dtype,
    len: usize,
) -> Result<()> {
    let allowed = if buffer.dtype() == Dtype::F32 { Dtype::F32 } else { dtype };
    expect(op, what, buffer, allowed, len)
}

/// The dtype of a buffer of floats.
pub(super) fn float(op: &'static str, buffer: &Buffer) -> Result<Dtype> {
    match buffer.dtype() {
        dtype if dtype.is_float() => Ok(dtype),
        dtype => Err(Error::Unsupported { op, dtype }),
    }
}

/// Whether every buffer starts where 16 bytes can be read at once.
pub(super) fn aligned(buffers: &[&Buffer]) -> bool {
    buffers.iter().all(|buffer| buffer.address().is_multiple_of(16))
}

impl Device for Cuda {
    fn profile(&self) -> Profile {
        self.profile
    }

    fn name(&self) -> String {
        let attention = match self.attention {
            AttentionKernels::Plain => ", plain attention",
            _ if self.cudnn().is_none() => ", no cuDNN",
            _ => "",
        };
        format!("cuda:{} ({}{attention})", self.context.ordinal, self.context.name)
    }

    fn alloc(&self, bytes: usize, what: &str) -> Result<Arc<dyn Memory>> {
        Ok(Arc::new(DeviceMemory::new(&self.context, bytes, what)?))
    }

    fn alloc_host(&self, bytes: usize, what: &str) -> Result<Arc<dyn Memory>> {
        Ok(Arc::new(PinnedMemory::new(&self.context, bytes, what)?))
    }

    fn host_use(&self) -> MemoryUse {
        let (current_bytes, peak_bytes) = self.context.host_held();
        MemoryUse { current_bytes, peak_bytes }
    }

    fn transfer(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        let stream = self.stream_of("transfer", stream)?;
        expect("transfer", "dst", dst, src.dtype(), src.len())?;
        if src.len() != dst.len() {
            let what = format!("{} elements into {}", src.len(), dst.len());
            return Err(Error::argument("transfer", what));
        }
        self.copies.transferred(src, dst)?;
        if src.is_empty() {
            return Ok(());
        }
        self.context.enter()?;
        let (from, to, bytes) = (src.address(), dst.address(), src.num_bytes());
        // SAFETY: both are `bytes` long, one of them pinned and the other the device's; who issues the copy keeps both
        // alive and untouched until an event has said that it was made.
        let answer = unsafe {
            match dst.on_host() {
                true => {
                    let to = std::ptr::with_exposed_provenance_mut(to);
                    sys::cuMemcpyDtoHAsync_v2(to, from as sys::CUdeviceptr, bytes, stream.handle())
                }
                false => {
                    let from = std::ptr::with_exposed_provenance(from);
                    sys::cuMemcpyHtoDAsync_v2(to as sys::CUdeviceptr, from, bytes, stream.handle())
                }
            }
        };
        check("cuMemcpyAsync", answer)
    }

    fn copied(&self) -> Copied {
        self.copies.copied()
    }

    /// This GPU's share of the host's cores.
    fn host_threads(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        (cores / library::device_count().max(1)).max(1)
    }

    fn memory_use(&self) -> MemoryUse {
        let (current_bytes, peak_bytes) = self.context.held();
        MemoryUse { current_bytes, peak_bytes }
    }

    /// What is not free on the GPU. The driver does not tell processes apart, so this includes the memory of
    /// others on the same GPU.
    fn measured_bytes(&self) -> Option<usize> {
        self.context.memory_info().ok().map(|(free, total)| total.saturating_sub(free))
    }

    fn stream(&self, name: &str, _role: Role) -> Result<crate::Stream> {
        Ok(crate::Stream::Cuda(Stream::new(&self.context, name)?))
    }

    fn write(&self, stream: &crate::Stream, src: &[u8], dst: &Buffer) -> Result<()> {
        let stream = self.stream_of("write", stream)?;
        if src.len() != dst.num_bytes() {
            let what = format!("{} bytes into a buffer of {}", src.len(), dst.num_bytes());
            return Err(Error::argument("write", what));
        }
        if dst.on_host() {
            let bytes = dst.cast_bits(Dtype::U8)?;
            stream.synchronize()?;
            // SAFETY: host memory, and what was issued for it on this stream is done; the caller keeps others away.
            unsafe { bytes.host_slice_mut::<u8>() }.copy_from_slice(src);
            return Ok(());
        }
        self.staging.upload(stream, src, dst.address())
    }

    fn read(&self, stream: &crate::Stream, src: &Buffer, dst: &mut [u8]) -> Result<()> {
        let stream = self.stream_of("read", stream)?;
        if dst.len() != src.num_bytes() {
            let what = format!("a buffer of {} into {} bytes", src.num_bytes(), dst.len());
            return Err(Error::argument("read", what));
        }
        if src.on_host() {
            let bytes = src.cast_bits(Dtype::U8)?;
            stream.synchronize()?;
            // SAFETY: host memory, and what was issued for it on this stream is done; the caller keeps writers away.
            dst.copy_from_slice(unsafe { bytes.host_slice::<u8>() });
            return Ok(());
        }
        if !dst.is_empty() {
            self.context.enter()?;
            let (to, from) = (dst.as_mut_ptr().cast(), src.address() as sys::CUdeviceptr);
            // SAFETY: both are `dst.len()` bytes long, and `dst` is borrowed until the synchronisation below.
            let answer = unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, dst.len(), stream.handle()) };
            let copied = check("cuMemcpyDtoHAsync", answer);
            // Even after an error nothing may write to `dst` once it is no longer borrowed.
            stream.synchronize().and(copied)?;
        }
        stream.synchronize()
    }

    /// With sums in a fixed order nothing depends on the clock: the library's first suggestion is taken.
    fn choose(
        &self,
        stream: &crate::Stream,
        products: &[ProductShape],
        room: &Arc<dyn Memory>,
    ) -> Result<String> {
        match self.profile {
            Profile::Cuda { deterministic: false } if Stream::can_time() => {
                self.choose_products(self.stream_of("choose", stream)?, products, room)
            }
            _ => Ok(String::new()),
        }
    }

    fn adopt(&self, choices: &str) {
        self.adopt_products(choices);
    }
}

macro_rules! delegate {
    ($($kernel:ident($args:ty)),* $(,)?) => {
        $(fn $kernel(&self, stream: &crate::Stream, args: &$args) -> Result<()> {
            self.$kernel(self.stream_of(stringify!($kernel), stream)?, args)
        })*
    };
}

/// The kernels themselves are in `flat`, `rows`, `norms`, `attention` and `gemm`, as methods of the same names.
impl Kernels for Cuda {
    delegate!(
        embedding(Embedding<'_>),
        embedding_grad(EmbeddingGrad<'_>),
        rms_norm(RmsNorm<'_>),
        rms_norm_grad(RmsNormGrad<'_>),
        head_norm(HeadNorm<'_>),
        head_norm_grad(HeadNormGrad<'_>),
        layer_norm(LayerNorm<'_>),
        layer_norm_grad(LayerNormGrad<'_>),
        bias(Bias<'_>),
        bias_grad(BiasGrad<'_>),
        activation(Activation<'_>),
        activation_grad(ActivationGrad<'_>),
        dropout(Dropout<'_>),
        sum_loss(SumLoss<'_>),
        rope(Rope<'_>),
        attention(Attention<'_>),
        attention_grad(AttentionGrad<'_>),
        attention_cached(AttentionCached<'_>),
        swiglu(Swiglu<'_>),
        swiglu_grad(SwigluGrad<'_>),
        cross_entropy(CrossEntropy<'_>),
        adamw(AdamW<'_>),
        judge(Judge<'_>),
    );

    fn gemm(&self, stream: &crate::Stream, args: &Gemm<'_>) -> Result<()> {
        self.products.multiply(self.stream_of("gemm", stream)?, args)
    }

    fn fill(&self, stream: &crate::Stream, dst: &Buffer, value: f32) -> Result<()> {
        self.fill(self.stream_of("fill", stream)?, dst, value)
    }

    fn copy(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.copy(self.stream_of("copy", stream)?, src, dst)
    }

    fn cast(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.cast(self.stream_of("cast", stream)?, src, dst)
    }

    fn add(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.add(self.stream_of("add", stream)?, src, dst)
    }

    fn sum(
        &self,
        stream: &crate::Stream,
        x: &Buffer,
        out: &Buffer,
        scratch: &Buffer,
        accumulate: bool,
    ) -> Result<()> {
        self.sum(self.stream_of("sum", stream)?, x, out, scratch, accumulate)
    }

    fn sum_squares(
        &self,
        stream: &crate::Stream,
        x: &Buffer,
        out: &Buffer,
        scratch: &Buffer,
        accumulate: bool,
    ) -> Result<()> {
        self.sum_squares(self.stream_of("sum_squares", stream)?, x, out, scratch, accumulate)
    }

    fn reciprocal(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.reciprocal(self.stream_of("reciprocal", stream)?, src, dst)
    }

    fn multiply(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.multiply(self.stream_of("multiply", stream)?, src, dst)
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.context)
    }
}
