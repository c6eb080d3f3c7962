//! The kernels of a training step, as one trait. Each takes its stream, flat buffers and sizes.
//!
//! Rules that hold for all of them:
//! - Matrices are row-major. "tokens" or "rows" count along the first dimension.
//! - Values are stored in the buffer's dtype and computed in f32; results are rounded to the storage dtype
//!   where PyTorch's eager operations round.
//! - Sums run in an order that depends on sizes only, never on timing: the same inputs give the same bits.
//! - Buffers are checked for dtype and length before anything is issued.

use crate::{Buffer, Dtype, Error, Result, Stream};
use std::fmt;

/// A matrix view: `rows × cols` with `stride` elements from one row to the next, read as its transpose when
/// `transposed` (rows and cols are those *before* transposing).
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub buffer: &'a Buffer,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
    pub transposed: bool,
}

impl<'a> Matrix<'a> {
    pub fn new(buffer: &'a Buffer, rows: usize, cols: usize) -> Self {
        Matrix { buffer, rows, cols, stride: cols, transposed: false }
    }

    /// Rows that are further apart than they are long.
    pub fn with_stride(self, stride: usize) -> Self {
        Matrix { stride, ..self }
    }

    pub fn t(self) -> Self {
        Matrix { transposed: !self.transposed, ..self }
    }

    /// (rows, cols) as the product sees them.
    pub fn shape(&self) -> (usize, usize) {
        if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) }
    }

    /// Elements from the first to the last one.
    pub fn span(&self) -> usize {
        if self.rows == 0 || self.cols == 0 { 0 } else { (self.rows - 1) * self.stride + self.cols }
    }
}

/// c = a · b + beta · c. `a` and `b` have one dtype; `c` has theirs or f32. `c` is not transposed.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'a> {
    pub a: Matrix<'a>,
    pub b: Matrix<'a>,
    pub c: Matrix<'a>,
    /// 0 overwrites `c` (which may hold anything, NaN included), 1 adds to it.
    pub beta: f32,
}

impl Gemm<'_> {
    /// (m, n, k), once shapes and lengths have been found to fit.
    pub fn check(&self) -> Result<(usize, usize, usize)> {
        let ((m, k), (k2, n), (m2, n2)) = (self.a.shape(), self.b.shape(), self.c.shape());
        if k != k2 || m != m2 || n != n2 || self.c.transposed {
            let what = format!("{m}×{k} · {k2}×{n} → {m2}×{n2}");
            return Err(Error::argument("gemm", what));
        }
        for (name, matrix) in [("a", &self.a), ("b", &self.b), ("c", &self.c)] {
            if matrix.stride < matrix.cols {
                return Err(Error::argument(
                    "gemm",
                    format!("{name}: stride {} < {}", matrix.stride, matrix.cols),
                ));
            }
            matrix.buffer.expect_len("gemm", name, matrix.span())?;
        }
        if self.a.buffer.dtype() != self.b.buffer.dtype() {
            let (expected, found) = (self.a.buffer.dtype(), self.b.buffer.dtype());
            return Err(Error::WrongDtype { op: "gemm", expected, found });
        }
        Ok((m, n, k))
    }
}

/// How one operand of a product lies in memory: what an algorithm depends on beside the dtypes. Rows and columns are
/// those before transposing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperandShape {
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
    pub transposed: bool,
}

impl OperandShape {
    /// Elements from the first to the last one.
    pub fn span(&self) -> usize {
        if self.rows == 0 || self.cols == 0 { 0 } else { (self.rows - 1) * self.stride + self.cols }
    }
}

/// A product without its operands: what a device may choose an algorithm by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProductShape {
    pub a: OperandShape,
    pub b: OperandShape,
    pub c: OperandShape,
    /// Of `a` and `b`.
    pub input: Dtype,
    pub output: Dtype,
}

