//! Which scores count: those of keys no later than the query, in its window, and in its document.

use super::descriptor::Result;
use super::graph::{Graph, Pointwise, Tensor, Type};
use super::sizes::{Documents, Sizes};
use std::ffi::c_void;

/// The numbers that masks need when a plan runs.
#[derive(Default)]
pub struct Masks {
    /// What masked scores become.
    masked: Vec<Tensor>,
    window: Option<Tensor>,
}

/// The values of those numbers.
pub struct Values {
    masked: f32,
    window: f32,
}

impl Values {
    pub fn new(window: Option<i64>) -> Self {
        Values { masked: f32::NEG_INFINITY, window: window.unwrap_or(0) as f32 }
    }
}

impl Masks {
    pub fn pointers(&self, values: &Values) -> impl Iterator<Item = (Tensor, *mut c_void)> {
        let (masked, window): (*const f32, *const f32) = (&values.masked, &values.window);
        let masked = self.masked.iter().map(move |&tensor| (tensor, masked.cast_mut().cast()));
        masked.chain(self.window.map(|tensor| (tensor, window.cast_mut().cast())))
    }

    /// Keeps the scores inside each document's length.
    pub fn padding(
        &mut self,
        graph: &mut Graph,
        sizes: &Sizes,
        scores: Tensor,
        documents: Option<Documents>,
    ) -> Result<Tensor> {
        let Some(documents) = documents else { return Ok(scores) };
        let (row, column) = indices(graph, sizes, scores)?;
        let boolean = Type::CUDNN_DATA_BOOLEAN;
        let row_there = sizes.scores(graph, boolean)?;
        graph.compare(Pointwise::CUDNN_POINTWISE_CMP_LT, row, documents.query_lengths, row_there)?;
        let column_there = sizes.scores(graph, boolean)?;
        graph.compare(Pointwise::CUDNN_POINTWISE_CMP_LT, column, documents.key_lengths, column_there)?;
        let both = sizes.scores(graph, boolean)?;
        graph.compare(Pointwise::CUDNN_POINTWISE_LOGICAL_AND, row_there, column_there, both)?;
        self.select(graph, sizes, both, scores)
    }

    /// Keeps the scores of keys no later than the query, and of its window where there is one.
    pub fn causal(&mut self, graph: &mut Graph, sizes: &Sizes, scores: Tensor) -> Result<Tensor> {
        let (row, column) = indices(graph, sizes, scores)?;
        let seen = sizes.scores(graph, Type::CUDNN_DATA_BOOLEAN)?;
        graph.compare(Pointwise::CUDNN_POINTWISE_CMP_GE, row, column, seen)?;
        let scores = self.select(graph, sizes, seen, scores)?;
        if sizes.window.is_none() {
            return Ok(scores);
        }
        let (row, column) = indices(graph, sizes, scores)?;
        let window = graph.number()?;
        let end = sizes.scores(graph, Type::CUDNN_DATA_FLOAT)?;
        graph.binary(Pointwise::CUDNN_POINTWISE_ADD, column, window, end)?;
        self.window = Some(window);
        let seen = sizes.scores(graph, Type::CUDNN_DATA_BOOLEAN)?;
        graph.compare(Pointwise::CUDNN_POINTWISE_CMP_GT, end, row, seen)?;
        self.select(graph, sizes, seen, scores)
    }

    fn select(&mut self, graph: &mut Graph, sizes: &Sizes, seen: Tensor, scores: Tensor) -> Result<Tensor> {
        let masked = graph.number()?;
        let out = sizes.scores(graph, Type::CUDNN_DATA_FLOAT)?;
        graph.select(seen, scores, masked, out)?;
        self.masked.push(masked);
        Ok(out)
    }
}

/// The query and the key of each score, within its batch.
fn indices(graph: &mut Graph, sizes: &Sizes, scores: Tensor) -> Result<(Tensor, Tensor)> {
    let row = sizes.scores(graph, Type::CUDNN_DATA_INT32)?;
    graph.index(scores, 2, row)?;
    let column = sizes.scores(graph, Type::CUDNN_DATA_INT32)?;
    graph.index(scores, 3, column)?;
    Ok((row, column))
}
