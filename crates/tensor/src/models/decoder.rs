//! The decoder that Llama, Qwen2, Qwen3 and Mistral share: embedding, layers, final norm and head with the loss.

use super::{Config, rope};
use crate::ops::{self, field};
use crate::{Block, ConstantId, Error, Init, ItemId, Mode, Model, Pass, Result, Var, WeightSpec};
use device::AttentionShape;
use std::sync::Arc;

/// The configured model as a list of blocks: shapes only. RoPE's tables reach `max_positions`.
pub(super) fn decoder(config: &Config, max_positions: usize) -> Model {
    let mut model = Model::default();
    let config = Arc::new(config.clone());
    let (hidden, vocab) = (config.hidden, config.vocab);
    let tables = rope::tables(&mut model, &config, max_positions);
    let embedding = model.item(vec![matrix(&config, "model.embed_tokens".into(), vocab, hidden)]);
    model.block(Embedding { item: embedding, vocab, hidden });
    for layer in 0..config.layers {
        let layer = Layer::new(&mut model, config.clone(), tables, layer);
        model.block(layer);
    }
    let norm = model.item(vec![norm("model.norm".into(), hidden)]);
    let head = if config.tied {
        embedding
    } else {
        model.item(vec![matrix(&config, "lm_head".into(), vocab, hidden)])
    };
    model.block(Head { norm, head, vocab, eps: config.norm_eps });
    model
}

fn matrix(config: &Config, name: String, rows: usize, cols: usize) -> WeightSpec {
    let init = Init::Normal { std: config.init_std };
    WeightSpec { name: name + ".weight", shape: [rows, cols].into(), init }
}

fn norm(name: String, len: usize) -> WeightSpec {
    WeightSpec { name: name + ".weight", shape: [len].into(), init: Init::Constant(1.0) }
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

/// Projections of one input, fused into one product, with their biases where there are any.
#[derive(Debug)]
struct Projection {
    weight: ItemId,
    bias: Option<ItemId>,
    out_cols: usize,
}

impl Projection {
    /// `parts` are names and numbers of output columns.
    fn new(
        model: &mut Model,
        config: &Config,
        parts: &[(String, usize)],
        in_cols: usize,
        bias: bool,
    ) -> Self {
        let weights = parts.iter().map(|(name, rows)| matrix(config, name.clone(), *rows, in_cols));
        let weight = model.item(weights.collect());
        let zeros = |(name, len): &(String, usize)| WeightSpec {
            name: format!("{name}.bias"),
            shape: [*len].into(),
            init: Init::Constant(0.0),
        };
        let bias = bias.then(|| model.item(parts.iter().map(zeros).collect()));
        Projection { weight, bias, out_cols: parts.iter().map(|(_, rows)| rows).sum() }
    }

    fn apply(&self, pass: &mut Pass<'_>, x: Var) -> Result<Var> {
        ops::linear(pass, x, self.weight, self.bias, self.out_cols)
    }
}

#[derive(Debug)]
struct Layer {
    config: Arc<Config>,
    tables: [ConstantId; 2],
    window: Option<usize>,
    input_norm: ItemId,
    qkv: Projection,
    head_norm: Option<ItemId>,
    o: Projection,
    post_norm: ItemId,
    gate_up: Projection,
    down: Projection,
}

impl Layer {
    fn new(model: &mut Model, config: Arc<Config>, tables: [ConstantId; 2], layer: usize) -> Self {
        let c = &*config;
        let name = |rest: &str| format!("model.layers.{layer}.{rest}");
        let part = |rest: &str, cols: usize| (name(rest), cols);
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let qkv_parts =
            [part("self_attn.q_proj", q), part("self_attn.k_proj", kv), part("self_attn.v_proj", kv)];
        let gate_up_parts = [part("mlp.gate_proj", c.intermediate), part("mlp.up_proj", c.intermediate)];
        let head_norms = ["self_attn.q_norm", "self_attn.k_norm"].map(|rest| norm(name(rest), c.head_dim));
        Layer {
            tables,
            window: c.windows.get(layer).copied().flatten(),
            input_norm: model.item(vec![norm(name("input_layernorm"), c.hidden)]),
            qkv: Projection::new(model, c, &qkv_parts, c.hidden, c.qkv_bias),
            head_norm: c.head_norm.then(|| model.item(head_norms.to_vec())),
            o: Projection::new(model, c, &[part("self_attn.o_proj", c.hidden)], q, c.o_bias),
            post_norm: model.item(vec![norm(name("post_attention_layernorm"), c.hidden)]),
            gate_up: Projection::new(model, c, &gate_up_parts, c.hidden, c.mlp_bias),
            down: Projection::new(model, c, &[part("mlp.down_proj", c.hidden)], c.intermediate, c.mlp_bias),
            config,
        }
    }

    fn attention(&self, pass: &mut Pass<'_>, x: Var) -> Result<Var> {
        let config = &self.config;
        let [rows, seq] = *pass.cx.batch.get(field::IDS)?.shape().dims() else {
            return Err(Error::Argument { op: "attention", what: "ids are not [rows, length]".into() });
        };
        let (heads, kv_heads, head_dim) = (config.heads, config.kv_heads, config.head_dim);
        let shape = AttentionShape { rows, seq, heads, kv_heads, head_dim, window: self.window };
        let x = pass.enter(x)?;
        let mut qkv = self.qkv.apply(pass, x)?;
        if let Some(norm) = self.head_norm {
            qkv = ops::head_norm(pass, qkv, norm, [heads, kv_heads], head_dim, config.norm_eps)?;
        }
        let qkv = ops::rope(pass, qkv, self.tables, heads + kv_heads, head_dim)?;
        let mixed = ops::attention(pass, qkv, shape)?;
        let out = self.o.apply(pass, mixed)?;
        pass.exit(out)
    }

    fn mlp(&self, pass: &mut Pass<'_>, x: Var) -> Result<Var> {
        let x = pass.enter(x)?;
        let gate_up = self.gate_up.apply(pass, x)?;
        let inner = ops::swiglu(pass, gate_up)?;
        let out = self.down.apply(pass, inner)?;
        pass.exit(out)
    }
}

impl Block for Layer {
    fn kind(&self) -> &str {
        self.config.family.layer_kind()
    }

    fn items(&self) -> Vec<ItemId> {
        let projections = [&self.qkv, &self.o, &self.gate_up, &self.down];
        let projected = projections.into_iter().flat_map(|p| [Some(p.weight), p.bias]);
        let norms = [Some(self.input_norm), self.head_norm, Some(self.post_norm)];
        norms.into_iter().chain(projected).flatten().collect()
    }

    fn forward(&self, pass: &mut Pass<'_>, carry: Vec<Var>) -> Result<Vec<Var>> {
        let eps = self.config.norm_eps;
        let (x, normed) = normed_carry(pass, carry, self.input_norm, eps)?;
        let delta = self.attention(pass, normed)?;
        let (x, normed) = ops::add_rms_norm(pass, x, delta, self.post_norm, eps)?;
        let delta = self.mlp(pass, normed)?;
        Ok(vec![x, delta])
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
        Ok(vec![match pass.cx.mode {
            Mode::Logits => ops::linear(pass, normed, self.head, None, self.vocab)?,
            Mode::Train | Mode::Eval | Mode::Decode => {
                ops::linear_cross_entropy(pass, normed, self.head, self.vocab)?
            }
        }])
    }
}
