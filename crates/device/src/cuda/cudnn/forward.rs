//! The forward graph: softmax(q·kᵀ·scale) under a causal mask, times v, and the log of the sum.

use super::descriptor::{Handle, Result};
use super::graph::{Graph, Place, Plan, Pointwise, Reduce, Tensor, Type};
use super::library::Library;
use super::sizes::Sizes;
use std::ffi::c_void;

pub struct Forward {
    plan: Plan,
    tensors: Tensors,
}

struct Tensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    masked: Tensor,
    out: Tensor,
    lse: Tensor,
}

/// Device addresses of one forward.
pub struct Addresses {
    pub q: usize,
    pub k: usize,
    pub v: usize,
    pub out: usize,
    pub lse: usize,
    pub workspace: usize,
}

impl Forward {
    pub fn new(library: &'static Library, handle: Handle, sizes: &Sizes) -> Result<Self> {
        let mut graph = Graph::new(library, handle);
        let tensors = build(&mut graph, sizes)?;
        Ok(Forward { plan: graph.plan()?, tensors })
    }

    pub fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes
    }

    /// # Safety
    /// Every address is valid for the sizes the plan was made for, until the work has run.
    pub unsafe fn run(&self, handle: Handle, scale: f32, at: &Addresses) -> Result<()> {
        let tensors = &self.tensors;
        let masked = f32::NEG_INFINITY;
        let pointers = [
            (tensors.q, at.q as *mut c_void),
            (tensors.k, at.k as *mut c_void),
            (tensors.v, at.v as *mut c_void),
            (tensors.scale, (&raw const scale).cast_mut().cast()),
            (tensors.masked, (&raw const masked).cast_mut().cast()),
            (tensors.out, at.out as *mut c_void),
            (tensors.lse, at.lse as *mut c_void),
        ];
        // SAFETY: every tensor in memory has its address, which the caller vouches for.
        unsafe { self.plan.run(handle, &pointers, at.workspace) }
    }
}

fn build(graph: &mut Graph, sizes: &Sizes) -> Result<Tensors> {
    let f32 = Type::CUDNN_DATA_FLOAT;
    let q = sizes.queries(graph)?;
    let k = sizes.keys_transposed(graph)?;
    let v = sizes.values(graph)?;
    let scale = graph.number()?;

    let product = sizes.scores(graph, f32)?;
    graph.matmul(q, k, product)?;
    let scaled = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, product, scale, scaled)?;
    let (scores, masked) = causal(graph, sizes, scaled)?;

    let max = sizes.row_numbers(graph, Place::Virtual)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_MAX, scores, max)?;
    let below_max = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_SUB, scores, max, below_max)?;
    let exp = sizes.scores(graph, f32)?;
    graph.unary(Pointwise::CUDNN_POINTWISE_EXP, below_max, exp)?;
    let sum = sizes.row_numbers(graph, Place::Virtual)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, exp, sum)?;
    let log = sizes.row_numbers(graph, Place::Virtual)?;
    graph.unary(Pointwise::CUDNN_POINTWISE_LOG, sum, log)?;
    let lse = sizes.row_numbers(graph, Place::Memory)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_ADD, max, log, lse)?;

    let probabilities = sizes.scores(graph, sizes.dtype)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_DIV, exp, sum, probabilities)?;
    let out = sizes.outputs(graph)?;
    graph.matmul(probabilities, v, out)?;
    Ok(Tensors { q, k, v, scale, masked, out, lse })
}

/// Keeps the scores of keys no later than the query; the others become the number returned second, which is
/// minus infinity.
pub fn causal(graph: &mut Graph, sizes: &Sizes, scores: Tensor) -> Result<(Tensor, Tensor)> {
    let row = sizes.scores(graph, Type::CUDNN_DATA_INT32)?;
    graph.index(scores, 2, row)?;
    let column = sizes.scores(graph, Type::CUDNN_DATA_INT32)?;
    graph.index(scores, 3, column)?;
    let seen = sizes.scores(graph, Type::CUDNN_DATA_BOOLEAN)?;
    graph.compare(Pointwise::CUDNN_POINTWISE_CMP_GE, row, column, seen)?;
    let masked = graph.number()?;
    let out = sizes.scores(graph, Type::CUDNN_DATA_FLOAT)?;
    graph.select(seen, scores, masked, out)?;
    Ok((out, masked))
}
