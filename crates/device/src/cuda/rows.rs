//! Kernels that work row by row: embedding, norm, rotation, activation and loss.

use super::device::{Cuda, aligned, expect, expect_or_f32, float};
use super::module::{Launch, args};
use super::nvrtc::{ACTIVATION, EMBEDDING, LOSS, NORM};
use super::stream::Stream;
use crate::profile::partials;
use crate::{
    CrossEntropy, Dtype, Embedding, EmbeddingGrad, Error, Result, RmsNorm, RmsNormGrad, Rope, Rotation,
    SumLoss, Swiglu, SwigluGrad,
};

/// Elements a thread takes at a time, where alignment allows.
pub(super) const GROUP: usize = 8;
/// Blocks along a grid's first side at most; kernels walk over what is left.
pub(super) const MAX_ROWS: usize = 1 << 20;
/// A grid's second side ends here.
pub(super) const MAX_GRID_Y: usize = 65_535;
/// Room for a norm's partial weight gradient in shared memory, with a margin for what the kernel has of its own.
pub(super) const MAX_SHARED_BYTES: usize = 40 << 10;
/// Shared memory that a loss leaves to what the kernel has of its own.
const OWN_SHARED_BYTES: usize = 2 << 10;

/// Threads for a row: enough to take it in one go, up to `most`.
pub(super) fn threads(cols: usize, vector: bool, most: usize) -> usize {
    let items = if vector { cols.div_ceil(GROUP) } else { cols };
    items.next_multiple_of(32).clamp(32, most)
}

/// How a norm's row lies in registers: threads, and groups of eight columns for each; no groups where the row cannot
/// be read 16 bytes at a time or is too long, and is walked column by column.
fn in_registers(cols: usize, vector: bool, most: usize) -> (usize, usize) {
    let items = cols / GROUP;
    let groups =
        [1, 2, 4].into_iter().find(|groups| items.div_ceil(*groups) <= if *groups == 4 { 512 } else { most });
    match groups {
        Some(groups) if vector => (items.div_ceil(groups).next_multiple_of(32), groups),
        _ => (threads(cols, false, 512), 0),
    }
}

pub(super) fn elements(op: &'static str, rows: usize, cols: usize) -> Result<usize> {
    rows.checked_mul(cols).ok_or_else(|| Error::argument(op, format!("{rows} × {cols} elements")))
}

/// Elements from the first to the last of `rows` rows of `cols`, `stride` apart.
pub(super) fn span(op: &'static str, rows: usize, cols: usize, stride: usize) -> Result<usize> {
    if stride < cols {
        return Err(Error::argument(op, format!("rows of {cols} are {stride} apart")));
    }
    Ok(if rows == 0 { 0 } else { elements(op, rows - 1, stride)? + cols })
}

impl Cuda {
    pub(super) fn embedding(&self, stream: &Stream, a: &Embedding<'_>) -> Result<()> {
        let op = "embedding";
        let dtype = float(op, a.table)?;
        a.table.expect_len(op, "table", elements(op, a.vocab, a.cols)?)?;
        expect(op, "ids", a.ids, Dtype::I32, a.tokens)?;
        expect(op, "out", a.out, dtype, elements(op, a.tokens, a.cols)?)?;
        if a.tokens == 0 || a.cols == 0 {
            return Ok(());
        }
        let vector = aligned(&[a.table, a.out]) && (a.cols * dtype.bytes()).is_multiple_of(16);
        let launch = Launch::new(a.tokens.min(MAX_ROWS), threads(a.cols, vector, 256));
        let values = args![a.table, a.ids, a.out, a.tokens, a.cols, vector];
        self.launch(stream, &EMBEDDING, &format!("embedding_{dtype}"), launch, values)
    }

    pub(super) fn embedding_grad(&self, stream: &Stream, a: &EmbeddingGrad<'_>) -> Result<()> {
        let op = "embedding_grad";
        let (dtype, table) = (float(op, a.dout)?, elements(op, a.vocab, a.cols)?);
        a.dout.expect_len(op, "dout", elements(op, a.tokens, a.cols)?)?;
        expect(op, "ids", a.ids, Dtype::I32, a.tokens)?;
        expect(op, "order", a.order, Dtype::I32, a.tokens)?;
        expect_or_f32(op, "dtable", a.dtable, dtype, table)?;
        if !a.accumulate {
            self.zero(stream, a.dtable, table)?;
        }
        if a.tokens == 0 || a.cols == 0 {
            return Ok(());
        }
        let vector = aligned(&[a.dout, a.dtable]) && a.cols.is_multiple_of(GROUP);
        let block = 128;
        let grid = [a.tokens.min(MAX_ROWS), a.cols.div_ceil(block * GROUP)];
        let name = format!("embedding_grad_{dtype}_{}", a.dtable.dtype());
        let values = args![a.dout, a.ids, a.order, a.dtable, a.tokens, a.cols, a.accumulate, vector];
        self.launch(stream, &EMBEDDING, &name, Launch { grid, block, shared_bytes: 0 }, values)
    }

