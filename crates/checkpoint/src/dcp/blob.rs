//! One blob of a `.distcp` file: what `torch.save` made of a tensor or of another object.

use super::pickle::{self, Class, Pickle, Value};
use super::region::Region;
use super::write::Object;
use super::zip::{self, Archive, Entry};
use crate::safetensors::bytes_of;
use crate::{Dtype, Error, Result};
use std::path::Path;

type Read<T> = std::result::Result<T, String>;

/// The pickle of a tensor has about 150 bytes, and that of a list of weights' names a few hundred kilobytes.
const MAX_PICKLE_BYTES: u64 = 16 << 20;

/// Objects read here are flat, or lists of flat ones.
const MAX_DEPTH: usize = 8;

/// More dimensions than torch has.
const MAX_DIMS: usize = 64;

/// A tensor in a blob: what it is, and where its bytes are within the blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Byte of the blob at which its first element lies; the others follow in row-major order.
    pub start: u64,
    /// Checksum of the entry that holds it, and where that lies; `None` where torch was told to make none.
    pub(crate) checksum: Option<Checksum>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checksum {
    pub crc32: u32,
    pub start: u64,
    pub bytes: u64,
}

/// The directory and the pickle of a blob.
struct Opened {
    entries: Vec<Entry>,
    /// The folder all entries lie in, with its slash.
    root: String,
    pickle: Vec<u8>,
    has_checksums: bool,
}

impl Opened {
    fn open(region: &Region<'_>) -> Read<Self> {
        let entries = zip::directory(region)?;
        let entry = entries.iter().find(|entry| entry.name.ends_with("/data.pkl"));
        let entry = entry.ok_or("not written by torch.save: it has no data.pkl")?;
        let root = entry.name.trim_end_matches("data.pkl").to_string();
        if entry.bytes > MAX_PICKLE_BYTES {
            return Err(format!("its pickle would have {} bytes", entry.bytes));
        }
        let pickle = read_entry(region, entry)?;
        // torch writes zeros where it was told to leave checksums out.
        let has_checksums = entry.crc32 != 0;
        if has_checksums && crc32fast::hash(&pickle) != entry.crc32 {
            return Err("damaged: its pickle does not have the checksum it claims".into());
        }
        let archive = Opened { pickle, root, has_checksums, entries };
        if let Some(order) = archive.entry("byteorder").filter(|entry| entry.bytes <= 16) {
            let order = read_entry(region, order)?;
            if order != b"little" {
                return Err("its numbers are big-endian".into());
            }
        }
        Ok(archive)
    }

    fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name.strip_prefix(&self.root) == Some(name))
    }
}

fn read_entry(region: &Region<'_>, entry: &Entry) -> Read<Vec<u8>> {
    // Within the archive first, so that the memory taken is no more than the file's.
    let start = entry.start(region)?;
    let mut bytes = vec![0; entry.bytes as usize];
    region.read(start, &mut bytes).map_err(|e| format!("it cannot be read: {e}"))?;
    Ok(bytes)
}

impl Tensor {
    /// Finds out what a blob in memory holds. `path` and `key` appear in errors.
    pub fn parse(path: &Path, key: &str, blob: &[u8]) -> Result<Self> {
        let tensor = Self::open(&Region::new(&blob, 0, blob.len() as u64));
        tensor.map_err(|what| Error::entry(path, key, what))
    }

    /// Finds out what the blob at `region` holds, without reading its numbers.
    pub(crate) fn open(region: &Region<'_>) -> Read<Self> {
        let archive = Opened::open(region)?;
        let pickle = pickle::read(&archive.pickle)?;
        let Stored { dtype, storage, offset, shape, stride } =
            stored(&pickle).ok_or("its pickle is not that of a plain tensor")?;
        if !is_row_major(&shape, &stride) {
            return Err(format!("a tensor of shape {shape:?} with strides {stride:?}; save it contiguous"));
        }
        let name = format!("data/{storage}");
        let entry = archive.entry(&name).ok_or_else(|| format!("it has no {name}"))?;
        let start = entry.start(region)?;
        let skipped = offset.checked_mul(dtype.bytes() as u64);
        let end =
            bytes_of(dtype, &shape).zip(skipped).and_then(|(bytes, skipped)| bytes.checked_add(skipped));
        if end.is_none_or(|end| end > entry.bytes) {
            return Err(format!("{dtype} {shape:?} does not fit into its {} bytes", entry.bytes));
        }
        let checksum = Checksum { crc32: entry.crc32, start, bytes: entry.bytes };
        let start = start + skipped.unwrap_or(0);
        Ok(Tensor { dtype, shape, start, checksum: archive.has_checksums.then_some(checksum) })
    }
}

/// An object that was saved by itself.
pub(crate) fn open_object(region: &Region<'_>) -> Read<Object> {
    let archive = Opened::open(region)?;
    let pickle = pickle::read(&archive.pickle)?;
    // What is shared in a pickle is not in what is made of it: neither depth nor number may run away.
    let mut left = archive.pickle.len();
    object(&pickle, pickle.root, MAX_DEPTH, &mut left)
}

