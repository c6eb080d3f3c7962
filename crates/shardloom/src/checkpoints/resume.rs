//! Going on from a checkpoint, at any number of ranks.

use super::contents;
use crate::data::{Cursor, Stream};
use crate::floats::{decode, encode, file_dtype, is_float};
use crate::run::Run;
use crate::{Error, Result};
use checkpoint::manifest::MANIFEST;
use checkpoint::storage::Disk;
use checkpoint::{Reader, Receipt, Series, State, moment_names};
use comm::Group;
use device::Dtype;
use fsdp::{Engine, Groups, Saved, Scaler, Slot};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tensor::Model;

/// Where a run starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// From the beginning.
    #[default]
    No,
    /// From the last checkpoint in its own output folder; from the beginning where there is none.
    Latest,
    /// From a checkpoint, or from the last one in a folder of them or in another run's output folder.
    From(PathBuf),
}

impl Resume {
    /// What `--resume` was given.
    pub fn parse(word: Option<&str>) -> Self {
        match word {
            None => Resume::No,
            Some("latest") => Resume::Latest,
            Some(dir) => Resume::From(dir.into()),
        }
    }

    /// The checkpoint meant, if there is one. Says which newer ones are passed over because they are broken.
    fn find(&self, run: &Run) -> Result<Option<PathBuf>> {
        let own = Series::new(run.output.join("checkpoints"), Arc::new(Disk));
        own.recover()?;
        checkpoint::recover(&Disk, &run.output.join("model"))?;
        match self {
            Resume::No => Ok(None),
            Resume::Latest => last_of(&own),
            Resume::From(dir) => find_in(dir).map(Some),
        }
    }
}

/// The checkpoint a folder is, or the last one in it where it holds several or is a run's output.
pub(super) fn find_in(dir: &Path) -> Result<PathBuf> {
    if dir.join(MANIFEST).exists() {
        return Ok(dir.to_path_buf());
    }
    for dir in [dir.join("checkpoints"), dir.to_path_buf()] {
        if let Some(found) = last_of(&Series::new(dir, Arc::new(Disk)))? {
            return Ok(found);
        }
    }
    let what = "there is no checkpoint: neither a manifest.json, nor folders step-… that have one";
    Err(Error::file(dir, what))
}

fn last_of(series: &Series) -> Result<Option<PathBuf>> {
    let latest = series.latest()?;
    for broken in &latest.broken {
        eprintln!("passed over: {broken}");
    }
    match (latest.path, latest.broken.first()) {
        (None, Some(broken)) => Err(Error::file(
            series.dir(),
            format!("none of its checkpoints is whole ({broken}); remove them to start from the beginning"),
        )),
        (path, _) => Ok(path),
    }
}

/// Rank 0 finds the checkpoint, and all take that one.
pub(crate) fn agree_on(resume: &Resume, run: &Run, ranks: &dyn Group) -> Result<Option<PathBuf>> {
    let mine = match ranks.rank() {
        0 => resume.find(run),
        _ => Ok(None),
    };
    let message = match &mine {
        Ok(Some(path)) => format!("+{}", path.display()),
        Ok(None) => String::new(),
        Err(error) => format!("!{error}"),
    };
    let all = ranks.exchange(message.as_bytes(), "checkpoint to resume")?;
    mine?;
    let said = String::from_utf8_lossy(&all[0]).into_owned();
    match said.split_at_checked(1) {
        Some(("+", path)) => Ok(Some(path.into())),
        Some((_, error)) => Err(Error::Config(error.to_string())),
        None => Ok(None),
    }
}

/// An open checkpoint that fits the run.
#[derive(Debug)]
pub(crate) struct Resumed {
    reader: Reader,
    pub state: State,
}

