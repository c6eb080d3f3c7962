//! Losses that end a user's own model: one f32 per row. As in the fused head, the input becomes its gradient in
//! the forward, started from [`Context::seed`]; the backward hands it on.

use super::{exactly, field};
use crate::{Context, Error, Mode, Op, Outcome, Pass, Result, Tensor, Var};
use device::{CrossEntropy, SumLoss};

/// Cross-entropy of logits `[rows, classes]` against the batch's labels; negative labels are ignored.
pub fn cross_entropy(pass: &mut Pass<'_>, logits: Var) -> Result<Var> {
    pass.apply1(Loss::CrossEntropy, vec![logits])
}

/// `scale · Σ x` of each row: for losses that a model has computed itself.
pub fn sum_loss(pass: &mut Pass<'_>, x: Var, scale: f32) -> Result<Var> {
    pass.apply1(Loss::Sum { scale, target: None }, vec![x])
}

/// The mean over a row of (x − target)²; `target` names a field of the batch, of the compute dtype.
pub fn squared_error(pass: &mut Pass<'_>, x: Var, target: &'static str) -> Result<Var> {
    let (_, cols) = x.tensor().rows_cols("squared_error")?;
    pass.apply1(Loss::Sum { scale: 1.0 / cols as f32, target: Some(target) }, vec![x])
}

#[derive(Debug)]
enum Loss {
    CrossEntropy,
    Sum { scale: f32, target: Option<&'static str> },
}

impl Loss {
    /// Losses of each row; with a seed `x` becomes its gradient.
    fn compute(&self, cx: &Context<'_>, x: &Tensor, losses: &Tensor, seed: Option<&Tensor>) -> Result<()> {
        let (rows, cols) = x.rows_cols(self.name())?;
        let seed = seed.map(Tensor::buffer);
        match self {
            Loss::CrossEntropy => {
                let labels = cx.batch.get(field::LABELS)?.buffer();
                let (logits, losses) = (x.buffer(), losses.buffer());
                let args = CrossEntropy { logits, labels, losses, seed, rows, vocab: cols, stride: cols };
                cx.device.cross_entropy(cx.stream, &args)?;
            }
            Loss::Sum { scale, target } => {
                let target = target.map(|name| cx.batch.get(name)).transpose()?;
                if let Some(target) = target.filter(|target| target.shape() != x.shape()) {
                    return Err(Error::shape(self.name(), x.shape().to_string(), target.shape()));
                }
                let (target, losses) = (target.map(Tensor::buffer), losses.buffer());
                let args = SumLoss { x: x.buffer(), target, losses, seed, scale: *scale, rows, cols };
                cx.device.sum_loss(cx.stream, &args)?;
            }
        }
        Ok(())
    }
}

impl Op for Loss {
    fn name(&self) -> &'static str {
        match self {
            Loss::CrossEntropy => "cross_entropy",
            Loss::Sum { target: None, .. } => "sum_loss",
            Loss::Sum { .. } => "squared_error",
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Tensor>) -> Result<Outcome> {
        let [x] = exactly(self.name(), inputs)?;
        let losses = cx.f32([x.rows_cols(self.name())?.0])?;
        if cx.mode != Mode::Train {
            self.compute(cx, &x, &losses, None)?;
            return Ok(Outcome { outputs: vec![losses], saved: vec![] });
        }
        let dx = if x.is_unique() {
            x
        } else {
            let copy = cx.tensor(x.shape().clone())?;
            cx.device.copy(cx.stream, x.buffer(), copy.buffer())?;
            copy
        };
        self.compute(cx, &dx, &losses, Some(cx.seed))?;
        Ok(Outcome { outputs: vec![losses], saved: vec![dx] })
    }

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
