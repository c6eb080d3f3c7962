//! Text as token ids and back. This is the one place that knows which tokenizer a model folder has.

use crate::data::tokenizer::{Tokenizer, TokenizerSource};
use crate::{Error, Result};
use std::path::Path;
use std::sync::Arc;

/// A model folder's way from text to ids.
#[derive(Clone, Debug)]
pub enum Text {
    Bytes(Bytes),
    /// A tokenizer.json, with the id an empty text begins with.
    Tokens(Arc<Tokenizer>, Option<i32>),
}

/// No tokenizer: a token is a byte. The first id beyond the bytes, where the vocabulary has one, ends a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    vocab: usize,
    bos: Option<i32>,
}

/// The id after the last byte's.
const AFTER_BYTES: i32 = 256;

impl Text {
    /// Looks into a Hugging Face folder. `bos` is the id its configuration names, if any.
    pub fn open(dir: &Path, vocab: usize, bos: Option<i32>) -> Result<Text> {
        if let TokenizerSource::Folder(folder) = TokenizerSource::of_model(dir)? {
            let bos = bos.filter(|&id| id >= 0 && (id as usize) < vocab);
            return Ok(Text::Tokens(Arc::new(Tokenizer::json(&folder, None)?), bos));
        }
        if vocab < AFTER_BYTES as usize {
            let what = format!("no tokenizer.json, and a vocabulary of {vocab} is too small for raw bytes");
            return Err(Error::file(dir, what));
        }
        // An id below 256 is a byte, whatever a configuration written for a tokenizer calls it.
        let bos = bos.filter(|&id| id >= AFTER_BYTES && (id as usize) < vocab);
        Ok(Text::Bytes(Bytes { vocab, bos }))
    }

    pub fn encode(&self, text: &str) -> Result<Vec<i32>> {
        match self {
            Text::Bytes(_) => Ok(text.bytes().map(i32::from).collect()),
            Text::Tokens(tokenizer, _) => {
                Ok(tokenizer.encode_prompt(text)?.into_iter().map(|id| id as i32).collect())
            }
        }
    }

    /// What an empty text begins with.
    pub fn bos(&self) -> Option<i32> {
        match self {
            Text::Bytes(bytes) => bytes.bos,
            Text::Tokens(_, bos) => *bos,
        }
    }

    /// Whether a text ends with this token.
    pub fn ends(&self, id: i32) -> bool {
        match self {
            Text::Bytes(bytes) => id == AFTER_BYTES && bytes.vocab > AFTER_BYTES as usize,
            Text::Tokens(tokenizer, _) => tokenizer.end().is_some_and(|end| end as i32 == id),
        }
    }

    /// Begins to turn ids into text, one at a time.
    pub fn stream(&self) -> TextStream {
        match self {
            Text::Bytes(_) => TextStream::Bytes(ByteStream { pending: vec![] }),
            Text::Tokens(tokenizer, _) => {
                TextStream::Tokens(TokenStream { tokenizer: tokenizer.clone(), ids: vec![], said: 0 })
            }
        }
    }
}

/// Text as its tokens arrive. A character comes out once it is whole; bytes that are none come out as U+FFFD.
#[derive(Debug)]
pub enum TextStream {
    Bytes(ByteStream),
    Tokens(TokenStream),
}

impl TextStream {
    /// What can be said for sure after one more token.
    pub fn push(&mut self, id: i32) -> String {
        match self {
            TextStream::Bytes(stream) => stream.push(id),
            TextStream::Tokens(stream) => stream.push(id as u32),
        }
    }

    /// The rest, when no more tokens come.
    pub fn finish(self) -> String {
        match self {
            TextStream::Bytes(stream) => stream.finish(),
            TextStream::Tokens(stream) => stream.finish(),
        }
    }
}

/// Tokens of a tokenizer. How a token reads may depend on the one before it, so the ones said last are decoded
/// again together with the new ones, and what is longer than before is new.
#[derive(Debug)]
pub struct TokenStream {
    tokenizer: Arc<Tokenizer>,
    /// The tokens said last, then those not said yet.
    ids: Vec<u32>,
    /// How many of `ids` have been said.
    said: usize,
}

