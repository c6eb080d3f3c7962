use super::{exactly, field, sole};
use crate::{Context, Error, Op, Outcome, Pass, Result, Tensor, Var};
use device::{AttentionShape, Dtype};

/// Causal attention over packed q ‖ k ‖ v: `[tokens, heads · head_dim]`.
pub fn attention(pass: &mut Pass<'_>, qkv: Var, shape: AttentionShape) -> Result<Var> {
    pass.apply1(Attention { shape }, vec![qkv])
}

#[derive(Debug)]
struct Attention {
    shape: AttentionShape,
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Tensor>) -> Result<Outcome> {
        let [qkv] = exactly(self.name(), inputs)?;
        let shape = self.shape;
        if qkv.rows_cols(self.name())? != (shape.tokens(), shape.qkv_cols()) {
            let expected = format!("[{}, {}]", shape.tokens(), shape.qkv_cols());
            return Err(Error::shape(self.name(), expected, qkv.shape()));
        }
        let out = cx.tensor([shape.tokens(), shape.out_cols()])?;
        let lse = cx.f32([shape.rows, shape.heads, shape.seq])?;
        let scratch = cx.scratch(Dtype::U8, cx.device.profile().attention_scratch(&shape, cx.compute))?;
        let args = device::Attention {
            shape,
            qkv: qkv.buffer(),
            document_start: cx.batch.find(field::DOCUMENT_START).map(Tensor::buffer),
            out: out.buffer(),
            lse: lse.buffer(),
            scratch: scratch.buffer(),
        };
        cx.device.attention(cx.stream, &args)?;
        Ok(Outcome { outputs: vec![out.clone()], saved: vec![qkv, out, lse] })
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Vec<Tensor>,
        grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let [qkv, out, lse] = exactly(self.name(), saved)?;
        let dout = sole(self.name(), grads)?;
        let dqkv = cx.tensor(qkv.shape().clone())?;
        let bytes = cx.device.profile().attention_grad_scratch(&self.shape, cx.compute);
        let scratch = cx.scratch(Dtype::U8, bytes)?;
        let args = device::AttentionGrad {
            shape: self.shape,
            qkv: qkv.buffer(),
            document_start: cx.batch.find(field::DOCUMENT_START).map(Tensor::buffer),
            out: out.buffer(),
            lse: lse.buffer(),
            dout: dout.buffer(),
            dqkv: dqkv.buffer(),
            scratch: scratch.buffer(),
        };
        cx.device.attention_grad(cx.stream, &args)?;
        Ok(vec![Some(dqkv)])
    }
}
