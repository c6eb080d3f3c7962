use super::{exactly, sole};
use crate::{Context, Error, ItemId, Op, Outcome, Pass, Result, Shape, Tensor, Var};
use device::{Gemm, Matrix};

/// `x · Wᵀ`, with the item's members stacked: one product for q ‖ k ‖ v.
pub fn linear(pass: &mut Pass<'_>, x: Var, item: ItemId, out_cols: usize) -> Result<Var> {
    pass.apply1(Linear { item, out_cols }, vec![x])
}

#[derive(Debug)]
struct Linear {
    item: ItemId,
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
        cx.device.gemm(cx.stream, &Gemm { a: x.matrix(), b: w.t(), c: out.matrix(), beta: 0.0 })?;
        Ok(Outcome { outputs: vec![out], saved: vec![x] })
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
        let weight = cx.weights.get(self.item)?;
        let dx = cx.tensor([rows, cols])?;
        let w = Matrix::new(&weight, self.out_cols, cols);
        cx.device.gemm(cx.stream, &Gemm { a: dout.matrix(), b: w, c: dx.matrix(), beta: 0.0 })?;
        Ok(vec![Some(dx)])
    }
}
