//! Writing folders that `torch.distributed.checkpoint` loads.

use super::blob::{archive, tensor_archive};
use super::checkpoint::METADATA;
use super::pickle::{Class, Pickler};
use super::zip::Archive;
use crate::safetensors::bytes_of;
use crate::storage::{Storage, Target};
use crate::{Dtype, Error, Result};
use std::path::Path;

/// Bytes that are in memory at once.
const BUFFER_BYTES: u64 = 4 << 20;

/// A piece's archive stays well below the 4 GiB from which zip needs other records.
const MAX_PIECE_BYTES: u64 = 1 << 30;

/// One step of the way to a value in nested dictionaries and lists: torch flattens them to keys joined by dots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Key(String),
    Index(usize),
}

impl From<&str> for Step {
    fn from(key: &str) -> Self {
        Step::Key(key.into())
    }
}

impl From<usize> for Step {
    fn from(index: usize) -> Self {
        Step::Index(index)
    }
}

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub path: Vec<Step>,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

/// A plain Python object to be written.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Tuple(Vec<Object>),
    List(Vec<Object>),
}

fn key_of(path: &[Step]) -> String {
    let steps = path.iter().map(|step| match step {
        Step::Key(key) => key.clone(),
        Step::Index(index) => index.to_string(),
    });
    steps.collect::<Vec<_>>().join(".")
}

/// One blob of a file to be written.
struct Blob {
    archive: Archive,
    /// The tensor, and its first byte that is here.
    source: Option<(usize, u64)>,
    /// Bytes of the tensor that are here.
    bytes: u64,
    file: usize,
    start: u64,
    len: u64,
}

/// The rows of a tensor that a blob holds.
struct Rows {
    first: usize,
    count: usize,
    blob: usize,
}

/// A folder whose blobs are written, and which is not a checkpoint yet.
#[derive(Debug)]
pub struct Unlisted<'a> {
    storage: &'a dyn Storage,
    dir: &'a Path,
    metadata: Vec<u8>,
}

impl Unlisted<'_> {
    /// Writes `.metadata` and renames it into place, which makes it a checkpoint.
    pub fn commit(self) -> Result<()> {
        let (path, temporary) = (self.dir.join(METADATA), self.dir.join(".metadata.tmp"));
        let len = self.metadata.len() as u64;
        let target = self.storage.create(&temporary, len).map_err(Error::io(&temporary, "create"))?;
        target.write_at(&self.metadata, 0).map_err(Error::io(&temporary, "write to"))?;
        target.sync().map_err(Error::io(&temporary, "sync"))?;
        self.storage.rename(&temporary, &path).map_err(Error::io(&path, "rename into"))?;
        self.storage.sync_dir(self.dir).map_err(Error::io(self.dir, "sync"))
    }
}

/// Writes tensors and objects into a folder of `num_files` files, each tensor's rows spread over all of them as that
/// many ranks of torch would have them. `read(number, byte_start, out)` gives the bytes of the tensor at `number`; each
/// is asked for once.
///
/// `.metadata` comes last, by [`Unlisted::commit`]: without it nobody takes the folder for a checkpoint.
pub fn write<'a>(
    storage: &'a dyn Storage,
    dir: &'a Path,
    num_files: usize,
    tensors: &[TensorSpec],
    objects: &[(Vec<Step>, Object)],
    mut read: impl FnMut(usize, u64, &mut [u8]) -> Result<()>,
) -> Result<Unlisted<'a>> {
    storage.create_dir(dir).map_err(Error::io(dir, "create"))?;
    if dir.join(METADATA).exists() {
        return Err(Error::format(dir, "there is a checkpoint already; choose another folder, or remove it"));
    }
    let layout = Layout::new(dir, num_files.max(1), tensors, objects)?;
    let mut buffer = Vec::new();
    for (number, &bytes) in layout.file_bytes.iter().enumerate() {
        let path = dir.join(file_name(number));
        let target = storage.create(&path, bytes).map_err(Error::io(&path, "create"))?;
        for blob in layout.blobs.iter().filter(|blob| blob.file == number) {
            blob.write(&path, &*target, &mut buffer, &mut read)?;
        }
        target.sync().map_err(Error::io(&path, "sync"))?;
    }
    Ok(Unlisted { storage, dir, metadata: layout.metadata(tensors, objects) })
}

fn file_name(number: usize) -> String {
    format!("__{number}_0.distcp")
}

