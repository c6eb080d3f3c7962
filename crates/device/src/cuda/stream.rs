//! Streams and events of the driver.

use super::driver::{Context, check};
use super::library;
use crate::{Error, Result};
use cudarc::driver::sys;
use std::fmt;
use std::sync::Arc;

/// A handle to a stream of the driver. It does not wait for the legacy default stream.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<StreamHandle>,
}

struct StreamHandle {
    context: Arc<Context>,
    raw: sys::CUstream,
    name: String,
}

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for StreamHandle {}
// SAFETY: as above; issuing from two threads at once is allowed, their order is then up to them.
unsafe impl Sync for StreamHandle {}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: destroyed once; the driver lets work in flight finish first.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A point in a stream's work, for ordering: it carries no time.
#[derive(Clone)]
pub struct Event {
    inner: Arc<EventHandle>,
}

struct EventHandle {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for EventHandle {}
// SAFETY: as above; after its creation an event is only waited for.
unsafe impl Sync for EventHandle {}

impl Drop for EventHandle {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: destroyed once; waits already issued on it stay valid.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

impl EventHandle {
    fn record(stream: &Stream, flags: sys::CUevent_flags) -> Result<Self> {
        let context = stream.inner.context.clone();
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a local.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags as u32) })?;
        let event = EventHandle { context, raw };
        // SAFETY: event and stream live, in the same context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw, stream.inner.raw) })?;
        Ok(event)
    }

    fn synchronize(&self) -> Result<()> {
        self.context.enter()?;
        // SAFETY: the event lives and was recorded.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })?;
        not_void(&self.context, "of an event")
    }
}

/// Fails where what has run was for nothing.
fn not_void(context: &Context, stream: &str) -> Result<()> {
    match context.void.get() {
        Some(why) => Err(Error::Stream { stream: stream.to_string(), what: why.clone() }),
        None => Ok(()),
    }
}

impl Stream {
    pub(super) fn new(context: &Arc<Context>, name: &str) -> Result<Self> {
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointer is to a local.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Stream { inner: Arc::new(StreamHandle { context: context.clone(), raw, name: name.to_string() }) })
    }

    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The driver's handle, for libraries that issue work themselves. Valid while this stream lives.
    pub fn handle(&self) -> sys::CUstream {
        self.inner.raw
    }

    /// Makes the stream's context the calling thread's, as such libraries expect.
    pub fn make_current(&self) -> Result<()> {
        self.inner.context.enter()
    }

    pub(super) fn belongs_to(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.inner.context, context)
    }

    pub(super) fn is(&self, other: &Stream) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    pub fn record(&self) -> Result<Event> {
        let event = EventHandle::record(self, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        Ok(Event { inner: Arc::new(event) })
    }

    pub fn wait(&self, event: &Event) -> Result<()> {
        self.inner.context.enter()?;
        // SAFETY: stream and event live. The driver keeps what it needs should the event go before the wait.
        let answer = unsafe { sys::cuStreamWaitEvent(self.inner.raw, event.inner.raw, 0) };
        check("cuStreamWaitEvent", answer)
    }

    pub fn synchronize(&self) -> Result<()> {
        self.inner.context.enter()?;
        // SAFETY: the stream lives.
        let answer = unsafe { sys::cuStreamSynchronize(self.inner.raw) };
        check("cuStreamSynchronize", answer)
            .map_err(|error| Error::Stream { stream: self.inner.name.clone(), what: error.to_string() })?;
        not_void(&self.inner.context, &self.inner.name)
    }

    /// Declares what this GPU computes for this process worth nothing from now on: whoever waits for any of its
    /// streams or events hears why. For libraries whose work on a stream was cut short, of which the stream itself
    /// knows nothing.
    pub fn declare_void(&self, why: &str) {
        let _ = self.inner.context.void.set(why.to_string());
    }

    /// Whether the driver can tell times between points (from CUDA 12.8 on).
    pub(super) fn can_time() -> bool {
        library::driver_has("cuEventElapsedTime_v2")
    }

    /// Marks a point whose time can be asked for later.
    pub fn record_timed(&self) -> Result<TimedEvent> {
        let event = EventHandle::record(self, sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        Ok(TimedEvent { inner: Arc::new(event) })
    }
}

impl Event {
    /// The host waits until the point is reached.
    pub fn synchronize(&self) -> Result<()> {
        self.inner.synchronize()
    }

    /// Whether the point is reached.
    pub fn has_passed(&self) -> Result<bool> {
        self.inner.context.enter()?;
        // SAFETY: the event lives and was recorded.
        match unsafe { sys::cuEventQuery(self.inner.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => check("cuEventQuery", answer).map(|()| true),
        }
    }
}

/// A point in a stream's work that knows when it was reached.
#[derive(Clone)]
pub struct TimedEvent {
    inner: Arc<EventHandle>,
}

impl TimedEvent {
    /// Waits for both points, and tells the milliseconds from this one to `end`.
    pub fn elapsed_ms(&self, end: &TimedEvent) -> Result<f32> {
        self.inner.synchronize()?;
        end.inner.synchronize()?;
        if !Stream::can_time() {
            let what = "it is older than CUDA 12.8 and has no cuEventElapsedTime_v2".to_string();
            return Err(Error::Unavailable { library: "the CUDA driver's timing", what });
        }
        let mut ms = 0.0f32;
        // SAFETY: the pointer is to a local; both events live, keep time and have been reached.
        let answer = unsafe { sys::cuEventElapsedTime_v2(&mut ms, self.inner.raw, end.inner.raw) };
        check("cuEventElapsedTime", answer)?;
        Ok(ms)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda::Stream({} on cuda:{})", self.inner.name, self.inner.context.ordinal)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda::Event({:p})", self.inner.raw)
    }
}

impl fmt::Debug for TimedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda::TimedEvent({:p})", self.inner.raw)
    }
}
