//! Reading a checkpoint by ranges, and proving that what was read is what was written.

use crate::manifest::{Entry, Manifest, Piece, check_pieces};
use crate::receipt::{self, Receipt, Stretch};
use crate::safetensors::{File, TensorInfo};
use crate::{Error, Result, State};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Bytes are read and summed in blocks of this size, so that they are still in the cache for the second.
const BLOCK: usize = 1 << 20;

/// An open checkpoint: its manifest is sound, all its files are there in their sizes, and every tensor is covered.
/// Whether the bytes are those that were written, only reading them shows: see [`Reader::prove`].
#[derive(Debug)]
pub struct Reader {
    dir: PathBuf,
    manifest: Manifest,
    files: Vec<File>,
    /// Sorted by name; a tensor's number is its place here.
    tensors: BTreeMap<String, Tensor>,
    read: Mutex<Vec<Stretch>>,
}

#[derive(Debug)]
struct Tensor {
    number: u32,
    file: usize,
    pieces: Vec<Piece>,
}

impl Reader {
    /// Reads the manifest and headers.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let manifest = Manifest::open(dir)?;
        let (mut files, mut tensors) = (Vec::new(), BTreeMap::new());
        for (name, entry) in &manifest.files {
            let path = dir.join(name);
            check_size(&path, entry)?;
            if !name.ends_with(".safetensors") {
                continue;
            }
            let file = open_file(&path, entry)?;
            for (tensor, pieces) in &entry.tensors {
                let tensor_of = Tensor { number: 0, file: files.len(), pieces: pieces.clone() };
                if tensors.insert(tensor.clone(), tensor_of).is_some() {
                    return Err(Error::entry(&path, tensor, "another file of the checkpoint has it too"));
                }
            }
            files.push(file);
        }
        for (number, tensor) in tensors.values_mut().enumerate() {
            tensor.number = number as u32;
        }
        Ok(Reader { dir: dir.to_path_buf(), manifest, files, tensors, read: Mutex::default() })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Names and entries of all tensors, sorted by name, each with its file.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &TensorInfo, &File)> {
        self.tensors.iter().map(|(name, tensor)| {
            let file = &self.files[tensor.file];
            (name.as_str(), file.get(name).expect("checked on opening"), file)
        })
    }

    /// The weights alone.
    pub fn weights(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors().filter(|(_, _, file)| !is_optimizer(file)).map(|(name, info, _)| (name, info))
    }

    /// What the optimizer keeps of the weights; nothing in a folder of weights alone.
    pub fn optimizer(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors().filter(|(_, _, file)| is_optimizer(file)).map(|(name, info, _)| (name, info))
    }

    /// A tensor's entry, or an error that names the folder.
    pub fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.find(name)?.1.info(name)
    }

    fn find(&self, name: &str) -> Result<(&Tensor, &File)> {
        let missing = || {
            let (path, key) = (self.dir.clone(), format!("tensor {name}"));
            Error::Missing { path, key, hint: format!(" among its {}", self.tensors.len()) }
        };
        let tensor = self.tensors.get(name).ok_or_else(missing)?;
        Ok((tensor, &self.files[tensor.file]))
    }

    /// Fails, naming what is missing, too many or of another shape, unless these are the tensors: `(name, shape)`.
    pub fn expect<'a>(&self, wanted: impl IntoIterator<Item = (&'a str, &'a [usize])>) -> Result<()> {
        let mut extra: BTreeMap<&str, ()> = self.tensors.keys().map(|name| (name.as_str(), ())).collect();
        let mut wrong = Vec::new();
        for (name, shape) in wanted {
            extra.remove(name);
            match self.info(name) {
                Err(_) => wrong.push(format!("{name} is missing")),
                Ok(info) if info.shape != shape => {
                    wrong.push(format!("{name} has shape {:?}, not {shape:?}", info.shape));
                }
                Ok(_) => {}
            }
        }
        wrong.extend(extra.keys().map(|name| format!("{name} is not wanted")));
        if wrong.is_empty() {
            return Ok(());
        }
        let (shown, count) = (wrong.len().min(5), wrong.len());
        let more = if count > shown { format!(", and {} more", count - shown) } else { String::new() };
        let what = format!("it is of another model: {}{more}", wrong[..shown].join("; "));
        Err(Error::format(&self.dir, what))
    }

    /// Fills `out` with a tensor's bytes from `byte_start` on, and remembers their checksums. A piece that is read whole
    /// is held against the manifest at once.
    pub fn read(&self, name: &str, byte_start: u64, out: &mut [u8]) -> Result<()> {
        let (tensor, file) = self.find(name)?;
        file.check_range(name, byte_start, out.len())?;
        let (mut piece_start, mut done, end) = (0, 0, byte_start + out.len() as u64);
        for piece in &tensor.pieces {
            let piece_end = piece_start + piece.bytes;
            let (from, to) = (byte_start.max(piece_start), end.min(piece_end));
            if from < to {
                let part = &mut out[done..done + (to - from) as usize];
                done += part.len();
                let crc32 = read_summed(file, name, from, part)?;
                if to - from == piece.bytes && crc32 != piece.crc32 {
                    return Err(damaged(file, name, piece_start, piece_end));
                }
                let stretch = Stretch { tensor: tensor.number, start: from, bytes: to - from, crc32 };
                self.read.lock().unwrap_or_else(PoisonError::into_inner).push(stretch);
            }
            piece_start = piece_end;
        }
        Ok(())
    }

    /// What was read since the last time somebody asked.
    pub fn receipt(&self) -> Receipt {
        Receipt(std::mem::take(&mut self.read.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Proves that those who give these receipts have together read every byte of every tensor exactly once, and that
    /// the bytes are those that were written.
    pub fn prove(&self, receipts: impl IntoIterator<Item = Receipt>) -> Result<()> {
        let read = receipt::sorted(receipts);
        let mut rest = read.as_slice();
        for (name, tensor) in &self.tensors {
            let file = &self.files[tensor.file];
            let size = file.info(name)?.num_bytes();
            let mut mine = receipt::take_whole(&mut rest, tensor.number, size, "read")
                .map_err(|what| Error::entry(file.path(), name, what))?;
            let mut start = 0;
            for piece in &tensor.pieces {
                let end = start + piece.bytes;
                let count = mine.iter().take_while(|stretch| stretch.end() <= end).count();
                let (parts, others) = mine.split_at(count);
                let mut sum = crc32fast::Hasher::new();
                for part in parts {
                    sum.combine(&crc32fast::Hasher::new_with_initial_len(part.crc32, part.bytes));
                }
                if piece.bytes > 0 && sum.finalize() != piece.crc32 {
                    return Err(damaged(file, name, start, end));
                }
                (mine, start) = (others, end);
            }
        }
        if rest.is_empty() {
            return Ok(());
        }
        Err(Error::format(&self.dir, "a receipt names tensors that are not in the manifest"))
    }

    /// The contents of a file that holds no tensors, held against its checksum.
    pub fn plain(&self, name: &str) -> Result<Vec<u8>> {
        let missing = || {
            let (path, key) = (self.dir.clone(), format!("file {name}"));
            Error::Missing { path, key, hint: " in the manifest".into() }
        };
        let entry = self.manifest.files.get(name).ok_or_else(missing)?;
        let path = self.dir.join(name);
        let bytes = std::fs::read(&path).map_err(Error::io(&path, "read"))?;
        if bytes.len() as u64 != entry.bytes || crc32fast::hash(&bytes) != entry.crc32 {
            return Err(Error::format(&path, "damaged: its bytes are not those that were written"));
        }
        Ok(bytes)
    }

    /// Names of the files that hold no tensors.
    pub fn plain_names(&self) -> impl Iterator<Item = &str> {
        let names = self.manifest.files.keys().map(String::as_str);
        names.filter(|name| !name.ends_with(".safetensors"))
    }

    /// Where the run stood.
    pub fn state(&self) -> Result<State> {
        let path = self.dir.join(State::FILE);
        if !self.manifest.files.contains_key(State::FILE) {
            let hint =
                ": it holds weights alone. A run can start from them (model.path), not go on from them";
            let (path, key) = (self.dir.clone(), State::FILE.into());
            return Err(Error::Missing { path, key, hint: hint.into() });
        }
        let state = State::parse(&path, &self.plain(State::FILE)?)?;
        if state.step != self.manifest.step {
            let what = format!("it says step {}, the manifest {}", state.step, self.manifest.step);
            return Err(Error::format(&path, what));
        }
        Ok(state)
    }

    /// Reads every byte and returns all that is wrong.
    pub fn verify(&self) -> Vec<Error> {
        let mut wrong: Vec<Error> = self.plain_names().filter_map(|name| self.plain(name).err()).collect();
        let mut block = vec![0; BLOCK];
        for (name, tensor) in &self.tensors {
            let file = &self.files[tensor.file];
            let mut start = 0;
            for piece in &tensor.pieces {
                let end = start + piece.bytes;
                match sum_of(file, name, start, end, &mut block) {
                    Ok(crc32) if crc32 == piece.crc32 => {}
                    Ok(_) => wrong.push(damaged(file, name, start, end)),
                    Err(error) => wrong.push(error),
                }
                start = end;
            }
        }
        wrong
    }
}

fn is_optimizer(file: &File) -> bool {
    let name = file.path().file_name().unwrap_or_default();
    name.to_string_lossy().starts_with("optimizer")
}

fn damaged(file: &File, name: &str, start: u64, end: u64) -> Error {
    let what = format!("damaged: bytes {start}..{end} of it are not those that were written");
    Error::entry(file.path(), name, what)
}

/// That the file is there, in its size.
fn check_size(path: &Path, entry: &Entry) -> Result<()> {
    let found = std::fs::metadata(path).map_err(Error::io(path, "look at"))?;
    if found.is_file() && found.len() == entry.bytes {
        return Ok(());
    }
    let state = if found.len() < entry.bytes { "truncated" } else { "not the file that was written" };
    let what = format!("{state}: it has {} bytes, the manifest says {}", found.len(), entry.bytes);
    Err(Error::format(path, what))
}

/// Opens a file of tensors and holds its header against the manifest.
fn open_file(path: &Path, entry: &Entry) -> Result<File> {
    let file = File::open(path)?;
    if file.header_crc32() != entry.crc32 {
        return Err(Error::format(path, "damaged: its header is not the one that was written"));
    }
    for (name, info) in file.tensors() {
        let pieces = entry.tensors.get(name);
        let pieces = pieces.ok_or_else(|| Error::entry(path, name, "the manifest does not have it"))?;
        check_pieces(path, name, info, pieces)?;
    }
    match entry.tensors.keys().find(|name| file.get(name).is_none()) {
        Some(name) => Err(Error::entry(path, name, "the manifest has it, the file does not")),
        None => Ok(file),
    }
}

/// Reads a range and returns its checksum.
fn read_summed(file: &File, name: &str, start: u64, out: &mut [u8]) -> Result<u32> {
    let (mut sum, mut at) = (crc32fast::Hasher::new(), start);
    for block in out.chunks_mut(BLOCK) {
        file.read_range(name, at, block)?;
        sum.update(block);
        at += block.len() as u64;
    }
    Ok(sum.finalize())
}

/// The checksum of a range, read through `block`.
fn sum_of(file: &File, name: &str, start: u64, end: u64, block: &mut [u8]) -> Result<u32> {
    let (mut sum, mut at) = (crc32fast::Hasher::new(), start);
    while at < end {
        let part = &mut block[..BLOCK.min((end - at) as usize)];
        file.read_range(name, at, part)?;
        sum.update(part);
        at += part.len() as u64;
    }
    Ok(sum.finalize())
}