/// Where everything will lie.
struct Layout {
    blobs: Vec<Blob>,
    file_bytes: Vec<u64>,
    /// Of each tensor.
    rows: Vec<Vec<Rows>>,
    /// Of each object: its blob.
    objects: Vec<usize>,
}

impl Layout {
    fn new(
        dir: &Path,
        num_files: usize,
        tensors: &[TensorSpec],
        objects: &[(Vec<Step>, Object)],
    ) -> Result<Self> {
        let mut layout = Layout {
            blobs: Vec::new(),
            file_bytes: vec![0; num_files],
            rows: tensors.iter().map(|_| Vec::new()).collect(),
            objects: Vec::new(),
        };
        for (_, object) in objects {
            let mut pickler = Pickler::new();
            put_object(&mut pickler, object);
            let blob = layout.put(0, archive(pickler.finish(), None), None, 0);
            layout.objects.push(blob);
        }
        for file in 0..num_files {
            for (number, spec) in tensors.iter().enumerate() {
                for (first, count) in rows_of(spec, num_files, file) {
                    let sizes = sizes_of(&spec.shape, count);
                    let archive = tensor_archive(spec.dtype, &sizes)
                        .map_err(|what| Error::entry(dir, &key_of(&spec.path), what))?;
                    let bytes = bytes_of(spec.dtype, &sizes).unwrap_or(0);
                    let row_bytes = spec.shape.get(1..).and_then(|rest| bytes_of(spec.dtype, rest));
                    let source = (number, first as u64 * row_bytes.unwrap_or(0));
                    let blob = layout.put(file, archive, Some(source), bytes);
                    layout.rows[number].push(Rows { first, count, blob });
                }
            }
        }
        Ok(layout)
    }

    /// Gives a blob the next place in a file; its number.
    fn put(&mut self, file: usize, archive: Archive, source: Option<(usize, u64)>, bytes: u64) -> usize {
        let start = self.file_bytes[file];
        let len = archive.head(0).len() as u64 + bytes + archive.tail(0).len() as u64;
        self.file_bytes[file] += len;
        self.blobs.push(Blob { archive, source, bytes, file, start, len });
        self.blobs.len() - 1
    }
}

/// The rows of a tensor in one of the files, as (first, count): torch.chunk's share, in pieces that are not too large.
/// What has no rows is in the first file.
fn rows_of(spec: &TensorSpec, num_files: usize, number: usize) -> Vec<(usize, usize)> {
    let Some(&rows) = spec.shape.first() else {
        return if number == 0 { vec![(0, 1)] } else { Vec::new() };
    };
    let share = rows.div_ceil(num_files);
    let (start, end) = ((number * share).min(rows), ((number + 1) * share).min(rows));
    let row_bytes = bytes_of(spec.dtype, &spec.shape[1..]).unwrap_or(u64::MAX).max(1);
    let most = usize::try_from((MAX_PIECE_BYTES / row_bytes).max(1)).unwrap_or(usize::MAX);
    (start..end).step_by(most).map(|first| (first, most.min(end - first))).collect()
}

