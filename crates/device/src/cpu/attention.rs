//! Causal attention, tile by tile: a block of queries against a block of keys, with the softmax kept up to
//! date as keys go by. The scores of a whole sequence are never held.

use super::elementwise::{load_from, store_to};
use super::float::{LANES, dot, exp, max_of, simd, sum_over};
use super::gemm::{Operand, product};
use super::{check, scratch};
use crate::{Attention, AttentionGrad, AttentionShape, Buffer, Dtype, Error, Result, Stream};
use std::ops::Range;

/// Queries and keys of a tile.
pub(super) const QUERIES: usize = 64;
pub(super) const KEYS: usize = 128;

pub fn attention(stream: &Stream, args: &Attention<'_>) -> Result<()> {
    const OP: &str = "attention";
    let Attention { shape, qkv, document_start, out, lse, .. } = *args;
    let sizes = Sizes::new(OP, &shape)?;
    let dtype = check::float(OP, qkv)?;
    check::buffer(OP, "qkv", qkv, dtype, shape.tokens() * shape.qkv_cols())?;
    check::buffer(OP, "out", out, dtype, shape.tokens() * shape.out_cols())?;
    check::buffer(OP, "lse", lse, Dtype::F32, shape.tokens() * shape.heads)?;
    document_start
        .map_or(Ok(()), |start| check::buffer(OP, "document_start", start, Dtype::I32, shape.tokens()))?;
    check::stream(OP, stream)?.run(|| {
        for row in 0..shape.rows {
            let visible = Visible::new(&shape, document_start, row);
            for kv_head in 0..shape.kv_heads {
                forward(args, &sizes, &visible, row, kv_head)?;
            }
        }
        Ok(())
    })
}

/// Lengths used over and over.
struct Sizes {
    shape: AttentionShape,
    /// Query heads to one key head.
    group: usize,
    dim: usize,
    seq: usize,
}

impl Sizes {
    fn new(op: &'static str, shape: &AttentionShape) -> Result<Self> {
        let AttentionShape { seq, heads, kv_heads, head_dim: dim, window, .. } = *shape;
        if kv_heads == 0 || heads % kv_heads != 0 || dim == 0 || window == Some(0) {
            return Err(Error::argument(op, format!("{shape:?}")));
        }
        Ok(Sizes { shape: *shape, group: heads / kv_heads, dim, seq })
    }

    /// Where a token's part of q ‖ k ‖ v begins; heads count through queries, keys and values.
    fn qkv_at(&self, row: usize, token: usize, head: usize) -> usize {
        (row * self.seq + token) * self.shape.qkv_cols() + head * self.dim
    }

    fn out_at(&self, row: usize, token: usize, head: usize) -> usize {
        (row * self.seq + token) * self.shape.out_cols() + head * self.dim
    }

    fn lse_at(&self, row: usize, head: usize, token: usize) -> usize {
        (row * self.shape.heads + head) * self.seq + token
    }

    fn key_head(&self, kv_head: usize) -> usize {
        self.shape.heads + kv_head
    }

    fn value_head(&self, kv_head: usize) -> usize {
        self.shape.heads + self.shape.kv_heads + kv_head
    }

    /// One head of some tokens, gathered into rows of `dim`.
    fn load_head(
        &self,
        buffer: &Buffer,
        starts: impl Iterator<Item = usize>,
        rows: &mut [f32],
    ) -> Result<()> {
        rows.chunks_exact_mut(self.dim).zip(starts).try_for_each(|(row, at)| load_from(buffer, at, row))
    }

    fn store_head(&self, buffer: &Buffer, starts: impl Iterator<Item = usize>, rows: &[f32]) -> Result<()> {
        rows.chunks_exact(self.dim).zip(starts).try_for_each(|(row, at)| store_to(buffer, at, row))
    }
}

/// Which keys the queries of one row see.
struct Visible<'a> {
    document_start: Option<&'a [i32]>,
    window: usize,
}

impl<'a> Visible<'a> {
    fn new(shape: &AttentionShape, document_start: Option<&'a Buffer>, row: usize) -> Self {
        // SAFETY: stream order keeps writers away from the document starts while the kernel runs.
        let all = document_start.map(|buffer| unsafe { buffer.host_slice::<i32>() });
        Visible {
            document_start: all.map(|starts| &starts[row * shape.seq..(row + 1) * shape.seq]),
            window: shape.window.unwrap_or(usize::MAX),
        }
    }

    /// A query always sees itself.
    fn keys(&self, query: usize) -> Range<usize> {
        let document = self.document_start.map_or(0, |starts| starts[query].max(0) as usize);
        document.max((query + 1).saturating_sub(self.window)).min(query)..query + 1
    }

    /// Blocks that hold every key the queries see.
    fn blocks(&self, queries: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let start = queries.clone().map(|query| self.keys(query).start).min().unwrap_or(0);
        let end = queries.end;
        (start..end).step_by(KEYS).map(move |key| key..end.min(key + KEYS))
    }

