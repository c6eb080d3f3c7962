use super::{exactly, sole};
use crate::{Context, Mode, Op, Outcome, Pass, Result, Tensor, Var};

/// Drops elements with probability `p` when training and scales the others up; the identity otherwise.
///
/// Which elements go depends on the run's seed, the step, the token's place in the whole batch and `site`, which
/// tells a model's dropouts apart: never on the number of ranks or micro-batches.
pub fn dropout(pass: &mut Pass<'_>, x: Var, p: f32, site: u64) -> Result<Var> {
    if pass.cx.mode != Mode::Train || p == 0.0 {
        return Ok(x);
    }
    pass.apply1(Dropout { p, site }, vec![x])
}

#[derive(Debug)]
struct Dropout {
    p: f32,
    site: u64,
}

impl Dropout {
    /// The gradient is dropped where the value was: nothing needs to be saved.
    fn apply(&self, cx: &Context<'_>, x: Tensor) -> Result<Tensor> {
        let (_, cols) = x.rows_cols(self.name())?;
        let out = if x.is_unique() { x.clone() } else { cx.tensor(x.shape().clone())? };
        let args = device::Dropout {
            x: x.buffer(),
            out: out.buffer(),
            p: self.p,
            key: cx.random.key(self.site),
            first: cx.random.first_row.wrapping_mul(cols as u64),
        };
        cx.device.dropout(cx.stream, &args)?;
        Ok(out)
    }
}

impl Op for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Tensor>) -> Result<Outcome> {
        let [x] = exactly(self.name(), inputs)?;
        Ok(Outcome { outputs: vec![self.apply(cx, x)?], saved: vec![] })
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Vec<Tensor>,
        grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.apply(cx, sole(self.name(), grads)?)?)])
    }
}
