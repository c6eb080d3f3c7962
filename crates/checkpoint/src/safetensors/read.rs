use super::header::{Header, MAX_HEADER_BYTES, TensorInfo};
use crate::{Error, Result};
use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// An open safetensors file whose header has been found sound. Data is read by position, from any thread.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    file: std::fs::File,
    /// Where the data starts.
    data: u64,
    header: Header,
    index: HashMap<String, usize>,
    header_crc32: u32,
}

impl File {
    /// Reads and checks the header, and that the file has all the bytes it promises.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = std::fs::File::open(path).map_err(Error::io(path, "open"))?;
        let size = file.metadata().map_err(Error::io(path, "look at"))?.len();
        if size < 8 {
            return Err(Error::format(path, format!("not a safetensors file: it has only {size} bytes")));
        }
        let mut start = [0; 8];
        file.read_exact_at(&mut start, 0).map_err(Error::io(path, "read the header length of"))?;
        let length = u64::from_le_bytes(start);
        if length > MAX_HEADER_BYTES {
            let what = format!("not a safetensors file: its header would have {length} bytes");
            return Err(Error::format(path, what));
        }
        let data = 8 + length;
        if data > size {
            let what =
                format!("truncated: the header ends at byte {data}, the file at {size}; fetch it again");
            return Err(Error::format(path, what));
        }
        let mut json = vec![0; length as usize];
        file.read_exact_at(&mut json, 8).map_err(Error::io(path, "read the header of"))?;
        let header = Header::parse(path, &json)?;
        let mut sum = crc32fast::Hasher::new();
        sum.update(&start);
        sum.update(&json);
        let found = size - data;
        if found != header.data_bytes {
            let state = if found < header.data_bytes { "truncated" } else { "too long" };
            let what = format!(
                "{state}: the header promises {} bytes of data, the file has {found}; fetch it again",
                header.data_bytes
            );
            return Err(Error::format(path, what));
        }
        let index = header.tensors.iter().enumerate().map(|(i, (name, _))| (name.clone(), i)).collect();
        let (path, header_crc32) = (path.to_path_buf(), sum.finalize());
        Ok(File { path, file, data, header, index, header_crc32 })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The checksum of what comes before the data.
    pub(crate) fn header_crc32(&self) -> u32 {
        self.header_crc32
    }

    /// Names and entries, in the order of their bytes.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &TensorInfo)> {
        self.header.tensors.iter().map(|(name, info)| (name.as_str(), info))
    }

    /// The `__metadata__` of the file.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&i| &self.header.tensors[i].1)
    }

    /// As [`File::get`], and an error that names the file when there is no such tensor.
    pub fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.get(name).ok_or_else(|| Error::Missing {
            path: self.path.clone(),
            key: format!("tensor {name}"),
            hint: String::new(),
        })
    }

    /// Fills `out` with a tensor's bytes from `byte_start` on.
    pub fn read_range(&self, name: &str, byte_start: u64, out: &mut [u8]) -> Result<()> {
        self.check_range(name, byte_start, out.len())?;
        let read = self.file.read_exact_at(out, self.data + self.info(name)?.start() + byte_start);
        read.map_err(|source| Error::Io { path: self.path.clone(), doing: "read from", source })
    }

    /// Fails where the range leaves the tensor.
    pub(crate) fn check_range(&self, name: &str, byte_start: u64, len: usize) -> Result<()> {
        self.info(name)?.check_range(&self.path, name, byte_start, len)
    }

    /// All bytes of a tensor.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.info(name)?.num_bytes() as usize];
        self.read_range(name, 0, &mut bytes)?;
        Ok(bytes)
    }
}
