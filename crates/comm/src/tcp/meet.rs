//! How the ranks of a group connect to each other: each listens while it joins, the higher rank of a pair dials
//! the lower, and both show that they belong to the job before anything else is said.

use super::link::{self, Link};
use crate::secret::{self, PROOF};
use crate::shm::system::{self, Mapping};
use crate::store::{self, Exchange, Store};
use crate::{Error, Result};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

const MAGIC: &[u8; 8] = b"shardtcp";
/// How long someone who connects may take over each part of the greeting.
const GREETING: Duration = Duration::from_secs(5);

/// Set to 0, ranks of one machine talk through sockets as well.
const RINGS: &str = "SHARDLOOM_TCP_SHM";

/// Who meets.
#[derive(Clone)]
struct Party {
    scope: String,
    rank: usize,
    secret: Vec<u8>,
    timeout: Duration,
}

/// A link to every other rank; none to the own.
pub fn meet(
    store: &Store,
    scope: &str,
    rank: usize,
    size: usize,
    exchange: &Exchange,
    timeout: Duration,
) -> Result<Vec<Option<Link>>> {
    let system = |what: String| Error::System { rank, group: scope.to_string(), what };
    let ip = store.local_ip()?;
    let listener = TcpListener::bind((ip, 0)).map_err(|e| system(format!("cannot listen on {ip}: {e}")))?;
    let address = listener.local_addr().map_err(|e| system(e.to_string()))?;
    // Another network namespace is another machine here: what lies between is a network.
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let here = format!("{} {}", system::machine(), network.display());
    let said = format!("{address}\n{size}\n{here}");
    let all = exchange.exchange(said.as_bytes(), "joining over TCP")?;
    let rings = std::env::var(RINGS).as_deref() != Ok("0");
    let mut peers = Vec::new();
    for (peer, said) in all.iter().enumerate() {
        let said = String::from_utf8_lossy(said).into_owned();
        let fields: Vec<&str> = said.split('\n').collect();
        let parsed = match fields.as_slice() {
            [address, theirs, machine] => {
                address.parse::<SocketAddr>().ok().map(|a| (a, theirs.to_string(), machine.to_string()))
            }
            _ => None,
        };
        let Some((address, theirs, machine)) = parsed else {
            return Err(system(format!("rank {peer} is of another version")));
        };
        if theirs.parse() != Ok(size) {
            return Err(system(format!("it counts {size} ranks, rank {peer} counts {theirs}")));
        }
        peers.push((address, rings && machine == here));
    }
    let secret = secret::from_environment().unwrap_or_default();
    let party = Party { scope: scope.to_string(), rank, secret, timeout };
    let mut links: Vec<Option<Link>> = (0..size).map(|_| None).collect();
    let started = Instant::now();
    for (peer, &(address, near)) in peers.iter().enumerate().take(rank) {
        let link = party.dial(peer, address, near).map_err(|e| {
            let seconds = started.elapsed().as_secs_f64();
            system(format!("cannot reach rank {peer} at {address}, after {seconds:.1} s: {e}"))
        })?;
        links[peer] = Some(link);
    }
    let failure = || store.watched_failure().ok().flatten();
    party.await_dials(&listener, &peers, &mut links, started, failure).map_err(system)?;
    Ok(links)
}

impl Party {
    fn message(&self, side: &[u8], from: usize, to: usize) -> Vec<u8> {
        [side, &(from as u64).to_le_bytes(), &(to as u64).to_le_bytes(), self.scope.as_bytes()].concat()
    }

