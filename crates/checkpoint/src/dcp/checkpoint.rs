//! A folder of `.metadata` and `.distcp` files, read by ranges.

use super::blob::{self, Checksum, Tensor};
use super::boxes::{Box as Within, Run, num_elements, prove_cover};
use super::metadata::{Item, Location, Metadata, Piece, TensorItem};
use super::region::Region;
use super::write::Object;
use crate::{Dtype, Error, Result};
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The name of the file that lists everything. It is written last: a folder without it is not a checkpoint.
pub const METADATA: &str = ".metadata";

/// A pickle becomes some tens of times its size in memory; the largest known have hundreds of megabytes.
const MAX_METADATA_BYTES: u64 = 2 << 30;

/// How much is read at once where short runs of a piece lie close together.
const BUFFER_BYTES: u64 = 1 << 20;

/// How many files are kept open.
const MAX_OPEN: usize = 128;

/// An open checkpoint of `torch.distributed.checkpoint`. Opening it reads `.metadata` alone and looks at files' sizes.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    metadata: Metadata,
    open: Mutex<HashMap<usize, Arc<File>>>,
    /// What was found in blobs, by file and first byte.
    blobs: Mutex<HashMap<(usize, u64), Arc<Tensor>>>,
}

impl Checkpoint {
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let path = dir.join(METADATA);
        let size = match std::fs::metadata(&path) {
            Ok(found) => found.len(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(no_metadata(dir)),
            Err(e) => return Err(Error::io(&path, "look at")(e)),
        };
        if size > MAX_METADATA_BYTES {
            return Err(Error::format(&path, format!("{size} bytes are too many for this file")));
        }
        let bytes = std::fs::read(&path).map_err(Error::io(&path, "read"))?;
        let metadata = Metadata::parse(&path, &bytes)?;
        let (open, blobs) = Default::default();
        let checkpoint = Checkpoint { dir: dir.to_path_buf(), metadata, open, blobs };
        checkpoint.check_sizes()?;
        Ok(checkpoint)
    }

