//! Where packed documents lie, as the graphs take it: a table that a kernel (`documents.cu`) writes into scratch.

use super::graph::{ALIGNMENT, Tensor};
use super::sizes::Documents;
use crate::AttentionShape;
use std::ffi::c_void;

/// Tokens for each document that a plan has room for. Empty documents cost little, but not nothing.
const TOKENS_PER_DOCUMENT: usize = 128;
const MAX_DOCUMENTS: usize = 512;

/// Device addresses of the columns of i32, each with room for `cap + 1`.
#[derive(Clone, Copy, Debug)]
pub struct DocumentTable {
    /// Documents it has room for.
    pub cap: usize,
    /// First tokens, of use to the kernel alone.
    pub first: usize,
    pub lengths: usize,
    /// Elements at which documents start: in q ‖ k ‖ v, in out, in k or v alone, in lse.
    pub qkv: usize,
    pub out: usize,
    pub kv: usize,
    pub lse: usize,
    /// One i32: the first token beyond the documents of the table.
    pub done: usize,
}

const COLUMNS: usize = 7;

impl DocumentTable {
    /// The table for a shape at an aligned address.
    pub fn new(shape: &AttentionShape, address: usize) -> Self {
        let cap = DocumentTable::cap(shape);
        let column = |number: usize| address + number * column_bytes(cap);
        DocumentTable {
            cap,
            first: column(0),
            lengths: column(1),
            qkv: column(2),
            out: column(3),
            kv: column(4),
            lse: column(5),
            done: column(6),
        }
    }

    pub fn bytes(shape: &AttentionShape) -> usize {
        (COLUMNS * column_bytes(DocumentTable::cap(shape))).next_multiple_of(256)
    }

    fn cap(shape: &AttentionShape) -> usize {
        (shape.tokens() / TOKENS_PER_DOCUMENT).min(MAX_DOCUMENTS).max(shape.rows)
    }

    /// Addresses for what both directions use.
    pub fn pointers(&self, documents: &Documents) -> [(Tensor, *mut c_void); 5] {
        [
            (documents.query_lengths, self.lengths as *mut c_void),
            (documents.key_lengths, self.lengths as *mut c_void),
            (documents.qkv, self.qkv as *mut c_void),
            (documents.out, self.out as *mut c_void),
            (documents.lse, self.lse as *mut c_void),
        ]
    }
}

fn column_bytes(cap: usize) -> usize {
    ((cap + 1) * 4).next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_room_for_a_document_a_row_at_least() {
        let shape =
            |rows, seq| AttentionShape { rows, seq, heads: 2, kv_heads: 1, head_dim: 64, window: None };
        for (rows, seq, cap) in [(1, 1, 1), (8, 16, 8), (2, 4096, 64), (16, 8192, 512), (600, 128, 600)] {
            let table = DocumentTable::new(&shape(rows, seq), 1 << 20);
            assert_eq!(table.cap, cap);
            let columns = [table.first, table.lengths, table.qkv, table.out, table.kv, table.lse, table.done];
            for pair in columns.windows(2) {
                assert!(pair[0] + (cap + 1) * 4 <= pair[1], "{table:?}");
                assert!(pair[1].is_multiple_of(ALIGNMENT), "{table:?}");
            }
            assert!(table.done + 4 <= (1 << 20) + DocumentTable::bytes(&shape(rows, seq)));
        }
    }
}
