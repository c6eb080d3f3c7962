//! Writing folders that `torch.distributed.checkpoint` loads.

use super::blob::{draft, draft_tensor};
use super::checkpoint::METADATA;
use super::pickle::{Class, Pickler};
use super::zip::Draft;
use crate::safetensors::bytes_of;
use crate::storage::{Disk, Storage};
use crate::{Dtype, Error, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
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

/// Where a piece will lie.
struct Place {
    offset: usize,
    rows: usize,
    file: usize,
    start: u64,
    bytes: u64,
}

/// Writes tensors and objects into a folder of `num_files` files, each tensor's rows spread over all of them as that
/// many ranks of torch would have them. `read(number, byte_start, out)` gives the bytes of the tensor at `number`.
///
/// `.metadata` comes last, and is renamed into place: without it nobody takes the folder for a checkpoint.
pub fn write(
    dir: &Path,
    num_files: usize,
    tensors: &[TensorSpec],
    objects: &[(Vec<Step>, Object)],
    mut read: impl FnMut(usize, u64, &mut [u8]) -> Result<()>,
) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(Error::io(dir, "make the folder"))?;
    if dir.join(METADATA).exists() {
        return Err(Error::format(dir, "there is a checkpoint already; choose another folder, or remove it"));
    }
    let num_files = num_files.max(1);
    let mut tensor_places: Vec<Vec<Place>> = tensors.iter().map(|_| Vec::new()).collect();
    let mut object_places = Vec::new();
    for number in 0..num_files {
        let mut file = Output::create(dir, number)?;
        if number == 0 {
            for (path, object) in objects {
                object_places.push(file.object(&key_of(path), object)?);
            }
        }
        for (tensor, (spec, places)) in tensors.iter().zip(&mut tensor_places).enumerate() {
            for (offset, rows) in rows_of(spec, num_files, number) {
                places.push(file.piece(spec, offset, rows, |start, out| read(tensor, start, out))?);
            }
        }
        file.file.sync_all().map_err(Error::io(&file.path, "sync"))?;
    }
    let objects: Vec<_> = objects.iter().map(|(path, _)| path).zip(object_places).collect();
    let tensors: Vec<_> = tensors.iter().zip(tensor_places).collect();
    write_last(dir, &metadata(&tensors, &objects))
}

/// The metadata, under a temporary name and then its own: a folder without it is no checkpoint.
fn write_last(dir: &Path, bytes: &[u8]) -> Result<()> {
    let (path, temporary) = (dir.join(METADATA), dir.join(format!("{METADATA}.tmp")));
    let file = Disk.create(&temporary, bytes.len() as u64).map_err(Error::io(&temporary, "create"))?;
    file.write_at(bytes, 0).map_err(Error::io(&temporary, "write to"))?;
    file.sync().map_err(Error::io(&temporary, "sync"))?;
    Disk.rename(&temporary, &path).map_err(Error::io(&path, "rename into"))?;
    Disk.sync_dir(dir).map_err(Error::io(dir, "sync"))
}

