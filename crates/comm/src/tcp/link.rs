//! A connection between two ranks: a socket, and between ranks of one machine also a ring of shared memory in
//! each direction. Then the bytes go through the rings, and the socket carries single bytes that wake a sleeper
//! (so that one `poll` waits for near and far peers alike) and tells when the peer is gone.

use crate::copy::copy;
use crate::shm::system::Mapping;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Bytes of a ring.
const RING: usize = 256 << 10;
/// Counters and data of one ring: each counter has a cache line (and its neighbour) to itself.
const LINE: usize = 128;
const DATA: usize = 4 * LINE;
const ONE_WAY: usize = DATA + RING;
/// Bytes of both rings.
pub const BYTES: usize = 2 * ONE_WAY;

/// How often the kernel sends again, or asks whether it may send, without any answer before a link counts as
/// cut: about six seconds.
const MAX_UNANSWERED: u8 = 5;

#[derive(Debug)]
pub struct Link {
    socket: TcpStream,
    near: Option<Near>,
    /// The peer closed its end, or it broke: what is in the ring may still be read.
    gone: Option<String>,
}

/// Rings to and from a rank of this machine.
#[derive(Debug)]
struct Near {
    memory: Mapping,
    /// Offsets of the ring this side writes, and of the one it reads.
    out: usize,
    into: usize,
}

impl Near {
    fn word(&self, ring: usize, index: usize) -> &AtomicU32 {
        self.memory.word(ring + index * LINE)
    }
}

// What each of a ring's words is.
const WRITTEN: usize = 0;
const READ: usize = 1;
const READER_SLEEPS: usize = 2;
const WRITER_SLEEPS: usize = 3;

impl Link {
    /// `memory` is shared with the peer; of its two rings, `first` says which one this side writes.
    pub fn new(socket: TcpStream, memory: Option<Mapping>, first: bool) -> io::Result<Self> {
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
        crate::socket::keep_alive(&socket)?;
        let (out, into) = if first { (0, ONE_WAY) } else { (ONE_WAY, 0) };
        Ok(Link { socket, near: memory.map(|memory| Near { memory, out, into }), gone: None })
    }

    pub fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// What to wait for before trying again to write, to read or both.
    pub fn events(&self, write: bool, read: bool) -> i16 {
        match self.near {
            Some(_) => libc::POLLIN,
            None => (if write { libc::POLLOUT } else { 0 }) | (if read { libc::POLLIN } else { 0 }),
        }
    }

    pub fn shut_down(&self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    /// Takes as many of the bytes as there is room for; 0 when the caller must wait.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, String> {
        let Some(near) = &self.near else {
            return match self.socket.write(bytes) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(0),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(0),
                other => other.map_err(|e| e.to_string()),
            };
        };
        let (written, read) = (near.word(near.out, WRITTEN), near.word(near.out, READ));
        let at = written.load(Ordering::Relaxed);
        let room = || RING.saturating_sub(at.wrapping_sub(read.load(Ordering::SeqCst)) as usize);
        if room() == 0 {
            // Says that it will sleep, and looks again: one of the two sides sees the other.
            near.word(near.out, WRITER_SLEEPS).store(1, Ordering::SeqCst);
            if room() == 0 {
                return self.gone.clone().map_or(Ok(0), Err);
            }
        }
        let start = at as usize % RING;
        let now = room().min(bytes.len()).min(RING - start).min(RING / 4);
        let into = near.memory.at(near.out + DATA + start, now) as *mut u8;
        // SAFETY: these bytes of the ring are free, and ours to write until the counter is raised.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), into, now) };
        written.store(at.wrapping_add(now as u32), Ordering::SeqCst);
        let sleeps = near.word(near.out, READER_SLEEPS).swap(0, Ordering::SeqCst) == 1;
        self.wake(sleeps);
        Ok(now)
    }

    /// Fills as many of the bytes as are there; 0 when the caller must wait.
    pub fn read(&mut self, bytes: &mut [u8]) -> Result<usize, String> {
        let Some(near) = &self.near else {
            return match self.socket.read(bytes) {
                Ok(0) => Err("its connection was closed".into()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(0),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(0),
                other => other.map_err(|e| e.to_string()),
            };
        };
        let (written, read) = (near.word(near.into, WRITTEN), near.word(near.into, READ));
        let at = read.load(Ordering::Relaxed);
        let there = || (written.load(Ordering::SeqCst).wrapping_sub(at) as usize).min(RING);
        if there() == 0 {
            near.word(near.into, READER_SLEEPS).store(1, Ordering::SeqCst);
            if there() == 0 {
                return self.gone.clone().map_or(Ok(0), Err);
            }
        }
        let start = at as usize % RING;
        let now = there().min(bytes.len()).min(RING - start);
        let from = near.memory.at(near.into + DATA + start, now);
        // SAFETY: these bytes of the ring are written, and left alone until the counter is raised.
        unsafe { copy(from, bytes.as_mut_ptr() as usize, now, bytes.len()) };
        read.store(at.wrapping_add(now as u32), Ordering::SeqCst);
        let sleeps = near.word(near.into, WRITER_SLEEPS).swap(0, Ordering::SeqCst) == 1;
        self.wake(sleeps);
        Ok(now)
    }

    fn wake(&mut self, sleeps: bool) {
        if sleeps && let Err(e) = self.socket.write(&[0]) {
            // A full socket has enough in it to wake anyone.
            if e.kind() != io::ErrorKind::WouldBlock {
                self.gone.get_or_insert(e.to_string());
            }
        }
    }

    /// After `poll` said that there is something to read: takes what only woke us, and notices the end.
    pub fn woken(&mut self) {
        if self.near.is_none() {
            return;
        }
        let mut bytes = [0; 64];
        loop {
            match self.socket.read(&mut bytes) {
                Ok(0) => {
                    self.gone.get_or_insert("its connection was closed".into());
                    return;
                }
                Ok(_) => {}
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                    return;
                }
                Err(e) => {
                    self.gone.get_or_insert(e.to_string());
                    return;
                }
            }
        }
    }

    /// Whether what was sent has not been acknowledged for seconds, though it was sent again and again. (A
    /// peer that is merely busy acknowledges: its kernel does.)
    pub fn is_cut(&self) -> bool {
        // SAFETY: plain numbers, for which zero is a value.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
        let into = (&raw mut info).cast();
        // SAFETY: the kernel writes at most `len` bytes into the structure.
        let code = unsafe {
            libc::getsockopt(self.socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, into, &mut len)
        };
        code == 0 && info.tcpi_retransmits.max(info.tcpi_probes) >= MAX_UNANSWERED
    }
}

/// Sleeps until one of the descriptors has one of its events, or about `time`; which ones have.
pub fn poll(wanted: &[(RawFd, i16)], time: Duration) -> Vec<bool> {
    let entry = |&(fd, events): &(RawFd, i16)| libc::pollfd { fd, events, revents: 0 };
    let mut entries: Vec<libc::pollfd> = wanted.iter().map(entry).collect();
    // SAFETY: as many structures as said, which outlive the call.
    unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, time.as_millis() as i32) };
    entries.iter().map(|entry| entry.revents != 0).collect()
}
