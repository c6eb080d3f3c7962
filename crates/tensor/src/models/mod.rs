//! Models as lists of blocks: single-device code, parallelism comes from outside.

mod config;
mod llama;
mod rope;

pub use config::{Config, RopeScaling};
pub use llama::llama;

use crate::{Error, Model, Result};

/// Builds the model a Hugging Face `config.json` describes: shapes only, no storage. RoPE's tables reach
/// `max_positions`.
pub fn build(config: &Config, max_positions: usize) -> Result<Model> {
    match config.model_type.as_str() {
        "llama" => llama(config, max_positions),
        other => Err(Error::Config(format!("model_type \"{other}\" is not supported (supported: llama)"))),
    }
}
