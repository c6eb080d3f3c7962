//! Llama: embedding, decoder layers, final norm and head with the loss.

use super::{Config, rope};
use crate::ops::{self, field};
use crate::{Block, ConstantId, Error, Init, ItemId, Model, Pass, Result, Var, WeightSpec};
use device::AttentionShape;

/// Llama as a list of blocks.
pub fn llama(config: &Config, max_positions: usize) -> Result<Model> {
    let mut model = Model::default();
    let (hidden, vocab) = (config.hidden, config.vocab);
    let matrix = |name: String, rows: usize, cols: usize| WeightSpec {
        name,
        shape: [rows, cols].into(),
        init: Init::Normal { std: config.init_std },
    };
    let norm = |name: String| WeightSpec { name, shape: [hidden].into(), init: Init::Constant(1.0) };
    let tables = rope::tables(&mut model, config, max_positions);

    let embedding = model.item(vec![matrix("model.embed_tokens.weight".into(), vocab, hidden)]);
    model.block(Embedding { item: embedding, vocab, hidden });
    for layer in 0..config.layers {
        let name = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let input_norm = model.item(vec![norm(name("input_layernorm"))]);
        let qkv = model.item(vec![
            matrix(name("self_attn.q_proj"), q, hidden),
            matrix(name("self_attn.k_proj"), kv, hidden),
            matrix(name("self_attn.v_proj"), kv, hidden),
        ]);
        let o = model.item(vec![matrix(name("self_attn.o_proj"), hidden, q)]);
        let post_norm = model.item(vec![norm(name("post_attention_layernorm"))]);
        let gate_up = model.item(vec![
            matrix(name("mlp.gate_proj"), config.intermediate, hidden),
            matrix(name("mlp.up_proj"), config.intermediate, hidden),
        ]);
        let down = model.item(vec![matrix(name("mlp.down_proj"), hidden, config.intermediate)]);
        model.block(Layer { config: config.clone(), tables, input_norm, qkv, o, post_norm, gate_up, down });
    }
    let norm = model.item(vec![norm("model.norm.weight".into())]);
    let head = if config.tied {
        embedding
    } else {
        model.item(vec![matrix("lm_head.weight".into(), vocab, hidden)])
    };
    model.block(Head { norm, head, vocab, eps: config.norm_eps });
    Ok(model)
}

#[derive(Debug)]
struct Embedding {
    item: ItemId,
    vocab: usize,
    hidden: usize,
}

impl Block for Embedding {
    fn kind(&self) -> &str {
        "Embedding"
    }

    fn items(&self) -> Vec<ItemId> {
        vec![self.item]
    }

    fn forward(&self, pass: &mut Pass<'_>, _carry: Vec<Var>) -> Result<Vec<Var>> {
        Ok(vec![ops::embedding(pass, self.item, self.vocab, self.hidden)?])
    }
}

/// The residual stream is carried as (x, delta): what it was and what the last sublayer adds, so that the
/// addition is part of the next norm.
fn normed_carry(pass: &mut Pass<'_>, carry: Vec<Var>, norm: ItemId, eps: f32) -> Result<(Var, Var)> {
    let mut carry = carry.into_iter();
    match (carry.next(), carry.next()) {
        (Some(x), Some(delta)) => ops::add_rms_norm(pass, x, delta, norm, eps),
        (Some(x), None) => ops::rms_norm(pass, x, norm, eps),
        _ => Err(Error::Argument { op: "rms_norm", what: "the carry is empty".into() }),
    }
}

#[derive(Debug)]
struct Layer {
    config: Config,
    tables: [ConstantId; 2],
    input_norm: ItemId,
    qkv: ItemId,
    o: ItemId,
    post_norm: ItemId,
    gate_up: ItemId,
    down: ItemId,
}

impl Block for Layer {
    fn kind(&self) -> &str {
        "LlamaDecoderLayer"
    }

    fn items(&self) -> Vec<ItemId> {
        vec![self.input_norm, self.qkv, self.o, self.post_norm, self.gate_up, self.down]
    }

    fn forward(&self, pass: &mut Pass<'_>, carry: Vec<Var>) -> Result<Vec<Var>> {
        let config = &self.config;
        let (x, normed) = normed_carry(pass, carry, self.input_norm, config.norm_eps)?;
        let delta = self.attention(pass, normed)?;
        let (x, normed) = ops::add_rms_norm(pass, x, delta, self.post_norm, config.norm_eps)?;
        let delta = self.mlp(pass, normed)?;
        Ok(vec![x, delta])
    }
}

impl Layer {
    fn attention(&self, pass: &mut Pass<'_>, x: Var) -> Result<Var> {
        let config = &self.config;
        let [rows, seq] = *pass.cx.batch.get(field::IDS)?.shape().dims() else {
            return Err(Error::Argument { op: "attention", what: "ids are not [rows, length]".into() });
        };
        let shape = AttentionShape {
            rows,
            seq,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            window: None,
        };
        let x = pass.enter(x)?;
        let qkv = ops::linear(pass, x, self.qkv, shape.qkv_cols())?;
        let qkv = ops::rope(pass, qkv, self.tables, config.heads + config.kv_heads, config.head_dim)?;
        let mixed = ops::attention(pass, qkv, shape)?;
        let out = ops::linear(pass, mixed, self.o, config.hidden)?;
        pass.exit(out)
    }

    fn mlp(&self, pass: &mut Pass<'_>, x: Var) -> Result<Var> {
        let x = pass.enter(x)?;
        let gate_up = ops::linear(pass, x, self.gate_up, 2 * self.config.intermediate)?;
        let inner = ops::swiglu(pass, gate_up)?;
        let out = ops::linear(pass, inner, self.down, self.config.hidden)?;
        pass.exit(out)
    }
}

#[derive(Debug)]
struct Head {
    norm: ItemId,
    head: ItemId,
    vocab: usize,
    eps: f32,
}

impl Block for Head {
    fn kind(&self) -> &str {
        "Head"
    }

    fn items(&self) -> Vec<ItemId> {
        vec![self.norm, self.head]
    }

    fn forward(&self, pass: &mut Pass<'_>, carry: Vec<Var>) -> Result<Vec<Var>> {
        let (_, normed) = normed_carry(pass, carry, self.norm, self.eps)?;
        Ok(vec![ops::linear_cross_entropy(pass, normed, self.head, self.vocab)?])
    }
}
