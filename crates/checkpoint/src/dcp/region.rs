//! A stretch of a file, or of memory: what a blob of a checkpoint lies in.

use std::fmt::Debug;
use std::io;
use std::os::unix::fs::FileExt;

/// Something that can be read by position.
pub(crate) trait ReadAt: Debug {
    /// Fills `out` with the bytes from `at` on.
    fn read_at(&self, at: u64, out: &mut [u8]) -> io::Result<()>;
}

impl ReadAt for std::fs::File {
    fn read_at(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(out, at)
    }
}

impl ReadAt for &[u8] {
    fn read_at(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(at).unwrap_or(usize::MAX);
        let bytes = start.checked_add(out.len()).and_then(|end| self.get(start..end));
        out.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Region<'a> {
    source: &'a dyn ReadAt,
    start: u64,
    len: u64,
}

impl<'a> Region<'a> {
    pub fn new(source: &'a dyn ReadAt, start: u64, len: u64) -> Self {
        Region { source, start, len }
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// Fills `out` from byte `at` of the region on.
    pub fn read(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        if at.checked_add(out.len() as u64).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.source.read_at(self.start + at, out)
    }
}
