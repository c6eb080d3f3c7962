//! Ranks on several machines, over sockets; ranks of one machine talk through shared memory.
//!
//! Every pair of ranks has a link. A call is one or more *transfers*, in each of which a rank writes to and
//! reads from several peers at once. The first transfer of a call begins with its header, to everyone it
//! concerns: that is how a mismatch is found. After that
//!
//! - gathers of large parts go round a ring (a machine's bytes reach the next machine once, however many ranks
//!   it has), small ones straight to everyone;
//! - broadcasts of large buffers go down a chain in slices, small ones down a tree;
//! - reductions send every rank the pieces it sums, and it sums them in rank order.
//!
//! A dead peer closes its socket, and one whose machine is cut off stops acknowledging; both are seen by whoever
//! waits for it. Who fails first writes why into the store and closes its sockets, so that everyone else finds
//! the reason there.

mod link;
mod meet;

use crate::call::{Call, HEADER, Header, Job};
use crate::copy::copy;
use crate::error::list_ranks;
use crate::queued::{Engine, Queued};
use crate::store::{Joining, Store};
use crate::ticket::Who;
use crate::{Error, Group, Reduction, Result, reduce};
use device::Dtype;
use link::Link;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Up to this many bytes a rank, everyone is told directly.
const SMALL: usize = 32 << 10;
/// Bytes that go to one peer, or down a chain, at a time.
const SLICE: usize = 512 << 10;
/// How often a sleeper looks whether its links are cut and the group has failed.
const LOOK: Duration = Duration::from_millis(50);
/// How long one who finds a link closed waits for the reason to appear in the store.
const REASON: Duration = Duration::from_millis(300);

/// Meets the other ranks of the group through the store and connects to each of them. Each listens, while it
/// joins, on the address by which it reaches the store. Where `SHARDLOOM_SECRET` is set, who connects must
/// know it. Groups that exist at the same time in one store need different names. A wait longer than `timeout`
/// is an error.
pub fn join(
    store: Arc<Store>,
    name: &str,
    rank: usize,
    size: usize,
    timeout: Duration,
) -> Result<Arc<dyn Group>> {
    join_at(Joining { store, scope: name, name, rank, size, timeout })
}

fn join_at(joining: Joining<'_>) -> Result<Arc<dyn Group>> {
    let exchange = joining.exchange("tcp")?;
    let Joining { store, scope, name, rank, size, timeout } = joining;
    let links = meet::meet(&store, scope, rank, size, &exchange, timeout)?;
    // A connection of its own: while others wait in the shared one, failures must get through.
    let news = store.another(Duration::from_secs(2))?;
    let scope = exchange.scope().to_string();
    let failure_key = format!("{scope}/failure");
    let (name, links, failed) = (name.to_string(), Mutex::new(links), Mutex::new(None));
    let engine = Tcp { store, scope, news, failure_key, name, rank, size, timeout, links, failed };
    Ok(Arc::new(Queued::new(engine)))
}

/// One rank.
struct Tcp {
    store: Arc<Store>,
    scope: String,
    news: Store,
    failure_key: String,
    name: String,
    rank: usize,
    size: usize,
    timeout: Duration,
    links: Mutex<Vec<Option<Link>>>,
    /// The first failure that this rank knows of.
    failed: Mutex<Option<Error>>,
}

/// Addresses and lengths of bytes in the order in which they go out or come in.
type Bytes = Vec<(usize, usize)>;

/// What goes between this rank and one peer in a transfer.
#[derive(Default)]
struct Flow {
    out: Bytes,
    into: Bytes,
}

/// A flow under way.
struct Progress {
    peer: usize,
    flow: Flow,
    /// Which piece is next, and how much of it is done.
    out_at: (usize, usize),
    into_at: (usize, usize),
    /// The peer's, and whether it was looked at.
    header: Box<[u8; HEADER]>,
    compared: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Progress {
    fn writes(&self) -> bool {
        self.out_at.0 < self.flow.out.len()
    }

    fn reads(&self) -> bool {
        self.into_at.0 < self.flow.into.len()
    }
}

/// Moves on by `now` bytes, over pieces that are done.
fn advance(at: &mut (usize, usize), pieces: &Bytes, now: usize) {
    at.1 += now;
    while at.0 < pieces.len() && at.1 == pieces[at.0].1 {
        *at = (at.0 + 1, 0);
    }
}

impl Tcp {
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.rank;
        (0..self.size).filter(move |&peer| peer != me)
    }

