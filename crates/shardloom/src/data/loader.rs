//! Batches prepared ahead of the trainer, by a thread of their own.

use super::{Cursor, Reader, Share, Stream};
use crate::{Error, Result};
use fsdp::HostBatch;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

/// Batches that wait at most.
const AHEAD: usize = 2;

/// Hands out a rank's batches in order. Dropping it ends its thread.
#[derive(Debug)]
pub struct Loader {
    /// None only while it is dropped.
    batches: Option<Receiver<Result<Vec<HostBatch>>>>,
    thread: Option<JoinHandle<()>>,
}

impl Loader {
    /// Starts to prepare `steps` batches from `cursor` on.
    pub fn start(stream: Arc<Stream>, share: Share, cursor: Cursor, steps: u64) -> Result<Self> {
        let (sender, batches) = sync_channel(AHEAD);
        let mut reader = Reader::new(stream.clone());
        let work = move || {
            let mut cursor = cursor;
            for _ in 0..steps {
                let batch = reader.micro_batches(cursor, share);
                let failed = batch.is_err();
                // Nobody waits for more where the receiver is gone.
                if sender.send(batch).is_err() || failed {
                    return;
                }
                cursor = cursor.advanced(share.global_batch as u64, stream.rows());
            }
        };
        let thread = std::thread::Builder::new().name(format!("loader {}", share.rank)).spawn(work);
        let thread = thread.map_err(|e| Error::Config(format!("starting the loader's thread: {e}")))?;
        Ok(Loader { batches: Some(batches), thread: Some(thread) })
    }

    /// The micro-batches of the next step.
    pub fn next_step(&mut self) -> Result<Vec<HostBatch>> {
        let received = self.batches.as_ref().and_then(|batches| batches.recv().ok());
        // The sender is gone early only after a panic, which has already been printed.
        received.unwrap_or(Err(Error::Loader))
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Without a receiver a send fails, and the thread ends.
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
