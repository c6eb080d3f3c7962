use super::{field, sole};
use crate::{Context, ItemId, Op, Outcome, Pass, Result, Tensor, Var};

/// Rows of the table for the batch's ids.
pub fn embedding(pass: &mut Pass<'_>, item: ItemId, vocab: usize, cols: usize) -> Result<Var> {
    pass.apply1(Embedding { item, vocab, cols }, vec![])
}

#[derive(Debug)]
struct Embedding {
    item: ItemId,
    vocab: usize,
    cols: usize,
}

impl Op for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn forward(&self, cx: &Context<'_>, _inputs: Vec<Tensor>) -> Result<Outcome> {
        let ids = cx.batch.get(field::IDS)?;
        let tokens = ids.shape().numel();
        let out = cx.tensor([tokens, self.cols])?;
        let args = device::Embedding {
            table: &cx.weights.get(self.item)?,
            ids: ids.buffer(),
            out: out.buffer(),
            tokens,
            vocab: self.vocab,
            cols: self.cols,
        };
        cx.device.embedding(cx.stream, &args)?;
        Ok(Outcome { outputs: vec![out], saved: vec![] })
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Vec<Tensor>,
        grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let dout = sole(self.name(), grads)?;
        let Some(grad) = cx.weights.grad(self.item)? else { return Ok(vec![]) };
        let ids = cx.batch.get(field::IDS)?;
        let args = device::EmbeddingGrad {
            dout: dout.buffer(),
            ids: ids.buffer(),
            order: cx.batch.get(field::ORDER)?.buffer(),
            dtable: &grad.buffer,
            tokens: ids.shape().numel(),
            vocab: self.vocab,
            cols: self.cols,
            accumulate: grad.accumulate,
        };
        cx.device.embedding_grad(cx.stream, &args)?;
        Ok(vec![])
    }
}
