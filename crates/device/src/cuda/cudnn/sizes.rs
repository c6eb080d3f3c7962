//! Dims and strides of everything in the attention graphs.

use super::descriptor::Result;
use super::graph::{Extent, Graph, Place, Tensor, Type};

/// What one plan is for. `qkv_cols` and `out_cols` are the elements from one token to the next, which are more
/// than the plan's own heads take where it runs on some of a model's heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sizes {
    pub dtype: Type,
    /// Rows of tokens; or, packed, the most documents of all rows.
    pub rows: i64,
    pub packing: Packing,
    pub seq: i64,
    pub heads: i64,
    pub kv_heads: i64,
    pub head_dim: i64,
    pub qkv_cols: i64,
    pub out_cols: i64,
    /// Keys a query sees at most, itself included.
    pub window: Option<i64>,
}

/// What the batches of a graph are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Packing {
    /// Rows of equal length.
    Rows,
    /// Documents, behind each other in the rows.
    Documents,
}

/// Lengths of documents, and the elements at which each starts in the tensors of its kind.
#[derive(Clone, Copy, Debug)]
pub struct Documents {
    pub query_lengths: Tensor,
    pub key_lengths: Tensor,
    /// In q ‖ k ‖ v and their gradient.
    pub qkv: Tensor,
    /// In out and its gradient.
    pub out: Tensor,
    /// In k, v, dk and dv where each is alone.
    pub kv: Tensor,
    pub lse: Tensor,
}

impl Documents {
    /// For a product of queries (rows) and keys (columns).
    pub fn scores(documents: Option<Self>) -> Extent {
        documents.map_or(Extent::default(), |d| Extent {
            m: Some(d.query_lengths),
            n: Some(d.key_lengths),
            ..Extent::default()
        })
    }

    /// For a product that sums over keys.
    pub fn over_keys(documents: Option<Self>) -> Extent {
        documents.map_or(Extent::default(), |d| Extent {
            m: Some(d.query_lengths),
            k: Some(d.key_lengths),
            ..Extent::default()
        })
    }

    /// For a product that sums over queries.
    pub fn over_queries(documents: Option<Self>) -> Extent {
        documents.map_or(Extent::default(), |d| Extent {
            m: Some(d.key_lengths),
            k: Some(d.query_lengths),
            ..Extent::default()
        })
    }
}

impl Sizes {
    pub fn documents(&self, graph: &mut Graph) -> Result<Option<Documents>> {
        if self.packing == Packing::Rows {
            return Ok(None);
        }
        Ok(Some(Documents {
            query_lengths: graph.per_batch(self.rows)?,
            key_lengths: graph.per_batch(self.rows)?,
            qkv: graph.per_batch(self.rows + 1)?,
            out: graph.per_batch(self.rows + 1)?,
            kv: graph.per_batch(self.rows + 1)?,
            lse: graph.per_batch(self.rows + 1)?,
        }))
    }

    /// q, or its gradient: `[rows, heads, seq, head_dim]` in a packed buffer.
    pub fn queries(&self, graph: &mut Graph, documents: Option<Documents>) -> Result<Tensor> {
        self.packed(graph, self.heads, documents)
    }

    /// v: `[rows, kv_heads, seq, head_dim]` in a packed buffer.
    pub fn values(&self, graph: &mut Graph, documents: Option<Documents>) -> Result<Tensor> {
        self.packed(graph, self.kv_heads, documents)
    }

    /// kᵀ or vᵀ: `[rows, kv_heads, head_dim, seq]` in a packed buffer.
    pub fn keys_transposed(&self, graph: &mut Graph, documents: Option<Documents>) -> Result<Tensor> {
        self.transposed(graph, self.qkv_cols, documents.map(|d| d.qkv))
    }

    /// The same as the backward reads them: of documents, alone.
    pub fn backward_keys(&self, graph: &mut Graph, documents: Option<Documents>) -> Result<Tensor> {
        self.transposed(graph, self.key_stride(documents), documents.map(|d| d.kv))
    }

    /// The backward's keys once more, where an operation has turned them back.
    pub fn keys_virtual(&self, graph: &mut Graph, documents: Option<Documents>) -> Result<Tensor> {
        let dims = [self.rows, self.kv_heads, self.seq, self.head_dim];
        let token = self.key_stride(documents);
        let strides = [self.seq * token, self.head_dim, token, 1];
        graph.ragged(Place::Virtual, Type::CUDNN_DATA_FLOAT, dims, strides, documents.map(|d| d.kv))
    }