fn object<'a>(pickle: &Pickle<'a>, value: Value<'a>, depth: usize, left: &mut usize) -> Read<Object> {
    let text_bytes = if let Value::Str(text) = value { text.len() } else { 0 };
    *left = left.checked_sub(1 + text_bytes).ok_or("it describes more than it holds")?;
    Ok(match value {
        Value::None => Object::None,
        Value::Bool(value) => Object::Bool(value),
        Value::Int(value) => Object::Int(value),
        Value::Float(value) => Object::Float(value),
        Value::Str(value) => Object::Text(value.to_string()),
        _ => {
            let depth = depth.checked_sub(1).ok_or("it is nested too deeply")?;
            let mut all = |values: &[Value<'a>]| -> Read<Vec<Object>> {
                values.iter().map(|value| object(pickle, *value, depth, left)).collect()
            };
            match (pickle.tuple(value), pickle.list(value)) {
                (Some(values), _) => Object::Tuple(all(values)?),
                (_, Some(values)) => Object::List(all(values)?),
                _ => return Err("it is no plain number, text, tuple or list".into()),
            }
        }
    })
}

struct Stored<'a> {
    dtype: Dtype,
    storage: &'a str,
    offset: u64,
    shape: Vec<usize>,
    stride: Vec<usize>,
}

/// `_rebuild_tensor_v2(('storage', torch.FloatStorage, key, device, numel), offset, size, stride, …)`, or v3 with an
/// untyped storage and the dtype at the end.
fn stored<'a>(pickle: &Pickle<'a>) -> Option<Stored<'a>> {
    let made = pickle.made(pickle.root)?;
    let args = pickle.tuple(made.args)?;
    let storage = pickle.tuple(pickle.outside(*args.first()?)?)?;
    let (Value::Str("storage"), Value::Class(class), Value::Str(key)) =
        (*storage.first()?, *storage.get(1)?, *storage.get(2)?)
    else {
        return None;
    };
    let dtype = match (made.class, class) {
        (Class::RebuildTensor, Class::Storage(dtype)) => dtype,
        (Class::RebuildTyped, Class::UntypedStorage) => match args.get(6)? {
            Value::Class(Class::Dtype(dtype)) => (*dtype)?,
            _ => return None,
        },
        _ => return None,
    };
    let Value::Int(offset) = *args.get(1)? else { return None };
    Some(Stored {
        dtype,
        storage: key,
        offset: u64::try_from(offset).ok()?,
        shape: dims(pickle, *args.get(2)?)?,
        stride: dims(pickle, *args.get(3)?)?,
    })
}

/// A tuple of dimensions, or a torch.Size.
pub(crate) fn dims<'a>(pickle: &Pickle<'a>, value: Value<'a>) -> Option<Vec<usize>> {
    let value = match pickle.made(value) {
        Some(made) if made.class == Class::Size => *pickle.tuple(made.args)?.first()?,
        Some(_) => return None,
        None => value,
    };
    let values =
        pickle.tuple(value).or_else(|| pickle.list(value)).filter(|values| values.len() <= MAX_DIMS)?;
    let dim = |value: &Value<'a>| match value {
        Value::Int(dim) => usize::try_from(*dim).ok(),
        _ => None,
    };
    values.iter().map(dim).collect()
}

/// Whether elements follow each other in row-major order. Strides of dimensions of one element mean nothing.
fn is_row_major(shape: &[usize], stride: &[usize]) -> bool {
    if shape.len() != stride.len() {
        return false;
    }
    let mut expected = 1usize;
    for (&dim, &stride) in shape.iter().zip(stride).rev() {
        if dim == 0 {
            return true;
        }
        if dim != 1 && stride != expected {
            return false;
        }
        expected = expected.saturating_mul(dim);
    }
    true
}

/// The archive of a tensor to be written.
pub(crate) fn tensor_archive(dtype: Dtype, shape: &[usize]) -> Read<Archive> {
    let bytes = bytes_of(dtype, shape).filter(|bytes| *bytes < 1 << 32).ok_or("too large for one piece")?;
    let mut pickler = pickle::Pickler::new();
    let storage = Class::Storage(dtype);
    storage.name().ok_or_else(|| format!("torch has no storage of {dtype}"))?;
    let row_major: Vec<usize> = (0..shape.len()).map(|dim| shape[dim + 1..].iter().product()).collect();
    pickler.call(Class::RebuildTensor, |p| {
        p.outside(|p| {
            p.text("storage");
            p.class(storage);
            p.text("0");
            p.text("cpu");
            p.int((bytes / dtype.bytes() as u64) as i64);
        });
        p.int(0);
        for dims in [shape, &row_major] {
            p.tuple(|p| dims.iter().for_each(|&dim| p.int(dim as i64)));
        }
        p.bool(false);
        p.call(Class::OrderedDict, |_| {});
    });
    Ok(archive(pickler.finish(), Some(("archive/data/0".into(), bytes))))
}

/// The archive of a pickle alone.
pub(crate) fn archive(pickle: Vec<u8>, large: Option<(String, u64)>) -> Archive {
    let small = [("data.pkl", pickle), ("byteorder", b"little".to_vec()), ("version", b"3\n".to_vec())];
    let small = small.map(|(name, bytes)| (format!("archive/{name}"), bytes));
    Archive::new(small.into(), large)
}
