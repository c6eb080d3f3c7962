//! The head and its loss as one operation, by chunks of tokens.
//!
//! The logits of all tokens would be the largest tensor of a step. So the forward makes them for one chunk,
//! turns them into their gradient in place, uses that for both gradients (of the input and of the weight), and
//! goes on to the next chunk. The backward has only to hand on what is already there: forward and backward of
//! the head are one action of the schedule, the turn.

use super::{exactly, field};
use crate::{Context, ItemId, Kind, Mode, Op, Outcome, Pass, Result, Tensor, Var};
use device::{CrossEntropy, Gemm, Matrix};

/// Logits start each row at a multiple of this many elements, whatever the vocabulary's size, so that rows are
/// aligned for vector accesses.
const LOGIT_ALIGN: usize = 64;

/// Cross-entropy of `x · Wᵀ` against the batch's labels: one f32 loss per token. When decoding there are no
/// labels: the result is the logits of each row's last token, f32 `[rows, vocab]`.
pub fn linear_cross_entropy(pass: &mut Pass<'_>, x: Var, item: ItemId, vocab: usize) -> Result<Var> {
    pass.apply1(LinearCrossEntropy { item, vocab }, vec![x])
}

#[derive(Debug)]
struct LinearCrossEntropy {
    item: ItemId,
    vocab: usize,
}

impl Op for LinearCrossEntropy {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Tensor>) -> Result<Outcome> {
        let [x] = exactly(self.name(), inputs)?;
        if cx.mode == Mode::Decode {
            return Ok(Outcome { outputs: vec![self.last_logits(cx, &x)?], saved: vec![] });
        }
        let (tokens, cols) = x.rows_cols(self.name())?;
        let losses = cx.f32([tokens])?;
        let training = cx.mode == Mode::Train;
        let dx = training.then(|| cx.tensor([tokens, cols])).transpose()?;
        let chunk = cx.loss_chunk.clamp(1, tokens.max(1));
        let stride = self.vocab.next_multiple_of(LOGIT_ALIGN);
        let logits = cx.arena.tensor(cx.compute, [chunk, stride], Kind::Scratch)?;
        for start in (0..tokens).step_by(chunk) {
            let rows = chunk.min(tokens - start);
            let part = |tensor: &Tensor| tensor.rows(start, rows);
            let dx = dx.as_ref().map(part).transpose()?;
            self.turn(cx, &part(&x)?, dx, &logits, &losses.buffer().slice(start, rows)?, start)?;
        }
        Ok(Outcome { outputs: vec![losses], saved: dx.into_iter().collect() })
    }

    /// The gradient was seeded and computed in the forward; the one that arrives stands for the loss itself.
    fn backward(
        &self,
        _cx: &Context<'_>,
        saved: Vec<Tensor>,
        _grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let [dx] = exactly(self.name(), saved)?;
        Ok(vec![Some(dx)])
    }
}

impl LinearCrossEntropy {
    fn last_logits(&self, cx: &Context<'_>, x: &Tensor) -> Result<Tensor> {
        let (tokens, cols) = x.rows_cols(self.name())?;
        let rows = cx.batch.get(field::IDS)?.shape().dims()[0];
        let seq = tokens / rows;
        let ends = x.buffer().slice((seq - 1) * cols, (tokens + 1 - seq) * cols)?;
        let weight = cx.weights.get(self.item)?;
        let logits = cx.f32([rows, self.vocab])?;
        let product = Gemm {
            a: Matrix::new(&ends, rows, cols).with_stride(seq * cols),
            b: Matrix::new(&weight, self.vocab, cols).t(),
            c: logits.matrix(),
            beta: 0.0,
        };
        cx.device.gemm(cx.stream, &product)?;
        Ok(logits)
    }

    /// One chunk: logits, loss and, with `dx`, both gradients.
    fn turn(
        &self,
        cx: &Context<'_>,
        x: &Tensor,
        dx: Option<Tensor>,
        logits: &Tensor,
        losses: &device::Buffer,
        start: usize,
    ) -> Result<()> {
        let (rows, cols) = x.rows_cols(self.name())?;
        let (_, stride) = logits.rows_cols(self.name())?;
        let weight = cx.weights.get(self.item)?;
        let w = Matrix::new(&weight, self.vocab, cols);
        let logits_matrix = Matrix::new(logits.buffer(), rows, self.vocab).with_stride(stride);
        cx.device.gemm(cx.stream, &Gemm { a: x.matrix(), b: w.t(), c: logits_matrix, beta: 0.0 })?;
        let args = CrossEntropy {
            logits: logits.buffer(),
            labels: &cx.batch.get(field::LABELS)?.buffer().slice(start, rows)?,
            losses,
            seed: dx.is_some().then_some(cx.seed.buffer()),
            rows,
            vocab: self.vocab,
            stride,
        };
        cx.device.cross_entropy(cx.stream, &args)?;
        let Some(dx) = dx else { return Ok(()) };
        cx.device.gemm(cx.stream, &Gemm { a: logits_matrix, b: w, c: dx.matrix(), beta: 0.0 })?;
        if let Some(grad) = cx.weights.grad(self.item)? {
            let dw = Matrix::new(&grad.buffer, self.vocab, cols);
            let beta = if grad.accumulate { 1.0 } else { 0.0 };
            cx.device.gemm(cx.stream, &Gemm { a: logits_matrix.t(), b: x.matrix(), c: dw, beta })?;
        }
        Ok(())
    }
}
