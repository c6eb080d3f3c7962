//! How the launchers of a job's nodes meet and stay in touch, through the store that workers meet in as well.
//!
//! One node serves the store. The others come to it, are counted, and learn who they are. From then on the set
//! of nodes is fixed: after a failed rank all nodes start theirs again together, but a node that is lost ends the
//! job (no shrinking, no growing; whoever manages the nodes starts it anew).

use super::env::SECRET;
use super::flags::{Conf, Job, Meeting};
use super::machine;
use super::watch::{Event, News, Outcome};
use crate::{Error, Result};
use comm::store::{Server, Store};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// Before the launchers' own keys; the rest are the workers', and last for one attempt.
const OURS: &str = "launch/";
const JOB: &str = "launch/job";
const MEMBERS: &str = "launch/members";
const ARRIVED: &str = "launch/arrived";

/// Between two looks at who has come.
const PAUSE: Duration = Duration::from_millis(20);
const HEARTBEAT: Duration = Duration::from_secs(1);
/// How long the node that serves waits for the others to have heard its last news.
const FAREWELL: Duration = Duration::from_secs(5);

/// This node's place in the job, and where its workers meet the others'.
#[derive(Clone, Debug)]
pub struct Place {
    pub node_rank: usize,
    pub num_nodes: usize,
    pub first_rank: usize,
    pub world: usize,
    pub host: String,
    pub port: u16,
    pub secret: Option<String>,
}

/// What the node that serves says about the job.
#[derive(Debug, Serialize, Deserialize)]
struct Terms {
    run_id: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Node {
    host: String,
    num_ranks: usize,
}

/// Who takes part: seats, in the order of node ranks, or why it came to nothing.
type Members = std::result::Result<Vec<(usize, Node)>, String>;

/// Why an attempt failed, told to all nodes.
#[derive(Debug, Serialize, Deserialize)]
struct Notice {
    text: String,
    /// No restart follows.
    last: bool,
}

#[derive(Debug)]
pub struct Rendezvous {
    pub place: Place,
    server: Option<Server>,
    peers: Option<Peers>,
}

fn failed(what: impl Into<String>) -> Error {
    Error::Launch(what.into())
}

fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

impl Rendezvous {
    pub fn meet(job: &Job) -> Result<Self> {
        let (host, port) = match &job.meeting {
            Meeting::Static { host, port, .. } | Meeting::First { host, port } => (host.clone(), *port),
        };
        let secret = secret(job)?;
        // What the store demands, and who connects to it shows.
        let shown = secret.clone().map(String::into_bytes).filter(|_| !job.plain_store);
        if job.nodes.max == 1 {
            let server = serve(&host, port, shown)?;
            let port = server.address().port();
            let world = job.num_local;
            let place = Place { node_rank: 0, num_nodes: 1, first_rank: 0, world, host, port, secret };
            return Ok(Rendezvous { place, server: Some(server), peers: None });
        }
        let address = address(&host, port);
        let (server, unable) = match &job.meeting {
            Meeting::Static { node_rank: 0, .. } => (Some(serve(&host, port, shown.clone())?), None),
            Meeting::Static { .. } => (None, None),
            Meeting::First { .. } if !is_here(&address) => (None, None),
            // Another node may be the first on this very machine.
            Meeting::First { .. } => match serve(&host, port, shown.clone()) {
                Ok(server) => (Some(server), None),
                Err(error) => (None, Some(error)),
            },
        };
        let store = Store::connect_with(&address, job.conf.join, shown.clone()).map_err(|error| {
            let also = unable.map(|e| format!(" (and here: {e})")).unwrap_or_default();
            failed(format!("no node to meet: {error}{also}"))
        })?;
        let Joined { members, seat } = join(job, &store, server.is_some())?;
        let node_rank = members.iter().position(|(member, _)| *member == seat).ok_or_else(|| {
            failed(format!("the job at {address} has started without this node; it came too late"))
        })?;
        let nodes: Vec<Node> = members.into_iter().map(|(_, node)| node).collect();
        let ranks = |nodes: &[Node]| nodes.iter().map(|node| node.num_ranks).sum();
        let place = Place {
            node_rank,
            num_nodes: nodes.len(),
            first_rank: ranks(&nodes[..node_rank]),
            world: ranks(&nodes),
            host,
            port,
            secret,
        };
        let peers = Peers {
            // Whoever is met answers soon, or is lost.
            store: Store::connect_with(&address, job.conf.keep_alive, shown.clone())?,
            address,
            shown,
            node_rank,
            nodes,
            conf: job.conf,
            attempt: Arc::default(),
            gone: Arc::default(),
        };
        Ok(Rendezvous { place, server, peers: Some(peers) })
    }

