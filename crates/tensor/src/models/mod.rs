//! Models as lists of blocks: single-device code, parallelism comes from outside.

mod config;
mod decoder;
mod rope;

pub use config::{Config, Family, RopeScaling};

use crate::{Model, Result};

/// Builds the model a Hugging Face `config.json` describes: shapes only, no storage. RoPE's tables reach
/// `max_positions`.
pub fn build(config: &Config, max_positions: usize) -> Result<Model> {
    Ok(decoder::decoder(config, max_positions))
}
