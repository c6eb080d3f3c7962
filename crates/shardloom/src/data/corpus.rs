//! Documents as tokens: in memory, or in a packed-token file.
//!
//! A packed-token file is a safetensors file with `tokens` (U32), all documents one after the other, each with
//! its end token where the tokenizer has one; `documents` (U64), where each document starts in `tokens`, and at
//! last their number of tokens in all; and `largest` (U32, one number), the largest id.

use crate::{Error, Result};
use checkpoint::Dtype;
use checkpoint::safetensors::{File, Layout, Writer};
use std::path::Path;

#[derive(Debug)]
pub struct Corpus {
    tokens: Tokens,
    /// Where each document starts, and at last the number of all tokens. Strictly increasing.
    offsets: Vec<u64>,
    largest: u32,
}

#[derive(Debug)]
enum Tokens {
    Memory(Vec<u32>),
    /// Read by position, as needed.
    File(File),
}

impl Default for Corpus {
    fn default() -> Self {
        Corpus { tokens: Tokens::Memory(vec![]), offsets: vec![0], largest: 0 }
    }
}

impl Corpus {
    /// Adds a document to a corpus in memory; one without tokens is none.
    pub fn push(&mut self, document: &[u32]) {
        let Tokens::Memory(tokens) = &mut self.tokens else { unreachable!("files are not added to") };
        if let Some(largest) = document.iter().max() {
            tokens.extend(document);
            self.offsets.push(tokens.len() as u64);
            self.largest = self.largest.max(*largest);
        }
    }

    /// Opens a packed-token file and checks its offsets.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path)?;
        let hint = "packed-token files are written by `shardloom data tokenize`";
        for (name, dtype) in [("tokens", Dtype::U32), ("documents", Dtype::U64), ("largest", Dtype::U32)] {
            let info = file.info(name).map_err(|e| Error::file(path, format!("{e}; {hint}")))?;
            if info.dtype != dtype || info.shape.len() != 1 {
                let what = format!("{name} is {} {:?}, expected a list of {dtype}", info.dtype, info.shape);
                return Err(Error::file(path, format!("{what}; {hint}")));
            }
        }
        let total = file.info("tokens")?.num_elements();
        let bytes = file.read("documents")?;
        let offsets: Vec<u64> = bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        if offsets.first() != Some(&0)
            || offsets.last() != Some(&total)
            || !offsets.is_sorted_by(|a, b| a < b)
        {
            let what = format!("documents does not rise from 0 to the {total} tokens; {hint}");
            return Err(Error::file(path, what));
        }
        let largest = match file.read("largest")?.as_chunks().0 {
            [bytes] => u32::from_le_bytes(*bytes),
            other => {
                return Err(Error::file(
                    path,
                    format!("largest has {} numbers, not one; {hint}", other.len()),
                ));
            }
        };
        Ok(Corpus { tokens: Tokens::File(file), offsets, largest })
    }

    /// Writes a corpus in memory as a packed-token file.
    pub fn save(&self, path: &Path) -> Result<()> {
        let Tokens::Memory(tokens) = &self.tokens else { unreachable!("files are not written again") };
        let shapes = [[tokens.len()], [self.offsets.len()], [1]];
        let layout = Layout::new(
            path,
            [
                // Eight bytes each first, so that everything lies aligned.
                ("documents", Dtype::U64, shapes[1].as_slice()),
                ("tokens", Dtype::U32, shapes[0].as_slice()),
                ("largest", Dtype::U32, shapes[2].as_slice()),
            ],
        )?;
        let writer = Writer::create(path, layout)?;
        for (part, chunk) in tokens.chunks(1 << 20).enumerate() {
            let bytes: Vec<u8> = chunk.iter().flat_map(|token| token.to_le_bytes()).collect();
            writer.write_range("tokens", (part as u64) << 22, &bytes)?;
        }
        let offsets: Vec<u8> = self.offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
        writer.write_range("documents", 0, &offsets)?;
        writer.write_range("largest", 0, &self.largest.to_le_bytes())?;
        Ok(writer.finish()?)
    }

    pub fn num_documents(&self) -> u64 {
        self.offsets.len() as u64 - 1
    }

    pub fn num_tokens(&self) -> u64 {
        self.offsets.last().copied().unwrap_or(0)
    }

    /// The largest token id.
    pub fn largest(&self) -> u32 {
        self.largest
    }

    /// Start and end of a document.
    pub fn document(&self, index: u64) -> (u64, u64) {
        let index = index as usize;
        (self.offsets[index], self.offsets[index + 1])
    }

    /// Adds the tokens of a range to `out`.
    pub fn read(&self, start: u64, len: usize, out: &mut Vec<i32>) -> Result<()> {
        match &self.tokens {
            Tokens::Memory(tokens) => {
                let tokens = &tokens[start as usize..start as usize + len];
                out.extend(tokens.iter().map(|token| *token as i32));
            }
            Tokens::File(file) => {
                let mut bytes = vec![0; len * 4];
                file.read_range("tokens", start * 4, &mut bytes)?;
                out.extend(bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_token_file_gives_back_what_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens.safetensors");
        let mut corpus = Corpus::default();
        for document in [&[1u32, 2, 3][..], &[], &[400_000], &[5, 6]] {
            corpus.push(document);
        }
        corpus.save(&path).unwrap();
        let read = Corpus::open(&path).unwrap();
        assert_eq!((read.num_documents(), read.num_tokens(), read.largest()), (3, 6, 400_000));
        assert_eq!(read.document(1), (3, 4));
        for corpus in [&corpus, &read] {
            let mut out = vec![];
            corpus.read(2, 3, &mut out).unwrap();
            assert_eq!(out, [3, 400_000, 5]);
        }
    }

    #[test]
    fn files_that_are_no_packed_tokens_say_what_is_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let write = |offsets: &[u64]| {
            let shapes = [[4], [offsets.len()], [1]];
            let layout = Layout::new(
                &path,
                [
                    ("tokens", Dtype::U32, &shapes[0][..]),
                    ("documents", Dtype::U64, &shapes[1][..]),
                    ("largest", Dtype::U32, &shapes[2][..]),
                ],
            );
            let writer = Writer::create(&path, layout.unwrap()).unwrap();
            let bytes: Vec<u8> = offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
            writer.write_range("documents", 0, &bytes).unwrap();
            writer.finish().unwrap();
        };
        for offsets in [&[0u64, 5][..], &[1, 4], &[0, 3, 2, 4], &[0, 2, 2, 4], &[]] {
            write(offsets);
            let error = Corpus::open(&path).unwrap_err().to_string();
            assert!(error.contains("rise from 0"), "{offsets:?}: {error}");
        }
        std::fs::write(&path, "{}").unwrap();
        assert!(Corpus::open(&path).unwrap_err().to_string().contains("not a safetensors file"));
    }
}