    pub(super) fn rms_norm(&self, stream: &Stream, a: &RmsNorm<'_>) -> Result<()> {
        let op = "rms_norm";
        let (dtype, len) = (float(op, a.x)?, elements(op, a.rows, a.cols)?);
        if a.delta.is_some() != a.sum.is_some() {
            return Err(Error::argument(op, "delta and sum are given together or not at all"));
        }
        let mut buffers = vec![a.x, a.out];
        buffers.extend(a.delta.into_iter().chain(a.sum));
        for buffer in &buffers {
            expect(op, "x, delta, sum or out", buffer, dtype, len)?;
        }
        expect(op, "weight", a.weight, dtype, a.cols)?;
        expect(op, "rstd", a.rstd, Dtype::F32, a.rows)?;
        if len == 0 {
            return Ok(());
        }
        buffers.push(a.weight);
        let vector = aligned(&buffers) && a.cols.is_multiple_of(GROUP);
        let (threads, groups) = in_registers(a.cols, vector, 256);
        let launch = Launch::new(a.rows.min(MAX_ROWS), threads);
        let values = args![a.x, a.delta, a.weight, a.sum, a.out, a.rstd, a.rows, a.cols, a.eps];
        self.launch(stream, &NORM, &format!("rms_norm_{groups}_{dtype}"), launch, values)
    }

    pub(super) fn rms_norm_grad(&self, stream: &Stream, a: &RmsNormGrad<'_>) -> Result<()> {
        let op = "rms_norm_grad";
        let (dtype, len) = (float(op, a.x)?, elements(op, a.rows, a.cols)?);
        let blocks = partials(a.rows, a.cols);
        let mut buffers = vec![a.x, a.dout, a.dx];
        buffers.extend(a.dresidual);
        for buffer in &buffers {
            expect(op, "x, dout, dresidual or dx", buffer, dtype, len)?;
        }
        expect(op, "weight", a.weight, dtype, a.cols)?;
        expect(op, "rstd", a.rstd, Dtype::F32, a.rows)?;
        a.dweight.map_or(Ok(()), |dweight| expect_or_f32(op, "dweight", dweight, dtype, a.cols))?;
        expect(op, "scratch", a.scratch, Dtype::F32, elements(op, blocks, a.cols)?)?;
        if a.cols == 0 {
            return Ok(());
        }
        buffers.extend([a.weight, a.scratch]);
        let vector = aligned(&buffers) && a.cols.is_multiple_of(GROUP);
        let (threads, groups) = in_registers(a.cols, vector, 512);
        let values = args![a.dout, a.x, a.weight, a.rstd, a.dresidual, a.dx, a.scratch, a.rows, a.cols];
        let name = format!("rms_norm_grad_{groups}_{dtype}");
        self.launch(stream, &NORM, &name, Launch::new(blocks, threads), values)?;
        let Some(dweight) = a.dweight else { return Ok(()) };
        self.add_partials(stream, (a.scratch, blocks), dweight, a.cols, a.accumulate)
    }

    pub(super) fn rope(&self, stream: &Stream, a: &Rope<'_>) -> Result<()> {
        let op = "rope";
        let (dtype, half) = (float(op, a.x)?, a.head_dim / 2);
        if !a.head_dim.is_multiple_of(2) {
            return Err(Error::argument(op, format!("a head of {} does not split in halves", a.head_dim)));
        }
        let cols = elements(op, a.heads, a.head_dim)?;
        a.x.expect_len(op, "x", span(op, a.tokens, cols, a.stride)?)?;
        expect(op, "positions", a.positions, Dtype::I32, a.tokens)?;
        expect(op, "cos", a.cos, Dtype::F32, half)?;
        expect(op, "sin", a.sin, Dtype::F32, a.cos.len())?;
        if a.tokens == 0 || cols == 0 {
            return Ok(());
        }
        let vector =
            aligned(&[a.x, a.cos, a.sin]) && half.is_multiple_of(GROUP) && a.stride.is_multiple_of(GROUP);
        let sign = if a.direction == Rotation::Forward { 1.0f32 } else { -1.0f32 };
        // Enough threads to take every head in one go, four of them each.
        let items = if vector { a.heads.div_ceil(4) * (half / GROUP) } else { a.heads * half };
        let threads = items.next_multiple_of(32).clamp(32, 256).max((half / GROUP).next_multiple_of(32));
        // Blocks go from token to token; as many as run at once.
        let launch = Launch::new(a.tokens.min(self.context.multiprocessors as usize * 16), threads);
        let values =
            args![a.x, a.positions, a.cos, a.sin, a.tokens, a.heads, a.head_dim, a.stride, sign, vector,];
        self.launch(stream, &ACTIVATION, &format!("rope_{dtype}"), launch, values)
    }