    /// From now on the other nodes' news arrive as events.
    pub fn watch_peers(&self, every: Duration, events: Sender<Event>) -> Result<()> {
        let Some(peers) = &self.peers else { return Ok(()) };
        let line = Line::open(peers, events)?;
        let listen = move || line.listen(every);
        let thread = std::thread::Builder::new().name("peers".into()).spawn(listen);
        thread.map(|_| ()).map_err(|e| failed(format!("cannot watch the other nodes: {e}")))
    }

    /// All ranks of this node have succeeded: waits until those of the others have.
    pub fn done(&self, attempt: u32, events: &Receiver<Event>) -> Result<Outcome> {
        let Some(peers) = &self.peers else { return Ok(Outcome::Done) };
        peers.store.add(&key(attempt, "done"), 1)?;
        loop {
            match events.recv() {
                Ok(Event::Signal(signal)) => return Ok(Outcome::Signal(signal)),
                Ok(Event::Peers { news, attempt: of }) if of == attempt => {
                    return Ok(match news {
                        News::AllDone => Outcome::Done,
                        News::Failed(what) => Outcome::PeerFailed(what),
                        News::Lost(what) => Outcome::PeerLost(what),
                    });
                }
                Ok(_) => {}
                Err(_) => return Err(failed("nothing watches the other nodes any more")),
            }
        }
    }

    /// Tells the others that this attempt failed. The first to say so is believed.
    pub fn report(&self, attempt: u32, text: String, last: bool) {
        let Some(peers) = &self.peers else { return };
        let tell = || -> Result<()> {
            if peers.store.add(&key(attempt, "failures"), 1)? == 1 {
                peers.store.set(&key(attempt, "failed"), &encode(&Notice { text, last })?)?;
            }
            Ok(())
        };
        // Who cannot be told will notice.
        let _ = tell();
    }

    /// Before a further attempt: all nodes have ended their ranks of the one before, and its keys are gone.
    pub fn restart(&self, attempt: u32, events: &Receiver<Event>) -> Result<()> {
        let forget = || self.server.iter().for_each(|server| server.forget_all_but(OURS));
        let Some(peers) = &self.peers else {
            forget();
            return Ok(());
        };
        let notice: Notice = decode(&peers.store.get(&key(attempt - 1, "failed"), peers.conf.join)?)?;
        if notice.last {
            return Err(failed(notice.text));
        }
        let (ready, go) = (key(attempt, "ready"), key(attempt, "go"));
        peers.store.add(&ready, 1)?;
        let deadline = Instant::now() + peers.conf.join;
        while !peers.store.check(&[&go])? {
            if self.server.is_some() && peers.store.add(&ready, 0)? == peers.nodes.len() as i64 {
                forget();
                peers.store.set(&go, b"")?;
            }
            match events.recv_timeout(PAUSE) {
                Ok(Event::Signal(signal)) => {
                    return Err(failed(format!("{} between two attempts", super::signal_name(signal))));
                }
                Ok(Event::Peers { news: News::Lost(what), .. }) => return Err(failed(what)),
                Err(RecvTimeoutError::Disconnected) => return Err(failed("nothing watches the other nodes")),
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
            }
            if Instant::now() > deadline {
                let (came, all) = (peers.store.add(&ready, 0)?, peers.nodes.len());
                let seconds = peers.conf.join.as_secs();
                return Err(failed(format!(
                    "{came} of {all} nodes came to attempt {attempt} in {seconds} s"
                )));
            }
        }
        peers.attempt.store(attempt, Ordering::Relaxed);
        Ok(())
    }

    /// The node that serves waits until the others have heard how it ended.
    pub fn leave(self) {
        let Some(peers) = &self.peers else { return };
        let (deadline, attempt) = (Instant::now() + FAREWELL, peers.attempt.load(Ordering::Relaxed));
        while self.server.is_some() && Instant::now() < deadline {
            match peers.store.add(&key(attempt, "heard"), 0) {
                Ok(heard) if heard < peers.nodes.len() as i64 => std::thread::sleep(PAUSE),
                _ => break,
            }
        }
        peers.gone.store(true, Ordering::Relaxed);
    }
}

fn key(attempt: u32, name: &str) -> String {
    format!("{OURS}{attempt}/{name}")
}

fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|e| failed(e.to_string()))
}

fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|e| failed(format!("the store holds no launcher's words: {e}")))
}

/// Serves at the address itself where that is this machine's, so that a job on one machine listens on the
/// loopback only; everywhere behind a translated address, or where this machine calls a name its own loopback
/// (127.0.1.1 of Debian's hosts file) under which other nodes look for it elsewhere.
fn serve(host: &str, port: u16, secret: Option<Vec<u8>>) -> Result<Server> {
    let address = address(host, port);
    let is_name = host != "localhost" && host.parse::<IpAddr>().is_err();
    let resolved = resolve(&address);
    let hidden = is_name && resolved.iter().all(|resolved| resolved.ip().is_loopback());
    let everywhere = !resolved.is_empty() && (hidden || !is_here(&address));
    let server = match everywhere {
        true => Store::serve_with(("0.0.0.0", port), secret),
        false => Store::serve_with(address.as_str(), secret),
    };
    server.map_err(|error| {
        failed(format!("{error}. Choose another --master-port, or --standalone, which takes a free one"))
    })
}

/// Whether an address is one of this machine's.
fn is_here(address: &str) -> bool {
    resolve(address).iter().any(|resolved| UdpSocket::bind((resolved.ip(), 0)).is_ok())
}

fn resolve(address: &str) -> Vec<SocketAddr> {
    address.to_socket_addrs().map(Vec::from_iter).unwrap_or_default()
}

/// The job's secret: the environment's, or one made for a node on its own. Several nodes cannot be handed one
/// through a store that anybody may read.
fn secret(job: &Job) -> Result<Option<String>> {
    let given = std::env::var(SECRET).ok().filter(|secret| !secret.is_empty());
    match given {
        None if job.nodes.max == 1 => machine::random_hex(16).map(Some),
        None if !job.plain_store => Err(Error::Config(format!(
            "several nodes need the job's secret: set {SECRET} to the same words on all of them, as in \
             export {SECRET}=$(openssl rand -hex 16); or, on a network where you trust everyone, pass \
             --plain-store to all"
        ))),
        given => Ok(given),
    }
}

/// Who takes part, with their seats; and this node's seat.
struct Joined {
    members: Vec<(usize, Node)>,
    seat: usize,
}

/// Takes a seat and waits for the others.
fn join(job: &Job, store: &Store, serves: bool) -> Result<Joined> {
    let seat;
    if serves {
        // Before the terms are known nobody else takes a seat: who serves has the first.
        seat = take_seat(job, store)?;
        store.set(JOB, &encode(&Terms { run_id: job.run_id.clone() })?)?;
    } else {
        let terms: Terms = decode(&store.get(JOB, job.conf.join)?)?;
        if terms.run_id != job.run_id {
            let (there, here, at) = (terms.run_id, &job.run_id, store.address());
            return Err(failed(format!("the job at {at} is {there:?}, and not {here:?} (--rdzv-id)")));
        }
        seat = take_seat(job, store)?;
    }
    let node = Node { host: job.host.clone(), num_ranks: job.num_local };
    store.set(&format!("{OURS}node/{seat}"), &encode(&node)?)?;
    if serves {
        let members = gather(job, store)?;
        store.set(MEMBERS, &encode(&members)?)?;
        if members.is_err() {
            // The store ends with us; let the others read why.
            std::thread::sleep(10 * PAUSE);
        }
    }
    let patience = job.conf.join + job.conf.last_call + Duration::from_secs(5);
    let members: Members = decode(&store.get(MEMBERS, patience)?)?;
    Ok(Joined { members: members.map_err(failed)?, seat })
}

fn take_seat(job: &Job, store: &Store) -> Result<usize> {
    match job.meeting {
        Meeting::First { .. } => Ok((store.add(ARRIVED, 1)? - 1).max(0) as usize),
        Meeting::Static { node_rank, .. } => {
            if store.add(&format!("{OURS}seat/{node_rank}"), 1)? > 1 {
                let at = store.address();
                return Err(failed(format!("another node with --node-rank {node_rank} has joined at {at}")));
            }
            Ok(node_rank)
        }
    }
}

