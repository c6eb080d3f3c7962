//! Streams and events: the only order there is between two pieces of device work.

use crate::{Error, Result, cpu, cuda};

/// What a stream is for. It decides where CPU work runs: the compute stream runs inline on the calling
/// thread, side streams on a worker thread of their own, so that a collective is in flight while the rank
/// computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Compute,
    Side,
}

/// A queue of device work that runs in order. Cloning gives another handle to the same queue.
#[derive(Clone, Debug)]
pub enum Stream {
    Cpu(cpu::Stream),
    Cuda(cuda::Stream),
    Null,
}

/// A point in a stream's work.
#[derive(Clone, Debug)]
pub enum Event {
    Cpu(cpu::Event),
    Cuda(cuda::Event),
    Null,
}

impl Stream {
    /// Marks the present end of this stream's work.
    pub fn record(&self) -> Result<Event> {
        match self {
            Stream::Cpu(stream) => Ok(Event::Cpu(stream.record()?)),
            Stream::Cuda(stream) => Ok(Event::Cuda(stream.record()?)),
            Stream::Null => Ok(Event::Null),
        }
    }

    /// Work issued on this stream from now on starts after `event`. The host does not wait, except on the
    /// CPU's inline stream, where it is the one that computes.
    pub fn wait(&self, event: &Event) -> Result<()> {
        match (self, event) {
            (Stream::Cpu(stream), Event::Cpu(event)) => stream.wait(event),
            (Stream::Cuda(stream), Event::Cuda(event)) => stream.wait(event),
            (Stream::Null, Event::Null) => Ok(()),
            // A host's worker sleeps until the device is there.
            (Stream::Cpu(stream), Event::Cuda(event)) => {
                let event = event.clone();
                stream.submit(move || event.synchronize())
            }
            _ => Err(Error::argument("Stream::wait", "the event is another device's")),
        }
    }

    /// The host waits until everything issued so far has run, and hears of what failed.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Stream::Cpu(stream) => stream.synchronize(),
            Stream::Cuda(stream) => stream.synchronize(),
            Stream::Null => Ok(()),
        }
    }
}

impl Event {
    /// The host waits until the point is reached, and hears of what failed before it.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Event::Cpu(event) => event.wait(),
            Event::Cuda(event) => event.synchronize(),
            Event::Null => Ok(()),
        }
    }
}