    /// out, or its gradient: `[rows, heads, seq, head_dim]`, heads side by side in each token.
    pub fn outputs(&self, graph: &mut Graph, documents: Option<Documents>) -> Result<Tensor> {
        let dims = [self.rows, self.heads, self.seq, self.head_dim];
        let strides = [self.seq * self.out_cols, self.head_dim, self.out_cols, 1];
        graph.ragged(Place::Memory, self.dtype, dims, strides, documents.map(|d| d.out))
    }

    /// `[rows, heads, seq, head_dim]` without gaps, in that order.
    pub fn per_head(&self, graph: &mut Graph, place: Place, dtype: Type) -> Result<Tensor> {
        let dims = [self.rows, self.heads, self.seq, self.head_dim];
        let head = self.seq * self.head_dim;
        graph.tensor(place, dtype, dims, [self.heads * head, head, self.head_dim, 1])
    }

    /// f32 sums of the queries' gradient: without gaps, or laid out as the gradient.
    pub fn query_sums(&self, graph: &mut Graph, documents: Option<Documents>) -> Result<Tensor> {
        let f32 = Type::CUDNN_DATA_FLOAT;
        let Some(documents) = documents else { return self.per_head(graph, Place::Memory, f32) };
        let dims = [self.rows, self.heads, self.seq, self.head_dim];
        let strides = [self.seq * self.qkv_cols, self.head_dim, self.qkv_cols, 1];
        graph.ragged(Place::Memory, f32, dims, strides, Some(documents.qkv))
    }

    /// dk or dv: in a packed buffer, or, of documents, alone.
    pub fn key_gradients(&self, graph: &mut Graph, documents: Option<Documents>) -> Result<Tensor> {
        let dims = [self.rows, self.kv_heads, self.seq, self.head_dim];
        let token = self.key_stride(documents);
        let strides = [self.seq * token, self.head_dim, token, 1];
        graph.ragged(Place::Memory, self.dtype, dims, strides, documents.map(|d| d.kv))
    }

    /// The same before query heads that share a key are summed. cuDNN multiplies the offsets of
    /// [`Sizes::key_gradients`] by the heads of a group.
    pub fn key_gradients_per_head(&self, graph: &mut Graph, documents: Documents) -> Result<Tensor> {
        let dims = [self.rows, self.heads, self.seq, self.head_dim];
        let token = self.heads * self.head_dim;
        let strides = [self.seq * token, self.head_dim, token, 1];
        graph.ragged(Place::Memory, self.dtype, dims, strides, Some(documents.kv))
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
    pub fn row_numbers(&self, graph: &mut Graph) -> Result<Tensor> {
        graph.tensor(Place::Virtual, Type::CUDNN_DATA_FLOAT, self.column(), self.column_strides())
    }

    /// The same in memory, laid out as lse.
    pub fn stored_row_numbers(&self, graph: &mut Graph, documents: Option<Documents>) -> Result<Tensor> {
        let (dims, strides) = (self.column(), self.column_strides());
        graph.ragged(Place::Memory, Type::CUDNN_DATA_FLOAT, dims, strides, documents.map(|d| d.lse))
    }

    fn transposed(&self, graph: &mut Graph, token: i64, offsets: Option<Tensor>) -> Result<Tensor> {
        let dims = [self.rows, self.kv_heads, self.head_dim, self.seq];
        graph.ragged(Place::Memory, self.dtype, dims, [self.seq * token, self.head_dim, 1, token], offsets)
    }

    /// Elements from one token's k, v, dk or dv to the next one's, in the backward.
    fn key_stride(&self, documents: Option<Documents>) -> i64 {
        documents.map_or(self.qkv_cols, |_| self.kv_heads * self.head_dim)
    }

    fn column(&self) -> [i64; 4] {
        [self.rows, self.heads, self.seq, 1]
    }

    fn column_strides(&self) -> [i64; 4] {
        [self.heads * self.seq, self.seq, 1, 1]
    }

    fn square(&self) -> [i64; 4] {
        [self.rows, self.heads, self.seq, self.seq]
    }

    fn packed(&self, graph: &mut Graph, heads: i64, documents: Option<Documents>) -> Result<Tensor> {
        let dims = [self.rows, heads, self.seq, self.head_dim];
        let strides = [self.seq * self.qkv_cols, self.head_dim, self.qkv_cols, 1];
        graph.ragged(Place::Memory, self.dtype, dims, strides, documents.map(|d| d.qkv))
    }
}