/// Waits for all nodes, or for enough of them and a last call.
fn gather(job: &Job, store: &Store) -> Result<Members> {
    let Conf { join, last_call, .. } = job.conf;
    let started = Instant::now();
    let mut enough_since: Option<Instant> = None;
    loop {
        let seats = match job.meeting {
            Meeting::Static { .. } => job.nodes.max,
            Meeting::First { .. } => store.add(ARRIVED, 0)?.max(0) as usize,
        };
        let mut members = Vec::new();
        for seat in 0..seats {
            let name = format!("{OURS}node/{seat}");
            if members.len() < job.nodes.max && store.check(&[&name])? {
                members.push((seat, decode(&store.get(&name, join)?)?));
            }
        }
        if members.len() >= job.nodes.min {
            let since = *enough_since.get_or_insert_with(Instant::now);
            if members.len() == job.nodes.max || since.elapsed() >= last_call {
                return Ok(Ok(members));
            }
        } else if started.elapsed() >= join {
            let hosts: Vec<&str> =
                members.iter().map(|(_, node): &(usize, Node)| node.host.as_str()).collect();
            return Ok(Err(format!(
                "{} of {} nodes came to {} within {:.1} s: {}",
                members.len(),
                job.nodes.min,
                store.address(),
                join.as_secs_f64(),
                hosts.join(", ")
            )));
        }
        std::thread::sleep(PAUSE);
    }
}

/// The other nodes, once met.
#[derive(Debug)]
struct Peers {
    store: Store,
    address: String,
    /// The secret that the store demands.
    shown: Option<Vec<u8>>,
    node_rank: usize,
    nodes: Vec<Node>,
    conf: Conf,
    attempt: Arc<AtomicU32>,
    /// This node has left.
    gone: Arc<AtomicBool>,
}

/// A thread's own connection to the store, on which it listens for news and gives signs of life.
#[derive(Debug)]
struct Line {
    store: Store,
    node_rank: usize,
    nodes: Vec<Node>,
    keep_alive: Duration,
    attempt: Arc<AtomicU32>,
    gone: Arc<AtomicBool>,
    events: Sender<Event>,
}

impl Line {
    fn open(peers: &Peers, events: Sender<Event>) -> Result<Self> {
        Ok(Line {
            store: Store::connect_with(&peers.address, peers.conf.keep_alive, peers.shown.clone())?,
            node_rank: peers.node_rank,
            nodes: peers.nodes.clone(),
            keep_alive: peers.conf.keep_alive,
            attempt: peers.attempt.clone(),
            gone: peers.gone.clone(),
            events,
        })
    }

    fn listen(&self, every: Duration) {
        let mut told = None;
        let mut lives = vec![(0, Instant::now()); self.nodes.len()];
        let mut last_beat: Option<Instant> = None;
        while !self.gone.load(Ordering::Relaxed) {
            let attempt = self.attempt.load(Ordering::Relaxed);
            let news = self.look(attempt, told == Some(attempt)).and_then(|news| match news {
                None if last_beat.is_none_or(|beat| beat.elapsed() >= HEARTBEAT) => {
                    last_beat = Some(Instant::now());
                    self.heartbeat(&mut lives)
                }
                news => Ok(news),
            });
            let news =
                news.unwrap_or_else(|error| Some(News::Lost(format!("the node that serves: {error}"))));
            if let Some(news) = news {
                told = Some(attempt);
                let lost = matches!(news, News::Lost(_));
                if self.events.send(Event::Peers { attempt, news }).is_err() || lost {
                    return;
                }
            }
            std::thread::sleep(every);
        }
    }

    /// What ends this attempt on all nodes, once.
    fn look(&self, attempt: u32, told: bool) -> Result<Option<News>> {
        if told {
            return Ok(None);
        }
        let failed = key(attempt, "failed");
        let news = if self.store.check(&[&failed])? {
            let notice: Notice = decode(&self.store.get(&failed, self.keep_alive)?)?;
            News::Failed(notice.text)
        } else if self.store.add(&key(attempt, "done"), 0)? == self.nodes.len() as i64 {
            News::AllDone
        } else {
            return Ok(None);
        };
        self.store.add(&key(attempt, "heard"), 1)?;
        Ok(Some(news))
    }

    fn heartbeat(&self, lives: &mut [(i64, Instant)]) -> Result<Option<News>> {
        for (number, node) in self.nodes.iter().enumerate() {
            let own = i64::from(number == self.node_rank);
            let beats = self.store.add(&format!("{OURS}alive/{number}"), own)?;
            let (before, since) = &mut lives[number];
            if beats != *before {
                (*before, *since) = (beats, Instant::now());
            } else if since.elapsed() > self.keep_alive {
                let (host, seconds) = (&node.host, since.elapsed().as_secs_f64());
                let what = format!("node {number} ({host}) has given no sign of life for {seconds:.0} s");
                return Ok(Some(News::Lost(what)));
            }
        }
        Ok(None)
    }
}
