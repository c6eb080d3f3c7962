//! `config.json` of a Hugging Face folder.

use crate::{Error, Result};
use serde::Deserialize;
use serde_json::{Map, Value};

/// Models this crate builds, by their `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Llama,
    Qwen2,
    Qwen3,
    Mistral,
}

impl Family {
    pub const ALL: [Family; 4] = [Family::Llama, Family::Qwen2, Family::Qwen3, Family::Mistral];

    pub const fn model_type(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::Mistral => "mistral",
        }
    }

    /// The Hugging Face class of its layers.
    pub const fn layer_kind(self) -> &'static str {
        match self {
            Family::Llama => "LlamaDecoderLayer",
            Family::Qwen2 => "Qwen2DecoderLayer",
            Family::Qwen3 => "Qwen3DecoderLayer",
            Family::Mistral => "MistralDecoderLayer",
        }
    }

    fn parse(model_type: &str) -> Result<Self> {
        Family::ALL.into_iter().find(|family| family.model_type() == model_type).ok_or_else(|| {
            let known = Family::ALL.map(Family::model_type).join(", ");
            Error::Config(format!("model_type \"{model_type}\" is not supported (supported: {known})"))
        })
    }
}

/// What a decoder-only model of the Llama family is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub family: Family,
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub norm_eps: f32,
    pub init_std: f32,
    pub tied: bool,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// Whether queries and keys are normalised head by head.
    pub head_norm: bool,
    /// Keys a layer's queries see at most, themselves included; None: all before them. Empty: None everywhere.
    pub windows: Vec<Option<usize>>,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
}

/// How RoPE's frequencies are stretched for contexts longer than those trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    Default,
    Linear {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: f64,
    },
    Yarn {
        factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        original_max_position: f64,
        /// Whether the ramp starts and ends at whole pairs.
        truncate: bool,
        attention_factor: f64,
    },
}

impl RopeScaling {
    /// The factor on cos and sin, and so its square on attention's scores.
    pub fn attention_factor(&self) -> f64 {
        match self {
            RopeScaling::Yarn { attention_factor, .. } => *attention_factor,
            _ => 1.0,
        }
    }
}

/// The file's own words.
#[derive(Deserialize)]
struct Raw {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: Option<f64>,
    #[serde(default = "default_norm_eps")]
    rms_norm_eps: f64,
    #[serde(default = "default_init_std")]
    initializer_range: f64,
    #[serde(default = "default_act")]
    hidden_act: String,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    attention_dropout: f64,
    #[serde(default)]
    use_sliding_window: bool,
    /// Absent is not null: transformers' default is a window.
    #[serde(default = "default_window")]
    sliding_window: Option<usize>,
    #[serde(default = "default_max_window_layers")]
    max_window_layers: usize,
    layer_types: Option<Vec<String>>,
    partial_rotary_factor: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Map<String, Value>>,
    rope_parameters: Option<Map<String, Value>>,
}

fn default_norm_eps() -> f64 {
    1e-6
}

fn default_init_std() -> f64 {
    0.02
}

fn default_act() -> String {
    "silu".into()
}

fn default_window() -> Option<usize> {
    Some(4096)
}

fn default_max_window_layers() -> usize {
    28
}

fn fail<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Config(what.into()))
}

impl Config {
    /// Reads the text of a `config.json`.
    pub fn parse(text: &str) -> Result<Self> {
        let raw: Raw = serde_json::from_str(text).map_err(|e| Error::Config(e.to_string()))?;
        let family = Family::parse(&raw.model_type)?;
        raw.check(family)?;
        let (rope_theta, rope_scaling) = raw.rope()?;
        // Qwen2 has biases without a key for them, and none on o.
        let has_key = matches!(family, Family::Llama | Family::Qwen3);
        Ok(Config {
            family,
            vocab: raw.vocab_size,
            hidden: raw.hidden_size,
            intermediate: raw.intermediate_size,
            layers: raw.num_hidden_layers,
            heads: raw.num_attention_heads,
            kv_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            head_dim: raw.head_dim(family),
            norm_eps: raw.rms_norm_eps as f32,
            init_std: raw.initializer_range as f32,
            tied: raw.tie_word_embeddings,
            qkv_bias: family == Family::Qwen2 || has_key && raw.attention_bias,
            o_bias: has_key && raw.attention_bias,
            mlp_bias: family == Family::Llama && raw.mlp_bias,
            head_norm: family == Family::Qwen3,
            windows: raw.windows(family)?,
            rope_theta,
            rope_scaling,
        })
    }
}

