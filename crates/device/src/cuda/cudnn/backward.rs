//! The backward graph: the probabilities once more from the scores and their lse, and from them the gradients.
//!
//! ```text
//! D  = Σ dout · out                  one number a query
//! P  = exp(q·kᵀ · scale − lse)       0 where masked
//! dv = Pᵀ · dout                     summed over the heads of a group
//! dS = P · (dout·vᵀ − D) · scale
//! dk = dSᵀ · q                       summed over the heads of a group
//! dq = dS · k
//! ```

use super::descriptor::{Handle, Result};
use super::forward::causal;
use super::graph::{Graph, Place, Plan, Pointwise, Reduce, Tensor, Type};
use super::library::Library;
use super::sizes::Sizes;
use std::ffi::c_void;

/// How the products that make up one query's gradient are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuerySum {
    /// Atomically into an f32 accumulator, in whichever order blocks finish: other bits on every run.
    Atomic,
    /// In one order. The workspace holds dS, `rows · heads · seq²` elements of the compute dtype.
    Ordered,
}

pub struct Backward {
    plan: Plan,
    tensors: Tensors,
}

struct Tensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    scale: Tensor,
    masked: Tensor,
    one: Tensor,
    row_sums: Tensor,
    accumulator: Option<Tensor>,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
}

/// Device addresses of one backward.
pub struct Addresses {
    pub q: usize,
    pub k: usize,
    pub v: usize,
    pub out: usize,
    pub dout: usize,
    pub lse: usize,
    pub dq: usize,
    pub dk: usize,
    pub dv: usize,
    /// f32 `[rows, heads, seq]`
    pub row_sums: usize,
    /// f32 `[rows, heads, seq, head_dim]`, used with [`QuerySum::Atomic`] alone; it need not be zeroed.
    pub accumulator: usize,
    pub workspace: usize,
}

impl Backward {
    pub fn new(
        library: &'static Library,
        handle: Handle,
        sizes: &Sizes,
        query_sum: QuerySum,
    ) -> Result<Self> {
        let mut graph = Graph::new(library, handle);
        let tensors = build(&mut graph, sizes, query_sum)?;
        Ok(Backward { plan: graph.plan()?, tensors })
    }

    pub fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes
    }

    /// # Safety
    /// Every address is valid for the sizes the plan was made for, until the work has run.
    pub unsafe fn run(&self, handle: Handle, scale: f32, at: &Addresses) -> Result<()> {
        let tensors = &self.tensors;
        let (masked, one) = (f32::NEG_INFINITY, 1.0f32);
        let mut pointers = vec![
            (tensors.q, at.q as *mut c_void),
            (tensors.k, at.k as *mut c_void),
            (tensors.v, at.v as *mut c_void),
            (tensors.out, at.out as *mut c_void),
            (tensors.dout, at.dout as *mut c_void),
            (tensors.lse, at.lse as *mut c_void),
            (tensors.scale, (&raw const scale).cast_mut().cast()),
            (tensors.masked, (&raw const masked).cast_mut().cast()),
            (tensors.one, (&raw const one).cast_mut().cast()),
            (tensors.row_sums, at.row_sums as *mut c_void),
            (tensors.dq, at.dq as *mut c_void),
            (tensors.dk, at.dk as *mut c_void),
            (tensors.dv, at.dv as *mut c_void),
        ];
        pointers.extend(tensors.accumulator.map(|tensor| (tensor, at.accumulator as *mut c_void)));
        // SAFETY: every tensor in memory has its address, which the caller vouches for.
        unsafe { self.plan.run(handle, &pointers, at.workspace) }
    }
}

fn build(graph: &mut Graph, sizes: &Sizes, query_sum: QuerySum) -> Result<Tensors> {
    let f32 = Type::CUDNN_DATA_FLOAT;
    let (q, k, v) = (sizes.queries(graph)?, sizes.keys_transposed(graph)?, sizes.keys_transposed(graph)?);
    let (out, dout) = (sizes.outputs(graph)?, sizes.outputs(graph)?);
    let lse = sizes.row_numbers(graph, Place::Memory)?;
    let (scale, one) = (graph.number()?, graph.number()?);

    // D. cuDNN knows the graph by its shape, in which a factor (one) stands before the sums go to memory.
    let products = sizes.per_head(graph, Place::Virtual, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, dout, out, products)?;
    let sums = sizes.row_numbers(graph, Place::Virtual)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, products, sums)?;
    let row_sums = sizes.row_numbers(graph, Place::Memory)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, sums, one, row_sums)?;

    // P
    let product = sizes.scores(graph, f32)?;
    graph.matmul(q, k, product)?;
    let scaled = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, product, scale, scaled)?;
    let below_lse = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_SUB, scaled, lse, below_lse)?;
    let (scores, masked) = causal(graph, sizes, below_lse)?;
    let probabilities = sizes.scores(graph, f32)?;
    graph.unary(Pointwise::CUDNN_POINTWISE_EXP, scores, probabilities)?;

    let dv = transposed_product(graph, sizes, probabilities, dout)?;

    // dS
    let dp = sizes.scores(graph, f32)?;
    graph.matmul(dout, v, dp)?;
    let centred = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_SUB, dp, row_sums, centred)?;
    let weighted = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, centred, probabilities, weighted)?;
    let ds = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, weighted, scale, ds)?;

    let dk = transposed_product(graph, sizes, ds, q)?;

    let keys = sizes.keys_virtual(graph)?;
    graph.reshape(k, keys)?;
    let dq = sizes.queries(graph)?;
    let accumulator = match query_sum {
        QuerySum::Atomic => {
            let accumulator = sizes.per_head(graph, Place::Memory, f32)?;
            graph.matmul(ds, keys, accumulator)?;
            graph.unary(Pointwise::CUDNN_POINTWISE_IDENTITY, accumulator, dq)?;
            Some(accumulator)
        }
        QuerySum::Ordered => {
            graph.matmul(ds, keys, dq)?;
            None
        }
    };
    Ok(Tensors { q, k, v, out, dout, lse, scale, masked, one, row_sums, accumulator, dq, dk, dv })
}

/// xᵀ · y, summed over the heads that share a key.
fn transposed_product(graph: &mut Graph, sizes: &Sizes, x: Tensor, y: Tensor) -> Result<Tensor> {
    let transposed = sizes.scores_transposed(graph)?;
    graph.reshape(x, transposed)?;
    let out = sizes.values(graph)?;
    if sizes.heads == sizes.kv_heads {
        graph.matmul(transposed, y, out)?;
    } else {
        let each = sizes.per_head(graph, Place::Virtual, sizes.dtype)?;
        graph.matmul(transposed, y, each)?;
        graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, each, out)?;
    }
    Ok(out)
}