    /// Every blob lies within its file.
    fn check_sizes(&self) -> Result<()> {
        let mut sizes = Vec::new();
        for name in &self.metadata.files {
            let path = self.dir.join(name);
            sizes.push(std::fs::metadata(&path).map_err(Error::io(&path, "look at"))?.len());
        }
        for (key, item) in &self.metadata.items {
            let (object, pieces) = match item {
                Item::Object(location) => (Some(location), &[][..]),
                Item::Tensor(tensor) => (None, &tensor.pieces[..]),
            };
            for location in object.into_iter().chain(pieces.iter().map(|piece| &piece.location)) {
                let (end, size) = (location.start + location.bytes, sizes[location.file]);
                if end > size {
                    let what =
                        format!("truncated: {key} ends at byte {end}, the file at {size}; copy it again");
                    return Err(Error::format(&self.file_path(location), what));
                }
            }
        }
        Ok(())
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// A tensor by its key, and an error that names the folder where there is none.
    pub fn tensor(&self, key: &str) -> Result<&TensorItem> {
        self.metadata.tensor(key).ok_or_else(|| self.missing(key))
    }

    fn missing(&self, key: &str) -> Error {
        let hint = format!(" among its {} keys", self.metadata.items.len());
        Error::Missing { path: self.dir.join(METADATA), key: key.to_string(), hint }
    }

    fn entry_error(&self, key: &str, what: impl Into<String>) -> Error {
        Error::entry(&self.dir.join(METADATA), key, what)
    }

    /// The dtype of a tensor.
    pub fn dtype(&self, key: &str) -> Result<Dtype> {
        let dtype = self.tensor(key)?.dtype;
        dtype.ok_or_else(|| self.entry_error(key, "its dtype is none of those read here"))
    }

    /// Proves that the pieces of a tensor are all of it, each element once.
    pub fn prove(&self, key: &str) -> Result<()> {
        let item = self.tensor(key)?;
        let boxes: Option<Vec<Within<'_>>> = item.pieces.iter().map(|piece| within(item, piece)).collect();
        let boxes = boxes.ok_or_else(|| self.entry_error(key, "a piece leaves it"))?;
        prove_cover(&item.shape, &boxes).map_err(|what| self.entry_error(key, what))
    }

    /// Fills `out` with a tensor's bytes from `byte_start` on, in row-major order. Reads those bytes alone.
    pub fn read_range(&self, key: &str, byte_start: u64, out: &mut [u8]) -> Result<()> {
        let item = self.tensor(key)?;
        let dtype = self.dtype(key)?;
        let size = dtype.bytes() as u64;
        let total = num_elements(&item.shape).and_then(|count| count.checked_mul(size)).unwrap_or(0);
        let (len, end) = (out.len(), byte_start.checked_add(out.len() as u64));
        let aligned = byte_start.is_multiple_of(size) && (len as u64).is_multiple_of(size);
        let Some(end) = end.filter(|end| *end <= total && aligned) else {
            let (path, key) = (self.dir.join(METADATA), key.to_string());
            return Err(Error::Range { path, key, start: byte_start, len, size: total });
        };
        let mut filled = 0;
        for piece in &item.pieces {
            let Some(within) = within(item, piece) else { continue };
            let mut runs = within.runs(byte_start / size..end / size).peekable();
            if runs.peek().is_none() {
                continue;
            }
            let file = self.file(&piece.location)?;
            let tensor = self.blob(key, dtype, piece, &file)?;
            let source = Source { region: region(&file, &piece.location), data: tensor.start, size };
            while let Some(run) = runs.next() {
                let last = last_close(run, &mut runs, size);
                filled += source
                    .copy(
                        run,
                        last,
                        within.runs(run.tensor_start..last.tensor_start + last.len),
                        byte_start,
                        out,
                    )
                    .map_err(Error::io(&self.file_path(&piece.location), "read from"))?;
            }
        }
        if filled < len as u64 {
            return Err(self.entry_error(key, "its pieces have not all of its elements"));
        }
        Ok(())
    }

    /// All bytes of a tensor, whose pieces have been proved to be all of it.
    pub fn read(&self, key: &str) -> Result<Vec<u8>> {
        self.prove(key)?;
        let item = self.tensor(key)?;
        // The blobs have this many bytes at least, and the files have the blobs: this is no lie.
        let held = item.pieces.iter().fold(0u64, |sum, piece| sum.saturating_add(piece.location.bytes));
        let bytes = num_elements(&item.shape)
            .and_then(|count| count.checked_mul(self.dtype(key).ok()?.bytes() as u64));
        let bytes = bytes.filter(|bytes| *bytes <= held);
        let bytes = bytes.ok_or_else(|| self.entry_error(key, "its files are too short for its shape"))?;
        let mut out = vec![0; bytes as usize];
        self.read_range(key, 0, &mut out)?;
        Ok(out)
    }

    /// A number saved as a tensor of one element, or by itself.
    pub fn number(&self, key: &str) -> Result<f64> {
        match self.metadata.items.get(key) {
            Some(Item::Tensor(item)) if num_elements(&item.shape) == Some(1) => self.scalar(key),
            Some(Item::Tensor(_)) => Err(self.entry_error(key, "it is not a single number")),
            _ => match self.object(key)? {
                Object::Int(value) => Ok(value as f64),
                Object::Float(value) => Ok(value),
                other => Err(self.entry_error(key, format!("it is {other:?}, not a number"))),
            },
        }
    }

    /// A plain object that is no tensor.
    pub fn object(&self, key: &str) -> Result<Object> {
        let Some(Item::Object(location)) = self.metadata.items.get(key) else {
            return Err(self.missing(key));
        };
        let file = self.file(location)?;
        let object = blob::open_object(&region(&file, location));
        object.map_err(|what| Error::entry(&self.file_path(location), key, what))
    }

    fn scalar(&self, key: &str) -> Result<f64> {
        let bytes = self.read(key)?;
        Ok(match (self.dtype(key)?, &bytes[..]) {
            (Dtype::F32, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
            (Dtype::I32, &[a, b, c, d]) => f64::from(i32::from_le_bytes([a, b, c, d])),
            (Dtype::F64, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]),
            (Dtype::I64, &[a, b, c, d, e, f, g, h]) => i64::from_le_bytes([a, b, c, d, e, f, g, h]) as f64,
            (dtype, _) => return Err(self.entry_error(key, format!("a number of dtype {dtype}"))),
        })
    }

    /// Reads every byte of a tensor's blobs and holds them against their checksums, where torch made some.
    pub fn verify(&self, key: &str) -> Result<()> {
        let dtype = self.dtype(key)?;
        let mut buffer = vec![0; BUFFER_BYTES as usize];
        for piece in &self.tensor(key)?.pieces {
            let file = self.file(&piece.location)?;
            let Some(Checksum { crc32, start, bytes }) = self.blob(key, dtype, piece, &file)?.checksum else {
                continue;
            };
            let path = self.file_path(&piece.location);
            let (region, mut hasher, mut at) = (region(&file, &piece.location), crc32fast::Hasher::new(), 0);
            while at < bytes {
                let part = &mut buffer[..(bytes - at).min(BUFFER_BYTES) as usize];
                region.read(start + at, part).map_err(Error::io(&path, "read from"))?;
                hasher.update(part);
                at += part.len() as u64;
            }
            if hasher.finalize() != crc32 {
                return Err(Error::entry(
                    &path,
                    key,
                    "damaged: its bytes do not have the checksum they should",
                ));
            }
        }
        Ok(())
    }

    fn file_path(&self, location: &Location) -> PathBuf {
        self.dir.join(&self.metadata.files[location.file])
    }

    fn file(&self, location: &Location) -> Result<Arc<File>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = open.get(&location.file) {
            return Ok(file.clone());
        }
        let path = self.file_path(location);
        let file = Arc::new(File::open(&path).map_err(Error::io(&path, "open"))?);
        if open.len() >= MAX_OPEN {
            open.clear();
        }
        open.insert(location.file, file.clone());
        Ok(file)
    }

