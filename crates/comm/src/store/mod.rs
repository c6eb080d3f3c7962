//! A small key-value store that ranks find each other with. It speaks PyTorch's TCPStore protocol, both ways:
//! ranks started by `torchrun` use the store its agent serves, and PyTorch's processes could use ours.

mod exchange;
mod server;
mod wire;

pub use exchange::Exchange;
pub(crate) use exchange::Joining;
pub use server::Server;

use crate::{Error, Result, secret, socket};
use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use wire::Message;

/// The environment variable in which our launcher says that the store it serves demands the job's secret; agents of
/// others serve any who come.
pub const MARKER: &str = "SHARDLOOM_STORE";
/// Its value where the secret is demanded.
pub const WITH_SECRET: &str = "secret";

/// Sockets take no timeout of zero.
const SHORTEST: Duration = Duration::from_millis(1);
/// How often one who waits looks whether the world has failed meanwhile.
pub(crate) const LOOK: Duration = Duration::from_millis(300);
/// Why the world has failed: the first rank that ended before its time, or gave up.
const FAILURE: &str = "failure";

/// A connection to a store. Calls from several threads take turns, also while one of them waits for a key.
#[derive(Debug)]
pub struct Store {
    address: String,
    /// How long an answer to a plain request may take.
    timeout: Duration,
    /// Before every key: what tells this run, and this attempt of it, from others in the same store.
    prefix: String,
    connection: Mutex<Connection>,
    /// How often each name was used by [`Store::scope`].
    scopes: Mutex<HashMap<String, u64>>,
    /// Ranks that say goodbye in [`Store::finish`].
    world: usize,
    server: Option<Server>,
    /// Shown to the server, which is ours and demands it.
    secret: Option<Vec<u8>>,
    /// Whether the server is ours, and so carries out wills.
    ours: bool,
    /// Whether who waits looks for the failure of the world.
    watches: AtomicBool,
    /// The failure, once this process knows of it.
    failed: OnceLock<String>,
}

/// How a wait ended.
#[derive(Debug)]
pub(crate) enum Waited {
    /// All keys are there.
    Done,
    TimedOut,
    /// The world has failed, for the reason that [`Error::of_failure`] understands.
    Failed(String),
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    /// Once a request failed half-way, answers no longer belong to questions.
    broken: Option<Error>,
}

/// Meets the other ranks of the world: rank 0 serves the store at `address` (host:port), unless a launcher does
/// already (`TORCHELASTIC_USE_AGENT_STORE`), and everyone connects to it. The job's secret is shown to a store of
/// our own, and to a launcher's where [`MARKER`] says so.
pub fn join(rank: usize, world: usize, address: &str, timeout: Duration) -> Result<Store> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let agent_serves = variable("TORCHELASTIC_USE_AGENT_STORE").eq_ignore_ascii_case("true");
    let demanded = agent_serves && variable(MARKER) == WITH_SECRET;
    let secret = secret::from_environment().filter(|_| demanded || !agent_serves);
    if demanded && secret.is_none() {
        let what = format!("it demands the job's secret, and {} is not set here", secret::VARIABLE);
        return Err(Error::Store { address: address.to_string(), what });
    }
    let server = if rank == 0 && !agent_serves { Some(serve_for(address)?) } else { None };
    let mut store = Store::connect_with(address, timeout, secret)?;
    store.server = server;
    store.world = world;
    store.ours = !agent_serves || !variable(MARKER).is_empty();
    // The agent's store outlives a restart of the workers; keys of the attempt before must not be found.
    store.prefix = format!("shardloom/{}/", variable("TORCHELASTIC_RESTART_COUNT"));
    Ok(store)
}

/// Serves at `address` itself where that is this machine's, so that a run on one machine listens on the
/// loopback only; behind a translated address, everywhere.
fn serve_for(address: &str) -> Result<Server> {
    let first = match Store::serve(address) {
        Ok(server) => return Ok(server),
        Err(error) => error,
    };
    let resolved = address.to_socket_addrs().map(Vec::from_iter).unwrap_or_default();
    let port = resolved.first().map(|resolved| resolved.port());
    let elsewhere = resolved.iter().all(|resolved| match std::net::UdpSocket::bind((resolved.ip(), 0)) {
        Ok(_) => false,
        Err(e) => e.kind() == io::ErrorKind::AddrNotAvailable,
    });
    match port.filter(|_| elsewhere) {
        Some(port) => Store::serve(("0.0.0.0", port)),
        None => Err(first),
    }
}

impl Store {
    /// Starts a server; port 0 lets the system choose one. Where `SHARDLOOM_SECRET` is set, it serves only
    /// those who know it.
    pub fn serve(address: impl ToSocketAddrs + std::fmt::Debug) -> Result<Server> {
        Server::start(address, secret::from_environment())
    }

