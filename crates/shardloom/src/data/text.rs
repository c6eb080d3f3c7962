//! Documents in files: a .txt is one, every line of a .jsonl is one.

use super::corpus::Corpus;
use super::tokenizer::Tokenizer;
use crate::{Error, Result};
use serde::Deserialize;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

/// Bytes of text tokenized at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// The files that a file name, a folder or a pattern means, in the order of their names.
pub fn files(path: &str) -> Result<Vec<PathBuf>> {
    let wrong = |what: String| Err(Error::Config(format!("{path}: {what}")));
    let plain = Path::new(path);
    if plain.is_file() {
        return checked(vec![plain.to_path_buf()]);
    }
    if plain.is_dir() {
        let entries = std::fs::read_dir(plain).map_err(|e| Error::file(plain, e))?;
        let entries = entries.collect::<std::io::Result<Vec<_>>>().map_err(|e| Error::file(plain, e))?;
        let mut found: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
        found.retain(|file| form(file).is_some() && file.is_file());
        if found.is_empty() {
            return wrong("the folder has no .txt or .jsonl file".into());
        }
        found.sort();
        return Ok(found);
    }
    if !path.contains(['*', '?', '[']) {
        return wrong("there is no such file or folder".into());
    }
    let matches = match glob::glob(path) {
        Ok(matches) => matches,
        Err(error) => return wrong(format!("not a pattern: {error}")),
    };
    let mut found = Vec::new();
    for file in matches {
        found.push(file.map_err(|e| Error::file(e.path(), e.error()))?);
    }
    found.retain(|file| file.is_file());
    if found.is_empty() {
        return wrong("no file matches".into());
    }
    found.sort();
    checked(found)
}

#[derive(Clone, Copy, Debug)]
enum Form {
    Text,
    Lines,
}

fn form(file: &Path) -> Option<Form> {
    match file.extension()?.to_str()? {
        "txt" => Some(Form::Text),
        "jsonl" => Some(Form::Lines),
        _ => None,
    }
}

fn checked(files: Vec<PathBuf>) -> Result<Vec<PathBuf>> {
    match files.iter().find(|file| form(file).is_none()) {
        None => Ok(files),
        Some(other) => Err(Error::file(
            other,
            "neither .txt (one document) nor .jsonl (an object with a \"text\" on each line)",
        )),
    }
}

/// All documents of the files as tokens.
pub fn tokenize(files: &[PathBuf], tokenizer: &Tokenizer) -> Result<Corpus> {
    let mut corpus = Corpus::default();
    let (mut waiting, mut bytes) = (Vec::new(), 0);
    let mut flush = |texts: &mut Vec<String>| -> Result<()> {
        for document in tokenizer.encode(std::mem::take(texts))? {
            corpus.push(&document);
        }
        Ok(())
    };
    for file in files {
        each_document(file, |text| {
            bytes += text.len();
            waiting.push(text);
            if bytes < CHUNK_BYTES {
                return Ok(());
            }
            bytes = 0;
            flush(&mut waiting)
        })?;
    }
    flush(&mut waiting)?;
    Ok(corpus)
}

fn each_document(path: &Path, mut body: impl FnMut(String) -> Result<()>) -> Result<()> {
    match form(path) {
        Some(Form::Lines) => each_line(path, body),
        _ => {
            let bytes = std::fs::read(path).map_err(|e| Error::file(path, e))?;
            let text = String::from_utf8(bytes).map_err(|e| {
                let at = e.utf8_error().valid_up_to();
                let line = 1 + e.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count();
                Error::file(path, format!("line {line}: not UTF-8; convert the file to UTF-8"))
            })?;
            body(text)
        }
    }
}

#[derive(Deserialize)]
struct Line {
    text: String,
}

fn each_line(path: &Path, mut body: impl FnMut(String) -> Result<()>) -> Result<()> {
    let file = std::fs::File::open(path).map_err(|e| Error::file(path, e))?;
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        if reader.read_until(b'\n', &mut line).map_err(|e| Error::file(path, e))? == 0 {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let parsed: Line = serde_json::from_slice(&line).map_err(|e| {
            let (what, column) = (e.to_string(), e.column());
            let what = what.split(" at line ").next().unwrap_or_default();
            let expected = "each line is an object with a string \"text\"";
            Error::file(path, format!("line {number}, column {column}: {what}; {expected}"))
        })?;
        body(parsed.text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        dir
    }

    fn names(path: &Path) -> Vec<String> {
        let files = files(path.to_str().unwrap()).unwrap();
        files.iter().map(|file| file.file_name().unwrap().to_str().unwrap().to_string()).collect()
    }

    #[test]
    fn a_file_a_folder_and_a_pattern_name_files_in_order() {
        let dir = folder(&[("b.txt", b""), ("a.jsonl", b""), ("a.txt", b""), ("notes.md", b"")]);
        assert_eq!(names(dir.path()), ["a.jsonl", "a.txt", "b.txt"]);
        assert_eq!(names(&dir.path().join("*.txt")), ["a.txt", "b.txt"]);
        assert_eq!(names(&dir.path().join("b.txt")), ["b.txt"]);
        for (name, named) in [
            ("*.parquet", "no file matches"),
            ("x", "no such file"),
            ("notes.md", ".jsonl"),
            ("*", "notes.md"),
        ] {
            let error = files(dir.path().join(name).to_str().unwrap()).unwrap_err();
            assert!(error.to_string().contains(named) && error.exit_status() == 2, "{name}: {error}");
        }
        let empty = files(folder(&[]).path().to_str().unwrap()).unwrap_err().to_string();
        assert!(empty.contains("no .txt"), "{empty}");
    }

    #[test]
    fn documents_are_files_and_lines() {
        let dir = folder(&[
            ("a.txt", b"ab\n"),
            ("b.jsonl", b"{\"text\": \"c\", \"id\": 1}\n\n{\"text\": \"\"}\n{\"text\": \"de\"}"),
        ]);
        let files = files(dir.path().to_str().unwrap()).unwrap();
        let corpus = tokenize(&files, &Tokenizer::bytes(true)).unwrap();
        assert_eq!(corpus.num_documents(), 3);
        let mut ids = vec![];
        corpus.read(0, corpus.num_tokens() as usize, &mut ids).unwrap();
        assert_eq!(ids, [97, 98, 10, 256, 99, 256, 100, 101, 256]);
    }

    #[test]
    fn bad_lines_are_named() {
        for (name, content, named) in [
            ("x.jsonl", &b"{\"text\": \"a\"}\n{\"text\": \n"[..], "line 2"),
            ("x.jsonl", b"\n\n{\"content\": \"a\"}\n", "line 3, column 16: missing field `text`"),
            ("x.jsonl", b"{\"text\": 7}\n", "line 1"),
            ("x.jsonl", b"{\"text\": \"\xff\"}\n", "line 1"),
            ("x.txt", b"fine\n\xff", "line 2: not UTF-8"),
        ] {
            let dir = folder(&[(name, content)]);
            let error = tokenize(&[dir.path().join(name)], &Tokenizer::bytes(true)).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(named) && text.contains(name) && error.exit_status() == 2, "{text}");
        }
    }
}
