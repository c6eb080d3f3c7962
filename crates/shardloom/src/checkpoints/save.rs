//! Saving while training goes on.
//!
//! A step that saves waits for a copy of this rank's state in host memory, no longer. A thread then writes it to its
//! place in files that all ranks share, meets the other ranks' threads in a group of their own, and rank 0 commits.

use super::contents;
use crate::floats::encode;
use crate::run::{Run, SavedAs};
use crate::{Error, Result, show};
use checkpoint::storage::Disk;
use checkpoint::{Draft, Dtype, Plan, Receipt, Series, State, Writer, moment_names};
use comm::Group;
use fsdp::{Engine, Slot, Source, Stretch};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tensor::Model;

/// Numbers of a frozen weight that are read and written at once.
const CHUNK: usize = 1 << 20;

/// A weights' source that a thread of its own may read.
pub type SharedSource = Arc<dyn Source + Send + Sync>;

/// What is to be saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct What {
    pub checkpoint: bool,
    /// The weights alone, as `output/model`.
    pub model: bool,
}

impl What {
    pub fn is_something(self) -> bool {
        self.checkpoint || self.model
    }
}

/// One rank's part in saving.
#[derive(Debug)]
pub struct Saver {
    place: Arc<Place>,
    background: bool,
    /// The last snapshot's memory, for the next.
    spare: Vec<u8>,
    /// The save that is going on, and how long its step waited for it.
    running: Option<(JoinHandle<Done>, Duration)>,
    /// How long steps have waited for saves since somebody asked.
    waited: Option<Duration>,
}

type Done = (Result<String>, Vec<u8>);

/// Where a run's files go, and with whom.
#[derive(Debug)]
struct Place {
    group: Arc<dyn Group>,
    source: Frozen,
    series: Series,
    keep: usize,
    model: PathBuf,
    checkpoint_plan: Plan,
    model_plan: Plan,
    weights: (SavedAs, Dtype),
    plain: Vec<(String, Vec<u8>)>,
}

/// Where frozen weights come from: the device may hold them rounded.
struct Frozen(SharedSource);

impl std::fmt::Debug for Frozen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Frozen")
    }
}

/// This rank's state at one moment, in host memory.
#[derive(Debug)]
struct Snapshot {
    bytes: Vec<u8>,
    /// Tensor, first byte within it, and where its bytes are.
    pieces: Vec<(String, u64, Range<usize>)>,
    frozen: Vec<Stretch>,
}

/// A folder that is to be written.
#[derive(Clone, Copy, Debug)]
struct Folder<'a> {
    dir: &'a Path,
    plan: &'a Plan,
    state: &'a State,
    /// Whether the state goes along.
    resumable: bool,
}

impl Saver {
    pub fn new(run: &Run, model: &Model, source: SharedSource, group: Arc<dyn Group>) -> Result<Self> {
        let dir = run.output.join("checkpoints");
        let (checkpoint_plan, model_plan) = contents::plans(run, model, &dir)?;
        let place = Place {
            source: Frozen(source),
            series: Series::new(dir, Arc::new(Disk)),
            keep: run.checkpoint.keep,
            model: run.output.join("model"),
            checkpoint_plan,
            model_plan,
            weights: (run.checkpoint.dtype, contents::dtypes(run).0),
            plain: if group.rank() == 0 { contents::plain_files(run)? } else { vec![] },
            group,
        };
        let background = run.checkpoint.background;
        Ok(Saver { place: Arc::new(place), background, spare: vec![], running: None, waited: None })
    }

    /// Saves, in the background if so configured. Every rank comes here after the same step. An earlier save is
    /// waited for; what the one that ended has to say is returned.
    pub fn save(&mut self, engine: &Engine, state: State, what: What) -> Result<Option<String>> {
        let started = Instant::now();
        let earlier = self.wait()?;
        let snapshot = self.place.take(engine, what, std::mem::take(&mut self.spare))?;
        let place = self.place.clone();
        let work = move || (place.save_all(&snapshot, &state, what), snapshot.bytes);
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(work);
        let thread = thread.map_err(|e| Error::Launch(format!("starting the checkpoint's thread: {e}")))?;
        self.running = Some((thread, started.elapsed()));
        let said = if self.background { earlier } else { self.wait()? };
        *self.waited.get_or_insert_default() += started.elapsed();
        Ok(said)
    }

