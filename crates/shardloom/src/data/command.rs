//! `data tokenize` and `data inspect`.

use super::pack::Rows;
use super::tokenizer::{Tokenizer, TokenizerSource};
use super::{Cursor, Data, Reader, text};
use crate::run::{DataSource, DocumentSource, ModelSource, Run};
use crate::{Error, Result};
use std::fmt::Write;
use std::path::Path;

/// Tokenizes files into a packed-token file, and says what went into it.
pub fn tokenize(inputs: &[String], tokenizer: &str, out: &Path) -> Result<String> {
    let tokenizer = match TokenizerSource::named(tokenizer)? {
        TokenizerSource::Bytes => Tokenizer::bytes(true),
        TokenizerSource::Folder(folder) => Tokenizer::json(&folder, None)?,
    };
    let mut files = Vec::new();
    for input in inputs {
        files.extend(text::files(input)?);
    }
    let corpus = text::tokenize(&files, &tokenizer)?;
    if corpus.num_tokens() == 0 {
        return Err(Error::Config("there is nothing to write: all documents are empty".into()));
    }
    corpus.save(out)?;
    let end = match tokenizer.end() {
        Some(end) => format!("each ends with token {end}"),
        None => "without end tokens: config.json names no eos_token_id".into(),
    };
    Ok(format!(
        "{}: {} documents ({end}), {} tokens of {}, from {} files",
        out.display(),
        corpus.num_documents(),
        corpus.num_tokens(),
        tokenizer.name(),
        files.len()
    ))
}

/// What the batch of a step (from 1) looks like.
pub fn inspect(run: &Run, step: u64, num_rows: usize) -> Result<String> {
    let data = Data::open(run)?;
    let stream = data.stream(run)?;
    let steps = stream.steps(run.length, run.global_batch);
    if step > steps {
        return Err(Error::Config(format!("--step {step}: the run has {steps} steps")));
    }
    let before = (step - 1) * run.global_batch as u64;
    let cursor = Cursor::default().advanced(before, stream.rows());
    let rows = Reader::new(stream.clone()).rows(cursor, run.global_batch)?;
    let tokenizer = decoder(run)?;
    let ignored = rows.labels.iter().filter(|label| **label < 0).count();
    let documents = (0..rows.ids.len()).filter(|&at| starts_document(&rows, at, data.seq)).count();
    let mut out = String::new();
    let _ = writeln!(out, "data: {}", stream.summary_of_run(run.length, run.global_batch));
    let _ = writeln!(
        out,
        "step {step}: epoch {}, rows {}–{} of its order, {documents} documents or parts of them, {:.2} % of labels \
         ignored",
        cursor.epoch,
        cursor.row,
        cursor.row + run.global_batch as u64 - 1,
        100.0 * ignored as f64 / rows.labels.len() as f64
    );
    for row in 0..num_rows.min(run.global_batch) {
        let _ = writeln!(out, "row {row}");
        show_row(&mut out, &rows, row * data.seq..(row + 1) * data.seq, tokenizer.as_ref());
    }
    Ok(out)
}

fn starts_document(rows: &Rows, at: usize, seq: usize) -> bool {
    rows.document_start[at] as usize == at % seq
}

/// One line for each document of a row: where it lies, how many labels count, how it begins and ends.
fn show_row(out: &mut String, rows: &Rows, row: std::ops::Range<usize>, tokenizer: Option<&Tokenizer>) {
    let mut first = row.start;
    while first < row.end {
        let start = rows.document_start[first];
        let mut end = first;
        while end < row.end && rows.document_start[end] == start {
            end += 1;
        }
        let counted = rows.labels[first..end].iter().filter(|label| **label >= 0).count();
        // What is padded is no text.
        let last = (first..end).rev().find(|&at| rows.labels[at] >= 0).map_or(first, |at| at + 1);
        let ids: Vec<u32> = rows.ids[first..end.min(last + 1)].iter().map(|id| *id as u32).collect();
        let snippet = match tokenizer {
            Some(tokenizer) => snippet(&tokenizer.decode(&ids)),
            None => snippet(&format!("{ids:?}")),
        };
        let (from, to) = (first - row.start, end - row.start - 1);
        let _ = writeln!(out, "  {from:>6}–{to:<6} {counted:>6} labels  {snippet}");
        first = end;
    }
}

/// The beginning and the end of a text, on one line.
fn snippet(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let part = |chars: &[char]| chars.iter().collect::<String>().escape_debug().to_string();
    match chars.len() {
        0..=72 => part(&chars),
        len => format!("{} … {}", part(&chars[..44]), part(&chars[len - 24..])),
    }
}

/// What turns a run's tokens back into text, where there is such a thing.
fn decoder(run: &Run) -> Result<Option<Tokenizer>> {
    let source = match (&run.data, &run.source) {
        (DataSource::Documents { source: DocumentSource::Text { tokenizer, .. }, .. }, _) => {
            tokenizer.clone()
        }
        (_, ModelSource::Folder(folder)) if folder.join("tokenizer.json").is_file() => {
            TokenizerSource::Folder(folder.clone())
        }
        // A vocabulary just large enough for bytes and their end is one of bytes.
        (DataSource::Documents { .. }, _) if (256..=257).contains(&run.config.vocab) => {
            TokenizerSource::Bytes
        }
        _ => return Ok(None),
    };
    Tokenizer::open(&source, &run.config_text, run.config.vocab).map(Some)
}
