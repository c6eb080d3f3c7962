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
use super::graph::{Graph, Place, Plan, Pointwise, Reduce, Tensor, Type};
use super::library::Library;
use super::masks::{Masks, Values};
use super::sizes::{Documents, Sizes};
use super::table::DocumentTable;
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
    window: Option<i64>,
}

struct Tensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    scale: Tensor,
    masks: Masks,
    documents: Option<Documents>,
    one: Tensor,
    row_sums: Tensor,
    accumulator: Option<Tensor>,
    dq: Tensor,
    dk: KeyGradient,
    dv: KeyGradient,
}

/// dk or dv, and what is summed to it where query heads share it and it lies in memory.
struct KeyGradient {
    each: Option<Tensor>,
    sum: Tensor,
}

/// Device addresses of one backward.
pub struct Addresses<'a> {
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
    /// f32 `[rows, heads, seq, head_dim]`, or for documents laid out as q ‖ k ‖ v; used with [`QuerySum::Atomic`]
    /// alone. It need not be zeroed.
    pub accumulator: usize,
    pub workspace: usize,
    /// There where the plan is for documents.
    pub documents: Option<&'a DocumentTable>,
    /// dk and dv of each query head, used for documents alone.
    pub dk_each: usize,
    pub dv_each: usize,
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
        Ok(Backward { plan: graph.plan()?, tensors, window: sizes.window })
    }

    pub fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes
    }

    /// # Safety
    /// Every address is valid for the sizes the plan was made for, until the work has run.
    pub unsafe fn run(&self, handle: Handle, scale: f32, at: &Addresses<'_>) -> Result<()> {
        let tensors = &self.tensors;
        let (values, one) = (Values::new(self.window), 1.0f32);
        let mut pointers = vec![
            (tensors.q, at.q as *mut c_void),
            (tensors.k, at.k as *mut c_void),
            (tensors.v, at.v as *mut c_void),
            (tensors.out, at.out as *mut c_void),
            (tensors.dout, at.dout as *mut c_void),
            (tensors.lse, at.lse as *mut c_void),
            (tensors.scale, (&raw const scale).cast_mut().cast()),
            (tensors.one, (&raw const one).cast_mut().cast()),
            (tensors.row_sums, at.row_sums as *mut c_void),
            (tensors.dq, at.dq as *mut c_void),
            (tensors.dk.sum, at.dk as *mut c_void),
            (tensors.dv.sum, at.dv as *mut c_void),
        ];
        pointers.extend(tensors.masks.pointers(&values));
        pointers.extend(tensors.dk.each.map(|tensor| (tensor, at.dk_each as *mut c_void)));
        pointers.extend(tensors.dv.each.map(|tensor| (tensor, at.dv_each as *mut c_void)));
        if let (Some(documents), Some(table)) = (&tensors.documents, at.documents) {
            pointers.extend(table.pointers(documents));
            pointers.push((documents.kv, table.kv as *mut c_void));
        }
        pointers.extend(tensors.accumulator.map(|tensor| (tensor, at.accumulator as *mut c_void)));
        // SAFETY: every tensor in memory has its address, which the caller vouches for.
        unsafe { self.plan.run(handle, &pointers, at.workspace) }
    }
}

fn build(graph: &mut Graph, sizes: &Sizes, query_sum: QuerySum) -> Result<Tensors> {
    let f32 = Type::CUDNN_DATA_FLOAT;
    let documents = sizes.documents(graph)?;
    let q = sizes.queries(graph, documents)?;
    let (k, v) = (sizes.backward_keys(graph, documents)?, sizes.backward_keys(graph, documents)?);
    let (out, dout) = (sizes.outputs(graph, documents)?, sizes.outputs(graph, documents)?);
    let lse = sizes.stored_row_numbers(graph, documents)?;
    let (scale, one) = (graph.number()?, graph.number()?);

    // D. cuDNN knows the graph by its shape, in which a factor (one) stands before the sums go to memory.
    let products = sizes.per_head(graph, Place::Virtual, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, dout, out, products)?;
    let sums = sizes.row_numbers(graph)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, products, sums)?;
    let row_sums = sizes.stored_row_numbers(graph, documents)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, sums, one, row_sums)?;

    // P
    let product = sizes.scores(graph, f32)?;
    graph.matmul(q, k, product, &Documents::scores(documents))?;
    let scaled = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, product, scale, scaled)?;
    let mut masks = Masks::default();
    let inside = masks.padding(graph, sizes, scaled, documents)?;
    let below_lse = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_SUB, inside, lse, below_lse)?;
    let scores = masks.causal(graph, sizes, below_lse)?;
    let probabilities = sizes.scores(graph, f32)?;
    graph.unary(Pointwise::CUDNN_POINTWISE_EXP, scores, probabilities)?;

    let dv = transposed_product(graph, sizes, documents, probabilities, dout)?;

    // dS
    let dp = sizes.scores(graph, f32)?;
    graph.matmul(dout, v, dp, &Documents::scores(documents))?;
    let centred = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_SUB, dp, row_sums, centred)?;
    let weighted = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, centred, probabilities, weighted)?;
    let ds = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, weighted, scale, ds)?;

    let dk = transposed_product(graph, sizes, documents, ds, q)?;

    let keys = sizes.keys_virtual(graph, documents)?;
    graph.reshape(k, keys)?;
    let dq = sizes.queries(graph, documents)?;
    let over_keys = Documents::over_keys(documents);
    let accumulator = match query_sum {
        QuerySum::Atomic => {
            let accumulator = sizes.query_sums(graph, documents)?;
            graph.matmul(ds, keys, accumulator, &over_keys)?;
            graph.unary(Pointwise::CUDNN_POINTWISE_IDENTITY, accumulator, dq)?;
            Some(accumulator)
        }
        QuerySum::Ordered => {
            graph.matmul(ds, keys, dq, &over_keys)?;
            None
        }
    };
    Ok(Tensors { q, k, v, out, dout, lse, scale, masks, documents, one, row_sums, accumulator, dq, dk, dv })
}

/// xᵀ · y, summed over the heads that share a key.
fn transposed_product(
    graph: &mut Graph,
    sizes: &Sizes,
    documents: Option<Documents>,
    x: Tensor,
    y: Tensor,
) -> Result<KeyGradient> {
    let transposed = sizes.scores_transposed(graph)?;
    graph.reshape(x, transposed)?;
    let over_queries = Documents::over_queries(documents);
    let sum = sizes.key_gradients(graph, documents)?;
    if sizes.heads == sizes.kv_heads {
        graph.matmul(transposed, y, sum, &over_queries)?;
        return Ok(KeyGradient { each: None, sum });
    }
    let each = match documents {
        Some(documents) => sizes.key_gradients_per_head(graph, documents)?,
        None => sizes.per_head(graph, Place::Virtual, sizes.dtype)?,
    };
    graph.matmul(transposed, y, each, &over_queries)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, each, sum)?;
    Ok(KeyGradient { each: documents.map(|_| each), sum })
}