    /// What the blob of a piece holds, which must be what the metadata says.
    fn blob(&self, key: &str, dtype: Dtype, piece: &Piece, file: &File) -> Result<Arc<Tensor>> {
        let place = (piece.location.file, piece.location.start);
        let known = || self.blobs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tensor) = known().get(&place).cloned() {
            return Ok(tensor);
        }
        let broken = |what| Error::entry(&self.file_path(&piece.location), key, what);
        let tensor = Tensor::open(&region(file, &piece.location)).map_err(broken)?;
        if tensor.dtype != dtype || tensor.shape != piece.sizes {
            let (found, shape, listed) = (tensor.dtype, tensor.shape, &piece.sizes);
            return Err(broken(format!(
                "it is {found} {shape:?} there, and {dtype} {listed:?} in {METADATA}"
            )));
        }
        let tensor = Arc::new(tensor);
        known().insert(place, tensor.clone());
        Ok(tensor)
    }
}

fn region<'a>(file: &'a File, location: &Location) -> Region<'a> {
    Region::new(file, location.start, location.bytes)
}

fn within<'a>(item: &'a TensorItem, piece: &'a Piece) -> Option<Within<'a>> {
    Within::new(&item.shape, &piece.offsets, &piece.sizes)
}

fn no_metadata(dir: &Path) -> Error {
    let steps = || {
        let entries = std::fs::read_dir(dir).ok()?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut steps: Vec<String> = names.filter(|name| dir.join(name).join(METADATA).exists()).collect();
        steps.sort();
        (!steps.is_empty()).then(|| format!(": name one of the checkpoints in it, as {}", steps.join(", ")))
    };
    let hint = if !dir.is_dir() {
        ": it is not a folder".to_string()
    } else {
        steps()
            .unwrap_or_else(|| ": not a distributed checkpoint, or one whose writing was interrupted".into())
    };
    Error::Missing { path: dir.to_path_buf(), key: METADATA.into(), hint }
}

/// The last of the runs that one read of a buffer's size takes together with `first`.
fn last_close(first: Run, runs: &mut std::iter::Peekable<impl Iterator<Item = Run>>, size: u64) -> Run {
    let mut last = first;
    let fits = |run: &Run| (run.box_start + run.len - first.box_start) * size <= BUFFER_BYTES;
    while let Some(run) = runs.next_if(fits) {
        last = run;
    }
    last
}

/// Where a piece's numbers are.
struct Source<'a> {
    region: Region<'a>,
    /// Byte of the region at which they start.
    data: u64,
    /// Bytes of an element.
    size: u64,
}

impl Source<'_> {
    /// Copies `runs`, which go from `first` to `last`, into `out`, which starts at byte `out_start` of the tensor.
    /// Returns the bytes copied.
    fn copy(
        &self,
        first: Run,
        last: Run,
        runs: impl Iterator<Item = Run>,
        out_start: u64,
        out: &mut [u8],
    ) -> std::io::Result<u64> {
        let size = self.size;
        let place = |run: Run| {
            let start = (run.tensor_start * size - out_start) as usize;
            start..start + (run.len * size) as usize
        };
        let data = self.data + first.box_start * size;
        if first == last {
            self.region.read(data, &mut out[place(first)])?;
            return Ok(first.len * size);
        }
        let mut buffer = vec![0; ((last.box_start + last.len - first.box_start) * size) as usize];
        self.region.read(data, &mut buffer)?;
        let mut copied = 0;
        for run in runs {
            let from = ((run.box_start - first.box_start) * size) as usize;
            let bytes = &buffer[from..from + (run.len * size) as usize];
            out[place(run)].copy_from_slice(bytes);
            copied += run.len * size;
        }
        Ok(copied)
    }
}
