//! Training data: from files to the micro-batches of a rank.
//!
//! All data is one stream of rows, epoch after epoch, the same for any number of ranks. Step s trains on the next
//! `global_batch` rows of it, of which each rank takes its contiguous part in order. [`Cursor`] says how far one
//! has come.

mod batches;
mod command;
pub mod corpus;
mod loader;
mod order;
pub mod pack;
pub mod text;
pub mod tokenizer;

pub use batches::Batches;
pub use command::{inspect, tokenize};
pub use loader::Loader;
pub use order::{Cursor, Permutation};

use crate::run::{DataSource, DocumentSource, Length};
use crate::{Error, Result, Run};
use comm::Group;
use corpus::Corpus;
use fsdp::{Field, HostBatch};
use pack::{Epoch, Packing, Rows};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use tokenizer::Tokenizer;

/// The data of a run. Whatever costs little has been checked; documents are read when they are first needed.
#[derive(Debug)]
pub struct Data {
    /// Tokens of a row.
    pub seq: usize,
    packing: Option<Packing>,
    stream: Mutex<Option<Arc<Stream>>>,
}

impl Data {
    pub fn open(run: &Run) -> Result<Self> {
        match &run.data {
            DataSource::Batches { path, seq_len } => {
                let batches = Batches::open(path)?;
                batches.check(run, *seq_len)?;
                let seq = batches.seq;
                let stream = Stream { kind: Kind::Batches(batches), seq, vocab: run.config.vocab };
                Ok(Data { seq, packing: None, stream: Mutex::new(Some(Arc::new(stream))) })
            }
            DataSource::Documents { seq_len, packing, .. } => {
                Ok(Data { seq: *seq_len, packing: Some(*packing), stream: Mutex::new(None) })
            }
        }
    }

    /// The fields of a micro-batch.
    pub fn fields(&self, rows: usize) -> Vec<Field> {
        match self.packing {
            Some(Packing::Packed) => Field::packed(rows, self.seq),
            _ => Field::tokens(rows, self.seq),
        }
    }

    /// The stream of rows, read by whoever comes first.
    pub fn stream(&self, run: &Run) -> Result<Arc<Stream>> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = &*stream {
            return Ok(stream.clone());
        }
        Ok(stream.insert(Arc::new(Stream::read(run)?)).clone())
    }
}

/// The rows of a run, in the order in which it trains on them.
#[derive(Debug)]
pub struct Stream {
    kind: Kind,
    seq: usize,
    vocab: usize,
}

#[derive(Debug)]
enum Kind {
    Batches(Batches),
    Documents { corpus: Corpus, packing: Packing, seed: u64, path: PathBuf },
}

impl Stream {
    fn read(run: &Run) -> Result<Self> {
        let (vocab, DataSource::Documents { source, seq_len, packing, seed }) = (run.config.vocab, &run.data)
        else {
            unreachable!("batches are opened at once")
        };
        let (corpus, path) = match source {
            DocumentSource::Tokens { path } => (Corpus::open(path)?, path),
            DocumentSource::Text { files, tokenizer } => {
                let tokenizer = Tokenizer::open(tokenizer, &run.config_text, vocab)?;
                (text::tokenize(files, &tokenizer)?, &files[0])
            }
        };
        if corpus.num_tokens() == 0 {
            return Err(Error::file(path, "there is nothing to train on: all documents are empty"));
        }
        if corpus.largest() as usize >= vocab {
            let what = format!(
                "token {} is outside the model's vocabulary of {vocab}; use the tokenizer that belongs to the model",
                corpus.largest()
            );
            return Err(Error::file(path, what));
        }
        let kind = Kind::Documents { corpus, packing: *packing, seed: *seed, path: path.clone() };
        let stream = Stream { kind, seq: *seq_len, vocab };
        stream.check_rows(run.global_batch)?;
        Ok(stream)
    }

    fn check_rows(&self, global_batch: usize) -> Result<()> {
        let rows = self.rows();
        if rows >= global_batch as u64 {
            return Ok(());
        }
        Err(Error::Config(format!(
            "the data has {}: fewer rows than train.global_batch = {global_batch}. Give more text, or lower \
             train.global_batch or data.seq_len",
            self.summary()
        )))
    }

    /// Rows of an epoch.
    pub fn rows(&self) -> u64 {
        match &self.kind {
            Kind::Batches(batches) => batches.steps * batches.rows as u64,
            Kind::Documents { corpus, packing, .. } => packing.num_rows(corpus, self.seq),
        }
    }

    /// Steps of a run of such length. Rows that make no whole batch at its end are left out.
    pub fn steps(&self, length: Length, global_batch: usize) -> u64 {
        self.steps_from(0, Cursor::default(), length, global_batch)
    }

