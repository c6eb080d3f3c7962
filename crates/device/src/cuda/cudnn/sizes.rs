//! Dims and strides of everything in the attention graphs.

use super::descriptor::Result;
use super::graph::{Graph, Place, Tensor, Type};

/// What one plan is for. `qkv_cols` and `out_cols` are the elements from one token to the next, which are more
/// than the plan's own heads take where it runs on some of a model's heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sizes {
    pub dtype: Type,
    pub rows: i64,
    pub seq: i64,
    pub heads: i64,
    pub kv_heads: i64,
    pub head_dim: i64,
    pub qkv_cols: i64,
    pub out_cols: i64,
}

impl Sizes {
    /// q, or its gradient: `[rows, heads, seq, head_dim]` in a packed buffer.
    pub fn queries(&self, graph: &mut Graph) -> Result<Tensor> {
        self.packed(graph, self.heads)
    }

    /// v, or the gradient of k or v: `[rows, kv_heads, seq, head_dim]` in a packed buffer.
    pub fn values(&self, graph: &mut Graph) -> Result<Tensor> {
        self.packed(graph, self.kv_heads)
    }

    /// kᵀ or vᵀ: `[rows, kv_heads, head_dim, seq]` in a packed buffer.
    pub fn keys_transposed(&self, graph: &mut Graph) -> Result<Tensor> {
        let dims = [self.rows, self.kv_heads, self.head_dim, self.seq];
        let strides = [self.seq * self.qkv_cols, self.head_dim, 1, self.qkv_cols];
        graph.tensor(Place::Memory, self.dtype, dims, strides)
    }

    /// The keys once more, where an operation has turned them back.
    pub fn keys_virtual(&self, graph: &mut Graph) -> Result<Tensor> {
        let dims = [self.rows, self.kv_heads, self.seq, self.head_dim];
        let strides = [self.seq * self.qkv_cols, self.head_dim, self.qkv_cols, 1];
        graph.tensor(Place::Virtual, Type::CUDNN_DATA_FLOAT, dims, strides)
    }

    /// out, or its gradient: `[rows, heads, seq, head_dim]`, heads side by side in each token.
    pub fn outputs(&self, graph: &mut Graph) -> Result<Tensor> {
        let dims = [self.rows, self.heads, self.seq, self.head_dim];
        let strides = [self.seq * self.out_cols, self.head_dim, self.out_cols, 1];
        graph.tensor(Place::Memory, self.dtype, dims, strides)
    }

    /// `[rows, heads, seq, head_dim]` without gaps, in that order.
    pub fn per_head(&self, graph: &mut Graph, place: Place, dtype: Type) -> Result<Tensor> {
        let dims = [self.rows, self.heads, self.seq, self.head_dim];
        let head = self.seq * self.head_dim;
        graph.tensor(place, dtype, dims, [self.heads * head, head, self.head_dim, 1])
    }

    /// `[rows, heads, seq, seq]`: a number for each query (row) and key (column).
    pub fn scores(&self, graph: &mut Graph, dtype: Type) -> Result<Tensor> {
        let square = self.seq * self.seq;
        graph.tensor(Place::Virtual, dtype, self.square(), [self.heads * square, square, self.seq, 1])
    }

    /// [`Sizes::scores`] read as their transpose.
    pub fn scores_transposed(&self, graph: &mut Graph) -> Result<Tensor> {
        let square = self.seq * self.seq;
        graph.tensor(Place::Virtual, self.dtype, self.square(), [self.heads * square, square, 1, self.seq])
    }

    /// `[rows, heads, seq, 1]`: one f32 for each query.
    pub fn row_numbers(&self, graph: &mut Graph, place: Place) -> Result<Tensor> {
        let dims = [self.rows, self.heads, self.seq, 1];
        graph.tensor(place, Type::CUDNN_DATA_FLOAT, dims, [self.heads * self.seq, self.seq, 1, 1])
    }

    fn square(&self) -> [i64; 4] {
        [self.rows, self.heads, self.seq, self.seq]
    }

    fn packed(&self, graph: &mut Graph, heads: i64) -> Result<Tensor> {
        let dims = [self.rows, heads, self.seq, self.head_dim];
        let strides = [self.seq * self.qkv_cols, self.head_dim, self.qkv_cols, 1];
        graph.tensor(Place::Memory, self.dtype, dims, strides)
    }
}
