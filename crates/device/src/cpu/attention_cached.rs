//! Attention of new tokens against a cache of keys and values: the queries of all heads that share a key head
//! are taken together, so that each cached key is read once.

use super::attention::{KEYS, QUERIES, multiply, softmax_step};
use super::check;
use super::elementwise::{load_from, store_to};
use super::gemm::{Operand, product};
use super::scratch;
use crate::{AttentionCached, Result, Stream};
use std::ops::Range;

pub fn attention_cached(stream: &Stream, args: &AttentionCached<'_>) -> Result<()> {
    args.check()?;
    check::stream("attention_cached", stream)?.run(|| {
        for row in 0..args.shape.rows {
            for kv_head in 0..args.shape.kv_heads {
                append(args, row, kv_head)?;
                attend(args, row, kv_head)?;
            }
        }
        Ok(())
    })
}

/// Where a new token's part of q ‖ k ‖ v begins; heads count through queries, keys and values.
fn qkv_at(args: &AttentionCached<'_>, row: usize, token: usize, head: usize) -> usize {
    (row * args.shape.seq + token) * args.shape.qkv_cols() + head * args.shape.head_dim
}

/// Where a cached token's key and value of one head begin.
fn cached_at(args: &AttentionCached<'_>, row: usize, kv_head: usize, token: usize) -> usize {
    ((row * args.shape.kv_heads + kv_head) * args.max_len + token) * args.shape.head_dim
}

fn append(args: &AttentionCached<'_>, row: usize, kv_head: usize) -> Result<()> {
    let (shape, dim) = (&args.shape, args.shape.head_dim);
    let first_value = shape.heads + shape.kv_heads;
    scratch::with([dim], |[values]| {
        for token in 0..shape.seq {
            let to = cached_at(args, row, kv_head, args.start + token);
            for (head, cache) in [(shape.heads, args.keys), (first_value, args.values)] {
                load_from(args.qkv, qkv_at(args, row, token, head + kv_head), values)?;
                store_to(cache, to, values)?;
            }
        }
        Ok(())
    })
}

/// The query heads of one key head, in one row.
fn attend(args: &AttentionCached<'_>, row: usize, kv_head: usize) -> Result<()> {
    let (shape, dim, scale) = (&args.shape, args.shape.head_dim, args.shape.scale());
    let group = shape.heads / shape.kv_heads;
    let most = (QUERIES / group).max(1);
    let rows = most * group;
    let lens = [KEYS * dim, KEYS * dim, rows * dim, rows * dim, rows * KEYS, rows, rows];
    scratch::with(lens, |[keys, values, q, sums, scores, maxima, totals]| {
        for tokens in blocks(0..shape.seq, most) {
            // Row i is head i % group of token i / group.
            let m = tokens.len() * group;
            let each =
                || tokens.clone().flat_map(|t| (0..group).map(move |head| (t, kv_head * group + head)));
            for ((token, head), q) in each().zip(q.chunks_exact_mut(dim)) {
                load_from(args.qkv, qkv_at(args, row, token, head), q)?;
            }
            sums[..m * dim].fill(0.0);
            maxima.fill(f32::NEG_INFINITY);
            totals.fill(0.0);
            let seen = |token: usize| {
                let end = args.start + token + 1;
                end.saturating_sub(shape.window.unwrap_or(usize::MAX))..end
            };
            for block in blocks(seen(tokens.start).start..args.start + tokens.end, KEYS) {
                let n = block.len();
                let at = cached_at(args, row, kv_head, block.start);
                load_from(args.keys, at, &mut keys[..n * dim])?;
                load_from(args.values, at, &mut values[..n * dim])?;
                product((m, n, dim), Operand::new(q, dim), Operand::t(keys, dim), scores, n, 0.0);
                for (i, (token, _)) in each().enumerate() {
                    let within = |key: usize| key.clamp(block.start, block.end) - block.start;
                    let Range { start, end } = seen(token);
                    let seen = within(start)..within(end);
                    let scores = &mut scores[i * n..][..n];
                    let rescale = softmax_step(scores, seen, scale, &mut maxima[i], &mut totals[i]);
                    if rescale != 1.0 {
                        multiply(&mut sums[i * dim..][..dim], rescale);
                    }
                }
                product((m, dim, n), Operand::new(scores, n), Operand::new(values, dim), sums, dim, 1.0);
            }
            for (i, (token, head)) in each().enumerate() {
                let sums = &mut sums[i * dim..][..dim];
                multiply(sums, 1.0 / totals[i]);
                store_to(args.out, (row * shape.seq + token) * shape.out_cols() + head * dim, sums)?;
            }
        }
        Ok(())
    })
}

fn blocks(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(len).map(move |start| start..range.end.min(start + len))
}