    /// A server that demands this secret, or none.
    pub fn serve_with(
        address: impl ToSocketAddrs + std::fmt::Debug,
        secret: Option<Vec<u8>>,
    ) -> Result<Server> {
        Server::start(address, secret)
    }

    /// Connects to `address` (host:port), trying until it works or `timeout` has passed; to one of our own
    /// servers, where `SHARDLOOM_SECRET` is set.
    pub fn connect(address: &str, timeout: Duration) -> Result<Self> {
        Self::connect_with(address, timeout, secret::from_environment())
    }

    /// The same, with this secret or none.
    pub fn connect_with(address: &str, timeout: Duration, secret: Option<Vec<u8>>) -> Result<Self> {
        let started = Instant::now();
        let mut pause = Duration::from_millis(10);
        for attempt in 1u64.. {
            let left = timeout.saturating_sub(started.elapsed());
            let dialed = dial(address, left.max(SHORTEST), timeout.max(SHORTEST), secret.as_deref());
            let failure = match dialed {
                Ok(stream) => return Ok(Self::over(stream, address, timeout.max(SHORTEST), secret)),
                // It is there, and will not change its mind.
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(Error::Store { address: address.to_string(), what: e.to_string() });
                }
                Err(failure) => failure,
            };
            if started.elapsed() + pause >= timeout {
                let seconds = started.elapsed().as_secs_f64();
                let what = format!("could not connect in {attempt} attempts over {seconds:.1} s: {failure}");
                return Err(Error::Store { address: address.to_string(), what });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(500));
        }
        unreachable!("attempts do not run out")
    }

    fn over(stream: TcpStream, address: &str, timeout: Duration, secret: Option<Vec<u8>>) -> Self {
        Store {
            address: address.to_string(),
            timeout,
            prefix: String::new(),
            connection: Mutex::new(Connection { stream, broken: None }),
            scopes: Mutex::default(),
            world: 1,
            server: None,
            secret,
            ours: false,
            watches: AtomicBool::new(false),
            failed: OnceLock::new(),
        }
    }

    /// From now on this connection stands for a rank of the world: should it end before [`Store::finish`], everyone
    /// who waits at the store hears within a second that the rank has ended. (A launcher of others, whose store
    /// does not know how, ends the ranks itself.) And who waits here hears of the others.
    pub fn stand_for(&self, rank: usize) -> Result<()> {
        if self.ours {
            let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            let who = format!("rank {rank} of the job (process {} on {})", std::process::id(), host.trim());
            self.will(&self.key(FAILURE), &Error::ended(&who))?;
        }
        self.watches.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn will(&self, key: &str, value: &str) -> Result<()> {
        let message = Message::new(wire::WILL).bytes(key.as_bytes()).bytes(value.as_bytes());
        self.request("leave a will at", key, &message, |_| Ok(()))
    }

    /// Tells every rank of the world why this one gives up. The first to say so, or to end, is believed.
    pub(crate) fn report(&self, failure: &str) -> Result<()> {
        self.note(failure);
        let message = Message::new(wire::COMPARE_SET).bytes(self.key(FAILURE).as_bytes());
        let message = message.bytes(b"").bytes(failure.as_bytes());
        self.request("report to", FAILURE, &message, wire::read_bytes).map(|_| ())
    }

    /// Lets those of this process know of a failure.
    pub(crate) fn note(&self, failure: &str) {
        let _ = self.failed.set(failure.to_string());
    }

    /// The failure of the world, as far as this process knows without asking.
    pub(crate) fn known_failure(&self) -> Option<&str> {
        self.failed.get().map(String::as_str)
    }

    /// The failure of the world, if there is one.
    pub(crate) fn failure(&self) -> Result<Option<String>> {
        if self.failed.get().is_none() && self.check(&[FAILURE])? {
            let text = String::from_utf8_lossy(&self.get_now(FAILURE)?).into_owned();
            let _ = self.failed.set(text);
        }
        Ok(self.failed.get().cloned())
    }

    /// The same, for one who waits elsewhere; none where this connection watches nobody.
    pub(crate) fn watched_failure(&self) -> Result<Option<String>> {
        if self.watches.load(Ordering::Relaxed) { self.failure() } else { Ok(None) }
    }

    /// Whether nothing listens at the store's address any more. A server that is merely slow still does.
    pub(crate) fn is_abandoned(&self) -> bool {
        let refuses = |address| {
            let tried = TcpStream::connect_timeout(&address, Duration::from_secs(1));
            tried.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
        };
        self.address.to_socket_addrs().is_ok_and(|mut addresses| addresses.all(refuses))
    }

    /// A second connection to the same keys, for one who must not wait behind others.
    pub(crate) fn another(&self, timeout: Duration) -> Result<Self> {
        let mut store = Self::connect_with(&self.address, timeout, self.secret.clone())?;
        store.prefix = self.prefix.clone();
        Ok(store)
    }

    /// The address of this machine by which it reaches the store.
    pub(crate) fn local_ip(&self) -> Result<std::net::IpAddr> {
        let address = self.lock().stream.local_addr();
        address.map(|address| address.ip()).map_err(|e| Error::Store {
            address: self.address.clone(),
            what: format!("the connection has no local address: {e}"),
        })
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// The server, where this process has it.
    pub fn server(&self) -> Option<&Server> {
        self.server.as_ref()
    }

    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let message = Message::new(wire::SET).bytes(self.key(key).as_bytes()).bytes(value);
        self.request("set", key, &message, |_| Ok(()))
    }

    /// Waits for the key and returns its value.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.wait(&[key], timeout)?;
        self.get_now(key)
    }

    /// The value of a key that exists.
    pub(crate) fn get_now(&self, key: &str) -> Result<Vec<u8>> {
        let message = Message::new(wire::GET).bytes(self.key(key).as_bytes());
        self.request("get", key, &message, wire::read_bytes)
    }

    /// Adds to a counter, which starts at 0, and returns the sum.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let message = Message::new(wire::ADD).bytes(self.key(key).as_bytes()).i64(amount);
        self.request("add to", key, &message, wire::read_i64)
    }

    /// Whether all keys exist.
    pub fn check(&self, keys: &[&str]) -> Result<bool> {
        let message = Message::new(wire::CHECK).keys(&self.keys(keys));
        let ready = |stream: &mut TcpStream| Ok(wire::read_u8(stream)? == wire::READY);
        self.request("check", &keys.join(", "), &message, ready)
    }

    /// Whether there was such a key.
    pub fn delete(&self, key: &str) -> Result<bool> {
        let message = Message::new(wire::DELETE).bytes(self.key(key).as_bytes());
        self.request("delete", key, &message, |stream| Ok(wire::read_i64(stream)? > 0))
    }

    /// Sleeps until all keys exist.
    pub fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        if self.wait_or_not(keys, timeout)? {
            return Ok(());
        }
        let what = format!("waited {:.1} s for {}", timeout.as_secs_f64(), keys.join(", "));
        Err(Error::Store { address: self.address.clone(), what })
    }

    /// Whether all keys exist by the end of `timeout`; an error where the world has failed.
    pub(crate) fn wait_or_not(&self, keys: &[&str], timeout: Duration) -> Result<bool> {
        let started = Instant::now();
        match self.wait_until(keys, timeout)? {
            Waited::Done => Ok(true),
            Waited::TimedOut => Ok(false),
            Waited::Failed(failure) => {
                let (seconds, failure) = (started.elapsed().as_secs_f64(), Error::tell_failure(&failure));
                let what = format!("waited {seconds:.1} s for {}: {failure}", keys.join(", "));
                Err(Error::Store { address: self.address.clone(), what })
            }
        }
    }

    /// Waits until all keys exist, the time is over or the world has failed.
    pub(crate) fn wait_until(&self, keys: &[&str], timeout: Duration) -> Result<Waited> {
        let started = Instant::now();
        loop {
            let watches = self.watches.load(Ordering::Relaxed);
            let left = timeout.saturating_sub(started.elapsed());
            if self.wait_once(keys, if watches { left.min(LOOK) } else { left })? {
                return Ok(Waited::Done);
            }
            if let Some(failure) = self.watched_failure()? {
                return Ok(Waited::Failed(failure));
            }
            if started.elapsed() >= timeout {
                return Ok(Waited::TimedOut);
            }
        }
    }

    fn wait_once(&self, keys: &[&str], timeout: Duration) -> Result<bool> {
        let message = Message::new(wire::WAIT).keys(&self.keys(keys));
        let patience = self.timeout;
        let answer = |stream: &mut TcpStream| {
            stream.set_read_timeout(Some(timeout.max(SHORTEST)))?;
            let first = wire::read_u8(stream);
            stream.set_read_timeout(Some(patience))?;
            match first {
                Ok(wire::STOP_WAITING) => return Ok(true),
                Ok(other) => return Err(unexpected(other)),
                Err(e) if is_timeout(&e) => {}
                Err(e) => return Err(e),
            }
            // The key may come just now: then its answer precedes that to the cancellation.
            Message::new(wire::CANCEL_WAIT).send(stream)?;
            match wire::read_u8(stream)? {
                wire::WAIT_CANCELED => Ok(false),
                wire::STOP_WAITING => match wire::read_u8(stream)? {
                    wire::WAIT_CANCELED => Ok(true),
                    other => Err(unexpected(other)),
                },
                other => Err(unexpected(other)),
            }
        };
        self.request("wait for", &keys.join(", "), &message, answer)
    }

    /// Says goodbye. Where this process serves the store, waits until everyone has, or `timeout` has passed:
    /// after this the store may be dropped without taking it from under somebody.
    pub fn finish(&self, timeout: Duration) -> Result<()> {
        if self.ours {
            self.will("", "")?;
        }
        let gone = self.add("goodbye", 1)?;
        if gone >= self.world as i64 {
            self.set("everyone is gone", b"1")?;
        }
        if self.server.is_none() || self.wait_or_not(&["everyone is gone"], timeout)? {
            return Ok(());
        }
        let (gone, world) = (self.add("goodbye", 0)?, self.world);
        let what = format!(
            "{gone} of {world} ranks had said goodbye after {:.1} s; the others lose the store",
            timeout.as_secs_f64()
        );
        Err(Error::Store { address: self.address.clone(), what })
    }

    /// A place for keys that no one used before: the n-th use of a name on one rank meets the n-th on others.
    pub(crate) fn scope(&self, name: &str) -> String {
        let mut scopes = self.scopes.lock().unwrap_or_else(PoisonError::into_inner);
        let uses = scopes.entry(name.to_string()).or_default();
        *uses += 1;
        format!("{name}/{uses}")
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn keys(&self, keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| self.key(key)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One question and its answer.
    fn request<T>(
        &self,
        doing: &str,
        key: &str,
        message: &Message,
        answer: impl FnOnce(&mut TcpStream) -> io::Result<T>,
    ) -> Result<T> {
        let mut connection = self.lock();
        if let Some(error) = &connection.broken {
            return Err(error.clone());
        }
        let started = Instant::now();
        let result = message.send(&mut connection.stream).and_then(|()| answer(&mut connection.stream));
        result.map_err(|e| {
            let why = match e.kind() {
                _ if is_timeout(&e) => "no answer".to_string(),
                io::ErrorKind::UnexpectedEof => "the connection was closed; has rank 0 ended?".to_string(),
                _ => e.to_string(),
            };
            let what = format!("{doing} {key}, after {:.1} s: {why}", started.elapsed().as_secs_f64());
            let error = Error::Store { address: self.address.clone(), what };
            connection.broken = Some(error.clone());
            error
        })
    }
}

fn unexpected(answer: u8) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("an answer that is not the protocol's: {answer}"))
}

