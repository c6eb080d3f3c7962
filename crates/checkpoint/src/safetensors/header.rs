//! The header: names to dtypes, shapes and byte ranges, checked once so that nobody downstream has to.

use crate::{Dtype, Error, Result};
use serde::de::{DeserializeSeed, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::Path;

/// What the format allows.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor of a file. Bytes are counted from the start of the data, after the header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorInfo {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    #[serde(rename = "data_offsets")]
    pub(crate) offsets: (u64, u64),
}

impl TensorInfo {
    /// Where its bytes start, counted from the start of the data.
    pub fn start(&self) -> u64 {
        self.offsets.0
    }

    pub fn num_bytes(&self) -> u64 {
        self.offsets.1 - self.offsets.0
    }

    pub fn num_elements(&self) -> u64 {
        self.num_bytes() / self.dtype.bytes() as u64
    }

    /// Fails where the range leaves the tensor; `path` and `key` say which it is.
    pub(crate) fn check_range(&self, path: &Path, key: &str, start: u64, len: usize) -> Result<()> {
        let size = self.num_bytes();
        if start.checked_add(len as u64).is_some_and(|end| end <= size) {
            return Ok(());
        }
        Err(Error::Range { path: path.to_path_buf(), key: key.to_string(), start, len, size })
    }
}

/// Bytes of a tensor, if they can be counted.
pub(crate) fn bytes_of(dtype: Dtype, shape: &[usize]) -> Option<u64> {
    shape.iter().try_fold(dtype.bytes() as u64, |bytes, &dim| bytes.checked_mul(dim as u64))
}

#[derive(Debug, Default)]
pub(crate) struct Header {
    /// In the order of their bytes.
    pub tensors: Vec<(String, TensorInfo)>,
    pub metadata: BTreeMap<String, String>,
    pub data_bytes: u64,
}

impl Header {
    /// Parses and checks: every entry's bytes are what its shape needs, and they follow each other from byte
    /// 0 on without holes.
    pub fn parse(path: &Path, json: &[u8]) -> Result<Self> {
        if json.first() != Some(&b'{') {
            return Err(Error::format(path, "not a safetensors file: its header does not start with {"));
        }
        let entries = serde_json::from_slice::<Entries>(json)
            .map_err(|e| Error::format(path, format!("the header cannot be read: {e}")))?;
        let Entries { mut tensors, metadata } = entries;
        // An empty tensor at the place where another one starts comes before it.
        tensors.sort_by_key(|(_, info)| info.offsets);
        let mut data_bytes = 0;
        for (name, info) in &tensors {
            let (start, end) = info.offsets;
            if end < start {
                return Err(Error::entry(path, name, format!("its bytes end at {end}, before {start}")));
            }
            if start != data_bytes {
                let what =
                    format!("its bytes start at {start}, but the entry before it ends at {data_bytes}");
                return Err(Error::entry(path, name, what));
            }
            if bytes_of(info.dtype, &info.shape) != Some(end - start) {
                let what = format!("{} {:?} does not fit into {} bytes", info.dtype, info.shape, end - start);
                return Err(Error::entry(path, name, what));
            }
            data_bytes = end;
        }
        Ok(Header { tensors, metadata, data_bytes })
    }
}

/// The header's JSON object, with duplicate names refused rather than overwritten.
#[derive(Default)]
struct Entries {
    tensors: Vec<(String, TensorInfo)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensor names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Entries, A::Error> {
        let mut entries = Entries::default();
        let mut seen = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(serde::de::Error::custom(format!("{name} occurs twice")));
            }
            if name == "__metadata__" {
                entries.metadata = map.next_value()?;
            } else {
                let info = map.next_value_seed(Named(&name))?;
                entries.tensors.push((name, info));
            }
        }
        Ok(entries)
    }
}

/// Says which entry could not be read.
struct Named<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Named<'_> {
    type Value = TensorInfo;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<TensorInfo, D::Error> {
        TensorInfo::deserialize(deserializer)
            .map_err(|e| serde::de::Error::custom(format!("{}: {e}", self.0)))
    }
}
