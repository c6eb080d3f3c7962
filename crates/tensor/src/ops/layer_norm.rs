use super::{exactly, sole};
use crate::{Context, ItemId, Op, Outcome, Pass, Result, Tensor, Var};
use device::Dtype;

/// LayerNorm of each row.
pub fn layer_norm(
    pass: &mut Pass<'_>,
    x: Var,
    weight: ItemId,
    bias: Option<ItemId>,
    eps: f32,
) -> Result<Var> {
    pass.apply1(LayerNorm { weight, bias, eps }, vec![x])
}

#[derive(Debug)]
struct LayerNorm {
    weight: ItemId,
    bias: Option<ItemId>,
    eps: f32,
}

impl Op for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Tensor>) -> Result<Outcome> {
        let [x] = exactly(self.name(), inputs)?;
        let (rows, cols) = x.rows_cols(self.name())?;
        let (out, statistics) = (cx.tensor([rows, cols])?, cx.f32([rows, 2])?);
        let bias = self.bias.map(|item| cx.weights.get(item)).transpose()?;
        let args = device::LayerNorm {
            x: x.buffer(),
            weight: &cx.weights.get(self.weight)?,
            bias: bias.as_ref(),
            out: out.buffer(),
            statistics: statistics.buffer(),
            rows,
            cols,
            eps: self.eps,
        };
        cx.device.layer_norm(cx.stream, &args)?;
        Ok(Outcome { outputs: vec![out], saved: vec![x, statistics] })
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Vec<Tensor>,
        grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let [x, statistics] = exactly(self.name(), saved)?;
        let dout = sole(self.name(), grads)?;
        let (rows, cols) = x.rows_cols(self.name())?;
        let dx = if dout.is_unique() { dout.clone() } else { cx.tensor([rows, cols])? };
        let scratch = cx.scratch(Dtype::F32, 2 * cx.device.profile().norm_scratch(rows, cols))?;
        let dweight = cx.weights.grad(self.weight)?;
        let dbias = self.bias.map(|item| cx.weights.grad(item)).transpose()?.flatten();
        let args = device::LayerNormGrad {
            dout: dout.buffer(),
            x: x.buffer(),
            weight: &cx.weights.get(self.weight)?,
            statistics: statistics.buffer(),
            dx: dx.buffer(),
            dweight: dweight.as_ref().map(|grad| (&grad.buffer, grad.accumulate)),
            dbias: dbias.as_ref().map(|grad| (&grad.buffer, grad.accumulate)),
            scratch: scratch.buffer(),
            rows,
            cols,
        };
        cx.device.layer_norm_grad(cx.stream, &args)?;
        Ok(vec![Some(dx)])
    }
}