    /// Looks whether a save has ended since; what it has to say, or its failure.
    pub fn poll(&mut self) -> Result<Option<String>> {
        let ended = self.running.as_ref().is_some_and(|(thread, _)| thread.is_finished());
        if ended { self.wait() } else { Ok(None) }
    }

    /// Waits for a save that is running.
    pub fn wait(&mut self) -> Result<Option<String>> {
        let Some((thread, copied)) = self.running.take() else { return Ok(None) };
        let panicked = |_| Error::Launch("the thread that saves checkpoints panicked (see above)".into());
        let (saved, bytes) = thread.join().map_err(panicked)?;
        self.spare = bytes;
        let waited = if self.background {
            format!("; training waited {:.1} s", copied.as_secs_f64())
        } else {
            String::new()
        };
        saved.map(|said| Some(said + &waited))
    }

    /// Bytes of all ranks' tensors in a checkpoint.
    pub fn total_bytes(&self) -> u64 {
        self.place.checkpoint_plan.data_bytes()
    }

    /// Bytes of this rank's last snapshot, once its save has ended.
    pub fn snapshot_bytes(&self) -> usize {
        self.spare.len()
    }

    /// How long steps have waited for saves since this was last asked.
    pub fn take_waited(&mut self) -> Option<Duration> {
        self.waited.take()
    }
}

impl Drop for Saver {
    /// A rank that fails does not leave the others' threads alone with a save that they began together.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

impl Place {
    /// Copies this rank's state to the host, or its weights alone.
    fn take(&self, engine: &Engine, what: What, mut bytes: Vec<u8>) -> Result<Snapshot> {
        let (trained, frozen): (Vec<_>, Vec<_>) =
            engine.saved_stretches().into_iter().partition(|stretch| stretch.trainable);
        let weight = if self.weights.0 == SavedAs::Master { Slot::Master } else { Slot::Compute };
        let all = [weight, Slot::Moment1, Slot::Moment2];
        let slots = if what.checkpoint { &all[..] } else { &all[..1] };
        let size = |slot: Slot| engine.slot_dtype(slot).bytes();
        let each: usize = slots.iter().map(|slot| size(*slot)).sum();
        let total = trained.iter().map(|stretch| stretch.len * each).sum();
        if bytes.len() != total {
            // Fresh pages, which nobody has to fill with zeros first.
            bytes = vec![0; total];
        }
        let (mut pieces, mut end) = (Vec::with_capacity(slots.len() * trained.len()), 0);
        for stretch in &trained {
            let [first, second] = moment_names(&stretch.name);
            for (&slot, name) in slots.iter().zip([stretch.name.clone(), first, second]) {
                let range = end..end + stretch.len * size(slot);
                engine.copy_slot(slot, stretch, &mut bytes[range.clone()])?;
                end = range.end;
                pieces.push((name, (stretch.start * size(slot)) as u64, range));
            }
        }
        Ok(Snapshot { bytes, pieces, frozen })
    }

    /// Everything that is to be saved of one snapshot; for people, what was.
    fn save_all(&self, snapshot: &Snapshot, state: &State, what: What) -> Result<String> {
        let step = state.step;
        let fail = |what: String| Error::Save { step, what };
        let mut said = Vec::new();
        if what.checkpoint {
            let dir = self.series.path(step);
            let folder = Folder { dir: &dir, plan: &self.checkpoint_plan, state, resumable: true };
            said.push(self.save(snapshot, &folder).map_err(fail)?);
            let kept = self.only_first(|| {
                self.series.point(step)?;
                self.series.prune(self.keep)
            });
            self.agree(kept.map(|()| vec![]), "older checkpoints removed").map_err(fail)?;
        }
        if what.model {
            let folder = Folder { dir: &self.model, plan: &self.model_plan, state, resumable: false };
            said.push(self.save(snapshot, &folder).map_err(fail)?);
        }
        Ok(said.join("\n"))
    }

