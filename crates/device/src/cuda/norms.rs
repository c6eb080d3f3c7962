//! Norms of heads, LayerNorm and biases: row by row forward, and column sums for their weights backward.

use super::device::{Cuda, aligned, expect, expect_or_f32, float};
use super::module::{Launch, args};
use super::nvrtc::{BIAS, HEAD_NORM, LAYER_NORM, NORM};
use super::rows::{GROUP, MAX_GRID_Y, MAX_ROWS, MAX_SHARED_BYTES, elements, span, threads};
use super::stream::Stream;
use crate::profile::partials;
use crate::{Bias, BiasGrad, Buffer, Dtype, Error, HeadNorm, HeadNormGrad, LayerNorm, LayerNormGrad, Result};

/// Warps of a block that norms heads.
const HEAD_WARPS: usize = 8;

/// Heads of a row as the kernels see them: (first heads, all heads, elements), once they fit in it.
fn heads_of(op: &'static str, heads: [usize; 2], head_dim: usize) -> Result<(usize, usize, usize)> {
    let all = heads[0] + heads[1];
    if head_dim == 0 {
        return Err(Error::argument(op, "heads of no elements"));
    }
    Ok((heads[0], all, elements(op, all, head_dim)?))
}

impl Cuda {
    pub(super) fn bias(&self, stream: &Stream, a: &Bias<'_>) -> Result<()> {
        let op = "bias";
        let (dtype, len) = (float(op, a.x)?, elements(op, a.rows, a.cols)?);
        a.x.expect_len(op, "x", len)?;
        expect(op, "bias", a.bias, dtype, a.cols)?;
        if len == 0 {
            return Ok(());
        }
        let vector = aligned(&[a.x, a.bias]) && a.cols.is_multiple_of(GROUP);
        let launch = self.columns_and_rows(a.rows, a.cols, vector);
        let values = args![a.x, a.bias, a.rows, a.cols, a.accumulate, vector];
        self.launch(stream, &BIAS, &format!("bias_{dtype}"), launch, values)
    }

    pub(super) fn bias_grad(&self, stream: &Stream, a: &BiasGrad<'_>) -> Result<()> {
        let op = "bias_grad";
        let dtype = float(op, a.dout)?;
        a.dout.expect_len(op, "dout", elements(op, a.rows, a.cols)?)?;
        expect_or_f32(op, "dbias", a.dbias, dtype, a.cols)?;
        let blocks = partials(a.rows, a.cols);
        expect(op, "scratch", a.scratch, Dtype::F32, elements(op, blocks, a.cols)?)?;
        if a.cols == 0 {
            return Ok(());
        }
        let vector = aligned(&[a.dout, a.scratch]) && a.cols.is_multiple_of(GROUP);
        let items = if vector { a.cols / GROUP } else { a.cols };
        let block = threads(a.cols, vector, 128);
        let grid = [blocks, items.div_ceil(block).min(MAX_GRID_Y)];
        let values = args![a.dout, a.scratch, a.rows, a.cols, vector];
        let launch = Launch { grid, block, shared_bytes: 0 };
        self.launch(stream, &BIAS, &format!("bias_grad_{dtype}"), launch, values)?;
        self.add_partials(stream, (a.scratch, blocks), a.dbias, a.cols, a.accumulate)
    }

    /// dst = Σ of `count` rows of partial sums, in a fixed order.
    pub(super) fn add_partials(
        &self,
        stream: &Stream,
        (partials, count): (&Buffer, usize),
        dst: &Buffer,
        cols: usize,
        accumulate: bool,
    ) -> Result<()> {
        let name = format!("weight_grad_{}", dst.dtype());
        let launch = Launch::new(cols.div_ceil(32).min(MAX_ROWS), 512);
        self.launch(stream, &NORM, &name, launch, args![partials, count, dst, cols, accumulate])
    }

    pub(super) fn head_norm(&self, stream: &Stream, a: &HeadNorm<'_>) -> Result<()> {
        let op = "head_norm";
        let dtype = float(op, a.x)?;
        let (first, all, cols) = heads_of(op, a.heads, a.head_dim)?;
        a.x.expect_len(op, "x", span(op, a.tokens, cols, a.stride)?)?;
        expect(op, "weight", a.weight, dtype, 2 * a.head_dim)?;
        let len = elements(op, a.tokens, cols)?;
        a.before.map_or(Ok(()), |before| expect(op, "before", before, dtype, len))?;
        if len == 0 {
            return Ok(());
        }
        let mut buffers = vec![a.x, a.weight];
        buffers.extend(a.before);
        let vector = aligned(&buffers) && a.head_dim.is_multiple_of(GROUP) && a.stride.is_multiple_of(GROUP);
        let grid = (a.tokens * all).div_ceil(HEAD_WARPS).min(MAX_ROWS);
        let values =
            args![a.x, a.weight, a.before, a.tokens, first, all, a.head_dim, a.stride, a.eps, vector];
        let launch = Launch::new(grid, HEAD_WARPS * 32);
        self.launch(stream, &HEAD_NORM, &format!("head_norm_{dtype}"), launch, values)
    }