impl Blob {
    /// Writes the archive around what `read` gives.
    fn write(
        &self,
        path: &Path,
        target: &dyn Target,
        buffer: &mut Vec<u8>,
        read: &mut impl FnMut(usize, u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let put = |bytes: &[u8], at: u64| target.write_at(bytes, at).map_err(Error::io(path, "write to"));
        let data = self.start + self.archive.head(0).len() as u64;
        let mut hasher = crc32fast::Hasher::new();
        if let Some((tensor, first)) = self.source {
            buffer.resize(BUFFER_BYTES.min(self.bytes) as usize, 0);
            let mut done = 0;
            while done < self.bytes {
                let part = &mut buffer[..(self.bytes - done).min(BUFFER_BYTES) as usize];
                read(tensor, first + done, part)?;
                hasher.update(part);
                put(part, data + done)?;
                done += part.len() as u64;
            }
        }
        let crc32 = hasher.finalize();
        put(&self.archive.head(crc32), self.start)?;
        put(&self.archive.tail(crc32), data + self.bytes)
    }
}

/// The shape of `rows` rows.
fn sizes_of(shape: &[usize], rows: usize) -> Vec<usize> {
    let mut sizes = shape.to_vec();
    if let Some(first) = sizes.first_mut() {
        *first = rows;
    }
    sizes
}

fn offsets_of(shape: &[usize], offset: usize) -> Vec<usize> {
    let mut offsets = vec![0; shape.len()];
    if let Some(first) = offsets.first_mut() {
        *first = offset;
    }
    offsets
}

fn put_object(p: &mut Pickler, object: &Object) {
    match object {
        Object::None => p.none(),
        Object::Bool(value) => p.bool(*value),
        Object::Int(value) => p.int(*value),
        Object::Float(value) => p.float(*value),
        Object::Text(value) => p.text(value),
        Object::Tuple(values) => p.tuple(|p| values.iter().for_each(|value| put_object(p, value))),
        Object::List(values) => p.list(|p| values.iter().for_each(|value| put_object(p, value))),
    }
}

impl Layout {
    /// The pickle of `Metadata`.
    fn metadata(&self, tensors: &[TensorSpec], objects: &[(Vec<Step>, Object)]) -> Vec<u8> {
        let mut pickler = Pickler::new();
        pickler.instance(Class::Metadata, |p| {
            p.dict(|p| {
                p.text("state_dict_metadata");
                p.dict(|p| {
                    tensors.iter().zip(&self.rows).for_each(|(spec, rows)| put_entry(p, spec, rows));
                    for (path, _) in objects {
                        p.text(&key_of(path));
                        p.bare(Class::BytesStorage);
                    }
                });
                p.text("planner_data");
                p.dict(|p| {
                    let paths = tensors.iter().map(|spec| &spec.path);
                    for path in paths.chain(objects.iter().map(|(path, _)| path)) {
                        p.text(&key_of(path));
                        p.tuple(|p| path.iter().for_each(|step| put_step(p, step)));
                    }
                });
                p.text("storage_data");
                p.dict(|p| {
                    for (spec, rows) in tensors.iter().zip(&self.rows) {
                        for rows in rows {
                            let offsets = offsets_of(&spec.shape, rows.first);
                            put_place(p, &spec.path, Some(&offsets), &self.blobs[rows.blob]);
                        }
                    }
                    for ((path, _), blob) in objects.iter().zip(&self.objects) {
                        put_place(p, path, None, &self.blobs[*blob]);
                    }
                });
                p.text("storage_meta");
                p.none();
                p.text("version");
                p.text("1.0.0");
            });
        });
        pickler.finish()
    }
}

fn put_step(p: &mut Pickler, step: &Step) {
    match step {
        Step::Key(key) => p.text(key),
        Step::Index(index) => p.int(*index as i64),
    }
}

/// A key and its `TensorStorageMetadata`.
fn put_entry(p: &mut Pickler, spec: &TensorSpec, rows: &[Rows]) {
    p.text(&key_of(&spec.path));
    p.instance(Class::TensorStorage, |p| {
        p.dict(|p| {
            p.text("properties");
            p.instance(Class::TensorProperties, |p| {
                p.tuple(|p| {
                    p.class(Class::Dtype(Some(spec.dtype)));
                    p.call(Class::Layout, |p| p.text("torch.strided"));
                    p.bool(false);
                    p.call(Class::MemoryFormat, |p| p.int(0));
                    p.bool(false);
                });
            });
            p.text("size");
            p.size(&spec.shape);
            p.text("chunks");
            p.list(|p| {
                for rows in rows {
                    p.instance(Class::Chunk, |p| {
                        p.dict(|p| {
                            p.text("offsets");
                            p.size(&offsets_of(&spec.shape, rows.first));
                            p.text("sizes");
                            p.size(&sizes_of(&spec.shape, rows.count));
                        });
                    });
                }
            });
        });
    });
}

/// A `MetadataIndex` and its `_StorageInfo`.
fn put_place(p: &mut Pickler, path: &[Step], offsets: Option<&[usize]>, blob: &Blob) {
    p.instance(Class::Index, |p| {
        p.dict(|p| {
            p.text("fqn");
            p.text(&key_of(path));
            p.text("index");
            p.none();
            if let Some(offsets) = offsets {
                p.text("offset");
                p.size(offsets);
            }
        });
    });
    p.instance(Class::StorageInfo, |p| {
        p.dict(|p| {
            p.text("relative_path");
            p.text(&file_name(blob.file));
            p.text("offset");
            p.int(blob.start as i64);
            p.text("length");
            p.int(blob.len as i64);
        });
    });
}
