use super::{exactly, sole};
use crate::{Context, Op, Outcome, Pass, Result, Tensor, Var};
use device::{ActivationGrad, Function};

/// max(x, 0)
pub fn relu(pass: &mut Pass<'_>, x: Var) -> Result<Var> {
    pass.apply1(Activation { function: Function::Relu }, vec![x])
}

/// x·Φ(x), by `erf`: PyTorch's `gelu`.
pub fn gelu(pass: &mut Pass<'_>, x: Var) -> Result<Var> {
    pass.apply1(Activation { function: Function::Gelu }, vec![x])
}

/// The same by `tanh`: PyTorch's `gelu(approximate="tanh")`.
pub fn gelu_tanh(pass: &mut Pass<'_>, x: Var) -> Result<Var> {
    pass.apply1(Activation { function: Function::GeluTanh }, vec![x])
}

#[derive(Debug)]
struct Activation {
    function: Function,
}

impl Op for Activation {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Tensor>) -> Result<Outcome> {
        let [x] = exactly(self.name(), inputs)?;
        let out = cx.tensor(x.shape().clone())?;
        let args = device::Activation { function: self.function, x: x.buffer(), out: out.buffer() };
        cx.device.activation(cx.stream, &args)?;
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
        let dx = if dout.is_unique() { dout.clone() } else { cx.tensor(x.shape().clone())? };
        let (x, dout) = (x.buffer(), dout.buffer());
        let args = ActivationGrad { function: self.function, x, dout, dx: dx.buffer() };
        cx.device.activation_grad(cx.stream, &args)?;
        Ok(vec![Some(dx)])
    }
}