impl ProductShape {
    pub fn new(args: &Gemm<'_>) -> Self {
        let operand = |matrix: &Matrix<'_>| {
            let Matrix { rows, cols, stride, transposed, .. } = *matrix;
            OperandShape { rows, cols, stride, transposed }
        };
        ProductShape {
            a: operand(&args.a),
            b: operand(&args.b),
            c: operand(&args.c),
            input: args.a.buffer.dtype(),
            output: args.c.buffer.dtype(),
        }
    }
}

/// As in `bf16 8192x4096 * 6144x4096^t = f32 8192x6144`, with a stride after a slash where rows lie apart.
impl fmt::Display for ProductShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operand = |o: &OperandShape| {
            let apart = if o.stride == o.cols { String::new() } else { format!("/{}", o.stride) };
            format!("{}x{}{apart}{}", o.rows, o.cols, if o.transposed { "^t" } else { "" })
        };
        let (a, b, c) = (operand(&self.a), operand(&self.b), operand(&self.c));
        write!(f, "{} {a} * {b} = {} {c}", self.input, self.output)
    }
}

/// `out[t] = table[ids[t]]`.
#[derive(Clone, Copy, Debug)]
pub struct Embedding<'a> {
    pub table: &'a Buffer,
    /// i32, one per token, each in 0..vocab (checked where the batch is made).
    pub ids: &'a Buffer,
    pub out: &'a Buffer,
    pub tokens: usize,
    pub vocab: usize,
    pub cols: usize,
}

/// `dtable[ids[t]] += dout[t]`, summed in token order.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingGrad<'a> {
    pub dout: &'a Buffer,
    pub ids: &'a Buffer,
    /// i32: token positions sorted by id, equal ids in token order.
    pub order: &'a Buffer,
    /// Of `dout`'s dtype or f32.
    pub dtable: &'a Buffer,
    pub tokens: usize,
    pub vocab: usize,
    pub cols: usize,
    /// Rows of ids that do not occur are set to zero unless accumulating.
    pub accumulate: bool,
}

/// `sum = x + delta`; `out = weight · round(sum · rstd)` with `rstd = 1/sqrt(mean(sum²) + eps)`.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a> {
    pub x: &'a Buffer,
    pub delta: Option<&'a Buffer>,
    pub weight: &'a Buffer,
    /// Where `x + delta` goes, rounded to the storage dtype before it is normalised; given exactly when
    /// `delta` is. May be `x` itself.
    pub sum: Option<&'a Buffer>,
    pub out: &'a Buffer,
    /// f32, one per row.
    pub rstd: &'a Buffer,
    pub rows: usize,
    pub cols: usize,
    pub eps: f32,
}

/// The gradient of [`RmsNorm`]: `dx = dresidual + (w·dout − x̂·mean(w·dout·x̂))·rstd`, `dweight = Σ dout·x̂`.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormGrad<'a> {
    pub dout: &'a Buffer,
    /// What was normalised (the sum).
    pub x: &'a Buffer,
    pub weight: &'a Buffer,
    pub rstd: &'a Buffer,
    /// Gradient arriving along the residual; may be `dx` itself.
    pub dresidual: Option<&'a Buffer>,
    pub dx: &'a Buffer,
    /// Of `x`'s dtype or f32; None where the weight is frozen.
    pub dweight: Option<&'a Buffer>,
    /// f32 of [`crate::Profile::norm_scratch`].
    pub scratch: &'a Buffer,
    pub rows: usize,
    pub cols: usize,
    pub accumulate: bool,
}

/// Rotates the first `heads` heads of each token in place (split-half rotation).
#[derive(Clone, Copy, Debug)]
pub struct Rope<'a> {
    /// `tokens` rows, `stride` apart; heads lie side by side from the row's start.
    pub x: &'a Buffer,
    /// i32, one per token.
    pub positions: &'a Buffer,
    /// f32 `[max_position, head_dim / 2]`.
    pub cos: &'a Buffer,
    pub sin: &'a Buffer,
    pub tokens: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub stride: usize,
    pub direction: Rotation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    Forward,
    /// The transpose of the forward rotation: what the gradient needs.
    Inverse,
}

