//! A device that counts bytes and computes nothing. The memory plan is made by running a step on it.

use crate::{
    Activation, ActivationGrad, AdamW, Attention, AttentionCached, AttentionGrad, Bias, BiasGrad, Buffer,
    Copied, CrossEntropy, Device, Dropout, Embedding, EmbeddingGrad, Gemm, HeadNorm, HeadNormGrad, Judge,
    Kernels, LayerNorm, LayerNormGrad, Memory, MemoryUse, ProductShape, Profile, Result, RmsNorm,
    RmsNormGrad, Role, Rope, Stream, SumLoss, Swiglu, SwigluGrad,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Stands in for a device of the given profile.
#[derive(Debug)]
pub struct Null {
    profile: Profile,
    products: Mutex<Vec<ProductShape>>,
}

impl Null {
    pub fn new(profile: Profile) -> Self {
        Null { profile, products: Mutex::default() }
    }

    /// The products it was asked for so far, each once, in order.
    pub fn products(&self) -> Vec<ProductShape> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ProductShape>> {
        self.products.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that are nowhere.
#[derive(Debug)]
struct Nowhere {
    bytes: usize,
}

impl Memory for Nowhere {
    fn address(&self) -> usize {
        0
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Device for Null {
    fn profile(&self) -> Profile {
        self.profile
    }

    fn name(&self) -> String {
        format!("null ({})", self.profile.name())
    }

    fn alloc(&self, bytes: usize, _what: &str) -> Result<Arc<dyn Memory>> {
        Ok(Arc::new(Nowhere { bytes }))
    }

    fn alloc_host(&self, bytes: usize, what: &str) -> Result<Arc<dyn Memory>> {
        self.alloc(bytes, what)
    }

    fn host_use(&self) -> MemoryUse {
        MemoryUse::default()
    }

    fn transfer(&self, _stream: &Stream, _src: &Buffer, _dst: &Buffer) -> Result<()> {
        Ok(())
    }

    fn copied(&self) -> Copied {
        Copied::default()
    }

    fn host_stream(&self, _name: &str) -> Result<Stream> {
        Ok(Stream::Null)
    }

    fn memory_use(&self) -> MemoryUse {
        MemoryUse::default()
    }

    fn measured_bytes(&self) -> Option<usize> {
        None
    }

    fn stream(&self, _name: &str, _role: Role) -> Result<Stream> {
        Ok(Stream::Null)
    }

    fn write(&self, _stream: &Stream, _src: &[u8], _dst: &Buffer) -> Result<()> {
        Ok(())
    }

    fn read(&self, _stream: &Stream, _src: &Buffer, dst: &mut [u8]) -> Result<()> {
        dst.fill(0);
        Ok(())
    }
}

macro_rules! nothing {
    ($($kernel:ident($args:ty)),* $(,)?) => {
        $(fn $kernel(&self, _stream: &Stream, _args: &$args) -> Result<()> { Ok(()) })*
    };
}

impl Kernels for Null {
    nothing!(
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
        swiglu(Swiglu<'_>),
        swiglu_grad(SwigluGrad<'_>),
        cross_entropy(CrossEntropy<'_>),
        adamw(AdamW<'_>),
        judge(Judge<'_>),
    );

    fn attention_cached(&self, _stream: &Stream, args: &AttentionCached<'_>) -> Result<()> {
        args.check().map(drop)
    }

    /// Shapes are still checked: a model that does not fit together fails in the plan.
    fn gemm(&self, _stream: &Stream, args: &Gemm<'_>) -> Result<()> {
        args.check()?;
        let (product, mut products) = (ProductShape::new(args), self.lock());
        if !products.contains(&product) {
            products.push(product);
        }
        Ok(())
    }

    fn fill(&self, _: &Stream, _: &Buffer, _: f32) -> Result<()> {
        Ok(())
    }

    fn copy(&self, _: &Stream, _: &Buffer, _: &Buffer) -> Result<()> {
        Ok(())
    }

    fn cast(&self, _: &Stream, _: &Buffer, _: &Buffer) -> Result<()> {
        Ok(())
    }

    fn add(&self, _: &Stream, _: &Buffer, _: &Buffer) -> Result<()> {
        Ok(())
    }

    fn sum(&self, _: &Stream, _: &Buffer, _: &Buffer, _: &Buffer, _: bool) -> Result<()> {
        Ok(())
    }

    fn sum_squares(&self, _: &Stream, _: &Buffer, _: &Buffer, _: &Buffer, _: bool) -> Result<()> {
        Ok(())
    }

    fn reciprocal(&self, _: &Stream, _: &Buffer, _: &Buffer) -> Result<()> {
        Ok(())
    }

    fn multiply(&self, _: &Stream, _: &Buffer, _: &Buffer) -> Result<()> {
        Ok(())
    }
}
