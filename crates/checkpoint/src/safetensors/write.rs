use super::header::{MAX_HEADER_BYTES, TensorInfo, bytes_of};
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

    /// Byte of the file at which a tensor starts.
    pub fn position(&self, name: &str) -> Option<u64> {
        Some(self.header.len() as u64 + self.get(name)?.start())
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

/// Writes ranges of one file, which lies under a temporary name until [`Writer::finish`] renames it.
///
/// Several writers may share a file: one of them [`create`](Writer::create)s it, the others
/// [`join`](Writer::join) it afterwards, all write disjoint ranges and [`sync`](Writer::sync), and when all
/// have, the first one finishes.
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
        let (path, temporary) = names(path.as_ref())?;
        let file = std::fs::File::create(&temporary).map_err(Error::io(&temporary, "create"))?;
        file.set_len(layout.file_bytes()).map_err(Error::io(&temporary, "make room in"))?;
        file.write_all_at(layout.header(), 0).map_err(Error::io(&temporary, "write the header of"))?;
        Ok(Writer { path, temporary, file, layout })
    }

    /// Opens the temporary file another writer has created with the same layout.
    pub fn join(path: impl AsRef<Path>, layout: Layout) -> Result<Self> {
        let (path, temporary) = names(path.as_ref())?;
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&temporary);
        let file = file.map_err(Error::io(&temporary, "open"))?;
        let mut header = vec![0; layout.header().len()];
        let read = file.read_exact_at(&mut header, 0);
        read.map_err(Error::io(&temporary, "read the header of"))?;
        if header != layout.header() {
            return Err(Error::format(&temporary, "it was created with other names, dtypes or shapes"));
        }
        Ok(Writer { path, temporary, file, layout })
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Writes a tensor's bytes from `byte_start` on.
    pub fn write_range(&self, name: &str, byte_start: u64, bytes: &[u8]) -> Result<()> {
        let (Some(info), Some(position)) = (self.layout.get(name), self.layout.position(name)) else {
            let (path, key) = (self.path.clone(), format!("tensor {name}"));
            return Err(Error::Missing { path, key, hint: " in the layout of this file".into() });
        };
        let (len, size) = (bytes.len(), info.num_bytes());
        if byte_start.checked_add(len as u64).is_none_or(|end| end > size) {
            let (path, key) = (self.path.clone(), name.to_string());
            return Err(Error::Range { path, key, start: byte_start, len, size });
        }
        let written = self.file.write_all_at(bytes, position + byte_start);
        written.map_err(Error::io(&self.temporary, "write to"))
    }

    /// Makes what this writer wrote outlast a crash.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(Error::io(&self.temporary, "sync"))
    }

    /// Gives the file its name. Everything must have been written; only one of several writers does this.
    pub fn finish(self) -> Result<()> {
        self.sync()?;
        std::fs::rename(&self.temporary, &self.path).map_err(Error::io(&self.path, "rename into"))?;
        sync_parent(&self.path)
    }
}

/// The final and the temporary name.
fn names(path: &Path) -> Result<(PathBuf, PathBuf)> {
    let Some(name) = path.file_name() else {
        return Err(Error::format(path, "not the name of a file"));
    };
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(".partial");
    Ok((path.to_path_buf(), path.with_file_name(temporary)))
}

/// A rename lasts once its folder is synced.
fn sync_parent(path: &Path) -> Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = std::fs::File::open(parent).map_err(Error::io(parent, "open"))?;
    folder.sync_all().map_err(Error::io(parent, "sync"))
}

/// Writes a small file under a temporary name and renames it.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let (path, temporary) = names(path)?;
    let file = std::fs::File::create(&temporary).map_err(Error::io(&temporary, "create"))?;
    file.write_all_at(bytes, 0).map_err(Error::io(&temporary, "write to"))?;
    file.sync_all().map_err(Error::io(&temporary, "sync"))?;
    std::fs::rename(&temporary, &path).map_err(Error::io(&path, "rename into"))?;
    sync_parent(&path)
}
