//! The store's server: a thread per connection around one table.
//!
//! A connection that waits for keys does not block its thread, which keeps reading so that it hears a
//! cancellation or the end; whoever sets the last missing key answers the waiting connection.

use super::wire::{self, Message};
use crate::{Error, Result, secret, socket};
use std::collections::HashMap;
use std::io::{self, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a connection may take to say that it speaks our protocol.
const GREETING: Duration = Duration::from_secs(10);

/// A running server; it ends, and closes its connections, when dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    table: Arc<Mutex<Table>>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Table {
    values: HashMap<Vec<u8>, Vec<u8>>,
    connections: HashMap<u64, Connection>,
    ending: bool,
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    /// Keys it waits for.
    waits_for: Option<Vec<Vec<u8>>>,
    /// A key and a value to be set when it ends.
    will: Option<(Vec<u8>, Vec<u8>)>,
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    pub(super) fn start(
        address: impl ToSocketAddrs + std::fmt::Debug,
        secret: Option<Vec<u8>>,
    ) -> Result<Self> {
        let error = |e: io::Error| Error::Store {
            address: format!("{address:?}"),
            what: format!("cannot listen there: {e}"),
        };
        let listener = TcpListener::bind(&address).map_err(error)?;
        let bound = listener.local_addr().map_err(error)?;
        let table = Arc::new(Mutex::new(Table::default()));
        let shared = table.clone();
        let acceptor = std::thread::Builder::new()
            .name("store".into())
            .spawn(move || accept(&listener, &shared, secret.map(Arc::new)));
        Ok(Server { address: bound, table, acceptor: Some(acceptor.map_err(error)?) })
    }

    /// Where it listens, with the port the system chose when 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Removes every key but those that begin with `prefix`.
    pub fn forget_all_but(&self, prefix: &str) {
        lock(&self.table).values.retain(|key, _| key.starts_with(prefix.as_bytes()));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        lock(&self.table).ending = true;
        for connection in lock(&self.table).connections.values() {
            let _ = connection.stream.shutdown(std::net::Shutdown::Both);
        }
        // The acceptor sleeps in `accept`: one more connection wakes it.
        let mut wake = self.address;
        match wake.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => wake.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => wake.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        let woken = TcpStream::connect_timeout(&wake, Duration::from_secs(1)).is_ok();
        if let Some(acceptor) = self.acceptor.take().filter(|_| woken) {
            let _ = acceptor.join();
        }
    }
}

fn accept(listener: &TcpListener, table: &Arc<Mutex<Table>>, secret: Option<Arc<Vec<u8>>>) {
    for id in 0.. {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            // Out of descriptors, or a peer that was gone again: neither ends the store.
            Err(_) => {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
        };
        if lock(table).ending {
            return;
        }
        let (shared, secret) = (table.clone(), secret.clone());
        // Without a thread for it the connection is closed, and the peer tries again.
        let _ = std::thread::Builder::new().name("store connection".into()).spawn(move || {
            let _ = serve(id, stream, &shared, secret.as_deref().map(Vec::as_slice));
            lock(&shared).leave(id);
        });
    }
}

/// Answers one connection until it ends or says something that is not the protocol.
fn serve(id: u64, stream: TcpStream, table: &Mutex<Table>, secret: Option<&[u8]>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(GREETING))?;
    // A peer that does not read its answers must not hold up the others.
    stream.set_write_timeout(Some(GREETING))?;
    // One whose machine is gone says nothing, not even goodbye.
    socket::keep_alive(&stream)?;
    let mut from = BufReader::new(stream.try_clone()?);
    if wire::read_u8(&mut from)? != wire::VALIDATE || wire::read_u32(&mut from)? != wire::MAGIC {
        return Ok(());
    }
    if let Some(secret) = secret
        && !knows(secret, &mut from, &stream)?
    {
        return Ok(());
    }
    stream.set_read_timeout(None)?;
    {
        let mut table = lock(table);
        if table.ending {
            return Ok(());
        }
        table.connections.insert(id, Connection { stream: stream.try_clone()?, waits_for: None, will: None });
    }
    let mut to = stream;
    loop {
        let op = wire::read_u8(&mut from)?;
        let Some(answer) = answer(op, id, &mut from, table)? else { return Ok(()) };
        answer.send(&mut to)?;
    }
}

/// Whether the client knows the secret; if so, it is shown that we do.
fn knows(secret: &[u8], from: &mut BufReader<TcpStream>, mut to: &TcpStream) -> io::Result<bool> {
    if wire::read_u8(from)? != wire::SECRET {
        return Ok(false);
    }
    let (theirs, mine): ([u8; 32], _) = (wire::read_array(from)?, secret::nonce()?);
    to.write_all(&mine)?;
    let proof = wire::read_array(from)?;
    if !secret::same(&proof, &secret::prove(secret, &[b"store client", &theirs, &mine])) {
        return Ok(false);
    }
    to.write_all(&secret::prove(secret, &[b"store server", &theirs, &mine]))?;
    Ok(true)
}

