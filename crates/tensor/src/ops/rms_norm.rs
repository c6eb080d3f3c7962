use super::exactly;
use crate::{Context, Error, ItemId, Op, Outcome, Pass, Result, Saved, Tensor, Var};

/// RMSNorm of `x`.
pub fn rms_norm(pass: &mut Pass<'_>, x: Var, item: ItemId, eps: f32) -> Result<(Var, Var)> {
    norm(pass, vec![x], item, eps)
}

/// `sum = x + delta` and RMSNorm of the sum: (sum, normed). The residual's addition and the norm are one pass
/// over memory.
pub fn add_rms_norm(pass: &mut Pass<'_>, x: Var, delta: Var, item: ItemId, eps: f32) -> Result<(Var, Var)> {
    norm(pass, vec![x, delta], item, eps)
}

fn norm(pass: &mut Pass<'_>, inputs: Vec<Var>, item: ItemId, eps: f32) -> Result<(Var, Var)> {
    let outputs = pass.apply(RmsNorm { item, eps }, inputs)?;
    let [sum, normed] = outputs.try_into().expect("rms_norm gives two results");
    Ok((sum, normed))
}

/// One or two inputs; gives (their sum, the norm of it).
#[derive(Debug)]
struct RmsNorm {
    item: ItemId,
    eps: f32,
}

impl Op for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Tensor>) -> Result<Outcome> {
        let delta = if inputs.len() == 2 { inputs.pop() } else { None };
        let [x] = exactly(self.name(), inputs)?;
        let (rows, cols) = x.rows_cols(self.name())?;
        let sum = match &delta {
            None => None,
            Some(_) if x.is_unique() => Some(x.clone()),
            Some(_) => Some(cx.tensor([rows, cols])?),
        };
        let (out, rstd) = (cx.tensor([rows, cols])?, cx.f32([rows])?);
        let args = device::RmsNorm {
            x: x.buffer(),
            delta: delta.as_ref().map(Tensor::buffer),
            weight: &cx.weights.get(self.item)?,
            sum: sum.as_ref().map(Tensor::buffer),
            out: out.buffer(),
            rstd: rstd.buffer(),
            rows,
            cols,
            eps: self.eps,
        };
        cx.device.rms_norm(cx.stream, &args)?;
        let sum = sum.unwrap_or(x);
        Ok(Outcome { outputs: vec![sum.clone(), out], saved: vec![sum, rstd] })
    }

    fn is_cheap(&self) -> bool {
        true
    }

    /// The norm of the saved sum; the scale comes out as it did.
    fn again(&self, cx: &Context<'_>, saved: &[Saved]) -> Result<Option<Tensor>> {
        let [Saved::Value(sum), Saved::Value(rstd)] = saved else { return Ok(None) };
        let (rows, cols) = sum.rows_cols(self.name())?;
        let out = cx.tensor([rows, cols])?;
        let args = device::RmsNorm {
            x: sum.buffer(),
            delta: None,
            weight: &cx.weights.get(self.item)?,
            sum: None,
            out: out.buffer(),
            rstd: rstd.buffer(),
            rows,
            cols,
            eps: self.eps,
        };
        cx.device.rms_norm(cx.stream, &args)?;
        Ok(Some(out))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Vec<Tensor>,
        grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let [x, rstd] = exactly(self.name(), saved)?;
        let mut grads = grads.into_iter();
        let (dsum, dout) = (grads.next().flatten(), grads.next().flatten());
        let dout = dout.ok_or(Error::Argument { op: self.name(), what: "no gradient at the norm".into() })?;
        let (rows, cols) = x.rows_cols(self.name())?;
        let dx = match &dsum {
            Some(dsum) if dsum.is_unique() => dsum.clone(),
            _ => cx.tensor([rows, cols])?,
        };
        let weight = cx.weights.get(self.item)?;
        let scratch = cx.scratch(device::Dtype::F32, cx.device.profile().norm_scratch(rows, cols))?;
        let grad = cx.weights.grad(self.item)?;
        let args = device::RmsNormGrad {
            dout: dout.buffer(),
            x: x.buffer(),
            weight: &weight,
            rstd: rstd.buffer(),
            dresidual: dsum.as_ref().map(Tensor::buffer),
            dx: dx.buffer(),
            dweight: grad.as_ref().map(|grad| &grad.buffer),
            scratch: scratch.buffer(),
            rows,
            cols,
            accumulate: grad.as_ref().is_some_and(|grad| grad.accumulate),
        };
        cx.device.rms_norm_grad(cx.stream, &args)?;
        Ok(vec![Some(dx.clone()), Some(dx)])
    }
}
