//! What a save does to the outside: few enough operations that a test can make each of them fail.
//!
//! On local disk several writers share a file and each writes its own ranges. An object store would have one writer
//! for each file, and a manifest that is put last instead of a rename.

use std::fmt::Debug;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Where checkpoints are written to.
pub trait Storage: Debug + Send + Sync {
    /// Makes a folder, and those above it.
    fn create_dir(&self, dir: &Path) -> io::Result<()>;

    /// Makes a file of `bytes` bytes, empty of what was there before.
    fn create(&self, path: &Path, bytes: u64) -> io::Result<Box<dyn Target>>;

    /// Opens a file somebody else has made.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Target>>;

    /// Gives a file or folder another name, at once. Nothing is there under that name, or a file or link.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Makes a link at `path` that leads to its neighbour `target`.
    fn link(&self, target: &str, path: &Path) -> io::Result<()>;

    /// Makes the names in a folder outlast a crash.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;

    /// Removes a folder with all it holds, or a file, or nothing where there is nothing.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// A file that is being written.
pub trait Target: Debug + Send + Sync {
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;

    /// Makes what was written outlast a crash.
    fn sync(&self) -> io::Result<()>;
}

/// The local disk, or a file system that all ranks share.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl Storage for Disk {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        std::fs::create_dir_all(dir)
    }

    fn create(&self, path: &Path, bytes: u64) -> io::Result<Box<dyn Target>> {
        let file = std::fs::File::create(path)?;
        file.set_len(bytes)?;
        Ok(Box::new(DiskFile(file)))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Target>> {
        Ok(Box::new(DiskFile(std::fs::OpenOptions::new().write(true).open(path)?)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn link(&self, target: &str, path: &Path) -> io::Result<()> {
        std::os::unix::fs::symlink(target, path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        std::fs::File::open(dir)?.sync_all()
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let removed = match std::fs::symlink_metadata(path) {
            Ok(found) if found.is_dir() => std::fs::remove_dir_all(path),
            Ok(_) => std::fs::remove_file(path),
            Err(e) => Err(e),
        };
        match removed {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

#[derive(Debug)]
struct DiskFile(std::fs::File);

impl Target for DiskFile {
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }
}