impl TokenStream {
    fn push(&mut self, id: u32) -> String {
        self.ids.push(id);
        let new = self.unsaid();
        // A character that is not whole shows as a replacement: wait for the rest of it.
        if new.is_empty() || new.ends_with(char::REPLACEMENT_CHARACTER) {
            return String::new();
        }
        self.ids.drain(..self.said);
        self.said = self.ids.len();
        new
    }

    fn unsaid(&self) -> String {
        let before = self.tokenizer.decode(&self.ids[..self.said]);
        let all = self.tokenizer.decode(&self.ids);
        all.get(before.len()..).unwrap_or_default().to_string()
    }

    fn finish(self) -> String {
        self.unsaid()
    }
}

/// Raw bytes.
#[derive(Debug)]
pub struct ByteStream {
    /// The beginning of a character.
    pending: Vec<u8>,
}

impl ByteStream {
    fn push(&mut self, id: i32) -> String {
        // 0xff occurs in no UTF-8 text: a token that is not a byte shows as such.
        self.pending.push(u8::try_from(id).unwrap_or(0xff));
        let mut text = String::new();
        loop {
            let (valid, broken) = match std::str::from_utf8(&self.pending) {
                Ok(valid) => (valid, None),
                Err(e) => {
                    let valid = str::from_utf8(&self.pending[..e.valid_up_to()]).unwrap_or_default();
                    (valid, e.error_len())
                }
            };
            text.push_str(valid);
            let spent = valid.len() + broken.unwrap_or(0);
            self.pending.drain(..spent);
            if broken.is_none() {
                return text;
            }
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }

    fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(bytes: &[u8]) -> Vec<String> {
        let mut stream = Text::Bytes(Bytes { vocab: 257, bos: None }).stream();
        let mut pieces: Vec<String> = bytes.iter().map(|byte| stream.push(i32::from(*byte))).collect();
        pieces.push(stream.finish());
        pieces
    }

    #[test]
    fn characters_come_out_whole() {
        assert_eq!(pieces("aé€😀".as_bytes()), ["a", "", "é", "", "", "€", "", "", "", "😀", ""]);
        assert_eq!(pieces(b"\xffb"), ["\u{fffd}", "b", ""]);
        assert_eq!(pieces(b"\xe2\x82a"), ["", "", "\u{fffd}a", ""]);
        assert_eq!(pieces(b"\xe2\x82"), ["", "", "\u{fffd}"]);
        assert_eq!(pieces(b"\xe2\xe2\x82\xac"), ["", "\u{fffd}", "", "€", ""]);
    }

    #[test]
    fn tokens_read_as_one_text() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer");
        let text = Text::open(&dir, 100_000, None).unwrap();
        for said in ["the cat sat", "  two  spaces", "é€😀 and more", ""] {
            let ids = text.encode(said).unwrap();
            let mut stream = text.stream();
            let mut pieces: String = ids.iter().map(|id| stream.push(*id)).collect();
            pieces += &stream.finish();
            let whole: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
            let Text::Tokens(tokenizer, _) = &text else { panic!("a tokenizer.json is there") };
            assert_eq!(pieces, tokenizer.decode(&whole));
        }
    }

    #[test]
    fn however_bytes_arrive_the_text_is_what_they_mean() {
        let mut seed = 3u64;
        for _ in 0..200 {
            let bytes: Vec<u8> = (0..20)
                .map(|_| {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    // Mostly the bytes of which longer characters are made.
                    [0x41, 0xc3, 0xa9, 0xe2, 0x82, 0xac, 0xf0, 0x9f, 0x98, 0x80][(seed >> 33) as usize % 10]
                })
                .collect();
            assert_eq!(pieces(&bytes).concat(), String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn what_lies_beyond_the_bytes_ends_or_begins() {
        let dir = Path::new("/nowhere");
        let text = Text::open(dir, 515, Some(1)).unwrap();
        assert_eq!((text.bos(), text.ends(256), text.ends(2)), (None, true, false));
        assert_eq!(Text::open(dir, 515, Some(300)).unwrap().bos(), Some(300));
        assert!(!Text::open(dir, 256, None).unwrap().ends(256));
        assert!(Text::open(dir, 100, None).unwrap_err().to_string().contains("too small"));
        assert_eq!(text.encode("hé").unwrap(), [104, 195, 169]);
        assert_eq!(text.stream().push(400), "\u{fffd}");
    }
}
