//! `generate`: text from a trained model.

mod sample;
mod text;

pub use sample::Sampling;
pub use text::{Text, TextStream};

use crate::run::DeviceChoice;
use crate::source::Folder;
use crate::{Error, Result, ranks};
use device::{Dtype, Profile};
use fsdp::{DecodePlan, Decoder, Decoding};
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use tensor::models::Config;

/// Tokens of a prompt taken in one pass at most.
const CHUNK: usize = 512;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Generate {
    /// A Hugging Face folder.
    pub model: PathBuf,
    pub prompt: String,
    /// New tokens at most.
    pub max_tokens: usize,
    pub sampling: Sampling,
    pub device: DeviceChoice,
    /// None: f32 on the CPU, bf16 on a GPU.
    pub dtype: Option<Dtype>,
}

/// What it came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Generated {
    pub prompt_tokens: usize,
    pub new_tokens: usize,
    /// Of the prompt's pass, and of all that came after it.
    pub prompt_s: f64,
    pub new_s: f64,
}

/// Writes the prompt's continuation to `out` as it comes, character by character.
pub fn generate(args: &Generate, out: &mut dyn Write) -> Result<Generated> {
    let (mut session, prompt) = Session::open(args)?;
    let loaded = Instant::now();
    let mut logits = session.decoder.feed(&prompt)?;
    let mut stream = session.text.stream();
    let prompted = Instant::now();
    let mut new_tokens = 0;
    while new_tokens < session.max_tokens {
        let position = (prompt.len() + new_tokens) as u64;
        let broken = || Error::NotNumbers { model: args.model.clone(), position };
        let id = args.sampling.choose(&logits, position).ok_or_else(broken)?;
        if session.text.ends(id) {
            break;
        }
        new_tokens += 1;
        if !say(out, &stream.push(id))? {
            break;
        }
        if new_tokens < session.max_tokens {
            logits = session.decoder.feed(&[id])?;
        }
    }
    say(out, &(stream.finish() + "\n"))?;
    Ok(Generated {
        prompt_tokens: prompt.len(),
        new_tokens,
        prompt_s: (prompted - loaded).as_secs_f64(),
        new_s: prompted.elapsed().as_secs_f64(),
    })
}

/// A model that is ready for its prompt.
struct Session {
    text: Text,
    decoder: Decoder,
    /// As asked for, or as many as the model has positions for.
    max_tokens: usize,
}

impl Session {
    fn open(args: &Generate) -> Result<(Self, Vec<i32>)> {
        let dir = &args.model;
        check(args)?;
        let path = dir.join("config.json");
        let config_text = std::fs::read_to_string(&path).map_err(|e| Error::file(&path, e))?;
        let config = Config::parse(&config_text)?;
        let told: Value = serde_json::from_str(&config_text).map_err(|e| Error::file(&path, e))?;
        let bos = told["bos_token_id"].as_i64().and_then(|id| i32::try_from(id).ok());
        let max_positions = told["max_position_embeddings"].as_u64().map_or(usize::MAX, |max| max as usize);
        let text = Text::open(dir, config.vocab, bos)?;
        let prompt = encode(&text, &args.prompt)?;
        // The last new token is never fed.
        let Some(room) = max_positions.checked_sub(prompt.len()).map(|left| left.saturating_add(1)) else {
            return Err(Error::Config(format!(
                "the prompt has {} tokens; the model has {max_positions} positions (max_position_embeddings)",
                prompt.len()
            )));
        };
        let max_tokens = args.max_tokens.min(room);
        let max_len = prompt.len() + max_tokens.saturating_sub(1);
        let decoder = decoder(args, dir, &config, prompt.len(), max_len)?;
        Ok((Session { text, decoder, max_tokens }, prompt))
    }
}

fn decoder(
    args: &Generate,
    dir: &Path,
    config: &Config,
    prompt_len: usize,
    max_len: usize,
) -> Result<Decoder> {
    let model = Arc::new(tensor::models::build(config, max_len)?);
    let source = Folder::open(dir, &model)?;
    let device = ranks::open_device(args.device)?;
    let natural = if device.profile() == Profile::Cpu { Dtype::F32 } else { Dtype::Bf16 };
    let decoding = Decoding {
        rows: 1,
        max_len,
        chunk: prompt_len.min(CHUNK),
        vocab: config.vocab,
        compute: args.dtype.unwrap_or(natural),
    };
    let plan = DecodePlan::new(&model, decoding, device.profile())?;
    Ok(Decoder::new(device, plan, model, &source)?)
}

fn check(args: &Generate) -> Result<()> {
    let Sampling { temperature, top_p, .. } = args.sampling;
    if !(temperature >= 0.0 && temperature.is_finite()) {
        return Err(Error::Config(format!("--temperature {temperature}: it is 0 or more")));
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return Err(Error::Config(format!("--top-p {top_p}: it is above 0 and at most 1")));
    }
    if args.max_tokens == 0 {
        return Err(Error::Config("--max-tokens 0: there is nothing to generate".into()));
    }
    Ok(())
}

fn encode(text: &Text, prompt: &str) -> Result<Vec<i32>> {
    let mut ids = text.encode(prompt)?;
    if ids.is_empty() {
        ids.extend(text.bos());
    }
    if ids.is_empty() {
        let what = "the prompt is empty, and this model has no token to begin a text with; give a prompt";
        return Err(Error::Config(what.into()));
    }
    Ok(ids)
}

/// Writes text at once. False: the reader has gone, which is no failure.
fn say(out: &mut dyn Write, text: &str) -> Result<bool> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(Error::file("standard output", e)),
    }
}
