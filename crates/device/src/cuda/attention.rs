//! Attention: cuDNN's where it is there and takes the shape, our own on the tensor cores (`flash`), and the plain
//! kernel that always can.

use super::cudnn::{DocumentTable, PackedLayout};
use super::device::{Cuda, aligned, expect, float};
use super::module::{Arg, Launch, args};
use super::nvrtc::{ATTENTION_BF16, ATTENTION_F16, ATTENTION_F32, CACHE, DOCUMENTS, Program};
use super::stream::Stream;
use crate::{
    Attention, AttentionCached, AttentionGrad, AttentionShape, Buffer, Device, Dtype, Error, Profile, Result,
};

/// Threads of a block in `attention.cu`.
const BLOCK: usize = 256;
/// Threads of the block of `documents.cu`.
const DOCUMENT_THREADS: usize = 1024;
/// A grid's second side ends here.
pub(super) const MAX_TILES: usize = 65_535;

/// Which kernels may compute attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKernels {
    /// cuDNN's where it is there and takes the shape, else our own.
    Any,
    /// Our own: on the tensor cores where they take the shape, else the plain one.
    Own,
    /// The plain one alone: the oracle on the GPU.
    Plain,
}

impl Cuda {
    pub(super) fn attention(&self, stream: &Stream, a: &Attention<'_>) -> Result<()> {
        let op = "attention";
        let dtype = check_inputs(op, &a.shape, a.qkv, a.document_start)?;
        expect(op, "out", a.out, dtype, a.shape.tokens() * a.shape.out_cols())?;
        expect(op, "lse", a.lse, Dtype::F32, a.shape.tokens() * a.shape.heads)?;
        if a.shape.tokens() == 0 {
            return Ok(());
        }
        let done = self.attention_cudnn(stream, a)? || self.has_flash() && self.flash(stream, a, 0)?;
        if done { Ok(()) } else { self.attention_plain(stream, a, dtype) }
    }

    pub(super) fn attention_grad(&self, stream: &Stream, a: &AttentionGrad<'_>) -> Result<()> {
        let op = "attention_grad";
        let dtype = check_inputs(op, &a.shape, a.qkv, a.document_start)?;
        let out = a.shape.tokens() * a.shape.out_cols();
        expect(op, "out", a.out, dtype, out)?;
        expect(op, "dout", a.dout, dtype, out)?;
        expect(op, "lse", a.lse, Dtype::F32, a.shape.tokens() * a.shape.heads)?;
        expect(op, "dqkv", a.dqkv, dtype, a.shape.tokens() * a.shape.qkv_cols())?;
        if a.shape.tokens() == 0 {
            return Ok(());
        }
        let done =
            self.attention_grad_cudnn(stream, a)? || self.has_flash() && self.flash_grad(stream, a, 0)?;
        if done { Ok(()) } else { self.attention_grad_plain(stream, a, dtype) }
    }

    /// New keys and values into the cache; then what a first pass needs is in `qkv` itself, and later ones read
    /// the cache.
    pub(super) fn attention_cached(&self, stream: &Stream, a: &AttentionCached<'_>) -> Result<()> {
        let op = "attention_cached";
        let (dtype, s) = (a.check()?, &a.shape);
        if s.head_dim > BLOCK {
            return Err(Error::argument(op, format!("heads of {}; {BLOCK} is the most", s.head_dim)));
        }
        if s.tokens() == 0 {
            return Ok(());
        }
        let new = s.tokens() * s.kv_heads * s.head_dim;
        let blocks = new.div_ceil(BLOCK).min(self.context.multiprocessors as usize * 32);
        let sizes = *args![s.seq, s.heads, s.kv_heads, s.head_dim, a.start, a.max_len];
        let mut values = args![a.qkv, a.keys, a.values, s.tokens()].to_vec();
        values.extend(sizes);
        let name = format!("cache_append_{dtype}");
        self.launch(stream, &CACHE, &name, Launch::new(blocks, BLOCK), &values)?;
        if a.start == 0 {
            let AttentionCached { shape, qkv, out, lse, scratch, .. } = *a;
            let whole = Attention { shape, qkv, document_start: None, out, lse, scratch };
            return self.attention(stream, &whole);
        }
        let mut values = args![a.qkv, a.keys, a.values, a.out].to_vec();
        values.extend(sizes);
        values.extend(args![s.window.unwrap_or(0), s.scale()]);
        let name = format!("attention_cached_{dtype}");
        self.launch(stream, &CACHE, &name, Launch::new(s.tokens() * s.heads, BLOCK), &values)
    }