    /// One folder: rank 0 creates its files, all write their parts, rank 0 commits. Where a rank fails, all do, and
    /// what there was before stays. The error says which rank it was, and what failed.
    fn save(&self, snapshot: &Snapshot, folder: &Folder<'_>) -> std::result::Result<String, String> {
        let started = Instant::now();
        let result = self.try_save(snapshot, folder);
        if result.is_err() && self.group.rank() == 0 {
            // Half a checkpoint is of no use, and its room may be what is missing.
            let _ = checkpoint::recover(&**self.series.storage(), folder.dir);
        }
        let (seconds, bytes) = (started.elapsed().as_secs_f64(), folder.plan.data_bytes() as usize);
        let said =
            format!("saved {} ({}) in {seconds:.1} s", folder.dir.display(), show::bytes(bytes).trim());
        result.map(|()| said)
    }

    fn try_save(&self, snapshot: &Snapshot, folder: &Folder<'_>) -> std::result::Result<(), String> {
        let Folder { dir, plan, state, resumable } = *folder;
        let storage = self.series.storage();
        let mut first = None;
        let created = self.only_first(|| {
            first = Some(Writer::create(storage.clone(), dir, plan.clone())?);
            Ok(())
        });
        self.agree(created.map(|()| vec![]), "files created")?;
        let written = match first {
            Some(writer) => Ok(writer),
            None => Writer::join(storage.clone(), dir, plan.clone()).map_err(|e| e.to_string()),
        }
        .and_then(|writer| self.write(snapshot, plan, writer));
        let (receipt, draft) = match written {
            Ok((receipt, draft)) => (Ok(receipt.to_bytes()), Some(draft)),
            Err(what) => (Err(what), None),
        };
        let receipts = self.agree(receipt, "tensors written")?;
        let committed = self.only_first(|| {
            let receipts = receipts.iter().map(|bytes| Receipt::from_bytes(bytes).unwrap_or_default());
            let mut plain = self.plain.clone();
            if resumable {
                plain.push((State::FILE.into(), state.to_json()?));
            }
            let label = self.series.label(state.step, self.group.size())?;
            let draft: Draft = draft.expect("all have written");
            draft.commit(receipts, &plain, label)
        });
        self.agree(committed.map(|()| vec![]), "checkpoint committed").map(drop)
    }

    /// What this rank has of the plan's tensors.
    fn write(
        &self,
        snapshot: &Snapshot,
        plan: &Plan,
        writer: Writer,
    ) -> std::result::Result<(Receipt, Draft), String> {
        let text = |e: checkpoint::Error| e.to_string();
        for (name, start, range) in &snapshot.pieces {
            if plan.contains(name) {
                writer.write(name, *start, &snapshot.bytes[range.clone()]).map_err(text)?;
            }
        }
        let dtype = self.weights.1;
        let (mut values, mut bytes) = (vec![], vec![]);
        for stretch in &snapshot.frozen {
            for start in (0..stretch.len).step_by(CHUNK) {
                values.resize(CHUNK.min(stretch.len - start), 0.0);
                bytes.resize(values.len() * dtype.bytes(), 0);
                let first = stretch.start + start;
                self.source.0.read(&stretch.name, first, &mut values).map_err(|e| e.to_string())?;
                encode(&values, dtype, &mut bytes);
                writer.write(&stretch.name, (first * dtype.bytes()) as u64, &bytes).map_err(text)?;
            }
        }
        writer.finish().map_err(text)
    }

    /// What rank 0 does for all.
    fn only_first(&self, work: impl FnOnce() -> checkpoint::Result<()>) -> std::result::Result<(), String> {
        if self.group.rank() == 0 { work().map_err(|e| e.to_string()) } else { Ok(()) }
    }

    /// Everybody's bytes, or the first rank's failure.
    fn agree(
        &self,
        mine: std::result::Result<Vec<u8>, String>,
        what: &str,
    ) -> std::result::Result<Vec<Vec<u8>>, String> {
        let message = match mine {
            Ok(bytes) => [&[1][..], &bytes].concat(),
            Err(text) => [&[0][..], text.as_bytes()].concat(),
        };
        let mut all = self.group.exchange(&message, what).map_err(|e| e.to_string())?;
        if let Some(rank) = all.iter().position(|message| message.first() != Some(&1)) {
            let text = String::from_utf8_lossy(all[rank].get(1..).unwrap_or_default()).into_owned();
            return Err(format!("rank {rank}: {text}"));
        }
        all.iter_mut().for_each(|message| {
            message.remove(0);
        });
        Ok(all)
    }
}
