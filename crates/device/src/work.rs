//! What a kernel must do at least: bytes through memory, each input read once and each output written once, and
//! FLOPs of products. Time beside this tells how far a kernel is from what the machine can do.

use crate::{
    Activation, ActivationGrad, AdamW, Attention, AttentionCached, AttentionGrad, AttentionShape, Bias,
    BiasGrad, Buffer, CrossEntropy, Dropout, Embedding, EmbeddingGrad, Gemm, HeadNorm, HeadNormGrad, Judge,
    LayerNorm, LayerNormGrad, RmsNorm, RmsNormGrad, Rope, SumLoss, Swiglu, SwigluGrad,
};
use std::ops::AddAssign;

/// Bytes moved and operations done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    pub bytes: u64,
    pub flops: u64,
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.flops += other.flops;
    }
}

/// The bytes of all these, each moved once.
pub(crate) fn moved<'a>(buffers: impl IntoIterator<Item = &'a Buffer>) -> Work {
    Work { bytes: buffers.into_iter().map(|buffer| buffer.num_bytes() as u64).sum(), flops: 0 }
}

/// Arguments of a kernel, with the work they ask for.
pub(crate) trait Asks {
    fn work(&self) -> Work;
}

/// Kernels that read and write whole buffers: each listed once for every time it is moved.
macro_rules! moves {
    ($($args:ident: |$a:ident| [$($buffer:expr),*] and [$($option:expr),*];)*) => {
        $(impl Asks for $args<'_> {
            fn work(&self) -> Work {
                let $a = self;
                moved([$($buffer),*].into_iter().chain([$($option),*].into_iter().flatten()))
            }
        })*
    };
}
moves! {
    RmsNorm: |a| [a.x, a.out, a.weight, a.rstd] and [a.delta, a.sum];
    RmsNormGrad: |a| [a.dout, a.x, a.dx, a.weight, a.rstd] and [a.dresidual, a.dweight];
    LayerNorm: |a| [a.x, a.out, a.weight, a.statistics] and [a.bias];
    LayerNormGrad: |a| [a.dout, a.x, a.dx, a.weight, a.statistics] and [a.dweight.map(|d| d.0), a.dbias.map(|d| d.0)];
    HeadNorm: |a| [a.x, a.x, a.weight] and [a.before];
    HeadNormGrad: |a| [a.dx, a.dx, a.before, a.weight] and [a.dweight];
    Bias: |a| [a.x, a.bias] and [a.accumulate.then_some(a.x)];
    BiasGrad: |a| [a.dout, a.dbias] and [None];
    Swiglu: |a| [a.gate_up, a.out] and [None];
    SwigluGrad: |a| [a.gate_up, a.dout, a.dgate_up] and [None];
    Activation: |a| [a.x, a.out] and [None];
    ActivationGrad: |a| [a.x, a.dout, a.dx] and [None];
    Dropout: |a| [a.x, a.out] and [None];
    Embedding: |a| [a.ids, a.out, a.out] and [None];
    EmbeddingGrad: |a| [a.dout, a.ids, a.order, a.dtable] and [a.accumulate.then_some(a.dtable)];
    CrossEntropy: |a| [a.logits, a.labels, a.losses] and [a.seed.map(|_| a.logits)];
    SumLoss: |a| [a.x, a.losses] and [a.target, a.seed.map(|_| a.x)];
    Judge: |a| [a.sum_squares, a.scaler, a.scaler, a.verdict] and [None];
    AdamW: |a| [a.master, a.master, a.moment1, a.moment1, a.moment2, a.moment2, a.grad] and [a.compute];
    AttentionCached: |a| [a.qkv, a.keys, a.values, a.out] and [None];
}

impl Asks for Rope<'_> {
    fn work(&self) -> Work {
        let turned = self.tokens * self.heads * self.head_dim * self.x.dtype().bytes();
        Work { bytes: 2 * turned as u64, flops: 0 }
    }
}

impl Asks for Gemm<'_> {
    fn work(&self) -> Work {
        let ((m, k), (_, n)) = (self.a.shape(), self.b.shape());
        let again = (self.beta != 0.0).then_some(self.c.buffer);
        let bytes = moved([self.a.buffer, self.b.buffer, self.c.buffer].into_iter().chain(again)).bytes;
        Work { bytes, flops: 2 * (m * n * k) as u64 }
    }
}

/// Products of causal attention, half of the square, whatever documents or a window leave out.
fn causal_flops(shape: &AttentionShape, products: u64) -> u64 {
    products * (shape.rows * shape.heads * shape.seq * shape.seq * shape.head_dim) as u64
}

impl Asks for Attention<'_> {
    fn work(&self) -> Work {
        Work { flops: causal_flops(&self.shape, 2), ..moved([self.qkv, self.out, self.lse]) }
    }
}

impl Asks for AttentionGrad<'_> {
    fn work(&self) -> Work {
        let bytes = moved([self.qkv, self.out, self.lse, self.dout, self.dqkv]);
        Work { flops: causal_flops(&self.shape, 5), ..bytes }
    }
}
