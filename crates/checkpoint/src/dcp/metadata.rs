//! The `.metadata` of a checkpoint: which tensors it has, in which boxes, and where their bytes are.

use super::blob::dims;
use super::boxes::Box as Within;
use super::pickle::{self, Class, Fields, Pickle, Value};
use crate::{Dtype, Error, Result};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Where a blob lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// Index into [`Metadata::files`].
    pub file: usize,
    pub start: u64,
    pub bytes: u64,
}

/// A box of a tensor, and the blob that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub offsets: Vec<usize>,
    pub sizes: Vec<usize>,
    pub location: Location,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorItem {
    /// `None` for dtypes of torch that nobody here asks for, as complex numbers.
    pub dtype: Option<Dtype>,
    pub shape: Vec<usize>,
    /// Sorted by their offsets.
    pub pieces: Vec<Piece>,
}

/// What a key stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    Tensor(TensorItem),
    /// Any other Python object, pickled by itself.
    Object(Location),
}

/// What `.metadata` says, checked: every piece lies within its tensor and has a blob of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    pub items: BTreeMap<String, Item>,
    /// Names of files in the same folder.
    pub files: Vec<String>,
}

impl Metadata {
    /// Reads the pickle. `path` is the file it came from; it appears in errors.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let pickle = pickle::read(bytes).map_err(|what| Error::format(path, what))?;
        let reader = Reader { path, pickle: &pickle };
        let fields =
            reader.fields(pickle.root, Class::Metadata, "not the metadata of a distributed checkpoint")?;
        let mut unplaced = reader.entries(&fields, bytes.len())?;
        let files = reader.place(&fields, &mut unplaced)?;
        let items = unplaced.into_iter().map(|(key, item)| Ok((key.to_string(), item.placed(path, key)?)));
        Ok(Metadata { items: items.collect::<Result<_>>()?, files })
    }

    pub fn tensor(&self, key: &str) -> Option<&TensorItem> {
        match self.items.get(key)? {
            Item::Tensor(item) => Some(item),
            Item::Object(_) => None,
        }
    }
}

/// An item whose blobs have not all been found yet.
enum Unplaced {
    Tensor { dtype: Option<Dtype>, shape: Vec<usize>, pieces: Vec<UnplacedPiece> },
    Object(Option<Location>),
}

struct UnplacedPiece {
    offsets: Vec<usize>,
    sizes: Vec<usize>,
    location: Option<Location>,
}

impl Unplaced {
    fn placed(self, path: &Path, key: &str) -> Result<Item> {
        let nowhere = |what: String| Error::entry(path, key, what);
        match self {
            Unplaced::Object(location) => {
                location.map(Item::Object).ok_or_else(|| nowhere("it has no place in any file".into()))
            }
            Unplaced::Tensor { dtype, shape, pieces } => {
                let place = |piece: UnplacedPiece| {
                    let UnplacedPiece { offsets, sizes, location } = piece;
                    let what = || nowhere(format!("its piece at {offsets:?} has no place in any file"));
                    match location {
                        Some(location) => Ok(Some(Piece { offsets, sizes, location })),
                        // Empty pieces may be left out.
                        None if sizes.contains(&0) => Ok(None),
                        None => Err(what()),
                    }
                };
                let pieces = pieces.into_iter().filter_map(|piece| place(piece).transpose());
                let pieces = pieces.collect::<Result<_>>()?;
                Ok(Item::Tensor(TensorItem { dtype, shape, pieces }))
            }
        }
    }
}

struct Reader<'p, 'a> {
    path: &'p Path,
    pickle: &'p Pickle<'a>,
}

impl<'p, 'a> Reader<'p, 'a> {
    fn fields(&self, value: Value<'a>, class: Class, what: &str) -> Result<Fields<'p, 'a>> {
        self.pickle.fields(value, class).ok_or_else(|| Error::format(self.path, what))
    }

