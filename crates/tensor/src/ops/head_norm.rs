use super::{exactly, sole};
use crate::{Context, Error, ItemId, Mode, Op, Outcome, Pass, Result, Tensor, Var};
use device::Dtype;

/// RMSNorm of every head of the first `heads[0]` (with the item's first member) and the next `heads[1]` (with its
/// second) of every row, in place.
pub fn head_norm(
    pass: &mut Pass<'_>,
    x: Var,
    item: ItemId,
    heads: [usize; 2],
    head_dim: usize,
    eps: f32,
) -> Result<Var> {
    pass.apply1(HeadNorm { item, heads, head_dim, eps }, vec![x])
}

#[derive(Debug)]
struct HeadNorm {
    item: ItemId,
    heads: [usize; 2],
    head_dim: usize,
    eps: f32,
}

impl HeadNorm {
    fn expect_unique(&self, x: &Tensor) -> Result<()> {
        if x.is_unique() {
            return Ok(());
        }
        Err(Error::Argument { op: self.name(), what: "normalises in place what others hold".into() })
    }
}

impl Op for HeadNorm {
    fn name(&self) -> &'static str {
        "head_norm"
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Tensor>) -> Result<Outcome> {
        let [x] = exactly(self.name(), inputs)?;
        self.expect_unique(&x)?;
        let (tokens, stride) = x.rows_cols(self.name())?;
        let cols = (self.heads[0] + self.heads[1]) * self.head_dim;
        let before = (cx.mode == Mode::Train).then(|| cx.tensor([tokens, cols])).transpose()?;
        let args = device::HeadNorm {
            x: x.buffer(),
            weight: &cx.weights.get(self.item)?,
            before: before.as_ref().map(Tensor::buffer),
            tokens,
            heads: self.heads,
            head_dim: self.head_dim,
            stride,
            eps: self.eps,
        };
        cx.device.head_norm(cx.stream, &args)?;
        Ok(Outcome { outputs: vec![x], saved: before.into_iter().collect() })
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Vec<Tensor>,
        grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let [before] = exactly(self.name(), saved)?;
        let dx = sole(self.name(), grads)?;
        self.expect_unique(&dx)?;
        let (tokens, stride) = dx.rows_cols(self.name())?;
        let grad = cx.weights.grad(self.item)?;
        let scratch_len = cx.device.profile().norm_scratch(tokens, 2 * self.head_dim);
        let scratch = cx.scratch(Dtype::F32, scratch_len)?;
        let args = device::HeadNormGrad {
            dx: dx.buffer(),
            before: before.buffer(),
            weight: &cx.weights.get(self.item)?,
            dweight: grad.as_ref().map(|grad| &grad.buffer),
            scratch: scratch.buffer(),
            tokens,
            heads: self.heads,
            head_dim: self.head_dim,
            stride,
            eps: self.eps,
            accumulate: grad.as_ref().is_some_and(|grad| grad.accumulate),
        };
        cx.device.head_norm_grad(cx.stream, &args)?;
        Ok(vec![Some(dx)])
    }
}