/// Sizes of a causal, grouped-query attention over `rows` sequences of `seq` tokens each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    pub rows: usize,
    pub seq: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Keys a query sees at most, itself included.
    pub window: Option<usize>,
}

impl AttentionShape {
    pub fn tokens(&self) -> usize {
        self.rows * self.seq
    }

    /// Elements of one token's q ‖ k ‖ v.
    pub fn qkv_cols(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    pub fn out_cols(&self) -> usize {
        self.heads * self.head_dim
    }

    /// The factor on q·k.
    pub fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// Softmax(q·kᵀ/√d)·v per head, each query seeing the keys of its own row from its document's first token to
/// itself.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    pub shape: AttentionShape,
    /// `[tokens, (heads + 2·kv_heads)·head_dim]`: all queries, then all keys, then all values of a token.
    pub qkv: &'a Buffer,
    /// i32 per token: index within its row of the first token of its document, which never falls within a row,
    /// since documents follow each other. None: one document a row.
    pub document_start: Option<&'a Buffer>,
    /// `[tokens, heads·head_dim]`
    pub out: &'a Buffer,
    /// f32 `[rows, heads, seq]`: log of the sum of exponentials of the scaled scores (natural log).
    pub lse: &'a Buffer,
    /// Bytes of [`crate::Profile::attention_scratch`].
    pub scratch: &'a Buffer,
}

#[derive(Clone, Copy, Debug)]
pub struct AttentionGrad<'a> {
    pub shape: AttentionShape,
    pub qkv: &'a Buffer,
    pub document_start: Option<&'a Buffer>,
    pub out: &'a Buffer,
    pub lse: &'a Buffer,
    pub dout: &'a Buffer,
    /// Laid out as `qkv`; every element is written.
    pub dqkv: &'a Buffer,
    /// Bytes of [`crate::Profile::attention_grad_scratch`].
    pub scratch: &'a Buffer,
}

/// Attention of new tokens against everything cached: puts their keys and values into the cache after the
/// `start` tokens each row has there, then lets each new query see the cached keys from its row's first token
/// (or its window's) to itself.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCached<'a> {
    /// `seq` counts the new tokens of a row.
    pub shape: AttentionShape,
    /// As in [`Attention`], of the new tokens.
    pub qkv: &'a Buffer,
    /// `[rows, kv_heads, max_len, head_dim]`, of `qkv`'s dtype.
    pub keys: &'a Buffer,
    pub values: &'a Buffer,
    /// Tokens of each row that are cached already.
    pub start: usize,
    pub max_len: usize,
    /// `[tokens, heads·head_dim]`
    pub out: &'a Buffer,
    /// As in [`Attention`], for devices that compute an empty cache's attention by that kernel. What it holds
    /// afterwards is unspecified.
    pub lse: &'a Buffer,
    pub scratch: &'a Buffer,
}

impl AttentionCached<'_> {
    /// Fails unless sizes fit together and the new tokens fit into the cache. Returns the dtype.
    pub fn check(&self) -> Result<Dtype> {
        const OP: &str = "attention_cached";
        let AttentionShape { rows, seq, heads, kv_heads, head_dim, window } = self.shape;
        let uneven = kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads);
        if uneven || head_dim == 0 || window == Some(0) {
            return Err(Error::argument(OP, format!("{:?}", self.shape)));
        }
        if self.start + seq > self.max_len {
            let what = format!("{seq} tokens after {} leave a cache of {}", self.start, self.max_len);
            return Err(Error::argument(OP, what));
        }
        let dtype = self.qkv.dtype();
        if !dtype.is_float() {
            return Err(Error::Unsupported { op: OP, dtype });
        }
        let cached = rows * kv_heads * self.max_len * head_dim;
        for (name, buffer, len) in [
            ("qkv", self.qkv, self.shape.tokens() * self.shape.qkv_cols()),
            ("keys", self.keys, cached),
            ("values", self.values, cached),
            ("out", self.out, self.shape.tokens() * self.shape.out_cols()),
        ] {
            if buffer.dtype() != dtype {
                return Err(Error::WrongDtype { op: OP, expected: dtype, found: buffer.dtype() });
            }
            buffer.expect_len(OP, name, len)?;
        }
        Ok(dtype)
    }
}

