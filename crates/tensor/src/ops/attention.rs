use super::{exactly, field, sole};
use crate::{Context, Error, Mode, Op, Outcome, Pass, Result, Tensor, Var};
use device::{AttentionShape, Dtype};

/// Causal attention over packed q ‖ k ‖ v: `[tokens, heads · head_dim]`. When decoding, the tokens come after
/// those in the cache and see them.
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
        if cx.mode == Mode::Decode {
            self.decode(cx, &qkv, &out, &lse, &scratch)?;
            return Ok(Outcome { outputs: vec![out], saved: vec![] });
        }
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
        let (profile, documents) = (cx.device.profile(), cx.batch.find(field::DOCUMENT_START));
        let bytes = match documents {
            None => profile.attention_grad_scratch(&self.shape, cx.compute),
            Some(_) => profile.packed_attention_grad_scratch(&self.shape, cx.compute),
        };
        let scratch = cx.scratch(Dtype::U8, bytes)?;
        let args = device::AttentionGrad {
            shape: self.shape,
            qkv: qkv.buffer(),
            document_start: documents.map(Tensor::buffer),
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

impl Attention {
    fn decode(
        &self,
        cx: &Context<'_>,
        qkv: &Tensor,
        out: &Tensor,
        lse: &Tensor,
        scratch: &Tensor,
    ) -> Result<()> {
        let missing = || Error::Argument { op: self.name(), what: "decoding without a cache".into() };
        let cache = cx.cache.ok_or_else(missing)?;
        let slot = cache.slot(cx.device, &self.shape)?;
        let args = device::AttentionCached {
            shape: self.shape,
            qkv: qkv.buffer(),
            keys: &slot.keys,
            values: &slot.values,
            start: cache.len(),
            max_len: cache.max_len(),
            out: out.buffer(),
            lse: lse.buffer(),
            scratch: scratch.buffer(),
        };
        Ok(cx.device.attention_cached(cx.stream, &args)?)
    }
}