    /// Blocks along a row, and rows.
    pub(super) fn columns_and_rows(&self, rows: usize, cols: usize, vector: bool) -> Launch {
        let items = if vector { cols.div_ceil(GROUP) } else { cols };
        let block = threads(cols, vector, 256);
        Launch { grid: [items.div_ceil(block).min(MAX_ROWS), rows.min(MAX_GRID_Y)], block, shared_bytes: 0 }
    }

    pub(super) fn swiglu(&self, stream: &Stream, a: &Swiglu<'_>) -> Result<()> {
        let op = "swiglu";
        let (dtype, len) = (float(op, a.gate_up)?, elements(op, a.rows, 2 * a.cols)?);
        a.gate_up.expect_len(op, "gate_up", len)?;
        expect(op, "out", a.out, dtype, len / 2)?;
        if len == 0 {
            return Ok(());
        }
        let vector = aligned(&[a.gate_up, a.out]) && a.cols.is_multiple_of(GROUP);
        let launch = self.columns_and_rows(a.rows, a.cols, vector);
        let values = args![a.gate_up, a.out, a.rows, a.cols, vector];
        self.launch(stream, &ACTIVATION, &format!("swiglu_{dtype}"), launch, values)
    }

    pub(super) fn swiglu_grad(&self, stream: &Stream, a: &SwigluGrad<'_>) -> Result<()> {
        let op = "swiglu_grad";
        let (dtype, len) = (float(op, a.gate_up)?, elements(op, a.rows, 2 * a.cols)?);
        a.gate_up.expect_len(op, "gate_up", len)?;
        expect(op, "dgate_up", a.dgate_up, dtype, len)?;
        expect(op, "dout", a.dout, dtype, len / 2)?;
        if len == 0 {
            return Ok(());
        }
        let vector = aligned(&[a.gate_up, a.dout, a.dgate_up]) && a.cols.is_multiple_of(GROUP);
        let launch = self.columns_and_rows(a.rows, a.cols, vector);
        let values = args![a.gate_up, a.dout, a.dgate_up, a.rows, a.cols, vector];
        self.launch(stream, &ACTIVATION, &format!("swiglu_grad_{dtype}"), launch, values)
    }

    pub(super) fn cross_entropy(&self, stream: &Stream, a: &CrossEntropy<'_>) -> Result<()> {
        let op = "cross_entropy";
        let dtype = float(op, a.logits)?;
        a.logits.expect_len(op, "logits", span(op, a.rows, a.vocab, a.stride)?)?;
        expect(op, "labels", a.labels, Dtype::I32, a.rows)?;
        expect(op, "losses", a.losses, Dtype::F32, a.rows)?;
        if let Some(seed) = a.seed {
            expect(op, "seed", seed, Dtype::F32, 1)?;
        }
        if a.rows == 0 {
            return Ok(());
        }
        let vector = aligned(&[a.logits]) && a.stride.is_multiple_of(GROUP);
        let group_bytes = GROUP * dtype.bytes();
        let room = self.context.max_shared_bytes.saturating_sub(OWN_SHARED_BYTES) / group_bytes;
        let kept = if vector && a.seed.is_some() { room.min(a.vocab / GROUP) } else { 0 };
        let launch = Launch {
            grid: [a.rows.min(MAX_ROWS), 1],
            block: threads(a.vocab, vector, 512),
            shared_bytes: kept * group_bytes,
        };
        let values = args![a.logits, a.labels, a.losses, a.seed, a.rows, a.vocab, a.stride, vector, kept];
        self.launch(stream, &LOSS, &format!("cross_entropy_{dtype}"), launch, values)
    }

    pub(super) fn sum_loss(&self, stream: &Stream, a: &SumLoss<'_>) -> Result<()> {
        let op = "sum_loss";
        let (dtype, len) = (float(op, a.x)?, elements(op, a.rows, a.cols)?);
        a.x.expect_len(op, "x", len)?;
        a.target.map_or(Ok(()), |target| expect(op, "target", target, dtype, len))?;
        expect(op, "losses", a.losses, Dtype::F32, a.rows)?;
        a.seed.map_or(Ok(()), |seed| expect(op, "seed", seed, Dtype::F32, 1))?;
        if a.rows == 0 {
            return Ok(());
        }
        let launch = Launch::new(a.rows.min(MAX_ROWS), threads(a.cols, false, 512));
        let values = args![a.x, a.target, a.losses, a.seed, a.scale, a.rows, a.cols];
        self.launch(stream, &LOSS, &format!("sum_loss_{dtype}"), launch, values)
    }
}