    pub(super) fn head_norm_grad(&self, stream: &Stream, a: &HeadNormGrad<'_>) -> Result<()> {
        let op = "head_norm_grad";
        let dtype = float(op, a.dx)?;
        let (first, all, cols) = heads_of(op, a.heads, a.head_dim)?;
        a.dx.expect_len(op, "dx", span(op, a.tokens, cols, a.stride)?)?;
        expect(op, "before", a.before, dtype, elements(op, a.tokens, cols)?)?;
        expect(op, "weight", a.weight, dtype, 2 * a.head_dim)?;
        a.dweight.map_or(Ok(()), |dweight| expect_or_f32(op, "dweight", dweight, dtype, 2 * a.head_dim))?;
        let sums = 2 * a.head_dim;
        let blocks = partials(a.tokens, sums);
        expect(op, "scratch", a.scratch, Dtype::F32, elements(op, blocks, sums)?)?;
        let warps = (MAX_SHARED_BYTES / (sums * 4)).min(HEAD_WARPS);
        if warps == 0 {
            return Err(Error::argument(op, format!("heads of {} are too long", a.head_dim)));
        }
        let vector = aligned(&[a.dx, a.before, a.weight])
            && a.head_dim.is_multiple_of(GROUP)
            && a.stride.is_multiple_of(GROUP);
        let launch = Launch { grid: [blocks, 1], block: warps * 32, shared_bytes: warps * sums * 4 };
        let values = args![
            a.dx, a.before, a.weight, a.scratch, a.tokens, first, all, a.head_dim, a.stride, a.eps, vector
        ];
        self.launch(stream, &HEAD_NORM, &format!("head_norm_grad_{dtype}"), launch, values)?;
        let Some(dweight) = a.dweight else { return Ok(()) };
        self.add_partials(stream, (a.scratch, blocks), dweight, sums, a.accumulate)
    }

    pub(super) fn layer_norm(&self, stream: &Stream, a: &LayerNorm<'_>) -> Result<()> {
        let op = "layer_norm";
        let (dtype, len) = (float(op, a.x)?, elements(op, a.rows, a.cols)?);
        a.x.expect_len(op, "x", len)?;
        expect(op, "out", a.out, dtype, len)?;
        expect(op, "weight", a.weight, dtype, a.cols)?;
        a.bias.map_or(Ok(()), |bias| expect(op, "bias", bias, dtype, a.cols))?;
        expect(op, "statistics", a.statistics, Dtype::F32, elements(op, a.rows, 2)?)?;
        if len == 0 {
            return Ok(());
        }
        let mut buffers = vec![a.x, a.out, a.weight];
        buffers.extend(a.bias);
        let vector = aligned(&buffers) && a.cols.is_multiple_of(GROUP);
        let launch = Launch::new(a.rows.min(MAX_ROWS), threads(a.cols, vector, 512));
        let values = args![a.x, a.weight, a.bias, a.out, a.statistics, a.rows, a.cols, a.eps, vector];
        self.launch(stream, &LAYER_NORM, &format!("layer_norm_{dtype}"), launch, values)
    }

    pub(super) fn layer_norm_grad(&self, stream: &Stream, a: &LayerNormGrad<'_>) -> Result<()> {
        let op = "layer_norm_grad";
        let (dtype, len) = (float(op, a.x)?, elements(op, a.rows, a.cols)?);
        for buffer in [a.x, a.dout, a.dx] {
            expect(op, "x, dout or dx", buffer, dtype, len)?;
        }
        expect(op, "weight", a.weight, dtype, a.cols)?;
        expect(op, "statistics", a.statistics, Dtype::F32, elements(op, a.rows, 2)?)?;
        for (grad, _) in a.dweight.into_iter().chain(a.dbias) {
            expect_or_f32(op, "dweight or dbias", grad, dtype, a.cols)?;
        }
        let blocks = partials(a.rows, a.cols);
        let part = elements(op, blocks, a.cols)?;
        expect(op, "scratch", a.scratch, Dtype::F32, 2 * part)?;
        if a.cols == 0 {
            return Ok(());
        }
        let (dweights, dbiases) = (a.scratch.slice(0, part)?, a.scratch.slice(part, part)?);
        let vector = aligned(&[a.x, a.dout, a.dx, a.weight]) && a.cols.is_multiple_of(GROUP);
        let shared = a.cols * 8 <= MAX_SHARED_BYTES;
        let shared_bytes = if shared { a.cols * 8 } else { 0 };
        let launch = Launch { grid: [blocks, 1], block: threads(a.cols, vector, 512), shared_bytes };
        let values = args![
            a.dout,
            a.x,
            a.weight,
            a.statistics,
            a.dx,
            &dweights,
            &dbiases,
            a.rows,
            a.cols,
            vector,
            shared
        ];
        self.launch(stream, &LAYER_NORM, &format!("layer_norm_grad_{dtype}"), launch, values)?;
        for (grad, partials) in [(a.dweight, &dweights), (a.dbias, &dbiases)] {
            let Some((grad, accumulate)) = grad else { continue };
            self.add_partials(stream, (partials, blocks), grad, a.cols, accumulate)?;
        }
        Ok(())
    }
}
