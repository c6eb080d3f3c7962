//! `config.json` of a Hugging Face folder.

use crate::{Error, Result};
use serde::Deserialize;
use serde_json::{Map, Value};

/// What a decoder-only model of the Llama family is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub model_type: String,
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
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
}

/// How RoPE's frequencies are stretched for contexts longer than those trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    Default,
    Llama3 { factor: f64, low_freq_factor: f64, high_freq_factor: f64, original_max_position: f64 },
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

impl Config {
    /// Reads the text of a `config.json`.
    pub fn parse(text: &str) -> Result<Self> {
        let raw: Raw = serde_json::from_str(text).map_err(|e| Error::Config(e.to_string()))?;
        raw.check()?;
        let (rope_theta, rope_scaling) = raw.rope()?;
        Ok(Config {
            vocab: raw.vocab_size,
            hidden: raw.hidden_size,
            intermediate: raw.intermediate_size,
            layers: raw.num_hidden_layers,
            heads: raw.num_attention_heads,
            kv_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            head_dim: raw.head_dim.unwrap_or(raw.hidden_size / raw.num_attention_heads),
            norm_eps: raw.rms_norm_eps as f32,
            init_std: raw.initializer_range as f32,
            tied: raw.tie_word_embeddings,
            model_type: raw.model_type,
            rope_theta,
            rope_scaling,
        })
    }
}

impl Raw {
    fn check(&self) -> Result<()> {
        let fail = |what: String| Err(Error::Config(what));
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads.unwrap_or(1)),
            ("head_dim", self.head_dim.unwrap_or(2)),
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
        if self.head_dim.is_none() && !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            return fail(
                "hidden_size is not a multiple of num_attention_heads and head_dim is not given".into(),
            );
        }
        if !self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads).is_multiple_of(2) {
            return fail("head_dim is odd: rotary embedding needs pairs".into());
        }
        if self.hidden_act != "silu" {
            return fail(format!("hidden_act \"{}\" is not supported (supported: silu)", self.hidden_act));
        }
        if self.attention_bias || self.mlp_bias {
            return fail("attention_bias and mlp_bias are not supported yet".into());
        }
        Ok(())
    }

    /// New files keep both in `rope_parameters`; older ones have `rope_theta` and `rope_scaling`.
    fn rope(&self) -> Result<(f64, RopeScaling)> {
        let table = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let number = |key: &str| table.and_then(|table| table.get(key)).and_then(Value::as_f64);
        let theta = number("rope_theta").or(self.rope_theta).unwrap_or(10_000.0);
        let word = |key: &str| table.and_then(|table| table.get(key)).and_then(Value::as_str);
        let need = |key: &'static str| {
            number(key).ok_or_else(|| Error::Config(format!("rope scaling \"llama3\" lacks {key}")))
        };
        let scaling = match word("rope_type").or(word("type")) {
            None | Some("default") => RopeScaling::Default,
            Some("llama3") => RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_max_position: need("original_max_position_embeddings")?,
            },
            Some(other) => {
                let known = "supported: default, llama3";
                return Err(Error::Config(format!("rope type \"{other}\" is not supported ({known})")));
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
            ("\"llama3\"", "\"yarn\"", "yarn"),
            ("\"factor\": 8.0,", "", "factor"),
            ("\"num_attention_heads\": 2", "\"num_attention_heads\": 0", "num_attention_heads"),
            ("\"vocab_size\": 10,", "", "vocab_size"),
        ] {
            let error = Config::parse(&OLD.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
