//! Attention on the tensor cores by kernels of our own (`flash.cu`), for 16-bit types and heads of up to 128.

use super::attention::{MAX_TILES, row_sums, shape_args};
use super::device::{Cuda, aligned};
use super::module::{Launch, args};
use super::nvrtc::{
    FLASH_BF16_64, FLASH_BF16_80, FLASH_BF16_96, FLASH_BF16_128, FLASH_F16_64, FLASH_F16_80, FLASH_F16_96,
    FLASH_F16_128, Program,
};
use super::stream::Stream;
use crate::{Attention, AttentionGrad, AttentionShape, Buffer, Dtype, Result};

/// Sizes in `flash.cu`: rows of its tiles, threads of its blocks.
const QUERIES: usize = 128;
const QUERY_GRAD_KEYS: usize = 32;
const QUERY_THREADS: usize = 128;
const KEYS: usize = 128;
const KEY_GRAD_QUERIES: usize = 64;
const KEY_THREADS: usize = 256;
const ROW_SUM_THREADS: usize = 256;

impl Cuda {
    /// Whether these kernels take a shape.
    pub(super) fn flash_takes(&self, shape: &AttentionShape, dtype: Dtype, buffers: &[&Buffer]) -> bool {
        aligned(buffers) && Kernels::take(shape, dtype, self.context.max_shared_bytes).is_some()
    }

    /// Issues the forward. False: these kernels do not take it, and nothing was issued. Arguments have been
    /// checked. `done`: the address of an i32, the first token that nobody has done yet; none, if 0.
    pub(super) fn flash(&self, stream: &Stream, a: &Attention<'_>, done: usize) -> Result<bool> {
        let s = &a.shape;
        let Some(kernels) = Kernels::take(s, a.qkv.dtype(), self.context.max_shared_bytes) else {
            return Ok(false);
        };
        if !aligned(&[a.qkv, a.out]) {
            return Ok(false);
        }
        let mut values = args![a.qkv, a.document_start, a.out, a.lse, done].to_vec();
        values.extend(shape_args(s));
        let launch = kernels.queries(s, kernels.forward_bytes());
        self.launch(stream, kernels.program, &kernels.name("flash"), launch, &values)?;
        Ok(true)
    }

    /// As [`Cuda::flash`]: row sums of `dout · out` into the scratch, then a kernel for the queries' gradient and
    /// one for the keys' and values', so that no two blocks add to the same place.
    pub(super) fn flash_grad(&self, stream: &Stream, a: &AttentionGrad<'_>, done: usize) -> Result<bool> {
        let s = &a.shape;
        let Some(kernels) = Kernels::take(s, a.qkv.dtype(), self.context.max_shared_bytes) else {
            return Ok(false);
        };
        if !aligned(&[a.qkv, a.out, a.dout, a.dqkv]) {
            return Ok(false);
        }
        let sums = row_sums("attention_grad", a)?;
        let items = s.tokens() * s.heads;
        let blocks = items.div_ceil(ROW_SUM_THREADS / 16).min(self.context.multiprocessors as usize * 32);
        let values = args![a.out, a.dout, &sums, done, s.tokens(), s.seq, s.heads, s.head_dim];
        let name = kernels.name("flash_row_sums");
        self.launch(stream, kernels.program, &name, Launch::new(blocks, ROW_SUM_THREADS), values)?;

        let mut values = args![a.qkv, a.document_start, a.lse, a.dout, &sums, a.dqkv, done].to_vec();
        values.extend(shape_args(s));
        let launch = kernels.queries(s, kernels.query_grad_bytes());
        self.launch(stream, kernels.program, &kernels.name("flash_query_grad"), launch, &values)?;

        let two = kernels.key_grad_bytes(2) <= self.context.max_shared_bytes;
        values.extend(args![two]);
        let shared_bytes = kernels.key_grad_bytes(if two { 2 } else { 1 });
        let grid = [s.rows * s.kv_heads, s.seq.div_ceil(KEYS)];
        let launch = Launch { grid, block: KEY_THREADS, shared_bytes };
        self.launch(stream, kernels.program, &kernels.name("flash_key_value_grad"), launch, &values)?;
        Ok(true)
    }
}