    fn dict(&self, fields: &Fields<'p, 'a>, name: &str) -> Result<&'p [(Value<'a>, Value<'a>)]> {
        let dict = fields.get(name).and_then(|value| self.pickle.dict(value));
        dict.ok_or_else(|| Error::format(self.path, format!("its {name} is not a dictionary")))
    }

    /// Keys, with the tensors' shapes and boxes.
    ///
    /// A pickle can name the same list of pieces from many keys, so that what it describes is far larger than itself.
    /// Nobody writes such; `input_bytes` bounds what is believed.
    fn entries(&self, fields: &Fields<'p, 'a>, input_bytes: usize) -> Result<BTreeMap<&'a str, Unplaced>> {
        let mut numbers_left = input_bytes.saturating_mul(4);
        let mut entries = BTreeMap::new();
        for (key, value) in self.dict(fields, "state_dict_metadata")? {
            let Value::Str(key) = *key else {
                return Err(Error::format(self.path, "a key that is no text"));
            };
            let entry = self.entry(key, *value, &mut numbers_left)?;
            if entries.insert(key, entry).is_some() {
                return Err(Error::entry(self.path, key, "it occurs twice"));
            }
        }
        Ok(entries)
    }

    fn entry(&self, key: &str, value: Value<'a>, numbers_left: &mut usize) -> Result<Unplaced> {
        let broken = |what: &str| Error::entry(self.path, key, what);
        if self.pickle.made(value).is_some_and(|made| made.class == Class::BytesStorage) {
            return Ok(Unplaced::Object(None));
        }
        let fields = self.pickle.fields(value, Class::TensorStorage);
        let fields = fields.ok_or_else(|| broken("it is neither a tensor nor an object"))?;
        let dtype = fields.get("properties").and_then(|value| self.dtype(value));
        let dtype = dtype.ok_or_else(|| broken("its dtype cannot be read"))?;
        let shape = fields.get("size").and_then(|value| dims(self.pickle, value));
        let shape = shape.ok_or_else(|| broken("its shape cannot be read"))?;
        let chunks = fields.get("chunks").and_then(|value| self.pickle.list(value));
        let mut pieces = Vec::new();
        for chunk in chunks.ok_or_else(|| broken("it has no list of pieces"))? {
            let piece = self.piece(*chunk).ok_or_else(|| broken("one of its pieces cannot be read"))?;
            if Within::new(&shape, &piece.offsets, &piece.sizes).is_none() {
                let UnplacedPiece { offsets, sizes, .. } = &piece;
                return Err(broken(&format!(
                    "its piece of {sizes:?} at {offsets:?} leaves its shape {shape:?}"
                )));
            }
            *numbers_left = numbers_left
                .checked_sub(2 * shape.len() + 1)
                .ok_or_else(|| broken("it has more pieces than the file has bytes"))?;
            pieces.push(piece);
        }
        pieces.sort_by(|a, b| a.offsets.cmp(&b.offsets));
        Ok(Unplaced::Tensor { dtype, shape, pieces })
    }

    /// Properties are a tuple whose first member is the dtype; the outer `None` is for what is none.
    fn dtype(&self, value: Value<'a>) -> Option<Option<Dtype>> {
        let made = self.pickle.made(value).filter(|made| made.class == Class::TensorProperties)?;
        match self.pickle.tuple(made.state?)?.first()? {
            Value::Class(Class::Dtype(dtype)) => Some(*dtype),
            _ => None,
        }
    }

    fn piece(&self, value: Value<'a>) -> Option<UnplacedPiece> {
        let fields = self.pickle.fields(value, Class::Chunk)?;
        let dims = |name: &str| dims(self.pickle, fields.get(name)?);
        Some(UnplacedPiece { offsets: dims("offsets")?, sizes: dims("sizes")?, location: None })
    }

    /// Gives every piece the blob that `storage_data` says, and returns the names of files.
    fn place(
        &self,
        fields: &Fields<'p, 'a>,
        entries: &mut BTreeMap<&'a str, Unplaced>,
    ) -> Result<Vec<String>> {
        let (mut files, mut numbers) = (Vec::new(), HashMap::new());
        for (index, info) in self.dict(fields, "storage_data")? {
            let index = self.fields(*index, Class::Index, "a blob without a key")?;
            let Some(Value::Str(key)) = index.get("fqn") else {
                return Err(Error::format(self.path, "a blob without a key"));
            };
            let broken = |what: &str| Error::entry(self.path, key, what);
            let info = self.pickle.fields(*info, Class::StorageInfo);
            let info = info.ok_or_else(|| broken("its place in a file cannot be read"))?;
            let (name, start, bytes) = self.location(key, &info)?;
            let file = *numbers.entry(name).or_insert_with(|| {
                files.push(name.to_string());
                files.len() - 1
            });
            let offset = index.get("offset").filter(|value| *value != Value::None);
            let offset = match offset {
                Some(value) => Some(
                    dims(self.pickle, value).ok_or_else(|| broken("the offset of a piece cannot be read"))?,
                ),
                None => None,
            };
            let entry =
                entries.get_mut(key).ok_or_else(|| broken("a file has it, the list of keys does not"))?;
            let slot =
                entry.slot(offset).ok_or_else(|| broken("a file has a piece of it that is not listed"))?;
            if slot.replace(Location { file, start, bytes }).is_some() {
                return Err(broken("one of its pieces is in two places"));
            }
        }
        Ok(files)
    }

    /// File, first byte and bytes of a blob.
    fn location(&self, key: &str, info: &Fields<'p, 'a>) -> Result<(&'a str, u64, u64)> {
        let broken = |what: String| Error::entry(self.path, key, what);
        let number = |name: &str| match info.get(name) {
            Some(Value::Int(number)) => u64::try_from(number).ok(),
            _ => None,
        };
        let (Some(Value::Str(name)), Some(start), Some(bytes)) =
            (info.get("relative_path"), number("offset"), number("length"))
        else {
            return Err(broken("its place in a file cannot be read".into()));
        };
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(broken(format!("{name:?} is not the name of a file in this folder")));
        }
        if start.checked_add(bytes).is_none() {
            return Err(broken(format!("{bytes} bytes at {start} are in no file")));
        }
        let transforms = info.get("transform_descriptors").unwrap_or(Value::None);
        let plain = transforms == Value::None || self.pickle.list(transforms).is_some_and(<[_]>::is_empty);
        if !plain {
            return Err(broken(
                "it was saved through an extension, as a compression; save it without".into(),
            ));
        }
        Ok((name, start, bytes))
    }
}