/// `out = silu(gate) · up` with gate ‖ up side by side in each row of `2·cols`.
#[derive(Clone, Copy, Debug)]
pub struct Swiglu<'a> {
    pub gate_up: &'a Buffer,
    pub out: &'a Buffer,
    pub rows: usize,
    pub cols: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct SwigluGrad<'a> {
    pub gate_up: &'a Buffer,
    pub dout: &'a Buffer,
    /// May be `gate_up` itself.
    pub dgate_up: &'a Buffer,
    pub rows: usize,
    pub cols: usize,
}

/// Per-row cross-entropy; optionally turns the logits into their gradient in place.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// `rows` rows of `vocab` values, `stride` apart.
    pub logits: &'a Buffer,
    /// i32; a negative label is ignored: its loss and gradient are zero.
    pub labels: &'a Buffer,
    /// f32, one per row.
    pub losses: &'a Buffer,
    /// With a seed (one f32 on the device), logits become `(softmax − onehot) · seed`; without, they stay.
    pub seed: Option<&'a Buffer>,
    pub rows: usize,
    pub vocab: usize,
    pub stride: usize,
}

/// Every row of `x` becomes the bias, or has it added. A product with a bias starts from rows of it (`beta` = 1),
/// so that the sum is rounded once, as in PyTorch's `addmm`.
#[derive(Clone, Copy, Debug)]
pub struct Bias<'a> {
    pub x: &'a Buffer,
    pub bias: &'a Buffer,
    pub rows: usize,
    pub cols: usize,
    /// Whether to add to what is there.
    pub accumulate: bool,
}

/// `dbias = Σ dout` over rows.
#[derive(Clone, Copy, Debug)]
pub struct BiasGrad<'a> {
    pub dout: &'a Buffer,
    /// Of `dout`'s dtype or f32.
    pub dbias: &'a Buffer,
    /// f32 of [`crate::Profile::norm_scratch`].
    pub scratch: &'a Buffer,
    pub rows: usize,
    pub cols: usize,
    pub accumulate: bool,
}

/// RMSNorm of single heads, in place: of each row the first `heads[0]` heads with the first weight and the next
/// `heads[1]` with the second. What lies behind them in the row stays.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a> {
    /// `tokens` rows, `stride` apart; heads lie side by side from the row's start.
    pub x: &'a Buffer,
    /// `[2, head_dim]`
    pub weight: &'a Buffer,
    /// Where the heads go as they were before, `[tokens, heads[0] + heads[1], head_dim]`: what the gradient needs.
    pub before: Option<&'a Buffer>,
    pub tokens: usize,
    pub heads: [usize; 2],
    pub head_dim: usize,
    pub stride: usize,
    pub eps: f32,
}

/// The gradient of [`HeadNorm`], in place as well.
#[derive(Clone, Copy, Debug)]
pub struct HeadNormGrad<'a> {
    /// Laid out as the forward's `x`; gradients of the normalised heads become those of the heads before.
    pub dx: &'a Buffer,
    pub before: &'a Buffer,
    pub weight: &'a Buffer,
    /// `[2, head_dim]` of `dx`'s dtype or f32; None where the weights are frozen.
    pub dweight: Option<&'a Buffer>,
    /// f32 of [`crate::Profile::norm_scratch`] for rows of `2 · head_dim`.
    pub scratch: &'a Buffer,
    pub tokens: usize,
    pub heads: [usize; 2],
    pub head_dim: usize,
    pub stride: usize,
    pub eps: f32,
    pub accumulate: bool,
}

