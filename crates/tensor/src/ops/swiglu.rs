use super::{exactly, sole};
use crate::{Context, Op, Outcome, Pass, Result, Saved, Tensor, Var};

/// `silu(gate) · up` of gate ‖ up.
pub fn swiglu(pass: &mut Pass<'_>, gate_up: Var) -> Result<Var> {
    pass.apply1(Swiglu, vec![gate_up])
}

#[derive(Debug)]
struct Swiglu;

impl Op for Swiglu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Tensor>) -> Result<Outcome> {
        let [gate_up] = exactly(self.name(), inputs)?;
        let out = self.run(cx, &gate_up)?;
        Ok(Outcome { outputs: vec![out], saved: vec![gate_up] })
    }

    fn is_cheap(&self) -> bool {
        true
    }

    fn again(&self, cx: &Context<'_>, saved: &[Saved]) -> Result<Option<Tensor>> {
        saved.first().and_then(Saved::value).map(|gate_up| self.run(cx, gate_up)).transpose()
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Vec<Tensor>,
        grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let [gate_up] = exactly(self.name(), saved)?;
        let dout = sole(self.name(), grads)?;
        let (rows, both) = gate_up.rows_cols(self.name())?;
        // What was saved is not needed again, so its gradient takes its place.
        let dgate_up = if gate_up.is_unique() { gate_up.clone() } else { cx.tensor([rows, both])? };
        let args = device::SwigluGrad {
            gate_up: gate_up.buffer(),
            dout: dout.buffer(),
            dgate_up: dgate_up.buffer(),
            rows,
            cols: both / 2,
        };
        cx.device.swiglu_grad(cx.stream, &args)?;
        Ok(vec![Some(dgate_up)])
    }
}

impl Swiglu {
    fn run(&self, cx: &Context<'_>, gate_up: &Tensor) -> Result<Tensor> {
        let (rows, both) = gate_up.rows_cols(self.name())?;
        let cols = both / 2;
        let out = cx.tensor([rows, cols])?;
        let args = device::Swiglu { gate_up: gate_up.buffer(), out: out.buffer(), rows, cols };
        cx.device.swiglu(cx.stream, &args)?;
        Ok(out)
    }
}