/// The kernels for one dtype and heads of up to `head_dim`.
#[derive(Clone, Copy)]
struct Kernels {
    program: &'static Program,
    dtype: Dtype,
    head_dim: usize,
}

impl Kernels {
    /// None where they do not take the shape, or need more shared memory than there is.
    fn take(shape: &AttentionShape, dtype: Dtype, max_shared_bytes: usize) -> Option<Self> {
        if !shape.head_dim.is_multiple_of(8) || shape.seq.div_ceil(QUERIES) > MAX_TILES {
            return None;
        }
        let (program, head_dim) = program(dtype, shape.head_dim)?;
        let kernels = Kernels { program, dtype, head_dim };
        let most = kernels.forward_bytes().max(kernels.query_grad_bytes()).max(kernels.key_grad_bytes(1));
        (most <= max_shared_bytes).then_some(kernels)
    }

    fn name(&self, kernel: &str) -> String {
        format!("{kernel}_{}_{}", self.dtype, self.head_dim)
    }

    /// One block for every head of every row and every tile of queries.
    fn queries(&self, shape: &AttentionShape, shared_bytes: usize) -> Launch {
        let grid = [shape.rows * shape.heads, shape.seq.div_ceil(QUERIES)];
        Launch { grid, block: QUERY_THREADS, shared_bytes }
    }

    /// Rows that are no multiple of 128 bytes have 16 of padding.
    fn row_bytes(&self) -> usize {
        2 * if self.head_dim.is_multiple_of(64) { self.head_dim } else { self.head_dim + 8 }
    }

    fn forward_bytes(&self) -> usize {
        let keys = if self.head_dim > 96 { 32 } else { 64 };
        (QUERIES + 4 * keys) * self.row_bytes()
    }

    fn query_grad_bytes(&self) -> usize {
        (2 * QUERIES + 4 * QUERY_GRAD_KEYS) * self.row_bytes()
    }

    /// Each stage has q, dout, and three numbers for each query.
    fn key_grad_bytes(&self, stages: usize) -> usize {
        2 * KEYS * self.row_bytes() + stages * KEY_GRAD_QUERIES * (2 * self.row_bytes() + 12)
    }
}

/// The program for heads of `head_dim`, and the size it rounds them up to.
fn program(dtype: Dtype, head_dim: usize) -> Option<(&'static Program, usize)> {
    let programs: [&'static Program; 4] = match dtype {
        Dtype::Bf16 => [&FLASH_BF16_64, &FLASH_BF16_80, &FLASH_BF16_96, &FLASH_BF16_128],
        Dtype::F16 => [&FLASH_F16_64, &FLASH_F16_80, &FLASH_F16_96, &FLASH_F16_128],
        _ => return None,
    };
    [64, 80, 96, 128].into_iter().zip(programs).find(|(most, _)| head_dim <= *most).map(|(d, p)| (p, d))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(head_dim: usize, dtype: Dtype, max_shared_bytes: usize) -> Option<usize> {
        let shape = AttentionShape { rows: 1, seq: 100, heads: 2, kv_heads: 1, head_dim, window: None };
        Kernels::take(&shape, dtype, max_shared_bytes).map(|kernels| kernels.head_dim)
    }

    #[test]
    fn heads_are_rounded_up_and_fit_the_shared_memory_of_small_gpus() {
        let small = 99 << 10;
        for (head_dim, expected) in [(8, 64), (64, 64), (72, 80), (88, 96), (104, 128), (128, 128)] {
            assert_eq!(take(head_dim, Dtype::Bf16, small), Some(expected));
        }
        assert_eq!(take(64, Dtype::F32, small), None);
        assert_eq!(take(20, Dtype::F16, small), None);
        assert_eq!(take(136, Dtype::F16, small), None);
        assert_eq!(take(128, Dtype::F16, 64 << 10), None);
    }
}