    /// cuDNN's, if it takes the shape. Documents beyond those it has room for are done by `flash`.
    fn attention_cudnn(&self, stream: &Stream, a: &Attention<'_>) -> Result<bool> {
        let Some(cudnn) = self.cudnn() else { return Ok(false) };
        let Some(starts) = a.document_start else { return cudnn.forward(stream.handle(), a) };
        if !self.flash_takes(&a.shape, a.qkv.dtype(), &[a.qkv, a.out]) {
            return Ok(false);
        }
        let Some((table, scratch)) = self.document_table(stream, &a.shape, starts, a.scratch)? else {
            return Ok(false);
        };
        let a = Attention { scratch: &scratch, ..*a };
        Ok(cudnn.forward_of(stream.handle(), &a, Some(&table))? && self.flash(stream, &a, table.done)?)
    }

    fn attention_grad_cudnn(&self, stream: &Stream, a: &AttentionGrad<'_>) -> Result<bool> {
        let Some(cudnn) = self.cudnn() else { return Ok(false) };
        let Some(starts) = a.document_start else { return cudnn.backward(stream.handle(), a) };
        // In a fixed order, cuDNN has no room for documents.
        if self.profile() == (Profile::Cuda { deterministic: true })
            || !self.flash_takes(&a.shape, a.qkv.dtype(), &[a.qkv, a.out, a.dout, a.dqkv])
        {
            return Ok(false);
        }
        let Some((table, scratch)) = self.document_table(stream, &a.shape, starts, a.scratch)? else {
            return Ok(false);
        };
        let (a, layout) =
            (AttentionGrad { scratch: &scratch, ..*a }, PackedLayout::new(&a.shape, a.qkv.dtype()));
        if scratch.num_bytes() < layout.workspace {
            return Ok(false);
        }
        let ([k, v], [dk, dv]) = (keys_and_values(a.qkv, &a.shape), keys_and_values(a.dqkv, &a.shape));
        let at = scratch.address();
        self.copy_keys(stream, &a, KeyCopy::Out([k, v], [at + layout.k, at + layout.v]))?;
        if !cudnn.backward_of(stream.handle(), &a, &table)? {
            return Ok(false);
        }
        self.copy_keys(stream, &a, KeyCopy::In([at + layout.dk, at + layout.dv], [dk, dv]))?;
        self.flash_grad(stream, &a, table.done)
    }

    /// Copies what belongs to every token's keys and values.
    fn copy_keys(&self, stream: &Stream, a: &AttentionGrad<'_>, copy: KeyCopy) -> Result<()> {
        let pieces = |cols: usize| cols * a.qkv.dtype().bytes() / 16;
        let (width, inside) = (pieces(a.shape.kv_heads * a.shape.head_dim), pieces(a.shape.qkv_cols()));
        let (from, from_stride, to, to_stride) = match copy {
            KeyCopy::Out(from, to) => (from, inside, to, width),
            KeyCopy::In(from, to) => (from, width, to, inside),
        };
        let (rows, blocks) = (a.shape.tokens(), self.context.multiprocessors as usize * 8);
        let values = args![from[0], from[1], from_stride, to[0], to[1], to_stride, width, rows];
        self.launch(stream, &DOCUMENTS, "copy_two", Launch::new(blocks, BLOCK), values)
    }