/// Whether an answer has not come in time. (A server whose machine is gone times out in another way.)
fn is_timeout(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

/// One attempt of at most `timeout` per address: connects, greets, and sees that it is a store that answers.
/// Later answers may take `patience`.
fn dial(
    address: &str,
    timeout: Duration,
    patience: Duration,
    secret: Option<&[u8]>,
) -> io::Result<TcpStream> {
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for resolved in address.to_socket_addrs()? {
        let greeted = TcpStream::connect_timeout(&resolved, timeout).and_then(|mut stream| {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(patience))?;
            socket::keep_alive(&stream)?;
            Message::new(wire::VALIDATE).u32(wire::MAGIC).send(&mut stream)?;
            if let Some(secret) = secret {
                show(&mut stream, secret)?;
            }
            let nonce = std::process::id();
            Message::new(wire::PING).u32(nonce).send(&mut stream)?;
            let answer = wire::read_u32(&mut stream).map_err(|e| match e.kind() {
                io::ErrorKind::UnexpectedEof => io::Error::new(
                    e.kind(),
                    format!("refused; is {} another there than here?", secret::VARIABLE),
                ),
                _ => e,
            })?;
            if answer != nonce {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "what answers there is not a store"));
            }
            stream.set_read_timeout(Some(patience))?;
            Ok(stream)
        });
        match greeted {
            Ok(stream) => return Ok(stream),
            Err(e) => failure = e,
        }
    }
    Err(failure)
}

/// Shows that we know the secret, and sees that the server does.
fn show(stream: &mut TcpStream, secret: &[u8]) -> io::Result<()> {
    let mine = secret::nonce()?;
    stream.write_all(&[&[wire::SECRET], &mine[..]].concat())?;
    let theirs: [u8; 32] = wire::read_array(stream).map_err(|e| denied(&e))?;
    stream.write_all(&secret::prove(secret, &[b"store client", &mine, &theirs]))?;
    let answer = wire::read_array(stream).map_err(|e| denied(&e))?;
    if !secret::same(&answer, &secret::prove(secret, &[b"store server", &mine, &theirs])) {
        return Err(denied(&"it does not know the job's secret"));
    }
    Ok(())
}

fn denied(why: &dyn std::fmt::Display) -> io::Error {
    let what =
        format!("it refused the job's secret ({}), or is not a store of ours: {why}", secret::VARIABLE);
    io::Error::new(io::ErrorKind::PermissionDenied, what)
}
