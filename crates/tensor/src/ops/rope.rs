use super::{exactly, field, sole};
use crate::{ConstantId, Context, Error, Op, Outcome, Pass, Result, Tensor, Var};
use device::Rotation;

/// Rotates the first `heads` heads of every row by the token's position, in place.
pub fn rope(
    pass: &mut Pass<'_>,
    x: Var,
    tables: [ConstantId; 2],
    heads: usize,
    head_dim: usize,
) -> Result<Var> {
    pass.apply1(Rope { tables, heads, head_dim }, vec![x])
}

#[derive(Debug)]
struct Rope {
    /// cos, sin
    tables: [ConstantId; 2],
    heads: usize,
    head_dim: usize,
}

impl Rope {
    fn rotate(&self, cx: &Context<'_>, x: Tensor, direction: Rotation) -> Result<Tensor> {
        let (tokens, stride) = x.rows_cols(self.name())?;
        if !x.is_unique() {
            return Err(Error::Argument {
                op: self.name(),
                what: "rotates in place what others hold".into(),
            });
        }
        let args = device::Rope {
            x: x.buffer(),
            positions: cx.batch.get(field::POSITIONS)?.buffer(),
            cos: cx.constants[self.tables[0].0].buffer(),
            sin: cx.constants[self.tables[1].0].buffer(),
            tokens,
            heads: self.heads,
            head_dim: self.head_dim,
            stride,
            direction,
        };
        cx.device.rope(cx.stream, &args)?;
        Ok(x)
    }
}

impl Op for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Tensor>) -> Result<Outcome> {
        let [x] = exactly(self.name(), inputs)?;
        Ok(Outcome { outputs: vec![self.rotate(cx, x, Rotation::Forward)?], saved: vec![] })
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Vec<Tensor>,
        grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let dout = sole(self.name(), grads)?;
        Ok(vec![Some(self.rotate(cx, dout, Rotation::Inverse)?)])
    }
}
