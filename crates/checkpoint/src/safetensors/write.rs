use super::header::{MAX_HEADER_BYTES, TensorInfo, bytes_of};
use crate::storage::{Disk, Storage};
use crate::{Dtype, Error, Result};
use serde::ser::{Serialize, SerializeMap, Serializer};
use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Where each tensor of a file to be written will lie: everything about it but the data. It depends on names,
/// dtypes and shapes only, so that several writers agree without talking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    tensors: Vec<(String, TensorInfo)>,
    index: HashMap<String, usize>,
    header: Vec<u8>,
    data_bytes: u64,
}

impl Layout {
    /// Lays the tensors out in the order given. `path` is the file this is for; it appears in errors.
    pub fn new<'a>(
        path: &Path,
        tensors: impl IntoIterator<Item = (&'a str, Dtype, &'a [usize])>,
    ) -> Result<Self> {
        let (mut entries, mut index, mut data_bytes) = (Vec::new(), HashMap::new(), 0u64);
        for (name, dtype, shape) in tensors {
            if name == "__metadata__" {
                return Err(Error::entry(path, name, "the format keeps this name for itself"));
            }
            if index.insert(name.to_string(), entries.len()).is_some() {
                return Err(Error::entry(path, name, "it is listed twice"));
            }
            let end = bytes_of(dtype, shape).and_then(|bytes| data_bytes.checked_add(bytes));
            let end = end.ok_or_else(|| Error::entry(path, name, format!("{shape:?} is too large")))?;
            let offsets = (data_bytes, end);
            entries.push((name.to_string(), TensorInfo { dtype, shape: shape.to_vec(), offsets }));
            data_bytes = end;
        }
        let json = serde_json::to_vec(&Entries(&entries));
        let mut json = json.map_err(|e| Error::format(path, format!("its header cannot be written: {e}")))?;
        json.resize(json.len().next_multiple_of(8), b' ');
        if json.len() as u64 > MAX_HEADER_BYTES {
            let what =
                format!("its header of {} bytes is over the format's limit; use more parts", json.len());
            return Err(Error::format(path, what));
        }
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.extend(json);
        Ok(Layout { tensors: entries, index, header, data_bytes })
    }

    /// The file's first bytes: length and header.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Bytes of the whole file.
    pub fn file_bytes(&self) -> u64 {
        self.header.len() as u64 + self.data_bytes
    }

    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, info)| (name.as_str(), info))
    }

    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&i| &self.tensors[i].1)
    }

    /// Byte of the file at which bytes `byte_start..byte_start + len` of a tensor lie. `path` appears in errors.
    pub fn position(&self, path: &Path, name: &str, byte_start: u64, len: usize) -> Result<u64> {
        let Some(info) = self.get(name) else {
            let (path, key) = (path.to_path_buf(), format!("tensor {name}"));
            return Err(Error::Missing { path, key, hint: " in the layout of this file".into() });
        };
        info.check_range(path, name, byte_start, len)?;
        Ok(self.header.len() as u64 + info.start() + byte_start)
    }
}

struct Entries<'a>(&'a [(String, TensorInfo)]);

impl Serialize for Entries<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len() + 1))?;
        map.serialize_entry("__metadata__", &HashMap::from([("format", "pt")]))?;
        for (name, info) in self.0 {
            map.serialize_entry(name, info)?;
        }
        map.end()
    }
}

/// Writes a file of its own, which lies under a temporary name until [`Writer::finish`] renames it.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    temporary: PathBuf,
    file: std::fs::File,
    layout: Layout,
}

impl Writer {
    /// Creates the temporary file at its full size, header included. What an earlier, unfinished attempt left
    /// there is replaced.
    pub fn create(path: impl AsRef<Path>, layout: Layout) -> Result<Self> {
        let path = path.as_ref();
        let Some(name) = path.file_name() else {
            return Err(Error::format(path, "not the name of a file"));
        };
        let temporary = path.with_file_name(format!(".{}.partial", name.to_string_lossy()));
        let file = std::fs::File::create(&temporary).map_err(Error::io(&temporary, "create"))?;
        file.set_len(layout.file_bytes()).map_err(Error::io(&temporary, "make room in"))?;
        file.write_all_at(layout.header(), 0).map_err(Error::io(&temporary, "write the header of"))?;
        Ok(Writer { path: path.to_path_buf(), temporary, file, layout })
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Writes a tensor's bytes from `byte_start` on.
    pub fn write_range(&self, name: &str, byte_start: u64, bytes: &[u8]) -> Result<()> {
        let position = self.layout.position(&self.path, name, byte_start, bytes.len())?;
        self.file.write_all_at(bytes, position).map_err(Error::io(&self.temporary, "write to"))
    }

    /// Gives the file its name. Everything must have been written.
    pub fn finish(self) -> Result<()> {
        self.file.sync_all().map_err(Error::io(&self.temporary, "sync"))?;
        std::fs::rename(&self.temporary, &self.path).map_err(Error::io(&self.path, "rename into"))?;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        Disk.sync_dir(parent).map_err(Error::io(parent, "sync"))
    }
}