    /// Writes a table of the documents into the scratch; returns it and the rest of the scratch. None where cuDNN
    /// takes no documents (it does on Hopper and the Blackwell of servers), or the scratch is too small.
    fn document_table(
        &self,
        stream: &Stream,
        s: &AttentionShape,
        starts: &Buffer,
        scratch: &Buffer,
    ) -> Result<Option<(DocumentTable, Buffer)>> {
        let (bytes, room) = (DocumentTable::bytes(s), scratch.num_bytes());
        if !(90..110).contains(&self.context.arch) || room < bytes || !aligned(&[scratch]) {
            return Ok(None);
        }
        let rest = scratch.cast_bits(Dtype::U8)?.slice(bytes, room - bytes)?;
        let table = DocumentTable::new(s, scratch.address());
        let DocumentTable { cap, first, lengths, qkv, out, kv, lse, done } = table;
        let mut values = args![starts, first, lengths, qkv, out, kv, lse, done].to_vec();
        let kv_cols = s.kv_heads * s.head_dim;
        values.extend(args![s.rows, s.seq, s.heads, cap, s.qkv_cols(), s.out_cols(), kv_cols]);
        self.launch(stream, &DOCUMENTS, "document_table", Launch::new(1, DOCUMENT_THREADS), &values)?;
        Ok(Some((table, rest)))
    }

    /// Tiles in shared memory, f32 inside; needs no scratch. Arguments have been checked.
    fn attention_plain(&self, stream: &Stream, a: &Attention<'_>, dtype: Dtype) -> Result<()> {
        let (s, tiles) = (&a.shape, Tiles::for_head("attention", a.shape.head_dim)?);
        let launch = tiles.launch("attention", s, s.heads, tiles.forward_queries, tiles.forward_floats())?;
        let name = format!("attention_{dtype}_{}", tiles.head_dim);
        let vector = aligned(&[a.qkv]) && s.head_dim.is_multiple_of(8);
        let mut values = args![a.qkv, a.document_start, a.out, a.lse].to_vec();
        values.extend(shape_args(s));
        values.extend(args![vector]);
        self.launch(stream, program(dtype), &name, launch, &values)
    }

    /// Row sums of `dout · out` first, into the scratch; then one kernel for the queries' gradient and one for
    /// the keys' and values', so that no two blocks add to the same place.
    fn attention_grad_plain(&self, stream: &Stream, a: &AttentionGrad<'_>, dtype: Dtype) -> Result<()> {
        let op = "attention_grad";
        let (s, tiles) = (&a.shape, Tiles::for_head(op, a.shape.head_dim)?);
        let sums = row_sums(op, a)?;
        let items = s.tokens() * s.heads;
        let blocks = items.div_ceil(BLOCK / 32).min(self.context.multiprocessors as usize * 32);
        let name = format!("attention_row_sums_{dtype}");
        let values = args![a.out, a.dout, &sums, s.tokens(), s.seq, s.heads, s.head_dim];
        self.launch(stream, program(dtype), &name, Launch::new(blocks, BLOCK), values)?;

        let vector = aligned(&[a.qkv, a.dout]) && s.head_dim.is_multiple_of(8);
        let mut values = args![a.qkv, a.document_start, a.lse, a.dout, &sums, a.dqkv].to_vec();
        values.extend(shape_args(s));
        values.extend(args![vector]);
        let floats = tiles.grad_floats();
        for (side, heads) in [("query", s.heads), ("key_value", s.kv_heads)] {
            let launch = tiles.launch(op, s, heads, tiles.grad_resident, floats)?;
            let name = format!("attention_{side}_grad_{dtype}_{}", tiles.head_dim);
            self.launch(stream, program(dtype), &name, launch, &values)?;
        }
        Ok(())
    }
}

/// A copy of two tensors, k and v or their gradients, by the addresses of their first elements.
enum KeyCopy {
    /// From a buffer of q ‖ k ‖ v to where they are alone.
    Out([usize; 2], [usize; 2]),
    /// The other way.
    In([usize; 2], [usize; 2]),
}

/// Addresses of the first key and value in a buffer of q ‖ k ‖ v.
fn keys_and_values(qkv: &Buffer, shape: &AttentionShape) -> [usize; 2] {
    let head = shape.head_dim * qkv.dtype().bytes();
    [shape.heads, shape.heads + shape.kv_heads].map(|heads| qkv.address() + heads * head)
}

fn program(dtype: Dtype) -> &'static Program {
    match dtype {
        Dtype::Bf16 => &ATTENTION_BF16,
        Dtype::F16 => &ATTENTION_F16,
        _ => &ATTENTION_F32,
    }
}