    fn dial(&self, peer: usize, address: SocketAddr, near: bool) -> io::Result<Link> {
        let mut socket = TcpStream::connect_timeout(&address, self.timeout)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(self.timeout))?;
        socket.set_write_timeout(Some(self.timeout))?;
        let mine = secret::nonce()?;
        socket.write_all(&[&MAGIC[..], &mine].concat())?;
        let theirs = read_array::<32>(&mut socket)?;
        let proof = secret::prove(&self.secret, &[&mine, &theirs, &self.message(b"dial", self.rank, peer)]);
        socket.write_all(&[&(self.rank as u32).to_le_bytes()[..], &proof].concat())?;
        let answer = read_array::<PROOF>(&mut socket).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => io::Error::other("refused; is the job's secret another there?"),
            _ => e,
        })?;
        let wanted =
            secret::prove(&self.secret, &[&mine, &theirs, &self.message(b"answer", self.rank, peer)]);
        if !secret::same(&answer, &wanted) {
            return Err(io::Error::other("who answers there does not know the job's secret"));
        }
        // Which of its descriptors is memory for the two of us, if they can be.
        let (pid, descriptor) = (read_array::<4>(&mut socket)?, read_array::<4>(&mut socket)?);
        let (pid, descriptor) = (u32::from_le_bytes(pid), i32::from_le_bytes(descriptor));
        let memory = match near && descriptor >= 0 {
            true => Mapping::open(pid, descriptor, link::BYTES).ok(),
            false => None,
        };
        socket.write_all(&[memory.is_some().into()])?;
        Link::new(socket, memory, true)
    }

    /// Lets the higher ranks in, and nobody else: each who connects is greeted by a thread of his own, so that
    /// a stranger who says nothing holds up nobody.
    fn await_dials(
        &self,
        listener: &TcpListener,
        peers: &[(SocketAddr, bool)],
        links: &mut [Option<Link>],
        started: Instant,
        failure: impl Fn() -> Option<String>,
    ) -> std::result::Result<(), String> {
        let near: Vec<bool> = peers.iter().map(|&(_, near)| near).collect();
        let (sender, arrivals): (Sender<(usize, Link)>, Receiver<_>) = channel();
        listener.set_nonblocking(true).map_err(|e| e.to_string())?;
        let mut looked = started;
        while links.iter().enumerate().any(|(peer, link)| peer > self.rank && link.is_none()) {
            let seconds = started.elapsed().as_secs_f64();
            if looked.elapsed() > store::LOOK {
                looked = Instant::now();
                if let Some(failure) = failure() {
                    let failure = Error::tell_failure(&failure);
                    return Err(format!("waiting for connections, after {seconds:.1} s: {failure}"));
                }
            }
            if started.elapsed() > self.timeout {
                let missing = (self.rank + 1..links.len()).filter(|&peer| links[peer].is_none());
                let missing = crate::error::list_ranks(missing);
                return Err(format!("{missing} did not connect in {seconds:.1} s"));
            }
            link::poll(&[(listener.as_raw_fd(), libc::POLLIN)], Duration::from_millis(5));
            if let Ok((socket, _)) = listener.accept() {
                let (party, sender, near) = (self.clone(), sender.clone(), near.clone());
                let greet = move || {
                    if let Ok(arrival) = party.greet(socket, &near) {
                        let _ = sender.send(arrival);
                    }
                };
                // Without a thread for it the connection is closed, and the peer says so.
                let _ = std::thread::Builder::new().name("greeting".into()).spawn(greet);
            }
            while let Ok((peer, link)) = arrivals.try_recv() {
                links[peer].get_or_insert(link);
            }
        }
        Ok(())
    }

    fn greet(&self, mut socket: TcpStream, near: &[bool]) -> io::Result<(usize, Link)> {
        let refused = || io::Error::other("a stranger");
        socket.set_nonblocking(false)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(GREETING))?;
        socket.set_write_timeout(Some(GREETING))?;
        if read_array::<8>(&mut socket)? != *MAGIC {
            return Err(refused());
        }
        let (theirs, mine) = (read_array::<32>(&mut socket)?, secret::nonce()?);
        socket.write_all(&mine)?;
        let peer = u32::from_le_bytes(read_array(&mut socket)?) as usize;
        let proof = read_array::<PROOF>(&mut socket)?;
        let wanted = secret::prove(&self.secret, &[&theirs, &mine, &self.message(b"dial", peer, self.rank)]);
        if !secret::same(&proof, &wanted) || peer <= self.rank || peer >= near.len() {
            return Err(refused());
        }
        let answer =
            secret::prove(&self.secret, &[&theirs, &mine, &self.message(b"answer", peer, self.rank)]);
        let shared = if near[peer] { Mapping::create(link::BYTES).ok() } else { None };
        let descriptor = shared.as_ref().map_or(-1, |(_, file)| file.as_raw_fd());
        let place = [std::process::id().to_le_bytes(), descriptor.to_le_bytes()].concat();
        socket.write_all(&[&answer[..], &place].concat())?;
        let taken = read_array::<1>(&mut socket)? == [1];
        Ok((peer, Link::new(socket, shared.map(|(memory, _)| memory).filter(|_| taken), false)?))
    }
}

fn read_array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}
