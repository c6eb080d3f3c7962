use super::{exactly, sole};
use crate::{Context, Error, ItemId, Op, Outcome, Pass, Result, Shape, Tensor, Var};
use device::{Bias, BiasGrad, Dtype, Gemm, Matrix};

/// `x · Wᵀ + bias`, with the items' members stacked: one product for q ‖ k ‖ v.
pub fn linear(
    pass: &mut Pass<'_>,
    x: Var,
    item: ItemId,
    bias: Option<ItemId>,
    out_cols: usize,
) -> Result<Var> {
    pass.apply1(Linear { item, bias, out_cols }, vec![x])
}

#[derive(Debug)]
struct Linear {
    item: ItemId,
    bias: Option<ItemId>,
    out_cols: usize,
}

impl Op for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Tensor>) -> Result<Outcome> {
        let [x] = exactly(self.name(), inputs)?;
        let (rows, cols) = x.rows_cols(self.name())?;
        let weight = cx.weights.get(self.item)?;
        if weight.len() != self.out_cols * cols {
            let expected = format!("[{}, {cols}]", self.out_cols);
            return Err(Error::shape(self.name(), expected, &Shape::from([weight.len()])));
        }
        let out = cx.tensor([rows, self.out_cols])?;
        let w = Matrix::new(&weight, self.out_cols, cols);
        let beta = if self.fill_with_bias(cx, &out)? { 1.0 } else { 0.0 };
        cx.device.gemm(cx.stream, &Gemm { a: x.matrix(), b: w.t(), c: out.matrix(), beta })?;
        Ok(Outcome { outputs: vec![out], saved: vec![x] })
    }

    /// The backward needs the input alone.
    fn unseen(&self, cx: &Context<'_>, inputs: &[Tensor]) -> Result<Option<Outcome>> {
        let [x] = inputs else { return Ok(None) };
        let (rows, _) = x.rows_cols(self.name())?;
        let out = cx.tensor([rows, self.out_cols])?;
        Ok(Some(Outcome { outputs: vec![out], saved: vec![x.clone()] }))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Vec<Tensor>,
        grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let [x] = exactly(self.name(), saved)?;
        let dout = sole(self.name(), grads)?;
        let (rows, cols) = x.rows_cols(self.name())?;
        if let Some(grad) = cx.weights.grad(self.item)? {
            let dw = Matrix::new(&grad.buffer, self.out_cols, cols);
            let beta = if grad.accumulate { 1.0 } else { 0.0 };
            cx.device.gemm(cx.stream, &Gemm { a: dout.matrix().t(), b: x.matrix(), c: dw, beta })?;
        }
        drop(x);
        self.bias_grad(cx, &dout)?;
        let weight = cx.weights.get(self.item)?;
        let dx = cx.tensor([rows, cols])?;
        let w = Matrix::new(&weight, self.out_cols, cols);
        cx.device.gemm(cx.stream, &Gemm { a: dout.matrix(), b: w, c: dx.matrix(), beta: 0.0 })?;
        Ok(vec![Some(dx)])
    }
}

impl Linear {
    /// The product is then added to the bias in f32 and rounded once.
    fn fill_with_bias(&self, cx: &Context<'_>, out: &Tensor) -> Result<bool> {
        let Some(item) = self.bias else { return Ok(false) };
        let (rows, cols) = out.rows_cols(self.name())?;
        let args = Bias { x: out.buffer(), bias: &cx.weights.get(item)?, rows, cols, accumulate: false };
        cx.device.bias(cx.stream, &args)?;
        Ok(true)
    }

    fn bias_grad(&self, cx: &Context<'_>, dout: &Tensor) -> Result<()> {
        let Some(item) = self.bias else { return Ok(()) };
        let Some(grad) = cx.weights.grad(item)? else { return Ok(()) };
        let (rows, cols) = dout.rows_cols(self.name())?;
        let scratch = cx.scratch(Dtype::F32, cx.device.profile().norm_scratch(rows, cols))?;
        let args = BiasGrad {
            dout: dout.buffer(),
            dbias: &grad.buffer,
            scratch: scratch.buffer(),
            rows,
            cols,
            accumulate: grad.accumulate,
        };
        Ok(cx.device.bias_grad(cx.stream, &args)?)
    }
}
