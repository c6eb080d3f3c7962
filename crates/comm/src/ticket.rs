//! What groups on CPU streams have in common: a call is checked, becomes a [`Job`] with a ticket, and runs when its
//! stream comes to it.

use crate::call::{Call, Job, Payload};
use crate::group::{check_all_to_all, check_parts, check_peer, check_root};
use crate::{Error, Group, Reduction, Result, reduce};
use device::{Buffer, Stream};
use std::fmt;
use std::sync::{Arc, OnceLock};

/// A call that was issued and has not run. If its stream drops it unrun, the peers must not wait for it.
pub(crate) trait Ticket: Send + 'static {
    /// Carries out this rank's part; the answers of an exchange.
    fn run(self) -> Result<Vec<Vec<u8>>>;
}

/// A rank of a group.
pub(crate) struct Who<'a> {
    pub kind: &'static str,
    pub name: &'a str,
    pub rank: usize,
    pub size: usize,
}

impl fmt::Display for Who<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({}, rank {} of {})", self.kind, self.name, self.rank, self.size)
    }
}

/// A group that gives a ticket for each call.
pub(crate) trait Ticketed: fmt::Debug + Send + Sync {
    type Ticket: Ticket;

    fn who(&self) -> Who<'_>;

    /// Takes the call's place in the order in which all ranks issue theirs.
    fn ticket(&self, job: Job) -> Result<Self::Ticket>;

    /// As [`Group::split`].
    fn part(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn Group>>>;
}

/// Issues a call on a stream.
fn issue<G: Ticketed>(
    group: &G,
    stream: &Stream,
    call: Call,
    (src, dst): (&Buffer, &Buffer),
    what: &str,
) -> Result<()> {
    let Stream::Cpu(stream) = stream else {
        let what = format!("{what}: a {} group works on CPU streams only", group.who().kind);
        return Err(Error::Argument { op: call.op(group.rank()), what });
    };
    let payload = Payload::Buffers(src.clone(), dst.clone());
    let ticket = group.ticket(Job { call, what: what.to_string(), payload })?;
    // On an inline stream the call has failed by the time `submit` returns, and the caller hears the error itself;
    // on a worker it travels through the stream as text.
    let failure = Arc::new(OnceLock::new());
    let (reported, name) = (failure.clone(), stream.name().to_string());
    let task = move || {
        ticket.run().map(|_| ()).map_err(|error| {
            let what = error.to_string();
            let _ = reported.set(error);
            device::Error::Stream { stream: name, what }
        })
    };
    let result = stream.submit(task);
    result.map_err(|error| failure.get().cloned().unwrap_or(Error::Device(error)))
}

/// Carries out a call of the host's.
fn agree<G: Ticketed>(group: &G, call: Call, bytes: &[u8], what: &str) -> Result<Vec<Vec<u8>>> {
    let payload = Payload::Bytes(bytes.to_vec());
    group.ticket(Job { call, what: what.to_string(), payload })?.run()
}

impl<G: Ticketed> Group for G {
    fn name(&self) -> &str {
        self.who().name
    }

    fn rank(&self) -> usize {
        self.who().rank
    }

    fn size(&self) -> usize {
        self.who().size
    }

    fn all_gather(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        check_parts("all_gather", what, src, dst, self)?;
        let call = Call::AllGather { dtype: src.dtype(), part: src.len() };
        issue(self, stream, call, (src, dst), what)
    }

    fn reduce_scatter(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        reduce::supports("reduce_scatter", src.dtype())?;
        check_parts("reduce_scatter", what, dst, src, self)?;
        let call = Call::ReduceScatter { dtype: dst.dtype(), part: dst.len() };
        issue(self, stream, call, (src, dst), what)
    }

    fn all_reduce(&self, stream: &Stream, buffer: &Buffer, reduction: Reduction, what: &str) -> Result<()> {
        reduce::supports("all_reduce", buffer.dtype())?;
        let call = Call::AllReduce { dtype: buffer.dtype(), len: buffer.len(), reduction };
        issue(self, stream, call, (buffer, buffer), what)
    }

    fn broadcast(&self, stream: &Stream, buffer: &Buffer, root: usize, what: &str) -> Result<()> {
        check_root("broadcast", what, root, self)?;
        let call = Call::Broadcast { dtype: buffer.dtype(), len: buffer.len(), root };
        issue(self, stream, call, (buffer, buffer), what)
    }

    fn all_to_all(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        check_all_to_all(what, src, dst, self)?;
        let call = Call::AllToAll { dtype: src.dtype(), part: src.len() / self.size() };
        issue(self, stream, call, (src, dst), what)
    }

    fn send(&self, stream: &Stream, src: &Buffer, to: usize, what: &str) -> Result<()> {
        check_peer("send", what, to, self)?;
        let call = Call::Transfer { dtype: src.dtype(), len: src.len(), from: self.rank(), to };
        issue(self, stream, call, (src, src), what)
    }

    fn receive(&self, stream: &Stream, dst: &Buffer, from: usize, what: &str) -> Result<()> {
        check_peer("receive", what, from, self)?;
        let call = Call::Transfer { dtype: dst.dtype(), len: dst.len(), from, to: self.rank() };
        issue(self, stream, call, (dst, dst), what)
    }

    fn exchange(&self, bytes: &[u8], what: &str) -> Result<Vec<Vec<u8>>> {
        agree(self, Call::Exchange, bytes, what)
    }

    fn barrier(&self, what: &str) -> Result<()> {
        agree(self, Call::Barrier, &[], what).map(|_| ())
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn Group>>> {
        self.part(ranks, name)
    }
}