/// `out = (x − mean) · rstd · weight + bias` per row, rounded once.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm<'a> {
    pub x: &'a Buffer,
    pub weight: &'a Buffer,
    pub bias: Option<&'a Buffer>,
    pub out: &'a Buffer,
    /// f32 `[rows, 2]`: mean and 1/sqrt(variance + eps).
    pub statistics: &'a Buffer,
    pub rows: usize,
    pub cols: usize,
    pub eps: f32,
}

#[derive(Clone, Copy, Debug)]
pub struct LayerNormGrad<'a> {
    pub dout: &'a Buffer,
    pub x: &'a Buffer,
    pub weight: &'a Buffer,
    pub statistics: &'a Buffer,
    /// May be `dout` itself.
    pub dx: &'a Buffer,
    /// Of `x`'s dtype or f32, and whether to add to it; None where the weight is frozen.
    pub dweight: Option<(&'a Buffer, bool)>,
    /// As `dweight`; None where there is no bias or it is frozen.
    pub dbias: Option<(&'a Buffer, bool)>,
    /// f32, twice [`crate::Profile::norm_scratch`].
    pub scratch: &'a Buffer,
    pub rows: usize,
    pub cols: usize,
}

/// A function of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Function {
    Relu,
    /// x·Φ(x) with the normal distribution's Φ by `erf`.
    Gelu,
    /// The same with Φ by `tanh`.
    GeluTanh,
}

/// `out = f(x)`, element by element. `out` may be `x` itself.
#[derive(Clone, Copy, Debug)]
pub struct Activation<'a> {
    pub function: Function,
    pub x: &'a Buffer,
    pub out: &'a Buffer,
}

/// `dx = f'(x) · dout`; `dx` may be either of them.
#[derive(Clone, Copy, Debug)]
pub struct ActivationGrad<'a> {
    pub function: Function,
    pub x: &'a Buffer,
    pub dout: &'a Buffer,
    pub dx: &'a Buffer,
}

/// `out = x / (1 − p)` where an element is kept, and 0 where it is dropped, which happens with probability `p`.
///
/// Element `i` is dropped or kept by `key` and `first + i` alone: whoever has the element gets the same answer,
/// whatever the number of ranks, and the gradient is the same operation over again. `out` may be `x` itself.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    pub x: &'a Buffer,
    pub out: &'a Buffer,
    pub p: f32,
    pub key: u64,
    /// Number of the first element among all of which `key` decides.
    pub first: u64,
}

impl Dropout<'_> {
    /// An element is dropped where its 32 random bits lie below this.
    pub fn threshold(&self) -> Result<u64> {
        if !(0.0..1.0).contains(&self.p) {
            return Err(Error::argument("dropout", format!("p = {} is not in 0..1", self.p)));
        }
        Ok((f64::from(self.p) * 4_294_967_296.0) as u64)
    }

    /// The random bits of one element (splitmix64, its upper half).
    pub const fn bits(key: u64, element: u64) -> u32 {
        let z = key.wrapping_add(element.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 32) as u32
    }
}

/// Losses that are sums over a row: `scale · Σ x`, or with a target `scale · Σ (x − target)²`.
#[derive(Clone, Copy, Debug)]
pub struct SumLoss<'a> {
    pub x: &'a Buffer,
    /// Of `x`'s dtype.
    pub target: Option<&'a Buffer>,
    /// f32, one per row.
    pub losses: &'a Buffer,
    /// With a seed (one f32 on the device), `x` becomes its gradient times the seed; without, it stays.
    pub seed: Option<&'a Buffer>,
    pub scale: f32,
    pub rows: usize,
    pub cols: usize,
}

/// How a loss scale follows what becomes of it, as PyTorch's `GradScaler` does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// Its factor after `interval` good steps in a row.
    pub growth: f32,
    /// Its factor after a step that overflowed.
    pub backoff: f32,
    pub interval: u32,
}

