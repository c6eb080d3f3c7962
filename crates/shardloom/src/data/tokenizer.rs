//! Text to tokens and back: a Hugging Face tokenizer.json, or raw bytes.

use crate::{Error, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Where a tokenizer comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSource {
    /// Each byte is a token.
    Bytes,
    /// A folder with a tokenizer.json.
    Folder(PathBuf),
}

impl TokenizerSource {
    /// `bytes`, a folder, or a tokenizer.json.
    pub fn named(name: &str) -> Result<Self> {
        if name == "bytes" {
            return Ok(TokenizerSource::Bytes);
        }
        let path = Path::new(name);
        let folder = match path.file_name() {
            Some(file) if file == "tokenizer.json" => path.parent().unwrap_or(Path::new("")),
            _ => path,
        };
        if !folder.join("tokenizer.json").is_file() {
            let what = "there is no tokenizer.json; give a folder that has one, or \"bytes\"";
            return Err(Error::file(path, what));
        }
        Ok(TokenizerSource::Folder(folder.to_path_buf()))
    }

    /// A model folder's own, raw bytes where it has none.
    pub fn of_model(folder: &Path) -> Result<Self> {
        if folder.join("tokenizer.json").is_file() {
            return Ok(TokenizerSource::Folder(folder.to_path_buf()));
        }
        // Bytes would be a silent surprise where the model was trained with a tokenizer.
        for other in ["tokenizer.model", "vocab.json", "tokenizer_config.json"] {
            if folder.join(other).is_file() {
                let what = format!(
                    "it has {other} but no tokenizer.json, the one form read here; convert it (transformers' \
                     save_pretrained of a fast tokenizer writes one), or set data.tokenizer"
                );
                return Err(Error::file(folder, what));
            }
        }
        Ok(TokenizerSource::Bytes)
    }
}

#[derive(Debug)]
pub struct Tokenizer {
    kind: Kind,
    /// What a document ends with.
    end: Option<u32>,
}

#[derive(Debug)]
enum Kind {
    Bytes,
    Json { tokenizer: Box<tokenizers::Tokenizer>, path: PathBuf },
}

/// The id that ends a document of raw bytes, where the vocabulary has room for it.
const BYTES_END: u32 = 256;

impl Tokenizer {
    /// For a model with such a config.json and vocabulary.
    pub fn open(source: &TokenizerSource, config_text: &str, vocab: usize) -> Result<Self> {
        let folder = match source {
            TokenizerSource::Folder(folder) => folder,
            TokenizerSource::Bytes if vocab < 256 => {
                return Err(Error::Config(format!(
                    "without a tokenizer text is raw bytes, which need a vocab_size of 256 (257 with an end of \
                     document); the model's is {vocab}. Set data.tokenizer, or make the vocabulary larger"
                )));
            }
            TokenizerSource::Bytes => return Ok(Self::bytes(vocab > BYTES_END as usize)),
        };
        Self::json(folder, Some(config_text))
    }

    pub fn bytes(has_end: bool) -> Self {
        Tokenizer { kind: Kind::Bytes, end: has_end.then_some(BYTES_END) }
    }

    /// A folder's tokenizer.json. Documents end with config.json's `eos_token_id` (the folder's, where no text
    /// is given), else with tokenizer_config.json's `eos_token`.
    pub fn json(folder: &Path, config_text: Option<&str>) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let mut tokenizer = tokenizers::Tokenizer::from_file(&path)
            .map_err(|e| Error::file(&path, format!("not a tokenizer: {e}")))?;
        // Some files carry the limits of the run they were made in.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| Error::file(&path, e))?;
        let own = std::fs::read_to_string(folder.join("config.json")).ok();
        let end = match config_text.or(own.as_deref()).map_or(Ok(None), end_of_config)? {
            Some(end) => Some(end),
            None => end_of_tokenizer_config(folder, &tokenizer),
        };
        Ok(Tokenizer { kind: Kind::Json { tokenizer: Box::new(tokenizer), path }, end })
    }

    pub fn end(&self) -> Option<u32> {
        self.end
    }

    pub fn name(&self) -> String {
        match &self.kind {
            Kind::Bytes => "bytes".into(),
            Kind::Json { path, .. } => path.display().to_string(),
        }
    }

    /// The tokens of each text with whatever the tokenizer itself puts around them (a beginning), and the end of
    /// a document. A text without tokens stays empty.
    pub fn encode(&self, texts: Vec<String>) -> Result<Vec<Vec<u32>>> {
        let mut documents: Vec<Vec<u32>> = match &self.kind {
            Kind::Bytes => texts.iter().map(|text| text.bytes().map(u32::from).collect()).collect(),
            Kind::Json { tokenizer, path } => {
                let full: Vec<bool> = texts.iter().map(|text| !text.is_empty()).collect();
                let encodings = tokenizer.encode_batch_fast(texts, true).map_err(|e| Error::file(path, e))?;
                let ids = encodings.iter().zip(full);
                ids.map(|(e, full)| if full { e.get_ids().to_vec() } else { vec![] }).collect()
            }
        };
        if let Some(end) = self.end {
            for document in documents.iter_mut().filter(|d| d.last().is_some_and(|last| *last != end)) {
                document.push(end);
            }
        }
        Ok(documents)
    }

    /// The tokens of a text that is to go on: as [`Tokenizer::encode`], without the end.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::Json { tokenizer, path } => {
                let encoding = tokenizer.encode_fast(text, true).map_err(|e| Error::file(path, e))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Text for people; what is no text becomes a replacement character.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Kind::Json { tokenizer, .. } => tokenizer.decode(ids, false).unwrap_or_default(),
        }
    }
}