fn check_inputs(
    op: &'static str,
    shape: &AttentionShape,
    qkv: &Buffer,
    document_start: Option<&Buffer>,
) -> Result<Dtype> {
    let dtype = float(op, qkv)?;
    if shape.kv_heads == 0 || !shape.heads.is_multiple_of(shape.kv_heads) || shape.heads == 0 {
        let what = format!("{} query heads do not share {} key heads", shape.heads, shape.kv_heads);
        return Err(Error::argument(op, what));
    }
    if shape.window == Some(0) || shape.head_dim == 0 || shape.seq > i32::MAX as usize {
        return Err(Error::argument(op, format!("{shape:?}")));
    }
    qkv.expect_len(op, "qkv", shape.tokens() * shape.qkv_cols())?;
    document_start.map_or(Ok(()), |start| expect(op, "document_start", start, Dtype::I32, shape.tokens()))?;
    Ok(dtype)
}

/// The start of the scratch as one f32 for each query and head.
pub(super) fn row_sums(op: &'static str, a: &AttentionGrad<'_>) -> Result<Buffer> {
    let items = a.shape.tokens() * a.shape.heads;
    let sums = a.scratch.cast_bits(Dtype::U8)?.slice(0, (items * 4).min(a.scratch.num_bytes()))?;
    let sums = sums.cast_bits(Dtype::F32)?;
    sums.expect_len(op, "scratch", items)?;
    Ok(sums)
}

/// The arguments that follow the buffers of all attention kernels.
pub(super) fn shape_args(s: &AttentionShape) -> [Arg; 6] {
    *args![s.seq, s.heads, s.kv_heads, s.head_dim, s.window.unwrap_or(0), s.scale()]
}

/// Sizes of the tiles for heads up to `head_dim`, as instantiated at the end of `attention.cu`.
#[derive(Clone, Copy, Debug)]
struct Tiles {
    head_dim: usize,
    forward_queries: usize,
    forward_keys: usize,
    /// Rows of the two tiles that stay while a gradient kernel runs.
    grad_resident: usize,
    /// Rows of the tile that is replaced all the time.
    grad_streamed: usize,
}

impl Tiles {
    fn for_head(op: &'static str, head_dim: usize) -> Result<Self> {
        let wide = |head_dim| Tiles {
            head_dim,
            forward_queries: 64,
            forward_keys: 64,
            grad_resident: 64,
            grad_streamed: 32,
        };
        match head_dim {
            0..=64 => Ok(wide(64)),
            65..=128 => Ok(wide(128)),
            129..=256 => Ok(Tiles {
                head_dim: 256,
                forward_queries: 32,
                forward_keys: 32,
                grad_resident: 32,
                grad_streamed: 16,
            }),
            _ => Err(Error::argument(op, format!("heads of {head_dim}; 256 is the most"))),
        }
    }

    /// f32 of shared memory: two tiles whose rows have four floats of padding, and the weights between them.
    fn forward_floats(&self) -> usize {
        let row = self.head_dim + 4;
        (self.forward_queries + self.forward_keys) * row + self.forward_queries * (self.forward_keys + 4)
    }

    fn grad_floats(&self) -> usize {
        let row = self.head_dim + 4;
        (2 * self.grad_resident + self.grad_streamed) * row + self.grad_resident * (self.grad_streamed + 4)
    }

    /// One block for every head of every row and every `tile` tokens.
    fn launch(
        &self,
        op: &'static str,
        shape: &AttentionShape,
        heads: usize,
        tile: usize,
        floats: usize,
    ) -> Result<Launch> {
        let tiles = shape.seq.div_ceil(tile);
        if tiles > MAX_TILES {
            return Err(Error::argument(
                op,
                format!("sequences of {}; {} is the most", shape.seq, MAX_TILES * tile),
            ));
        }
        Ok(Launch { grid: [shape.rows * heads, tiles], block: BLOCK, shared_bytes: floats * 4 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_the_shared_memory_of_small_gpus() {
        for head_dim in [1, 64, 80, 128, 192, 256] {
            let tiles = Tiles::for_head("test", head_dim).unwrap();
            // 99 KiB less what a kernel has of its own.
            let most = (99 << 10) - 512;
            assert!(tiles.forward_floats() * 4 <= most && tiles.grad_floats() * 4 <= most, "{tiles:?}");
        }
        assert!(Tiles::for_head("test", 257).is_err());
    }
}