/// Decides on the device, from the gradient's norm, whether a step's update is made and by which factors: the
/// host need not wait for it. The update is made when the norm is finite.
#[derive(Clone, Copy, Debug)]
pub struct Judge<'a> {
    /// One f32: Σ g² of the whole gradient, times the scale squared.
    pub sum_squares: &'a Buffer,
    /// Four f32, read and written: the scale on gradients; good steps since it last changed; steps skipped so
    /// far; the step that ended the run, or 0.
    pub scaler: &'a Buffer,
    /// Five f32, written; see [`VERDICT`].
    pub verdict: &'a Buffer,
    /// 0: no clipping.
    pub max_norm: f32,
    /// From 1. Adam's own step is this less those skipped.
    pub step: u64,
    pub betas: [f64; 2],
    pub lr: f64,
    /// None: the scale stays, and once a step could not be made none is made again, so that weights stay as
    /// they were before it.
    pub scaling: Option<Scaling>,
}

/// Numbers of a verdict: the norm, unscaled; the factor on every gradient, min(1, max_norm / (norm + 1e-6)) /
/// scale; 1 or 0, whether the update is made; sqrt(1 − β2^t); −lr / (1 − β1^t). The last two are computed in f64
/// and rounded once.
pub const VERDICT: usize = 5;
/// Numbers of a scaler's state.
pub const SCALER: usize = 4;

/// Scalars of one AdamW step that the host knows, computed in f64 and rounded once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWScalars {
    /// 1 − lr·weight_decay
    pub keep: f32,
    pub one_minus_beta1: f32,
    pub beta2: f32,
    pub one_minus_beta2: f32,
    pub eps: f32,
}

/// Rounding to bf16 by chance: up or down in proportion to how near each neighbour is, so that updates too small for
/// bf16 add up on average instead of being lost. Element `i` is rounded by `key` and `first + i` alone: whoever owns
/// the element gets the same answer, whatever the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByChance {
    pub key: u64,
    /// Number of the first element among all of which `key` decides.
    pub first: u64,
}

impl ByChance {
    /// The same choices for a part that begins `elements` later.
    pub const fn after(self, elements: usize) -> Self {
        ByChance { first: self.first.wrapping_add(elements as u64), ..self }
    }

    /// A value of bf16 next to `x`. Infinities and NaN stay; nothing finite becomes infinite.
    pub const fn round(&self, x: f32, index: usize) -> f32 {
        const EXPONENT: u32 = 0x7f80_0000;
        let bits = x.to_bits();
        if bits & EXPONENT == EXPONENT {
            return x;
        }
        let chance = Dropout::bits(self.key, self.first.wrapping_add(index as u64)) & 0xffff;
        let rounded = (bits + chance) & 0xffff_0000;
        f32::from_bits(if rounded & EXPONENT == EXPONENT { bits & 0xffff_0000 } else { rounded })
    }
}

/// One AdamW step over a flat range, unless the verdict says no:
/// ```text
/// g  = grad · clip
/// p  = p · keep
/// m  = fma(1−β1, g − m, m)
/// v  = v · β2; v = fma((1−β2)·g, g, v)
/// p += (step_size · m) / (sqrt(v) / bias2_sqrt + eps)
/// ```
#[derive(Clone, Copy, Debug)]
pub struct AdamW<'a> {
    pub master: &'a Buffer,
    pub moment1: &'a Buffer,
    pub moment2: &'a Buffer,
    pub grad: &'a Buffer,
    /// What [`Judge`] decided; its clip, bias2_sqrt and step_size are those above.
    pub verdict: &'a Buffer,
    /// Where the next step's compute weights go, when they are not the master itself.
    pub compute: Option<&'a Buffer>,
    pub scalars: AdamWScalars,
    /// How master weights of bf16 are rounded; to the nearest where it is None.
    pub rounding: Option<ByChance>,
}

impl AdamW<'_> {
    /// Fails unless rounding by chance is asked of bf16 alone.
    pub fn check_rounding(&self) -> Result<()> {
        match (self.rounding, self.master.dtype()) {
            (None, _) | (Some(_), Dtype::Bf16) => Ok(()),
            (Some(_), dtype) => Err(Error::Unsupported { op: "adamw with rounding by chance", dtype }),
        }
    }
}