/// `eos_token_id`: a number, a list of which the first counts, or nothing.
fn end_of_config(text: &str) -> Result<Option<u32>> {
    let config: Value = serde_json::from_str(text).map_err(|e| Error::Config(format!("config.json: {e}")))?;
    let value = match &config["eos_token_id"] {
        Value::Array(list) => list.first().unwrap_or(&Value::Null),
        value => value,
    };
    if value.is_null() {
        return Ok(None);
    }
    let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
    id.map(Some).ok_or_else(|| Error::Config(format!("config.json: eos_token_id = {value} is no token id")))
}

fn end_of_tokenizer_config(folder: &Path, tokenizer: &tokenizers::Tokenizer) -> Option<u32> {
    let text = std::fs::read_to_string(folder.join("tokenizer_config.json")).ok()?;
    let config: Value = serde_json::from_str(&text).ok()?;
    let token = config["eos_token"].as_str().or_else(|| config["eos_token"]["content"].as_str())?;
    tokenizer.token_to_id(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer")
    }

    fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        tokenizer.encode(vec![text.into()]).unwrap().remove(0)
    }

    #[test]
    fn bytes_are_their_own_tokens() {
        let tokenizer = Tokenizer::bytes(true);
        assert_eq!(encode(&tokenizer, "aé"), [97, 195, 169, 256]);
        assert_eq!(encode(&tokenizer, ""), [0u32; 0]);
        assert_eq!(tokenizer.decode(&[97, 195, 169, 256]), "aé");
        assert_eq!(encode(&Tokenizer::bytes(false), "ab"), [97, 98]);
    }

    #[test]
    fn a_tokenizer_json_merges_and_ends_documents() {
        let tokenizer = Tokenizer::json(&fixture(), None).unwrap();
        assert_eq!(tokenizer.end(), Some(0));
        // The merges make "th" (9), "the" (10) and "Ġthe" (12); "<end>" (0) comes from config.json.
        assert_eq!(encode(&tokenizer, "the"), [10, 0]);
        assert_eq!(encode(&tokenizer, "the the hat"), [10, 12, 8, 3, 4, 2, 0]);
        assert_eq!(encode(&tokenizer, ""), [0u32; 0]);
        assert_eq!(tokenizer.decode(&[10, 12]), "the the");
    }

    #[test]
    fn the_end_comes_from_the_config_and_may_be_a_list() {
        for (config, end) in [
            (r#"{"eos_token_id": 7}"#, Some(7)),
            (r#"{"eos_token_id": [5, 6]}"#, Some(5)),
            (r#"{"eos_token_id": null}"#, Some(0)),
            (r#"{"eos_token_id": []}"#, Some(0)),
        ] {
            // Without one in the config, tokenizer_config.json's "<end>" serves, which is 0.
            assert_eq!(Tokenizer::json(&fixture(), Some(config)).unwrap().end(), end, "{config}");
        }
        let error = Tokenizer::json(&fixture(), Some(r#"{"eos_token_id": "x"}"#)).unwrap_err();
        assert!(error.to_string().contains("eos_token_id"), "{error}");
    }

    #[test]
    fn bad_tokenizers_say_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(TokenizerSource::of_model(dir.path()).unwrap(), TokenizerSource::Bytes);
        let missing = TokenizerSource::named(dir.path().to_str().unwrap()).unwrap_err().to_string();
        assert!(missing.contains("no tokenizer.json"), "{missing}");
        std::fs::write(dir.path().join("tokenizer.model"), "x").unwrap();
        let other = TokenizerSource::of_model(dir.path()).unwrap_err().to_string();
        assert!(other.contains("tokenizer.model") && other.contains("convert"), "{other}");
        std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        let broken = Tokenizer::json(dir.path(), None).unwrap_err().to_string();
        assert!(broken.contains("not a tokenizer"), "{broken}");
        let small = Tokenizer::open(&TokenizerSource::Bytes, "{}", 96).unwrap_err();
        assert!(small.to_string().contains("256") && small.exit_status() == 2, "{small}");
    }
}
