//! The checkpoints of a run: `step-000100`, `step-000200`, … and `latest`, which leads to the last one saved.

use crate::manifest::{Label, Manifest};
use crate::storage::Storage;
use crate::write::{beside, recover};
use crate::{Error, Reader, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const PREFIX: &str = "step-";
/// A link for people and other programs; which checkpoint is the last, the manifests themselves say.
const LATEST: &str = "latest";
/// The ending of a checkpoint that is being removed.
const REMOVED: &str = "removed";

/// A folder of checkpoints.
#[derive(Clone, Debug)]
pub struct Series {
    dir: PathBuf,
    storage: Arc<dyn Storage>,
}

/// The last checkpoint that is whole, and those saved after it that are not, with what is wrong.
#[derive(Debug, Default)]
pub struct Latest {
    pub path: Option<PathBuf>,
    pub broken: Vec<Error>,
}

impl Series {
    pub fn new(dir: impl Into<PathBuf>, storage: Arc<dyn Storage>) -> Self {
        Series { dir: dir.into(), storage }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Where the checkpoint of a step lies.
    pub fn path(&self, step: u64) -> PathBuf {
        self.dir.join(format!("{PREFIX}{step:06}"))
    }

    /// After an interruption: removes what was never finished, and brings back what had stepped aside.
    pub fn recover(&self) -> Result<()> {
        for name in self.names()? {
            let Some((stem, ending)) = name.split_once('.') else { continue };
            match ending {
                "partial" | "replaced" if step_of(stem).is_some() => {
                    recover(&*self.storage, &self.dir.join(stem))?;
                }
                REMOVED | "partial" => self.remove(&self.dir.join(&name))?,
                _ => {}
            }
        }
        Ok(())
    }

    /// The last checkpoint saved whose manifest is sound and whose files are all there.
    pub fn latest(&self) -> Result<Latest> {
        let mut latest = Latest::default();
        for (path, _) in self.saved(&mut latest.broken)?.into_iter().rev() {
            match Reader::open(&path) {
                Ok(_) => return Ok(Latest { path: Some(path), ..latest }),
                Err(error) => latest.broken.push(error),
            }
        }
        Ok(latest)
    }

    /// The label of one that is saved now: later than all others, whatever the clock said when they were.
    pub fn label(&self, step: u64, ranks: usize) -> Result<Label> {
        let mut label = Label::now(step, ranks);
        if let Some((_, last)) = self.saved(&mut Vec::new())?.last() {
            label.saved_unix_ms = label.saved_unix_ms.max(last.saved_unix_ms.saturating_add(1));
        }
        Ok(label)
    }

    /// Lets `latest` lead to the checkpoint of a step.
    pub fn point(&self, step: u64) -> Result<()> {
        let link = self.dir.join(LATEST);
        let temporary = beside(&link, "partial")?;
        let name = format!("{PREFIX}{step:06}");
        self.remove(&temporary)?;
        self.storage.link(&name, &temporary).map_err(Error::io(&temporary, "create"))?;
        self.storage.rename(&temporary, &link).map_err(Error::io(&link, "rename into"))
    }

    /// Removes all but the last `keep` checkpoints saved. 0 keeps all. Those that are not whole do not count as
    /// kept, and are left alone.
    pub fn prune(&self, keep: usize) -> Result<()> {
        let saved = self.saved(&mut Vec::new())?;
        if keep == 0 {
            return Ok(());
        }
        for (path, _) in saved.iter().rev().skip(keep) {
            // Under its own name it would be half a checkpoint for a while.
            let gone = beside(path, REMOVED)?;
            self.remove(&gone)?;
            self.storage.rename(path, &gone).map_err(Error::io(path, "rename"))?;
            self.remove(&gone)?;
        }
        Ok(())
    }

    /// Those with a sound manifest, in the order in which they were saved.
    fn saved(&self, broken: &mut Vec<Error>) -> Result<Vec<(PathBuf, Manifest)>> {
        let mut saved = Vec::new();
        for name in self.names()? {
            if step_of(&name).is_none() {
                continue;
            }
            let path = self.dir.join(name);
            match Manifest::open(&path) {
                Ok(manifest) => saved.push((path, manifest)),
                Err(error) => broken.push(error),
            }
        }
        saved.sort_by_key(|(_, manifest)| (manifest.saved_unix_ms, manifest.step));
        Ok(saved)
    }

    fn names(&self) -> Result<Vec<String>> {
        let entries = match std::fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
            Err(e) => return Err(Error::io(&self.dir, "read")(e)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::io(&self.dir, "read"))?;
            names.extend(entry.file_name().into_string().ok());
        }
        names.sort();
        Ok(names)
    }

    fn remove(&self, path: &Path) -> Result<()> {
        self.storage.remove(path).map_err(Error::io(path, "remove"))
    }
}

/// The step of `step-000100`.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?;
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    if plain { digits.parse().ok() } else { None }
}