    /// The part of a block that a query sees, counted from the block's start.
    fn within(&self, query: usize, block: &Range<usize>) -> Range<usize> {
        let keys = self.keys(query);
        let start = keys.start.clamp(block.start, block.end) - block.start;
        let end = keys.end.clamp(block.start, block.end) - block.start;
        start..end.max(start)
    }
}

fn query_blocks(seq: usize) -> impl Iterator<Item = Range<usize>> {
    (0..seq).step_by(QUERIES).map(move |query| query..seq.min(query + QUERIES))
}

/// The query heads of one key head, in one row.
fn forward(
    args: &Attention<'_>,
    sizes: &Sizes,
    visible: &Visible<'_>,
    row: usize,
    kv_head: usize,
) -> Result<()> {
    let (dim, seq, scale) = (sizes.dim, sizes.seq, sizes.shape.scale());
    let lens = [seq * dim, seq * dim, QUERIES * dim, QUERIES * dim, QUERIES * KEYS, QUERIES, QUERIES];
    scratch::with(lens, |[keys, values, q, sums, scores, maxima, totals]| {
        sizes.load_head(args.qkv, (0..seq).map(|t| sizes.qkv_at(row, t, sizes.key_head(kv_head))), keys)?;
        sizes.load_head(
            args.qkv,
            (0..seq).map(|t| sizes.qkv_at(row, t, sizes.value_head(kv_head))),
            values,
        )?;
        for head in kv_head * sizes.group..(kv_head + 1) * sizes.group {
            for queries in query_blocks(seq) {
                let m = queries.len();
                let q = &mut q[..m * dim];
                let sums = &mut sums[..m * dim];
                sizes.load_head(args.qkv, queries.clone().map(|t| sizes.qkv_at(row, t, head)), q)?;
                sums.fill(0.0);
                maxima.fill(f32::NEG_INFINITY);
                totals.fill(0.0);
                for block in visible.blocks(&queries) {
                    let n = block.len();
                    let (k, v) = (&keys[block.start * dim..], &values[block.start * dim..]);
                    product((m, n, dim), Operand::new(q, dim), Operand::t(k, dim), scores, n, 0.0);
                    for (i, query) in queries.clone().enumerate() {
                        let seen = visible.within(query, &block);
                        let scores = &mut scores[i * n..][..n];
                        let rescale = softmax_step(scores, seen, scale, &mut maxima[i], &mut totals[i]);
                        if rescale != 1.0 {
                            multiply(&mut sums[i * dim..][..dim], rescale);
                        }
                    }
                    product((m, dim, n), Operand::new(scores, n), Operand::new(v, dim), sums, dim, 1.0);
                }
                for (i, query) in queries.clone().enumerate() {
                    multiply(&mut sums[i * dim..][..dim], 1.0 / totals[i]);
                    store_to(args.lse, sizes.lse_at(row, head, query), &[maxima[i] + totals[i].ln()])?;
                }
                sizes.store_head(args.out, queries.map(|t| sizes.out_at(row, t, head)), sums)?;
            }
        }
        Ok(())
    })
}

/// What is seen of a row, widened to whole lanes as far as the row goes: loops over it leave no remainder to be
/// worked through one by one.
#[inline(always)]
fn whole_lanes(seen: &Range<usize>, len: usize) -> Range<usize> {
    seen.start - seen.start % LANES..seen.end.next_multiple_of(LANES).min(len)
}

simd! {
    /// Turns a query's scores into exponentials under the maximum so far, zero where it does not see. Returns
    /// the factor on what was summed under the maximum before.
    pub fn softmax_step(scores: &mut [f32], seen: Range<usize>, scale: f32, max: &mut f32, total: &mut f32) -> f32 {
        if seen.is_empty() {
            scores.fill(0.0);
            return 1.0;
        }
        let lanes = whole_lanes(&seen, scores.len());
        scores[..lanes.start].fill(0.0);
        scores[lanes.end..].fill(0.0);
        for score in &mut scores[lanes.clone()] {
            *score *= scale;
        }
        // What is not seen takes a seen score's place for a while: −∞ would send `exp` through subnormals, which
        // processors are slow at.
        let (stand_in, before, after) = (scores[seen.start], lanes.start..seen.start, seen.end..lanes.end);
        scores[before.clone()].fill(stand_in);
        scores[after.clone()].fill(stand_in);
        let largest = max_of(&scores[lanes.clone()]).max(*max);
        for score in &mut scores[lanes.clone()] {
            *score = exp(*score - largest);
        }
        scores[before].fill(0.0);
        scores[after].fill(0.0);
        let rescale = match *max {
            f32::NEG_INFINITY => 0.0,
            max => exp(max - largest),
        };
        *max = largest;
        *total = *total * rescale + sum_over([&scores[lanes]], |[p]| p);
        rescale
    }
}

simd! {
    pub fn multiply(values: &mut [f32], factor: f32) {
        for value in values {
            *value *= factor;
        }
    }
}