/// Carries out one request. None: no such request.
fn answer(
    op: u8,
    id: u64,
    from: &mut BufReader<TcpStream>,
    table: &Mutex<Table>,
) -> io::Result<Option<Message>> {
    let nothing = Message::default();
    let answer = match op {
        wire::SET => {
            let (key, value) = (wire::read_bytes(from)?, wire::read_bytes(from)?);
            lock(table).set(key, value);
            nothing
        }
        wire::COMPARE_SET => {
            let key = wire::read_bytes(from)?;
            let (expected, desired) = (wire::read_bytes(from)?, wire::read_bytes(from)?);
            nothing.bytes(&lock(table).compare_set(key, expected, desired))
        }
        wire::GET => {
            let key = wire::read_bytes(from)?;
            nothing.bytes(lock(table).values.get(&key).map_or(&[], Vec::as_slice))
        }
        wire::ADD => {
            let (key, amount) = (wire::read_bytes(from)?, wire::read_i64(from)?);
            nothing.i64(lock(table).add(key, amount))
        }
        wire::CHECK => {
            let keys = wire::read_keys(from)?;
            let ready = lock(table).has_all(&keys);
            Message::new(if ready { wire::READY } else { wire::NOT_READY })
        }
        wire::WAIT => {
            let keys = wire::read_keys(from)?;
            let mut table = lock(table);
            if table.has_all(&keys) {
                Message::new(wire::STOP_WAITING)
            } else {
                let connection = table.connections.get_mut(&id);
                connection.ok_or(io::ErrorKind::NotConnected)?.waits_for = Some(keys);
                nothing
            }
        }
        wire::CANCEL_WAIT => {
            if let Some(connection) = lock(table).connections.get_mut(&id) {
                connection.waits_for = None;
            }
            Message::new(wire::WAIT_CANCELED)
        }
        wire::NUM_KEYS => nothing.i64(lock(table).values.len() as i64),
        wire::DELETE => {
            let key = wire::read_bytes(from)?;
            nothing.i64(lock(table).values.remove(&key).is_some().into())
        }
        wire::APPEND => {
            let (key, value) = (wire::read_bytes(from)?, wire::read_bytes(from)?);
            let mut table = lock(table);
            let whole = [table.values.remove(&key).unwrap_or_default(), value].concat();
            table.set(key, whole);
            nothing
        }
        wire::MULTI_GET => {
            let keys = wire::read_keys(from)?;
            let table = lock(table);
            let value = |key| table.values.get(key).map_or(&[][..], Vec::as_slice);
            keys.iter().fold(nothing, |message, key| message.bytes(value(key)))
        }
        wire::MULTI_SET => {
            for _ in 0..wire::read_count(from)? {
                let (key, value) = (wire::read_bytes(from)?, wire::read_bytes(from)?);
                lock(table).set(key, value);
            }
            nothing
        }
        wire::PING => nothing.u32(wire::read_u32(from)?),
        wire::WILL => {
            let (key, value) = (wire::read_bytes(from)?, wire::read_bytes(from)?);
            if let Some(connection) = lock(table).connections.get_mut(&id) {
                connection.will = Some((key, value)).filter(|(key, _)| !key.is_empty());
            }
            nothing
        }
        _ => return Ok(None),
    };
    Ok(Some(answer))
}

impl Table {
    fn has_all(&self, keys: &[Vec<u8>]) -> bool {
        keys.iter().all(|key| self.values.contains_key(key))
    }

    /// Carries out what a connection that has ended wanted. The first to end is believed.
    fn leave(&mut self, id: u64) {
        let Some(connection) = self.connections.remove(&id) else { return };
        let _ = connection.stream.shutdown(std::net::Shutdown::Both);
        if let Some((key, value)) = connection.will
            && !self.ending
            && !self.values.contains_key(&key)
        {
            self.set(key, value);
        }
    }

    /// Sets, and answers every connection that waited for just this.
    fn set(&mut self, key: Vec<u8>, value: Vec<u8>) {
        let new = self.values.insert(key, value).is_none();
        if !new {
            return;
        }
        let values = &self.values;
        for connection in self.connections.values_mut() {
            let waits = connection.waits_for.as_ref();
            if waits.is_some_and(|keys| keys.iter().all(|key| values.contains_key(key))) {
                connection.waits_for = None;
                // A peer that is gone is noticed by its own thread.
                let _ = connection.stream.write_all(&[wire::STOP_WAITING]);
            }
        }
    }

    fn add(&mut self, key: Vec<u8>, amount: i64) -> i64 {
        let text = self.values.get(&key).and_then(|value| std::str::from_utf8(value).ok());
        let sum = text.and_then(|text| text.parse::<i64>().ok()).unwrap_or(0).wrapping_add(amount);
        self.set(key, sum.to_string().into_bytes());
        sum
    }

    fn compare_set(&mut self, key: Vec<u8>, expected: Vec<u8>, desired: Vec<u8>) -> Vec<u8> {
        match self.values.get(&key) {
            None if !expected.is_empty() => expected,
            Some(current) if *current != expected => current.clone(),
            _ => {
                self.set(key, desired.clone());
                desired
            }
        }
    }
}