impl Unplaced {
    /// Where the location of the piece at `offset` belongs. Tensors saved whole may be listed without an offset.
    fn slot(&mut self, offset: Option<Vec<usize>>) -> Option<&mut Option<Location>> {
        match (self, offset) {
            (Unplaced::Object(location), None) => Some(location),
            (Unplaced::Tensor { pieces, .. }, Some(offset)) => {
                // Of several pieces at one place, all but one are empty.
                let first = pieces.partition_point(|piece| piece.offsets < offset);
                let end = pieces.partition_point(|piece| piece.offsets <= offset);
                let found = &mut pieces[first..end];
                let full = found.iter().position(|piece| !piece.sizes.contains(&0)).unwrap_or(0);
                found.get_mut(full).map(|piece| &mut piece.location)
            }
            (Unplaced::Tensor { pieces, .. }, None) => match &mut pieces[..] {
                [piece] => Some(&mut piece.location),
                _ => None,
            },
            (Unplaced::Object(_), Some(_)) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Many keys that all name one list of pieces, by the memo: few bytes that describe very much.
    #[test]
    fn a_pickle_that_describes_far_more_than_it_holds_is_refused() {
        let class = |name: &str| {
            [b"ctorch.distributed.checkpoint.metadata\n", name.as_bytes(), b"\n)\x81}("].concat()
        };
        let text = |text: &str| [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
        let chunk = || {
            let sizes = [text("offsets"), b"K\0\x85".to_vec(), text("sizes"), b"K\x01\x85".to_vec()].concat();
            [class("ChunkStorageMetadata").as_slice(), &sizes, b"ubq\x01"].concat()
        };
        let tensor = |key: &str, chunks: &[u8]| {
            let properties =
                b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81ctorch\nfloat32\n\x85b"
                    .to_vec();
            let fields =
                [text("properties"), properties, text("size"), b"M\xff\xff\x85".to_vec(), text("chunks")];
            [text(key).as_slice(), &class("TensorStorageMetadata"), &fields.concat(), chunks, b"ub"].concat()
        };
        let list = [b"]q\x02(", chunk().as_slice(), &b"h\x01".repeat(5000), b"e"].concat();
        let keys =
            (0..5000).flat_map(|key| tensor(&key.to_string(), if key == 0 { &list } else { b"h\x02" }));
        let body: Vec<u8> =
            [text("state_dict_metadata"), b"}(".to_vec(), keys.collect(), b"u".to_vec()].concat();
        let pickle = [b"\x80\x02", class("Metadata").as_slice(), &body, b"ub."].concat();
        let text = Metadata::parse(Path::new(".metadata"), &pickle).unwrap_err().to_string();
        assert!(text.contains("more pieces than the file has bytes"), "{text}");
    }
}