fn file_name(number: usize) -> String {
    format!("__{number}_0.distcp")
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

/// A file of blobs, one after another.
struct Output {
    path: std::path::PathBuf,
    file: File,
    number: usize,
    end: u64,
    buffer: Vec<u8>,
}

impl Output {
    fn create(dir: &Path, number: usize) -> Result<Self> {
        let path = dir.join(file_name(number));
        let file = File::create(&path).map_err(Error::io(&path, "create"))?;
        Ok(Output { path, file, number, end: 0, buffer: Vec::new() })
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<()> {
        self.file.write_all_at(bytes, at).map_err(Error::io(&self.path, "write to"))
    }

    fn object(&mut self, key: &str, object: &Object) -> Result<Place> {
        let mut pickler = Pickler::new();
        put_object(&mut pickler, object);
        self.blob(key, &draft(pickler.finish(), None), 0, 0, 0, |_, _| Ok(()))
    }

    fn piece(
        &mut self,
        spec: &TensorSpec,
        offset: usize,
        rows: usize,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<Place> {
        let key = key_of(&spec.path);
        let sizes = sizes_of(&spec.shape, rows);
        let draft = draft_tensor(spec.dtype, &sizes).map_err(|what| Error::entry(&self.path, &key, what))?;
        let row_bytes = spec.shape.get(1..).and_then(|rest| bytes_of(spec.dtype, rest)).unwrap_or(0);
        let first = offset as u64 * row_bytes;
        let bytes = bytes_of(spec.dtype, &sizes).unwrap_or(0);
        self.blob(&key, &draft, bytes, offset, rows, |start, out| read(first + start, out))
    }

    /// Writes an archive whose large entry of `bytes` bytes comes from `read`.
    fn blob(
        &mut self,
        key: &str,
        draft: &Draft,
        bytes: u64,
        offset: usize,
        rows: usize,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<Place> {
        let (start, head_bytes) = (self.end, draft.head(0).len() as u64);
        let mut hasher = crc32fast::Hasher::new();
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(BUFFER_BYTES.min(bytes) as usize, 0);
        let mut done = 0;
        while done < bytes {
            let part = &mut buffer[..(bytes - done).min(BUFFER_BYTES) as usize];
            read(done, part)?;
            hasher.update(part);
            self.write(part, start + head_bytes + done)?;
            done += part.len() as u64;
        }
        self.buffer = buffer;
        let crc32 = hasher.finalize();
        let tail = draft.tail(crc32);
        self.write(&draft.head(crc32), start)?;
        self.write(&tail, start + head_bytes + bytes)?;
        self.end = start + head_bytes + bytes + tail.len() as u64;
        debug_assert!(head_bytes + bytes < 1 << 32, "{key}");
        Ok(Place { offset, rows, file: self.number, start, bytes: self.end - start })
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

/// The pickle of `Metadata`.
fn metadata(tensors: &[(&TensorSpec, Vec<Place>)], objects: &[(&Vec<Step>, Place)]) -> Vec<u8> {
    let mut pickler = Pickler::new();
    pickler.instance(Class::Metadata, |p| {
        p.dict(|p| {
            p.text("state_dict_metadata");
            p.dict(|p| {
                tensors.iter().for_each(|(spec, places)| put_entry(p, spec, places));
                for (path, _) in objects {
                    p.text(&key_of(path));
                    p.bare(Class::BytesStorage);
                }
            });
            p.text("planner_data");
            p.dict(|p| {
                let paths = tensors.iter().map(|(spec, _)| &spec.path);
                for path in paths.chain(objects.iter().map(|(path, _)| *path)) {
                    p.text(&key_of(path));
                    p.tuple(|p| path.iter().for_each(|step| put_step(p, step)));
                }
            });
            p.text("storage_data");
            p.dict(|p| {
                for (spec, places) in tensors {
                    for place in places {
                        put_place(p, &spec.path, Some(offsets_of(&spec.shape, place.offset)), place);
                    }
                }
                objects.iter().for_each(|(path, place)| put_place(p, path, None, place));
            });
            p.text("storage_meta");
            p.none();
            p.text("version");
            p.text("1.0.0");
        });
    });
    pickler.finish()
}

fn put_step(p: &mut Pickler, step: &Step) {
    match step {
        Step::Key(key) => p.text(key),
        Step::Index(index) => p.int(*index as i64),
    }
}

/// A key and its `TensorStorageMetadata`.
fn put_entry(p: &mut Pickler, spec: &TensorSpec, places: &[Place]) {
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
                for place in places {
                    p.instance(Class::Chunk, |p| {
                        p.dict(|p| {
                            p.text("offsets");
                            p.size(&offsets_of(&spec.shape, place.offset));
                            p.text("sizes");
                            p.size(&sizes_of(&spec.shape, place.rows));
                        });
                    });
                }
            });
        });
    });
}

/// A `MetadataIndex` and its `_StorageInfo`.
fn put_place(p: &mut Pickler, path: &[Step], offsets: Option<Vec<usize>>, place: &Place) {
    p.instance(Class::Index, |p| {
        p.dict(|p| {
            p.text("fqn");
            p.text(&key_of(path));
            p.text("index");
            p.none();
            if let Some(offsets) = &offsets {
                p.text("offset");
                p.size(offsets);
            }
        });
    });
    p.instance(Class::StorageInfo, |p| {
        p.dict(|p| {
            p.text("relative_path");
            p.text(&file_name(place.file));
            p.text("offset");
            p.int(place.start as i64);
            p.text("length");
            p.int(place.bytes as i64);
        });
    });
}