impl Raw {
    fn check(&self, family: Family) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads.unwrap_or(1)),
            ("head_dim", self.head_dim.unwrap_or(2)),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return fail(format!("{name} is 0"));
        }
        let kv_heads = self.num_key_value_heads.unwrap_or(self.num_attention_heads);
        if !self.num_attention_heads.is_multiple_of(kv_heads) {
            return fail(format!(
                "num_attention_heads = {} is not a multiple of num_key_value_heads = {kv_heads}",
                self.num_attention_heads
            ));
        }
        let divides = self.hidden_size.is_multiple_of(self.num_attention_heads);
        if self.head_dim.is_none() && family != Family::Qwen3 && !divides {
            return fail("hidden_size is not a multiple of num_attention_heads and head_dim is not given");
        }
        if !self.head_dim(family).is_multiple_of(2) {
            return fail("head_dim is odd: rotary embedding needs pairs");
        }
        if self.hidden_act != "silu" {
            return fail(format!("hidden_act \"{}\" is not supported (supported: silu)", self.hidden_act));
        }
        if self.attention_dropout != 0.0 {
            return fail(format!(
                "attention_dropout = {} is not supported (supported: 0)",
                self.attention_dropout
            ));
        }
        Ok(())
    }

    fn head_dim(&self, family: Family) -> usize {
        // Qwen3's heads have a size of their own, whatever the hidden size.
        let otherwise =
            if family == Family::Qwen3 { 128 } else { self.hidden_size / self.num_attention_heads };
        self.head_dim.unwrap_or(otherwise)
    }

    fn windows(&self, family: Family) -> Result<Vec<Option<usize>>> {
        let slides = match family {
            Family::Llama => return Ok(vec![]),
            Family::Mistral => return Ok(self.windows_where(|_| true)),
            Family::Qwen2 | Family::Qwen3 => self.use_sliding_window,
        };
        let Some(types) = &self.layer_types else {
            return Ok(self.windows_where(|layer| slides && layer >= self.max_window_layers));
        };
        if types.len() != self.num_hidden_layers {
            return fail(format!("{} layer_types for {} layers", types.len(), self.num_hidden_layers));
        }
        if let Some(other) =
            types.iter().find(|name| !["full_attention", "sliding_attention"].contains(&name.as_str()))
        {
            let known = "supported: full_attention, sliding_attention";
            return fail(format!("layer type \"{other}\" is not supported ({known})"));
        }
        Ok(self.windows_where(|layer| slides && types[layer] == "sliding_attention"))
    }

    fn windows_where(&self, slides: impl Fn(usize) -> bool) -> Vec<Option<usize>> {
        (0..self.num_hidden_layers).map(|layer| self.sliding_window.filter(|_| slides(layer))).collect()
    }

    /// New files keep both in `rope_parameters`; older ones have `rope_theta` and `rope_scaling`.
    fn rope(&self) -> Result<(f64, RopeScaling)> {
        let table = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let number = |key: &str| table.and_then(|table| table.get(key)).and_then(Value::as_f64);
        let theta = number("rope_theta").or(self.rope_theta).unwrap_or(10_000.0);
        let word = |key: &str| table.and_then(|table| table.get(key)).and_then(Value::as_str);
        let kind = word("rope_type").or(word("type")).unwrap_or("default");
        if let Some(part) =
            number("partial_rotary_factor").or(self.partial_rotary_factor).filter(|p| *p != 1.0)
        {
            return fail(format!("partial_rotary_factor = {part} is not supported (supported: 1)"));
        }
        let need = |key: &'static str| {
            number(key).ok_or_else(|| Error::Config(format!("rope scaling \"{kind}\" lacks {key}")))
        };
        let scaling = match kind {
            "default" => RopeScaling::Default,
            "linear" => RopeScaling::Linear { factor: need("factor")? },
            "llama3" => RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_max_position: need("original_max_position_embeddings")?,
            },
            "yarn" => {
                let original_max_position = number("original_max_position_embeddings")
                    .or(self.max_position_embeddings)
                    .map_or_else(|| need("original_max_position_embeddings"), Ok)?;
                let factor = need("factor")?;
                let magnitude =
                    |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
                let mscale = |key| number(key).filter(|scale| *scale != 0.0);
                let computed = match (mscale("mscale"), mscale("mscale_all_dim")) {
                    (Some(one), Some(all)) => magnitude(one) / magnitude(all),
                    _ => magnitude(1.0),
                };
                let truncate = table.and_then(|table| table.get("truncate")).and_then(Value::as_bool);
                RopeScaling::Yarn {
                    factor,
                    beta_fast: number("beta_fast").unwrap_or(32.0),
                    beta_slow: number("beta_slow").unwrap_or(1.0),
                    original_max_position,
                    truncate: truncate.unwrap_or(true),
                    attention_factor: number("attention_factor").unwrap_or(computed),
                }
            }
            other => {
                let known = "supported: default, linear, llama3, yarn";
                return fail(format!("rope type \"{other}\" is not supported ({known})"));
            }
        };
        Ok((theta, scaling))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = r#"{"model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "rope_theta": 500000.0, "rope_scaling":
        {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192}}"#;

    #[test]
    fn old_and_new_spellings_of_rope_mean_the_same() {
        let new = OLD.replace(
            "\"rope_theta\": 500000.0, \"rope_scaling\":\n        {",
            "\"rope_parameters\": {\"rope_theta\": 500000.0, ",
        );
        assert_ne!(new, OLD);
        assert_eq!(Config::parse(OLD).unwrap(), Config::parse(&new).unwrap());
        assert_eq!(Config::parse(OLD).unwrap().kv_heads, 2);
    }

    #[test]
    fn what_is_not_supported_is_named() {
        for (from, to, named) in [
            ("\"llama3\"", "\"longrope\"", "longrope"),
            ("\"llama\"", "\"gpt2\"", "supported: llama, qwen2, qwen3, mistral"),
            ("\"factor\": 8.0,", "", "factor"),
            ("\"num_attention_heads\": 2", "\"num_attention_heads\": 0", "num_attention_heads"),
            ("\"vocab_size\": 10,", "", "vocab_size"),
        ] {
            let error = Config::parse(&OLD.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn biases_norms_and_windows_are_the_familys() {
        let parse = |family: &str, more: &str| {
            let text =
                OLD.replace("\"llama\"", &format!("\"{family}\"")).replacen('{', &format!("{{{more}"), 1);
            Config::parse(&text.replace("hidden_layers\": 1", "hidden_layers\": 3")).unwrap()
        };
        let biases = |c: &Config| (c.qkv_bias, c.o_bias, c.mlp_bias, c.head_norm);
        assert_eq!(biases(&parse("llama", "")), (false, false, false, false));
        assert_eq!(
            biases(&parse("llama", "\"attention_bias\": true, \"mlp_bias\": true,")),
            (true, true, true, false)
        );
        assert_eq!(biases(&parse("qwen2", "")), (true, false, false, false));
        assert_eq!(biases(&parse("qwen3", "")), (false, false, false, true));
        assert_eq!(parse("qwen3", "").head_dim, 128);
        assert_eq!(biases(&parse("mistral", "")), (false, false, false, false));

        assert_eq!(parse("llama", "\"sliding_window\": 9,").windows, []);
        assert_eq!(parse("mistral", "").windows, [Some(4096); 3]);
        assert_eq!(parse("mistral", "\"sliding_window\": null,").windows, [None; 3]);
        let qwen = |more: &str| parse("qwen2", &format!("\"sliding_window\": 9, {more}")).windows;
        assert_eq!(qwen(""), [None; 3]);
        let on = "\"use_sliding_window\": true,";
        assert_eq!(qwen(&format!("{on} \"max_window_layers\": 1,")), [None, Some(9), Some(9)]);
        let types = "\"layer_types\": [\"sliding_attention\", \"full_attention\", \"full_attention\"],";
        assert_eq!(qwen(&format!("{on} {types}")), [Some(9), None, None]);
    }
}