pub fn attention_grad(stream: &Stream, args: &AttentionGrad<'_>) -> Result<()> {
    const OP: &str = "attention_grad";
    let AttentionGrad { shape, qkv, document_start, out, lse, dout, dqkv, .. } = *args;
    let sizes = Sizes::new(OP, &shape)?;
    let dtype = check::float(OP, qkv)?;
    check::buffer(OP, "qkv", qkv, dtype, shape.tokens() * shape.qkv_cols())?;
    check::buffer(OP, "dqkv", dqkv, dtype, shape.tokens() * shape.qkv_cols())?;
    check::buffer(OP, "out", out, dtype, shape.tokens() * shape.out_cols())?;
    check::buffer(OP, "dout", dout, dtype, shape.tokens() * shape.out_cols())?;
    check::buffer(OP, "lse", lse, Dtype::F32, shape.tokens() * shape.heads)?;
    document_start
        .map_or(Ok(()), |start| check::buffer(OP, "document_start", start, Dtype::I32, shape.tokens()))?;
    check::stream(OP, stream)?.run(|| {
        for row in 0..shape.rows {
            let visible = Visible::new(&shape, document_start, row);
            for kv_head in 0..shape.kv_heads {
                backward(args, &sizes, &visible, row, kv_head)?;
            }
        }
        Ok(())
    })
}

/// The gradients of one key head and of its query heads, in one row. Probabilities are computed again from
/// the saved log-sums.
fn backward(
    args: &AttentionGrad<'_>,
    sizes: &Sizes,
    visible: &Visible<'_>,
    row: usize,
    kv_head: usize,
) -> Result<()> {
    let (dim, seq, scale) = (sizes.dim, sizes.seq, sizes.shape.scale());
    let (all, tile, pairs) = (seq * dim, QUERIES * dim, QUERIES * KEYS);
    let lens = [all, all, all, all, tile, tile, tile, tile, pairs, pairs, QUERIES, QUERIES];
    let key_at = |t| sizes.qkv_at(row, t, sizes.key_head(kv_head));
    let value_at = |t| sizes.qkv_at(row, t, sizes.value_head(kv_head));
    scratch::with(lens, |[keys, values, dkeys, dvalues, q, o, dout, dq, p, ds, lse, delta]| {
        sizes.load_head(args.qkv, (0..seq).map(key_at), keys)?;
        sizes.load_head(args.qkv, (0..seq).map(value_at), values)?;
        dkeys.fill(0.0);
        dvalues.fill(0.0);
        for head in kv_head * sizes.group..(kv_head + 1) * sizes.group {
            for queries in query_blocks(seq) {
                let m = queries.len();
                let (q, o, dout, dq) =
                    (&mut q[..m * dim], &mut o[..m * dim], &mut dout[..m * dim], &mut dq[..m * dim]);
                let query_at = |t| sizes.qkv_at(row, t, head);
                let out_at = |t| sizes.out_at(row, t, head);
                sizes.load_head(args.qkv, queries.clone().map(query_at), q)?;
                sizes.load_head(args.out, queries.clone().map(out_at), o)?;
                sizes.load_head(args.dout, queries.clone().map(out_at), dout)?;
                load_from(args.lse, sizes.lse_at(row, head, queries.start), &mut lse[..m])?;
                for i in 0..m {
                    delta[i] = dot(&o[i * dim..][..dim], &dout[i * dim..][..dim]);
                }
                dq.fill(0.0);
                for block in visible.blocks(&queries) {
                    let n = block.len();
                    let span = block.start * dim..block.end * dim;
                    let (k, v) = (&keys[span.clone()], &values[span.clone()]);
                    product((m, n, dim), Operand::new(q, dim), Operand::t(k, dim), p, n, 0.0);
                    product((m, n, dim), Operand::new(dout, dim), Operand::t(v, dim), ds, n, 0.0);
                    for (i, query) in queries.clone().enumerate() {
                        let seen = visible.within(query, &block);
                        let (p, ds) = (&mut p[i * n..][..n], &mut ds[i * n..][..n]);
                        probabilities(p, ds, seen, scale, lse[i], delta[i]);
                    }
                    product(
                        (n, dim, m),
                        Operand::t(p, n),
                        Operand::new(dout, dim),
                        &mut dvalues[span.clone()],
                        dim,
                        1.0,
                    );
                    product((n, dim, m), Operand::t(ds, n), Operand::new(q, dim), &mut dkeys[span], dim, 1.0);
                    product((m, dim, n), Operand::new(ds, n), Operand::new(k, dim), dq, dim, 1.0);
                }
                sizes.store_head(args.dqkv, queries.map(query_at), dq)?;
            }
        }
        sizes.store_head(args.dqkv, (0..seq).map(key_at), dkeys)?;
        sizes.store_head(args.dqkv, (0..seq).map(value_at), dvalues)
    })
}

simd! {
    /// Scores become probabilities, and their gradients those of the scores before scaling.
    fn probabilities(p: &mut [f32], ds: &mut [f32], seen: Range<usize>, scale: f32, lse: f32, delta: f32) {
        let lanes = whole_lanes(&seen, p.len());
        for (p, ds) in p[lanes.clone()].iter_mut().zip(&mut ds[lanes]) {
            *p = exp(*p * scale - lse);
            *ds = *p * (*ds - delta) * scale;
        }
        for row in [p, ds] {
            row[..seen.start].fill(0.0);
            row[seen.end..].fill(0.0);
        }
    }
}
