//! Rows of a table by token id, and the sum of their gradients.

use super::elementwise::{add_assign, load_from, store_to};
use super::float::by_dtype;
use super::{check, scratch};
use crate::{Dtype, Embedding, EmbeddingGrad, Error, Result, Stream};

pub fn embedding(stream: &Stream, args: &Embedding<'_>) -> Result<()> {
    const OP: &str = "embedding";
    let Embedding { table, ids, out, tokens, vocab, cols } = *args;
    let dtype = check::float(OP, table)?;
    check::buffer(OP, "table", table, dtype, vocab * cols)?;
    check::buffer(OP, "ids", ids, Dtype::I32, tokens)?;
    check::buffer(OP, "out", out, dtype, tokens * cols)?;
    check::stream(OP, stream)?.run(|| {
        // SAFETY: stream order keeps writers away from `ids`.
        let ids = unsafe { &ids.host_slice::<i32>()[..tokens] };
        check::indices(OP, "ids", ids, vocab)?;
        by_dtype!(OP, dtype, T => {
            // SAFETY: stream order keeps other writers away; the output is not the table.
            let (table, out) = unsafe { (table.host_slice::<T>(), out.host_slice_mut::<T>()) };
            for (t, &id) in ids.iter().enumerate() {
                out[t * cols..][..cols].copy_from_slice(&table[id as usize * cols..][..cols]);
            }
            Ok(())
        })
    })
}

pub fn embedding_grad(stream: &Stream, args: &EmbeddingGrad<'_>) -> Result<()> {
    const OP: &str = "embedding_grad";
    let EmbeddingGrad { dout, ids, order, dtable, tokens, vocab, cols, accumulate } = *args;
    let dtype = check::float(OP, dout)?;
    check::buffer(OP, "dout", dout, dtype, tokens * cols)?;
    check::buffer(OP, "ids", ids, Dtype::I32, tokens)?;
    check::buffer(OP, "order", order, Dtype::I32, tokens)?;
    check::dtype_or_f32(OP, "dtable", dtable, dtype, vocab * cols)?;
    check::stream(OP, stream)?.run(|| {
        // SAFETY: stream order keeps writers away from both.
        let (ids, order) =
            unsafe { (&ids.host_slice::<i32>()[..tokens], &order.host_slice::<i32>()[..tokens]) };
        check::indices(OP, "ids", ids, vocab)?;
        check::indices(OP, "order", order, tokens)?;
        let id = |&token: &i32| ids[token as usize];
        if !order.is_sorted_by_key(id) {
            return Err(Error::argument(OP, "order does not sort the ids"));
        }
        scratch::with([cols, cols], |[sum, row]| {
            let mut runs = order.chunk_by(|a, b| id(a) == id(b)).peekable();
            for entry in 0..vocab {
                let run = runs.next_if(|run| id(&run[0]) as usize == entry).unwrap_or(&[]);
                if run.is_empty() && accumulate {
                    continue;
                }
                sum.fill(0.0);
                if accumulate {
                    load_from(dtable, entry * cols, sum)?;
                }
                for &token in run {
                    load_from(dout, token as usize * cols, row)?;
                    add_assign(sum, row);
                }
                store_to(dtable, entry * cols, sum)?;
            }
            Ok(())
        })
    })
}
