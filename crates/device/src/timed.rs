//! A device that tells how long each kernel took on another one.
//!
//! It stands between the engine and a real device and marks the stream before and after every kernel: with the
//! clock where kernels run inline, with timed events on GPUs. Marks cost a few microseconds each.

use crate::work::{Asks, Work, moved};
use crate::{
    Activation, ActivationGrad, AdamW, Attention, AttentionCached, AttentionGrad, Bias, BiasGrad, Buffer,
    Copied, CrossEntropy, Device, Dropout, Embedding, EmbeddingGrad, Gemm, HeadNorm, HeadNormGrad, Judge,
    Kernels, LayerNorm, LayerNormGrad, Memory, MemoryUse, ProductShape, Profile, Result, RmsNorm,
    RmsNormGrad, Role, Rope, Stream, SumLoss, Swiglu, SwigluGrad, cuda,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Times the kernels of `inner`.
#[derive(Debug)]
pub struct Timed {
    inner: Arc<dyn Device>,
    spans: Mutex<BTreeMap<String, Vec<Span>>>,
}

/// One call: when it began and ended, and what it was asked to do.
type Span = (Mark, Mark, Work);

#[derive(Debug)]
enum Mark {
    Host(Instant),
    Cuda(cuda::TimedEvent),
}

/// One kernel's calls, added up.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    pub name: String,
    pub calls: usize,
    pub total_ms: f64,
    pub work: Work,
}

impl Timed {
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Timed { inner, spans: Mutex::default() }
    }

    /// What has been measured since the last call, longest first. Waits for the device.
    pub fn take(&self) -> Result<Vec<KernelTime>> {
        let spans = std::mem::take(&mut *self.lock());
        let mut times = Vec::with_capacity(spans.len());
        for (name, spans) in spans {
            let calls = spans.len();
            let (mut total_ms, mut work) = (0.0, Work::default());
            for (start, end, asked) in &spans {
                work += *asked;
                total_ms += match (start, end) {
                    (Mark::Cuda(start), Mark::Cuda(end)) => f64::from(start.elapsed_ms(end)?),
                    (Mark::Host(start), Mark::Host(end)) => (*end - *start).as_secs_f64() * 1e3,
                    _ => 0.0,
                };
            }
            times.push(KernelTime { name, calls, total_ms, work });
        }
        times.sort_by(|a, b| b.total_ms.total_cmp(&a.total_ms));
        Ok(times)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Vec<Span>>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn time(
        &self,
        name: impl Into<String>,
        stream: &Stream,
        work: Work,
        kernel: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let start = mark(stream)?;
        kernel()?;
        let end = mark(stream)?;
        self.lock().entry(name.into()).or_default().push((start, end, work));
        Ok(())
    }
}

fn mark(stream: &Stream) -> Result<Mark> {
    match stream {
        Stream::Cuda(stream) => Ok(Mark::Cuda(stream.record_timed()?)),
        _ => Ok(Mark::Host(Instant::now())),
    }
}

impl Device for Timed {
    fn profile(&self) -> Profile {
        self.inner.profile()
    }

    fn name(&self) -> String {
        self.inner.name()
    }

    fn alloc(&self, bytes: usize, what: &str) -> Result<Arc<dyn Memory>> {
        self.inner.alloc(bytes, what)
    }

    fn alloc_host(&self, bytes: usize, what: &str) -> Result<Arc<dyn Memory>> {
        self.inner.alloc_host(bytes, what)
    }

    fn host_use(&self) -> MemoryUse {
        self.inner.host_use()
    }

    fn transfer(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.inner.transfer(stream, src, dst)
    }

    fn copied(&self) -> Copied {
        self.inner.copied()
    }

    fn host_stream(&self, name: &str) -> Result<Stream> {
        self.inner.host_stream(name)
    }

    fn host_threads(&self) -> usize {
        self.inner.host_threads()
    }

    fn memory_use(&self) -> MemoryUse {
        self.inner.memory_use()
    }

    fn measured_bytes(&self) -> Option<usize> {
        self.inner.measured_bytes()
    }

    fn stream(&self, name: &str, role: Role) -> Result<Stream> {
        self.inner.stream(name, role)
    }

    fn write(&self, stream: &Stream, src: &[u8], dst: &Buffer) -> Result<()> {
        self.inner.write(stream, src, dst)
    }

    fn read(&self, stream: &Stream, src: &Buffer, dst: &mut [u8]) -> Result<()> {
        self.inner.read(stream, src, dst)
    }

    fn choose(&self, stream: &Stream, products: &[ProductShape], room: &Arc<dyn Memory>) -> Result<String> {
        self.inner.choose(stream, products, room)
    }

    fn adopt(&self, choices: &str) {
        self.inner.adopt(choices);
    }
}

macro_rules! timed {
    ($($kernel:ident($args:ty)),* $(,)?) => {
        $(fn $kernel(&self, stream: &Stream, args: &$args) -> Result<()> {
            self.time(stringify!($kernel), stream, args.work(), || self.inner.$kernel(stream, args))
        })*
    };
}

impl Kernels for Timed {
    timed!(
        embedding(Embedding<'_>),
        embedding_grad(EmbeddingGrad<'_>),
        rms_norm(RmsNorm<'_>),
        rms_norm_grad(RmsNormGrad<'_>),
        rope(Rope<'_>),
        attention(Attention<'_>),
        attention_grad(AttentionGrad<'_>),
        attention_cached(AttentionCached<'_>),
        swiglu(Swiglu<'_>),
        swiglu_grad(SwigluGrad<'_>),
        cross_entropy(CrossEntropy<'_>),
        adamw(AdamW<'_>),
        judge(Judge<'_>),
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
    );

    /// Products are told apart by their sizes: they are most of a step, and each shape has its own speed.
    fn gemm(&self, stream: &Stream, args: &Gemm<'_>) -> Result<()> {
        let (m, n, k) = args.check()?;
        let letter = |transposed: bool| if transposed { 't' } else { 'n' };
        let name = format!("gemm {}{} {m}×{n}×{k}", letter(args.a.transposed), letter(args.b.transposed));
        self.time(name, stream, args.work(), || self.inner.gemm(stream, args))
    }

    fn fill(&self, stream: &Stream, dst: &Buffer, value: f32) -> Result<()> {
        self.time("fill", stream, moved([dst]), || self.inner.fill(stream, dst, value))
    }

    fn copy(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.time("copy", stream, moved([src, dst]), || self.inner.copy(stream, src, dst))
    }

    fn cast(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.time("cast", stream, moved([src, dst]), || self.inner.cast(stream, src, dst))
    }

    fn add(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.time("add", stream, moved([src, dst, dst]), || self.inner.add(stream, src, dst))
    }

    fn sum(
        &self,
        stream: &Stream,
        x: &Buffer,
        out: &Buffer,
        scratch: &Buffer,
        accumulate: bool,
    ) -> Result<()> {
        self.time("sum", stream, moved([x]), || self.inner.sum(stream, x, out, scratch, accumulate))
    }

    fn sum_squares(
        &self,
        stream: &Stream,
        x: &Buffer,
        out: &Buffer,
        scratch: &Buffer,
        accumulate: bool,
    ) -> Result<()> {
        self.time("sum_squares", stream, moved([x]), || {
            self.inner.sum_squares(stream, x, out, scratch, accumulate)
        })
    }

    fn reciprocal(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.time("reciprocal", stream, Work::default(), || self.inner.reciprocal(stream, src, dst))
    }

    fn multiply(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.time("multiply", stream, Work::default(), || self.inner.multiply(stream, src, dst))
    }
}
