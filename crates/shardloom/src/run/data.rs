//! What a run trains on.

use super::raw;
use super::resolve::{ModelSource, only, wrong};
use crate::data::pack::Packing;
use crate::data::text;
use crate::data::tokenizer::{Tokenizer, TokenizerSource};
use crate::{Error, Result};
use std::path::PathBuf;

#[derive(Clone, Debug, PartialEq)]
pub enum DataSource {
    /// Ready-made batches in a safetensors file.
    Batches {
        path: PathBuf,
        /// Tokens of a row, where the file is to be held to it.
        seq_len: Option<usize>,
    },
    Documents {
        source: DocumentSource,
        /// Tokens of a row.
        seq_len: usize,
        packing: Packing,
        seed: u64,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub enum DocumentSource {
    Text {
        files: Vec<PathBuf>,
        tokenizer: TokenizerSource,
    },
    /// A packed-token file.
    Tokens {
        path: PathBuf,
    },
}

pub(super) fn resolve(raw: &raw::Data, model: &ModelSource, vocab: usize) -> Result<DataSource> {
    let path = |means: &str| match &raw.path {
        Some(path) => Ok(path.as_str()),
        None => wrong(format!("data.path is needed: {means}")),
    };
    let source = match raw.kind.as_str() {
        "batches" => {
            only("data.pack", raw.pack.unwrap_or(false), false)?;
            only("data.tokenizer", raw.tokenizer.as_deref(), None)?;
            let path = path("a safetensors file with input_ids and labels")?.into();
            return Ok(DataSource::Batches { path, seq_len: raw.seq_len });
        }
        "text" => {
            let path = path("a .txt or .jsonl file, a folder of them, or a pattern such as data/*.jsonl")?;
            seq_len(raw)?;
            let files = text::files(path).map_err(|error| match error {
                Error::Config(what) => Error::Config(format!("data.path: {what}")),
                other => other,
            })?;
            DocumentSource::Text { files, tokenizer: tokenizer(raw, model, vocab)? }
        }
        "tokens" => {
            only("data.tokenizer", raw.tokenizer.as_deref(), None)?;
            DocumentSource::Tokens { path: path("a file written by `shardloom data tokenize`")?.into() }
        }
        "chat" => {
            return wrong("data.kind = \"chat\" is not supported yet; it is one of: text, tokens, batches");
        }
        other => {
            return wrong(format!("data.kind = \"{other}\" is unknown; it is one of: text, tokens, batches"));
        }
    };
    let packing = if raw.pack.unwrap_or(true) { Packing::Packed } else { Packing::Padded };
    Ok(DataSource::Documents { source, seq_len: seq_len(raw)?, packing, seed: raw.seed.unwrap_or(0) })
}

fn seq_len(raw: &raw::Data) -> Result<usize> {
    match raw.seq_len {
        Some(0) => wrong("data.seq_len must be at least 1"),
        Some(seq_len) => Ok(seq_len),
        None => {
            wrong(format!("data.seq_len, the tokens of a row, is needed for data.kind = \"{}\"", raw.kind))
        }
    }
}

fn tokenizer(raw: &raw::Data, model: &ModelSource, vocab: usize) -> Result<TokenizerSource> {
    let source = match (&raw.tokenizer, model) {
        (Some(name), _) => TokenizerSource::named(name)?,
        (None, ModelSource::Folder(folder)) => TokenizerSource::of_model(folder)?,
        (None, ModelSource::Seed(_)) => TokenizerSource::Bytes,
    };
    if source == TokenizerSource::Bytes {
        Tokenizer::open(&source, "", vocab)?;
    }
    Ok(source)
}
