//! The host as a device: the default one, and the reference the others are compared with.
//!
//! Kernels run on the thread that calls them, one file per family. They convert rows or tiles to f32, compute
//! there, and round where the interface says; a converted row also makes it safe to write over an input.

mod activation;
mod attention;
mod attention_cached;
mod bias;
pub(crate) mod check;
mod dropout;
pub(crate) mod elementwise;
mod embedding;
mod float;
mod gemm;
mod head_norm;
mod layer_norm;
mod loss;
pub(crate) mod memory;
mod norm;
pub(crate) mod optim;
mod rope;
mod scratch;
mod stream;
mod swiglu;
mod transpose;

pub use stream::{Event, Stream};

use crate::{
    Activation, ActivationGrad, AdamW, Attention, AttentionCached, AttentionGrad, Bias, BiasGrad, Buffer,
    Copied, CrossEntropy, Device, Dropout, Dtype, Embedding, EmbeddingGrad, Error, Gemm, HeadNorm,
    HeadNormGrad, Judge, Kernels, LayerNorm, LayerNormGrad, Memory, MemoryUse, Profile, Result, RmsNorm,
    RmsNormGrad, Role, Rope, SumLoss, Swiglu, SwigluGrad,
};
use memory::{CopyCounters, Counters, Region};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The host's memory and cores.
#[derive(Debug, Default)]
pub struct Cpu {
    counters: Arc<Counters>,
    /// Of memory that stands for the host's, beside the device's.
    host: Arc<Counters>,
    copies: CopyCounters,
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
        Ok(Arc::new(Region::new(bytes, what, &self.counters, false)?))
    }

    fn alloc_host(&self, bytes: usize, what: &str) -> Result<Arc<dyn Memory>> {
        Ok(Arc::new(Region::new(bytes, what, &self.host, true)?))
    }

    fn host_use(&self) -> MemoryUse {
        self.host.memory_use()
    }

    fn transfer(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.copies.transferred(src, dst)?;
        elementwise::copy(stream, src, dst)
    }

    fn copied(&self) -> Copied {
        self.copies.copied()
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

/// A GPU's kernels would reach the host's memory slowly or not at all; here they must not reach it either.
fn on_device<const N: usize>(op: &'static str, buffers: [&Buffer; N]) -> Result<()> {
    match buffers.iter().find(|buffer| buffer.on_host()) {
        None => Ok(()),
        Some(buffer) => Err(Error::argument(op, format!("{buffer:?} is in host memory"))),
    }
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
        embedding::embedding(Embedding<'_>),
        embedding::embedding_grad(EmbeddingGrad<'_>),
        norm::rms_norm(RmsNorm<'_>),
        norm::rms_norm_grad(RmsNormGrad<'_>),
        head_norm::head_norm(HeadNorm<'_>),
        head_norm::head_norm_grad(HeadNormGrad<'_>),
        layer_norm::layer_norm(LayerNorm<'_>),
        layer_norm::layer_norm_grad(LayerNormGrad<'_>),
        bias::bias(Bias<'_>),
        bias::bias_grad(BiasGrad<'_>),
        activation::activation(Activation<'_>),
        activation::activation_grad(ActivationGrad<'_>),
        dropout::dropout(Dropout<'_>),
        loss::sum_loss(SumLoss<'_>),
        rope::rope(Rope<'_>),
        attention::attention(Attention<'_>),
        attention::attention_grad(AttentionGrad<'_>),
        attention_cached::attention_cached(AttentionCached<'_>),
        swiglu::swiglu(Swiglu<'_>),
        swiglu::swiglu_grad(SwigluGrad<'_>),
        loss::cross_entropy(CrossEntropy<'_>),
        optim::judge(Judge<'_>),
    );

    fn gemm(&self, stream: &crate::Stream, args: &Gemm<'_>) -> Result<()> {
        on_device("gemm", [args.a.buffer, args.b.buffer, args.c.buffer])?;
        gemm::gemm(stream, args)
    }

    fn adamw(&self, stream: &crate::Stream, args: &AdamW<'_>) -> Result<()> {
        on_device("adamw", [args.master, args.moment1, args.moment2, args.grad, args.verdict])?;
        optim::adamw(stream, args)
    }

    fn fill(&self, stream: &crate::Stream, dst: &Buffer, value: f32) -> Result<()> {
        on_device("fill", [dst])?;
        elementwise::fill(stream, dst, value)
    }

    fn copy(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        on_device("copy", [src, dst])?;
        self.copies.on_device.fetch_add(src.num_bytes(), Ordering::Relaxed);
        elementwise::copy(stream, src, dst)
    }

    fn cast(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        on_device("cast", [src, dst])?;
        elementwise::cast(stream, src, dst)
    }

    fn add(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        on_device("add", [src, dst])?;
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
        on_device("sum", [x, out])?;
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
        on_device("sum_squares", [x, out])?;
        elementwise::sum_squares(stream, x, out, accumulate)
    }

    fn reciprocal(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        elementwise::reciprocal(stream, src, dst)
    }

    fn multiply(&self, stream: &crate::Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        elementwise::multiply(stream, src, dst)
    }
}

#[cfg(test)]
mod tests {
    use super::float::tests::at_every_level;
    use super::*;
    use crate::AdamWScalars;

    /// Rows of the kernels whose loops this crate compiles several times.
    fn run_all(dtype: Dtype) -> Vec<Vec<u8>> {
        let device: &dyn Device = &Cpu::new();
        let stream = device.stream("test", Role::Compute).unwrap();
        let (rows, cols) = (5, 97);
        let input = |len: usize, factor: usize| {
            let values: Vec<f32> = (0..len).map(|i| ((i * factor) % 1013) as f32 * 0.004 - 2.0).collect();
            let exact = device.alloc_buffer(Dtype::F32, len, "exact").unwrap();
            device.write_slice(&stream, &values, &exact).unwrap();
            let rounded = device.alloc_buffer(dtype, len, "rounded").unwrap();
            device.cast(&stream, &exact, &rounded).unwrap();
            rounded
        };
        let (x, y, weight) = (input(rows * 2 * cols, 7919), input(rows * cols, 104_729), input(cols, 31));
        let f32s = |len| device.alloc_buffer(Dtype::F32, len, "f32").unwrap();
        let (rstd, dw, losses, one, scratch) = (f32s(rows), f32s(cols), f32s(rows), f32s(2), f32s(cols));
        let out = || input(rows * 2 * cols, 1);
        let (norm, dx, act, dact, att, datt) = (out(), out(), out(), out(), out(), out());
        let lse = f32s(rows * cols);
        let labels = device.alloc_buffer(Dtype::I32, rows, "labels").unwrap();
        device.write_slice(&stream, &[3, 90, -1, 0, 50], &labels).unwrap();
        device.fill(&stream, &one, 1.0).unwrap();

        let args = RmsNorm {
            x: &x,
            delta: None,
            weight: &weight,
            sum: None,
            out: &norm,
            rstd: &rstd,
            rows,
            cols,
            eps: 1e-5,
        };
        device.rms_norm(&stream, &args).unwrap();
        let args = RmsNormGrad {
            dout: &y,
            x: &x,
            weight: &weight,
            rstd: &rstd,
            dresidual: None,
            dx: &dx,
            dweight: Some(&dw),
            scratch: &scratch,
            rows,
            cols,
            accumulate: false,
        };
        device.rms_norm_grad(&stream, &args).unwrap();
        device.swiglu(&stream, &Swiglu { gate_up: &x, out: &act, rows, cols }).unwrap();
        let args = SwigluGrad { gate_up: &x, dout: &y, dgate_up: &dact, rows, cols };
        device.swiglu_grad(&stream, &args).unwrap();
        let shape =
            crate::AttentionShape { rows: 1, seq: 20, heads: 2, kv_heads: 1, head_dim: 8, window: None };
        let args =
            Attention { shape, qkv: &x, document_start: None, out: &att, lse: &lse, scratch: &scratch };
        device.attention(&stream, &args).unwrap();
        let args = AttentionGrad {
            shape,
            qkv: &x,
            document_start: None,
            out: &att,
            lse: &lse,
            dout: &y,
            dqkv: &datt,
            scratch: &scratch,
        };
        device.attention_grad(&stream, &args).unwrap();
        device.sum_squares(&stream, &x, &one, &scratch, true).unwrap();
        let (p, m, v) = (input(rows * cols, 3), input(rows * cols, 5), f32s(rows * cols));
        device.fill(&stream, &v, 0.01).unwrap();
        let scalars =
            AdamWScalars { keep: 0.999, one_minus_beta1: 0.1, beta2: 0.95, one_minus_beta2: 0.05, eps: 1e-8 };
        let verdict = f32s(crate::VERDICT);
        device.write_slice(&stream, &[1.0f32, 1.0, 1.0, 0.3, -0.01], &verdict).unwrap();
        let (master, moment1, moment2, grad) = (&p, &m, &v, &y);
        let args = AdamW {
            master,
            moment1,
            moment2,
            grad,
            verdict: &verdict,
            compute: None,
            scalars,
            rounding: None,
        };
        device.adamw(&stream, &args).unwrap();
        let args = CrossEntropy {
            logits: &y,
            labels: &labels,
            losses: &losses,
            seed: Some(&one),
            rows,
            vocab: cols,
            stride: cols,
        };
        device.cross_entropy(&stream, &args).unwrap();

        let (layer, dlayer, db, sums) = (out(), out(), f32s(cols), f32s(2 * cols));
        let statistics = f32s(2 * rows);
        let args = LayerNorm {
            x: &x,
            weight: &weight,
            bias: Some(&weight),
            out: &layer,
            statistics: &statistics,
            rows,
            cols,
            eps: 1e-5,
        };
        device.layer_norm(&stream, &args).unwrap();
        let args = LayerNormGrad {
            dout: &act,
            x: &x,
            weight: &weight,
            statistics: &statistics,
            dx: &dlayer,
            dweight: None,
            dbias: Some((&db, false)),
            scratch: &sums,
            rows,
            cols,
        };
        device.layer_norm_grad(&stream, &args).unwrap();
        let (gelu, dgelu, tanh, fewer) = (out(), out(), out(), out());
        let erf = crate::Function::Gelu;
        device.activation(&stream, &Activation { function: erf, x: &x, out: &gelu }).unwrap();
        let args = ActivationGrad { function: erf, x: &x, dout: &gelu, dx: &dgelu };
        device.activation_grad(&stream, &args).unwrap();
        let function = crate::Function::GeluTanh;
        device.activation(&stream, &Activation { function, x: &x, out: &tanh }).unwrap();
        device.dropout(&stream, &Dropout { x: &x, out: &fewer, p: 0.3, key: 5, first: 9 }).unwrap();

        let bytes =
            |buffer: &Buffer| device.read_vec::<u8>(&stream, &buffer.cast_bits(Dtype::U8).unwrap()).unwrap();
        [
            &norm, &dx, &dw, &act, &dact, &att, &datt, &one, &p, &m, &v, &y, &losses, &layer, &dlayer, &db,
            &gelu, &dgelu, &tanh, &fewer,
        ]
        .map(bytes)
        .to_vec()
    }

    #[test]
    fn kernels_give_the_same_bits_at_every_level() {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let results = at_every_level(|| run_all(dtype));
            assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{dtype}");
        }
    }
}