impl Resumed {
    /// Opens it, and finds out what does not fit before anything is loaded.
    pub fn open(dir: &Path, model: &Model) -> Result<Self> {
        let reader = Reader::open(dir)?;
        let state = reader.state()?;
        let (weights, moments) = contents::tensors(model);
        let all = weights.iter().chain(&moments);
        reader.expect(all.map(|(name, shape)| (name.as_str(), shape.as_slice())))?;
        if let Some((name, info, file)) = reader.tensors().find(|(_, info, _)| !is_float(info.dtype)) {
            return Err(Error::file(
                file.path(),
                format!("{name} is {}; F32, BF16 and F16 are read", info.dtype),
            ));
        }
        Ok(Resumed { reader, state })
    }

    pub fn dir(&self) -> &Path {
        self.reader.dir()
    }

    /// The next row to train on.
    pub fn cursor(&self, stream: &Stream, fingerprint: u64, global_batch: usize) -> Result<Cursor> {
        match self.state.data {
            Some(position) if position.fingerprint == fingerprint => {
                Ok(Cursor { epoch: position.epoch, row: position.row })
            }
            Some(_) => Err(Error::Config(format!(
                "{}: it was trained on other data, or on rows in another order. Give it the same [data] settings and \
                 files; or start a new run from its weights, with model.path",
                self.dir().display()
            ))),
            // An imported state does not know its data: it is taken to have used whole batches of it.
            None => Ok(Cursor::default().advanced(self.state.step * global_batch as u64, stream.rows())),
        }
    }

    /// Gives the engine its state, and proves together with the ranks that hold the other shards that every element was
    /// read once, as it was written.
    pub fn restore(&self, engine: &mut Engine, groups: &Groups) -> Result<()> {
        engine.restore(self)?;
        engine.set_scaler(&self.scaler(engine)?)?;
        let mine = self.reader.receipt();
        if !engine.plan().settings.is_sharded() {
            return Ok(self.reader.prove([mine])?);
        }
        let all = groups.reduce.exchange(&mine.to_bytes(), "what was read of the checkpoint")?;
        let receipts = all.iter().map(|bytes| Receipt::from_bytes(bytes).unwrap_or_default());
        Ok(self.reader.prove(receipts)?)
    }
}

impl Resumed {
    /// The loss scaler as it was, or as it is at the beginning where there was none.
    fn scaler(&self, engine: &Engine) -> Result<Scaler> {
        let State { step, optimizer_step, scaler, .. } = self.state;
        let skipped_steps = step.saturating_sub(optimizer_step);
        match (engine.plan().settings.loss_scale(), scaler) {
            (Some(_), Some(saved)) if saved.scale > 0.0 && saved.scale.is_finite() => {
                Ok(Scaler { scale: saved.scale, good_steps: saved.good_steps as u32, skipped_steps })
            }
            (Some(_), Some(saved)) => {
                let what = format!("a loss scale of {} cannot be", saved.scale);
                Err(Error::file(self.dir().join(State::FILE), what))
            }
            _ => Ok(Scaler { skipped_steps, ..engine.scaler()? }),
        }
    }
}

impl Saved for Resumed {
    fn read(&self, slot: Slot, name: &str, start: usize, dtype: Dtype, out: &mut [u8]) -> fsdp::Result<()> {
        let [first, second] = moment_names(name);
        let tensor = match slot {
            Slot::Master | Slot::Compute => name,
            Slot::Moment1 => &first,
            Slot::Moment2 => &second,
        };
        let fail = |e: checkpoint::Error| fsdp::Error::Weight { name: name.into(), what: e.to_string() };
        let (wanted, found) = (file_dtype(dtype), self.reader.info(tensor).map_err(fail)?.dtype);
        let at = (start * found.bytes()) as u64;
        if wanted == found {
            return self.reader.read(tensor, at, out).map_err(fail);
        }
        let len = out.len() / wanted.bytes();
        let (mut bytes, mut values) = (vec![0; len * found.bytes()], vec![0.0; len]);
        self.reader.read(tensor, at, &mut bytes).map_err(fail)?;
        decode(found, &bytes, &mut values);
        encode(&values, wanted, out);
        Ok(())
    }
}