    /// Writes and reads all flows at once. `with_header` puts the job's header before every flow and compares
    /// what the peers put before theirs.
    ///
    /// # Safety
    /// What flows name is valid for as long as this runs: to read what goes out, to write what comes in.
    unsafe fn transfer(
        &self,
        links: &mut [Option<Link>],
        job: &Job,
        flows: Vec<(usize, Flow)>,
        with_header: bool,
    ) -> Result<Vec<Header>> {
        let mine = job.header().encode();
        let mut headers = vec![job.header(); self.size];
        let start = |(peer, mut flow): (usize, Flow)| {
            let mut header = Box::new([0; HEADER]);
            if with_header {
                flow.out.insert(0, (mine.as_ptr().expose_provenance(), HEADER));
                flow.into.insert(0, (header.as_mut_ptr().expose_provenance(), HEADER));
            }
            let mut progress =
                Progress { peer, flow, out_at: (0, 0), into_at: (0, 0), header, compared: false };
            // Pieces without bytes are done before they begin.
            advance(&mut progress.out_at, &progress.flow.out, 0);
            advance(&mut progress.into_at, &progress.flow.into, 0);
            progress
        };
        let mut under_way: Vec<Progress> = flows.into_iter().map(start).collect();
        let started = Instant::now();
        let mut moved_at = started;
        loop {
            let mut moved = false;
            for progress in &mut under_way {
                let peer = progress.peer;
                let Some(link) = &mut links[peer] else { continue };
                // SAFETY: passed on.
                match unsafe { step(link, progress) } {
                    Ok(step) => moved |= step,
                    Err(why) => return Err(self.lost(job, peer, why, started)),
                }
                if with_header && !progress.compared && progress.into_at.0 > 0 {
                    let compared = job.compare(&progress.header[..], &self.name, self.rank, peer);
                    headers[peer] = compared.map_err(|error| self.fail(error))?;
                    progress.compared = true;
                }
            }
            under_way.retain(|progress| progress.writes() || progress.reads());
            if under_way.is_empty() {
                return Ok(headers);
            }
            if moved {
                moved_at = Instant::now();
                continue;
            }
            let wanted = |progress: &Progress| {
                let link = links[progress.peer].as_ref();
                link.map_or((-1, 0), |link| {
                    (link.descriptor(), link.events(progress.writes(), progress.reads()))
                })
            };
            let wanted: Vec<_> = under_way.iter().map(wanted).collect();
            let woken = link::poll(&wanted, LOOK);
            for (progress, woken) in under_way.iter().zip(&woken) {
                if let Some(link) = links[progress.peer].as_mut().filter(|_| *woken) {
                    link.woken();
                }
            }
            if woken.iter().any(|&woken| woken) {
                continue;
            }
            self.look_around(links, job, &under_way, moved_at)?;
        }
    }

