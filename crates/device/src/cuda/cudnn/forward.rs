//! The forward graph: softmax(q·kᵀ·scale) under a causal mask, times v, and the log of the sum.

use super::descriptor::{Handle, Result};
use super::graph::{Extent, Graph, Plan, Pointwise, Reduce, Tensor, Type};
use super::library::Library;
use super::masks::{Masks, Values};
use super::sizes::{Documents, Sizes};
use super::table::DocumentTable;
use std::ffi::c_void;

pub struct Forward {
    plan: Plan,
    tensors: Tensors,
    window: Option<i64>,
}

struct Tensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    masks: Masks,
    documents: Option<Documents>,
    out: Tensor,
    lse: Tensor,
}

/// Device addresses of one forward.
pub struct Addresses<'a> {
    pub q: usize,
    pub k: usize,
    pub v: usize,
    pub out: usize,
    pub lse: usize,
    pub workspace: usize,
    /// There where the plan is for documents.
    pub documents: Option<&'a DocumentTable>,
}

impl Forward {
    pub fn new(library: &'static Library, handle: Handle, sizes: &Sizes) -> Result<Self> {
        let mut graph = Graph::new(library, handle);
        let tensors = build(&mut graph, sizes)?;
        Ok(Forward { plan: graph.plan()?, tensors, window: sizes.window })
    }

    pub fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes
    }

    /// # Safety
    /// Every address is valid for the sizes the plan was made for, until the work has run.
    pub unsafe fn run(&self, handle: Handle, scale: f32, at: &Addresses<'_>) -> Result<()> {
        let tensors = &self.tensors;
        let values = Values::new(self.window);
        let mut pointers = vec![
            (tensors.q, at.q as *mut c_void),
            (tensors.k, at.k as *mut c_void),
            (tensors.v, at.v as *mut c_void),
            (tensors.scale, (&raw const scale).cast_mut().cast()),
            (tensors.out, at.out as *mut c_void),
            (tensors.lse, at.lse as *mut c_void),
        ];
        pointers.extend(tensors.masks.pointers(&values));
        if let (Some(documents), Some(table)) = (&tensors.documents, at.documents) {
            pointers.extend(table.pointers(documents));
        }
        // SAFETY: every tensor in memory has its address, which the caller vouches for.
        unsafe { self.plan.run(handle, &pointers, at.workspace) }
    }
}

fn build(graph: &mut Graph, sizes: &Sizes) -> Result<Tensors> {
    let f32 = Type::CUDNN_DATA_FLOAT;
    let documents = sizes.documents(graph)?;
    let q = sizes.queries(graph, documents)?;
    let k = sizes.keys_transposed(graph, documents)?;
    let v = sizes.values(graph, documents)?;
    let scale = graph.number()?;

    let product = sizes.scores(graph, f32)?;
    graph.matmul(q, k, product, &Extent { padded: documents.is_some(), ..Documents::scores(documents) })?;
    let scaled = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, product, scale, scaled)?;
    let mut masks = Masks::default();
    let inside = masks.padding(graph, sizes, scaled, documents)?;
    let scores = masks.causal(graph, sizes, inside)?;

    let max = sizes.row_numbers(graph)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_MAX, scores, max)?;
    let below_max = sizes.scores(graph, f32)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_SUB, scores, max, below_max)?;
    let exp = sizes.scores(graph, f32)?;
    graph.unary(Pointwise::CUDNN_POINTWISE_EXP, below_max, exp)?;
    let sum = sizes.row_numbers(graph)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, exp, sum)?;
    let log = sizes.row_numbers(graph)?;
    graph.unary(Pointwise::CUDNN_POINTWISE_LOG, sum, log)?;
    let lse = sizes.stored_row_numbers(graph, documents)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_ADD, max, log, lse)?;

    let probabilities = sizes.scores(graph, sizes.dtype)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_DIV, exp, sum, probabilities)?;
    let out = sizes.outputs(graph, documents)?;
    graph.matmul(probabilities, v, out, &Documents::over_keys(documents))?;
    Ok(Tensors { q, k, v, scale, masks, documents, out, lse })
}
