//! The host as a device: the default one, and the reference the others are compared with.
//!
//! Kernels run on the thread that calls them, one file per family. They convert rows or tiles to f32, compute
//! there, and round where the interface says; a converted row also makes it safe to write over an input.

mod attention;
mod check;
mod elementwise;
mod embedding;
mod float;
mod gemm;
mod loss;
mod memory;
mod norm;
mod optim;
mod rope;
mod scratch;
mod stream;
mod swiglu;

pub use stream::{Event, Stream};

use crate::{
    AdamW, Attention, AttentionGrad, Buffer, CrossEntropy, Device, Dtype, Embedding, EmbeddingGrad, Error,
    Gemm, Kernels, Memory, MemoryUse, Profile, Result, RmsNorm, RmsNormGrad, Role, Rope, Swiglu, SwigluGrad,
};
use memory::{Counters, Region};
use std::sync::Arc;

/// The host's memory and cores.
#[derive(Debug, Default)]
pub struct Cpu {
    counters: Arc<Counters>,
}

impl Cpu {
    pub fn new() -> Self {
        Cpu::default()
    }
}

impl Device for Cpu {
    fn profile(&self) -> Profile {
        Profile::Cpu
    }

    fn name(&self) -> String {
        "cpu".into()
    }

    fn alloc(&self, bytes: usize, what: &str) -> Result<Arc<dyn Memory>> {
        Ok(Arc::new(Region::new(bytes, what, &self.counters)?))
    }

    fn memory_use(&self) -> MemoryUse {
        self.counters.memory_use()
    }

    fn measured_bytes(&self) -> Option<usize> {
        memory::resident_bytes()
    }

    fn stream(&self, name: &str, role: Role) -> Result<crate::Stream> {
        Ok(crate::Stream::Cpu(Stream::new(name, role)?))
    }

    fn write(&self, stream: &crate::Stream, src: &[u8], dst: &Buffer) -> Result<()> {
        let dst = dst.cast_bits(Dtype::U8)?;
        same_bytes("write", src.len(), dst.len())?;
        check::stream("write", stream)?.run(|| {
            // SAFETY: stream order keeps everyone else away from `dst` while this runs.
            unsafe { dst.host_slice_mut::<u8>() }.copy_from_slice(src);
            Ok(())
        })
    }

    fn read(&self, stream: &crate::Stream, src: &Buffer, dst: &mut [u8]) -> Result<()> {
        let src = src.cast_bits(Dtype::U8)?;
        same_bytes("read", src.len(), dst.len())?;
        check::stream("read", stream)?.run(|| {
            // SAFETY: stream order keeps writers away from `src` while this runs.
            dst.copy_from_slice(unsafe { src.host_slice::<u8>() });
            Ok(())
        })
    }
}

fn same_bytes(op: &'static str, from: usize, to: usize) -> Result<()> {
    if from == to { Ok(()) } else { Err(Error::argument(op, format!("{from} bytes into {to}"))) }
}

macro_rules! kernels {
    ($($family:ident::$kernel:ident($args:ty)),* $(,)?) => {
        $(fn $kernel(&self, stream: &crate::Stream, args: &$args) -> Result<()> {
            $family::$kernel(stream, args)
        })*
    };
}

impl Kernels for Cpu {
    kernels!(
        gemm::gemm(Gemm<'_>),
        embedding::embedding(Embedding<'_>),
        embedding::embedding_grad(EmbeddingGrad<'_>),
        norm::rms_norm(RmsNorm<'_>),
        norm::rms_norm_grad(RmsNormGrad<'_>),
        rope::rope(Rope<'_>),
        attention::attention(Attention<'_>),
        attention::attention_grad(AttentionGrad<'_>),
        swiglu::swiglu(Swiglu<'_>),
        swiglu::swiglu_grad(SwigluGrad<'_>),
        loss::cross_entropy(CrossEntropy<'_>),
        optim::adamw(AdamW<'_>),
    );

    fn fill(&self, stream: &crate::Stream, dst: &Buffer, value: f32) -> Result<()> {
        elementwise::fill(stream, dst, value)
    }

    fn copy(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        elementwise::copy(stream, src, dst)
    }

    fn cast(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        elementwise::cast(stream, src, dst)
    }

    fn add(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        elementwise::add(stream, src, dst)
    }

    fn sum(
        &self,
        stream: &crate::Stream,
        x: &Buffer,
        out: &Buffer,
        _: &Buffer,
        accumulate: bool,
    ) -> Result<()> {
        elementwise::sum(stream, x, out, accumulate)
    }

    fn sum_squares(
        &self,
        stream: &crate::Stream,
        x: &Buffer,
        out: &Buffer,
        _: &Buffer,
        accumulate: bool,
    ) -> Result<()> {
        elementwise::sum_squares(stream, x, out, accumulate)
    }

    fn reciprocal(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        elementwise::reciprocal(stream, src, dst)
    }

    fn clip_scale(
        &self,
        stream: &crate::Stream,
        sum_squares: &Buffer,
        max_norm: f32,
        out: &Buffer,
    ) -> Result<()> {
        elementwise::clip_scale(stream, sum_squares, max_norm, out)
    }
}