    /// Fails when what is waited for will not come.
    fn look_around(
        &self,
        links: &[Option<Link>],
        job: &Job,
        under_way: &[Progress],
        moved_at: Instant,
    ) -> Result<()> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let cut = |progress: &&Progress| links[progress.peer].as_ref().is_some_and(Link::is_cut);
        if let Some(progress) = under_way.iter().find(cut) {
            let why = "its machine does not answer any more".to_string();
            return Err(self.lost(job, progress.peer, why, moved_at));
        }
        if moved_at.elapsed() < self.timeout {
            return Ok(());
        }
        let seconds = moved_at.elapsed().as_secs_f64();
        let missing = list_ranks(under_way.iter().map(|progress| progress.peer));
        let (rank, group, what) = (self.rank, self.name.clone(), job.what.clone());
        Err(self.fail(Error::Timeout { rank, group, op: job.call.op(rank), what, seconds, missing }))
    }

    /// A link is closed: because its rank is gone, or because it has failed and said why in the store.
    fn lost(&self, job: &Job, peer: usize, why: String, started: Instant) -> Error {
        let (rank, group, what) = (self.rank, self.name.clone(), job.what.clone());
        let seconds = started.elapsed().as_secs_f64();
        if let Some(error) = self.told(REASON) {
            return error;
        }
        self.fail(Error::PeerLost { rank, group, op: job.call.op(rank), what, seconds, peer, why })
    }

    /// The failure that another rank wrote into the store, if it does within `patience`.
    fn told(&self, patience: Duration) -> Option<Error> {
        if !self.news.wait_or_not(&[&self.failure_key], patience).ok()? {
            return None;
        }
        let text = self.news.get_now(&self.failure_key).ok()?;
        let error = Error::decode(&String::from_utf8_lossy(&text), self.rank, &self.name);
        Some(lock(&self.failed).get_or_insert(error).clone())
    }

    /// Whether a rank has failed while this one was elsewhere: what it sent before may still be here, and would
    /// let a call succeed that the others have given up.
    fn failed_meanwhile(&self, links: &[Option<Link>]) -> Option<Error> {
        let ends: Vec<_> = links.iter().flatten().map(|link| (link.descriptor(), libc::POLLRDHUP)).collect();
        let closed = link::poll(&ends, Duration::ZERO).contains(&true);
        // One that only left said nothing.
        if closed { self.told(Duration::ZERO) } else { None }
    }

    fn carry_out(&self, links: &mut [Option<Link>], job: &Job) -> Result<Vec<Vec<u8>>> {
        let mut run = Run { tcp: self, links, job, with_header: true };
        match job.call {
            Call::Exchange => return run.exchange(),
            Call::Barrier => run.everyone(|_| Flow::default())?,
            Call::AllGather { dtype, part } => {
                let (src, dst) = job.buffers();
                let (own, bytes) = (dst.address() + self.rank * part * dtype.bytes(), part * dtype.bytes());
                // SAFETY: checked sizes; `src` is apart from `dst`, or its own part at its place.
                unsafe { copy(src.address(), own, bytes, dst.num_bytes()) };
                let starts: Vec<usize> = (0..=self.size).map(|rank| rank * bytes).collect();
                run.gather(dst.address(), &starts)?;
            }
            Call::AllToAll { dtype, part } => {
                let (src, dst) = (job.buffers().0.address(), job.buffers().1.address());
                let (me, bytes) = (self.rank, part * dtype.bytes());
                // SAFETY: checked sizes; `src` and `dst` are apart.
                unsafe { copy(src + me * bytes, dst + me * bytes, bytes, bytes * self.size) };
                run.everyone(|peer| Flow {
                    out: vec![(src + peer * bytes, bytes)],
                    into: vec![(dst + peer * bytes, bytes)],
                })?;
            }
            Call::ReduceScatter { dtype, part } => {
                let (src, dst) = job.buffers();
                let starts: Vec<usize> = (0..=self.size).map(|rank| rank * part * dtype.bytes()).collect();
                run.reduce(src.address(), &starts, dst.address(), dtype, Reduction::Sum)?;
            }
            Call::AllReduce { dtype, len, reduction } => {
                let at = job.buffers().0.address();
                if len * dtype.bytes() <= SMALL {
                    run.reduce_small(at, len, dtype, reduction)?;
                } else {
                    let start = |rank: usize| rank * len / self.size * dtype.bytes();
                    let starts: Vec<usize> = (0..=self.size).map(start).collect();
                    run.reduce(at, &starts, at + starts[self.rank], dtype, reduction)?;
                    run.gather(at, &starts)?;
                }
            }
            Call::Broadcast { dtype, len, root } => {
                run.everyone(|_| Flow::default())?;
                run.broadcast(job.buffers().0.address(), len * dtype.bytes(), root)?;
            }
            Call::Transfer { from, to, .. } => {
                let (src, dst) = job.buffers();
                if from == self.rank {
                    run.transfer(vec![(
                        to,
                        Flow { out: vec![(src.address(), src.num_bytes())], into: vec![] },
                    )])?;
                } else {
                    run.transfer(vec![(
                        from,
                        Flow { out: vec![], into: vec![(dst.address(), dst.num_bytes())] },
                    )])?;
                }
            }
        }
        Ok(Vec::new())
    }
}

/// Writes and reads until the link wants to wait; whether anything moved.
///
/// # Safety
/// As for [`Tcp::transfer`].
unsafe fn step(link: &mut Link, progress: &mut Progress) -> std::result::Result<bool, String> {
    let mut moved = false;
    loop {
        let mut now = 0;
        if progress.writes() {
            let ((start, len), done) = (progress.flow.out[progress.out_at.0], progress.out_at.1);
            // SAFETY: the caller's promise.
            let bytes = unsafe { std::slice::from_raw_parts((start + done) as *const u8, len - done) };
            let written = link.write(bytes)?;
            advance(&mut progress.out_at, &progress.flow.out, written);
            now += written;
        }
        if progress.reads() {
            let ((start, len), done) = (progress.flow.into[progress.into_at.0], progress.into_at.1);
            // SAFETY: the caller's promise.
            let bytes = unsafe { std::slice::from_raw_parts_mut((start + done) as *mut u8, len - done) };
            let read = link.read(bytes)?;
            let piece = progress.into_at.0;
            advance(&mut progress.into_at, &progress.flow.into, read);
            now += read;
            if piece == 0 && progress.into_at.0 > 0 {
                // The header is looked at before more is read.
                return Ok(true);
            }
        }
        if now == 0 {
            return Ok(moved);
        }
        moved = true;
    }
}