    /// Steps of a run that has made `step` of them and come to `cursor`.
    pub fn steps_from(&self, step: u64, cursor: Cursor, length: Length, global_batch: usize) -> u64 {
        match length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => {
                let left = (epochs * self.rows()).saturating_sub(cursor.rows_before(self.rows()));
                step + left / global_batch as u64
            }
        }
    }

    /// Holds this rank's data against the others': were they to differ, ranks would train on some rows twice and
    /// on others never, and might not even stop at the same step.
    pub fn agree(&self, run: &Run, ranks: &dyn Group) -> Result<()> {
        let mine =
            format!("{} ({:016x})", self.summary_of_run(run.length, run.global_batch), self.fingerprint());
        let all = ranks.exchange(mine.as_bytes(), "data")?;
        match all.iter().position(|theirs| theirs != mine.as_bytes()) {
            None => Ok(()),
            Some(peer) => Err(Error::Config(format!(
                "rank {} and rank {peer} do not have the same data: {mine} and {}. Give every rank the same files \
                 in the same order and the same [data] settings",
                ranks.rank(),
                String::from_utf8_lossy(&all[peer])
            ))),
        }
    }

    /// A hash of what decides which row holds what: order and lengths of documents, seed, rows.
    pub fn fingerprint(&self) -> u64 {
        let hash = |hash: u64, number: u64| (hash ^ number).wrapping_mul(0x100000001b3).rotate_left(29);
        let start = hash(0xcbf29ce484222325, self.seq as u64);
        match &self.kind {
            Kind::Batches(batches) => [batches.steps, batches.rows as u64].into_iter().fold(start, hash),
            Kind::Documents { corpus, packing, seed, .. } => {
                let start = hash(hash(start, *seed), *packing as u64);
                (0..corpus.num_documents())
                    .fold(start, |so_far, index| hash(so_far, corpus.document(index).1))
            }
        }
    }

    /// For people: how much there is.
    pub fn summary(&self) -> String {
        let rows = format!("{} rows of {} tokens", self.rows(), self.seq);
        match &self.kind {
            Kind::Batches(_) => rows,
            Kind::Documents { corpus, .. } => {
                format!("{} documents, {} tokens, {rows}", corpus.num_documents(), corpus.num_tokens())
            }
        }
    }

    /// For people: what a run takes of it.
    pub fn summary_of_run(&self, length: Length, global_batch: usize) -> String {
        let (steps, rows) = (self.steps(length, global_batch), self.rows());
        let taken = steps * global_batch as u64;
        let mut text = format!(
            "{}; {steps} steps of {global_batch} rows are {:.2} epochs",
            self.summary(),
            taken as f64 / rows as f64
        );
        if let Length::Epochs(epochs) = length {
            match epochs * rows - taken {
                0 => {}
                left => text += &format!("; the last {left} rows make no whole batch and are left out"),
            }
        }
        text
    }
}

/// Which part of every batch is a rank's, and how it is divided.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    pub rank: usize,
    pub ranks: usize,
    /// Rows over all ranks; a multiple of their number.
    pub global_batch: usize,
    /// Rows of a micro-batch; the rank's rows are a multiple of it.
    pub micro_batch: usize,
}

/// Reads rows of a stream. Keeps the order of the epoch it is in.
#[derive(Debug)]
pub struct Reader {
    stream: Arc<Stream>,
    epoch: Option<(u64, Epoch)>,
}

impl Reader {
    pub fn new(stream: Arc<Stream>) -> Self {
        Reader { stream, epoch: None }
    }

    /// `count` rows from `cursor` on.
    pub fn rows(&mut self, cursor: Cursor, count: usize) -> Result<Rows> {
        let mut rows = Rows::default();
        for ahead in 0..count as u64 {
            let Cursor { epoch, row } = cursor.advanced(ahead, self.stream.rows());
            match &self.stream.kind {
                Kind::Batches(batches) => batches.append(row, &mut rows)?,
                Kind::Documents { corpus, packing, seed, .. } => {
                    if self.epoch.as_ref().is_none_or(|(current, _)| *current != epoch) {
                        self.epoch = None;
                        let order = Epoch::new(corpus, *packing, self.stream.seq, *seed, epoch);
                        self.epoch = Some((epoch, order));
                    }
                    let Some((_, order)) = &self.epoch else { unreachable!("it has just been made") };
                    order.append(corpus, row, &mut rows)?;
                }
            }
        }
        Ok(rows)
    }

    /// A rank's micro-batches of the batch that starts at `cursor`.
    pub fn micro_batches(&mut self, cursor: Cursor, share: Share) -> Result<Vec<HostBatch>> {
        let per_rank = share.global_batch / share.ranks;
        let first = cursor.advanced((share.rank * per_rank) as u64, self.stream.rows());
        let rows = self.rows(first, per_rank)?;
        let (seq, vocab) = (self.stream.seq, self.stream.vocab);
        let size = share.micro_batch * seq;
        let chunks = rows.ids.chunks(size).zip(rows.labels.chunks(size));
        let batches: fsdp::Result<Vec<HostBatch>> = match &self.stream.kind {
            Kind::Documents { packing: Packing::Packed, .. } => chunks
                .zip(rows.document_start.chunks(size))
                .map(|((ids, labels), starts)| HostBatch::packed(ids, labels, starts, seq, vocab))
                .collect(),
            _ => chunks.map(|(ids, labels)| HostBatch::tokens(ids, labels, seq, vocab)).collect(),
        };
        let path = match &self.stream.kind {
            Kind::Batches(batches) => batches.path(),
            Kind::Documents { path, .. } => path,
        };
        batches.map_err(|e| {
            Error::file(path, format!("from row {} of epoch {} on: {e}", first.row, first.epoch))
        })
    }
}
