//! The few things that Linux gives to processes of one machine: memory in common, sleeping on a word in it,
//! and seeing that another process has ended.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Memory that other processes map too. It has no name in any file system: it is gone with the last process
/// that maps it, however those end.
#[derive(Debug)]
pub struct Mapping {
    start: usize,
    bytes: usize,
}

impl Mapping {
    /// New memory, all zero; it takes room as it is touched. The file is for others to open while it is held.
    pub fn create(bytes: usize) -> io::Result<(Self, File)> {
        // SAFETY: the name is a C string; what returns is a new descriptor or an error.
        let descriptor = unsafe { libc::memfd_create(c"shardloom".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and ours alone.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(bytes as u64)?;
        Ok((Self::of(&file, bytes)?, file))
    }

    /// The memory that process `pid` holds as `descriptor`.
    pub fn open(pid: u32, descriptor: i32, bytes: usize) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(format!("/proc/{pid}/fd/{descriptor}"))?;
        if file.metadata()?.len() != bytes as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not of the size agreed on"));
        }
        Self::of(&file, bytes)
    }

    fn of(file: &File, bytes: usize) -> io::Result<Self> {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that is as long.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping { start: start.expose_provenance(), bytes })
    }

    /// The address of byte `offset`, of `len` that must be inside.
    pub fn at(&self, offset: usize, len: usize) -> usize {
        assert!(offset + len <= self.bytes, "{len} bytes at {offset} of {}", self.bytes);
        self.start + offset
    }

    pub fn word(&self, offset: usize) -> &AtomicU32 {
        let address = self.at(offset, 4);
        assert!(address.is_multiple_of(4));
        // SAFETY: four aligned bytes inside the mapping, which every process uses as an atomic only.
        unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(address)) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by us, and nothing that borrows from it is left.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.start), self.bytes) };
    }
}

/// A number in common memory that one process raises and others wait for.
#[derive(Clone, Copy, Debug)]
pub struct Counter<'a> {
    pub value: &'a AtomicU32,
    /// How many sleep on it: nobody is woken by a system call where nobody sleeps.
    pub sleepers: &'a AtomicU32,
}

/// Whether a counter that wraps around has come to `target`.
pub fn reached(value: u32, target: u32) -> bool {
    value.wrapping_sub(target) as i32 >= 0
}

impl Counter<'_> {
    pub fn get(self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    pub fn set(self, value: u32) {
        // Sequentially consistent with the sleeper's count and look: one of the two sees the other.
        self.value.store(value, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            wake(self.value);
        }
    }

    /// Looks for `target` for a moment. Worth it only where the peers have cores of their own.
    pub fn spin(self, target: u32, time: Duration) -> bool {
        let started = Instant::now();
        loop {
            for _ in 0..32 {
                if reached(self.get(), target) {
                    return true;
                }
                std::hint::spin_loop();
            }
            if started.elapsed() >= time {
                return false;
            }
        }
    }

    /// Sleeps until the counter comes to `target`, or about `time`.
    pub fn sleep(self, target: u32, time: Duration) -> bool {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let seen = self.value.load(Ordering::SeqCst);
        if !reached(seen, target) {
            sleep(self.value, seen, time);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        reached(self.get(), target)
    }
}

fn sleep(word: &AtomicU32, seen: u32, time: Duration) {
    let time = libc::timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos() as _ };
    // SAFETY: the word outlives the call, and the kernel only compares it. Waking for no reason is allowed.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &time) };
}

fn wake(word: &AtomicU32) {
    // SAFETY: the kernel looks for sleepers on this word and touches nothing else.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Another process, known for good: its number may be given to a new one, this handle stays with it.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    handle: OwnedFd,
}

impl Process {
    /// The process with this number that started at this time.
    pub fn watch(pid: u32, start_time: u64) -> io::Result<Self> {
        // SAFETY: no pointers; what returns is a new descriptor or an error.
        let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and ours alone.
        let handle = unsafe { OwnedFd::from_raw_fd(descriptor as i32) };
        let process = Process { pid, handle };
        if self::start_time(pid)? != start_time || process.has_ended() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "it has ended"));
        }
        Ok(process)
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    pub fn has_ended(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.handle.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure, which outlives the call.
        unsafe { libc::poll(&mut poll, 1, 0) == 1 }
    }
}

/// When a process started, in the kernel's ticks.
pub fn start_time(pid: u32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is a name in brackets that may contain anything.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let field = rest.split_whitespace().nth(19).and_then(|field| field.parse().ok());
    field.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its stat has no start time"))
}

/// What tells this machine, and the part of it in which process numbers mean the same, from others.
pub fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}