/// What a step computes with. Implemented once per device.
pub trait Kernels {
    fn gemm(&self, stream: &Stream, args: &Gemm<'_>) -> Result<()>;

    fn embedding(&self, stream: &Stream, args: &Embedding<'_>) -> Result<()>;
    fn embedding_grad(&self, stream: &Stream, args: &EmbeddingGrad<'_>) -> Result<()>;

    fn rms_norm(&self, stream: &Stream, args: &RmsNorm<'_>) -> Result<()>;
    fn rms_norm_grad(&self, stream: &Stream, args: &RmsNormGrad<'_>) -> Result<()>;

    fn head_norm(&self, stream: &Stream, args: &HeadNorm<'_>) -> Result<()>;
    fn head_norm_grad(&self, stream: &Stream, args: &HeadNormGrad<'_>) -> Result<()>;

    fn layer_norm(&self, stream: &Stream, args: &LayerNorm<'_>) -> Result<()>;
    fn layer_norm_grad(&self, stream: &Stream, args: &LayerNormGrad<'_>) -> Result<()>;

    fn bias(&self, stream: &Stream, args: &Bias<'_>) -> Result<()>;
    fn bias_grad(&self, stream: &Stream, args: &BiasGrad<'_>) -> Result<()>;

    fn rope(&self, stream: &Stream, args: &Rope<'_>) -> Result<()>;

    fn attention(&self, stream: &Stream, args: &Attention<'_>) -> Result<()>;
    fn attention_grad(&self, stream: &Stream, args: &AttentionGrad<'_>) -> Result<()>;
    fn attention_cached(&self, stream: &Stream, args: &AttentionCached<'_>) -> Result<()>;

    fn swiglu(&self, stream: &Stream, args: &Swiglu<'_>) -> Result<()>;
    fn swiglu_grad(&self, stream: &Stream, args: &SwigluGrad<'_>) -> Result<()>;

    fn activation(&self, stream: &Stream, args: &Activation<'_>) -> Result<()>;
    fn activation_grad(&self, stream: &Stream, args: &ActivationGrad<'_>) -> Result<()>;

    fn dropout(&self, stream: &Stream, args: &Dropout<'_>) -> Result<()>;

    fn cross_entropy(&self, stream: &Stream, args: &CrossEntropy<'_>) -> Result<()>;
    fn sum_loss(&self, stream: &Stream, args: &SumLoss<'_>) -> Result<()>;

    fn adamw(&self, stream: &Stream, args: &AdamW<'_>) -> Result<()>;

    /// Every element becomes `value` (floats only; rounded to the dtype).
    fn fill(&self, stream: &Stream, dst: &Buffer, value: f32) -> Result<()>;

    /// Bytes from `src` to `dst`, of the same dtype and length, not overlapping.
    fn copy(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()>;

    /// Element by element to another float dtype, rounding to nearest even.
    fn cast(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()>;

    /// dst += src, element by element, computed in f32 and rounded once to `dst`'s dtype. Lengths are equal.
    fn add(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()>;

    /// out[0] = Σ x (x f32; out one f32), plus what is there when `accumulate`. `scratch`: f32 of
    /// [`crate::Profile::sum_scratch`].
    fn sum(
        &self,
        stream: &Stream,
        x: &Buffer,
        out: &Buffer,
        scratch: &Buffer,
        accumulate: bool,
    ) -> Result<()>;

    /// out[0] = Σ x² (x of any float dtype; out one f32), plus what is there when `accumulate`.
    fn sum_squares(
        &self,
        stream: &Stream,
        x: &Buffer,
        out: &Buffer,
        scratch: &Buffer,
        accumulate: bool,
    ) -> Result<()>;

    /// dst[i] = 1 / src[i], and 0 where src[i] is 0 (f32).
    fn reciprocal(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()>;

    /// dst[i] *= src[i] (f32).
    fn multiply(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()>;

    fn judge(&self, stream: &Stream, args: &Judge<'_>) -> Result<()>;
}