/// One call that runs. Addresses are those of the job's buffers, within the sizes that were checked when it
/// was issued, or of locals that outlive each transfer: that is what makes its transfers safe.
struct Run<'a> {
    tcp: &'a Tcp,
    links: &'a mut [Option<Link>],
    job: &'a Job,
    /// Until the first transfer.
    with_header: bool,
}

impl Run<'_> {
    fn transfer(&mut self, flows: Vec<(usize, Flow)>) -> Result<Vec<Header>> {
        let with_header = std::mem::replace(&mut self.with_header, false);
        // SAFETY: see above.
        unsafe { self.tcp.transfer(self.links, self.job, flows, with_header) }
    }

    /// A flow to and from every peer.
    fn everyone(&mut self, flow: impl Fn(usize) -> Flow) -> Result<()> {
        let flows = self.tcp.peers().map(|peer| (peer, flow(peer))).collect();
        self.transfer(flows).map(|_| ())
    }

    /// Everyone's headers, and only with some peers anything more.
    fn headers(&mut self) -> Result<()> {
        if self.with_header { self.everyone(|_| Flow::default()) } else { Ok(()) }
    }

    /// Of the bytes at `at`, cut at `starts`, each rank has its own part: now all have all.
    fn gather(&mut self, at: usize, starts: &[usize]) -> Result<()> {
        let (me, size) = (self.tcp.rank, self.tcp.size);
        let part = |rank: usize| (at + starts[rank], starts[rank + 1] - starts[rank]);
        let largest = (0..size).map(|rank| part(rank).1).max().unwrap_or(0);
        if size == 2 || largest <= SMALL {
            return self.everyone(|peer| Flow { out: vec![part(me)], into: vec![part(peer)] });
        }
        self.headers()?;
        let (next, before) = ((me + 1) % size, (me + size - 1) % size);
        for step in 0..size - 1 {
            let (out, into) = ((me + size - step) % size, (me + size - step - 1) % size);
            let out = Flow { out: vec![part(out)], into: vec![] };
            self.transfer(vec![(next, out), (before, Flow { out: vec![], into: vec![part(into)] })])?;
        }
        Ok(())
    }

    /// `dst` becomes this rank's part (of the bytes at `src`, cut at `starts`) of the sum over all ranks.
    fn reduce(
        &mut self,
        src: usize,
        starts: &[usize],
        dst: usize,
        dtype: Dtype,
        reduction: Reduction,
    ) -> Result<()> {
        let (me, size) = (self.tcp.rank, self.tcp.size);
        let bytes = |rank: usize| starts[rank + 1] - starts[rank];
        let largest = (0..size).map(bytes).max().unwrap_or(0);
        let slice = |rank: usize, index: usize| {
            let start = (index * SLICE).min(bytes(rank));
            (start, SLICE.min(bytes(rank) - start))
        };
        // Elements are at most four bytes; what is received is cut at multiples of SLICE.
        let room = SLICE.min(largest).div_ceil(4);
        let mut received = vec![0u32; room * size];
        let place = received.as_mut_ptr().expose_provenance();
        let place = |rank: usize| place + rank * room * 4;
        for index in 0..largest.div_ceil(SLICE).max(1) {
            let (own, len) = slice(me, index);
            self.everyone(|peer| {
                let (start, out) = slice(peer, index);
                Flow { out: vec![(src + starts[peer] + start, out)], into: vec![(place(peer), len)] }
            })?;
            let from = |rank: usize| if rank == me { src + starts[me] + own } else { place(rank) };
            let sources: Vec<usize> = (0..size).map(from).collect();
            // SAFETY: as many bytes at each, aligned for the elements; `dst` may be the own source.
            unsafe {
                reduce::reduce_at(&sources, dst + own, len / dtype.bytes(), dtype, reduction, bytes(me))?;
            }
        }
        Ok(())
    }

    /// Everyone sends everything to everyone, who sums it for himself.
    fn reduce_small(&mut self, at: usize, len: usize, dtype: Dtype, reduction: Reduction) -> Result<()> {
        let (me, size, bytes) = (self.tcp.rank, self.tcp.size, len * dtype.bytes());
        let room = bytes.div_ceil(4);
        let mut received = vec![0u32; room * size];
        let place = received.as_mut_ptr().expose_provenance();
        let place = |rank: usize| if rank == me { at } else { place + rank * room * 4 };
        self.everyone(|peer| Flow { out: vec![(at, bytes)], into: vec![(place(peer), bytes)] })?;
        let sources: Vec<usize> = (0..size).map(place).collect();
        // SAFETY: as many bytes at each, aligned for the elements; the destination is the own source.
        unsafe { reduce::reduce_at(&sources, at, len, dtype, reduction, bytes)? };
        Ok(())
    }

    fn broadcast(&mut self, at: usize, bytes: usize, root: usize) -> Result<()> {
        let size = self.tcp.size;
        // Ranks counted from the root.
        let me = (self.tcp.rank + size - root) % size;
        let rank = |place: usize| (place + root) % size;
        let out = |start: usize, len: usize| Flow { out: vec![(at + start, len)], into: vec![] };
        let into = |start: usize, len: usize| Flow { out: vec![], into: vec![(at + start, len)] };
        if bytes <= SMALL {
            // A tree: who is at a place below 2^k has it after k steps, and hands it to the place 2^k further.
            let mut reach = 1;
            while reach < size {
                if me < reach && me + reach < size {
                    self.transfer(vec![(rank(me + reach), out(0, bytes))])?;
                } else if (reach..2 * reach).contains(&me) {
                    self.transfer(vec![(rank(me - reach), into(0, bytes))])?;
                }
                reach *= 2;
            }
            return Ok(());
        }
        // A chain: each receives one slice while it hands on the one before.
        let slices: Vec<(usize, usize)> =
            (0..bytes).step_by(SLICE).map(|start| (start, SLICE.min(bytes - start))).collect();
        for index in 0..=slices.len() {
            let mut flows = Vec::new();
            if me > 0 && index < slices.len() {
                flows.push((rank(me - 1), into(slices[index].0, slices[index].1)));
            }
            if me + 1 < size && index > 0 {
                flows.push((rank(me + 1), out(slices[index - 1].0, slices[index - 1].1)));
            }
            self.transfer(flows)?;
        }
        Ok(())
    }

    fn exchange(&mut self) -> Result<Vec<Vec<u8>>> {
        let flows = self.tcp.peers().map(|peer| (peer, Flow::default())).collect();
        let headers = self.transfer(flows)?;
        let bytes = self.job.bytes();
        let mut answers: Vec<Vec<u8>> = headers.iter().map(|header| vec![0; header.num_bytes]).collect();
        answers[self.tcp.rank].copy_from_slice(bytes);
        let flow = |(peer, answer): (usize, &mut Vec<u8>)| {
            let out = vec![(bytes.as_ptr().expose_provenance(), bytes.len())];
            (peer, Flow { out, into: vec![(answer.as_mut_ptr().expose_provenance(), answer.len())] })
        };
        let me = self.tcp.rank;
        let flows = answers.iter_mut().enumerate().filter(|(peer, _)| *peer != me).map(flow).collect();
        self.transfer(flows)?;
        Ok(answers)
    }
}

impl Engine for Tcp {
    fn who(&self) -> Who<'_> {
        Who { kind: "tcp", name: &self.name, rank: self.rank, size: self.size }
    }

    fn run(&self, job: &Job) -> Result<Vec<Vec<u8>>> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let mut links = lock(&self.links);
        let result = match self.failed_meanwhile(&links) {
            Some(error) => Err(error),
            None => self.carry_out(&mut links, job),
        };
        if result.is_err() {
            // So that everyone hears of it.
            links.iter().flatten().for_each(Link::shut_down);
        }
        result
    }

    fn fail(&self, error: Error) -> Error {
        let mut failed = lock(&self.failed);
        if let Some(first) = &*failed {
            return first.clone();
        }
        *failed = Some(error.clone());
        // Who cannot reach the store any more cannot tell; the others will see the links closed.
        if let Ok(1) = self.news.add(&format!("{} counted", self.failure_key), 1) {
            let _ = self.news.set(&self.failure_key, error.encode().as_bytes());
        }
        // Not while a call runs: it closes them itself.
        if let Ok(links) = self.links.try_lock() {
            links.iter().flatten().for_each(Link::shut_down);
        }
        error
    }

    fn failure(&self) -> Option<Error> {
        lock(&self.failed).clone()
    }

    fn scope(&self) -> &str {
        &self.scope
    }

    fn join(&self, ranks: &[usize], rank: usize, scope: &str, name: &str) -> Result<Arc<dyn Group>> {
        let (store, size, timeout) = (self.store.clone(), ranks.len(), self.timeout);
        join_at(Joining { store, scope, name, rank, size, timeout })
    }

    fn leaving(&self, _: &'static str) {}
}
