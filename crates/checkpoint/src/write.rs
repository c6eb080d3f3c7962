//! Writing a checkpoint, by one writer or by many that share its files.
//!
//! ```text
//! one of them          every one of them                   the one
//! Writer::create  ──►  Writer::join, write…, finish  ──►   Draft::commit(everybody's receipts)
//! ```
//!
//! Everything goes into `NAME.partial`. Committing proves that every byte was written exactly once, writes the
//! plain files and the manifest, and renames the folder: until then there is no checkpoint, afterwards a whole one. A
//! writer that dies leaves a folder that nobody takes for one, and that the next attempt removes.

use crate::folder;
use crate::manifest::{Entry, Label, MANIFEST, Manifest, Piece};
use crate::receipt::{self, Receipt, Stretch};
use crate::safetensors::Layout;
use crate::storage::{Storage, Target};
use crate::{Dtype, Error, Result};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes are summed and written in blocks of this size, so that they are still in the cache for the second.
const BLOCK: usize = 1 << 20;

/// What a tensor of a checkpoint is called, what it is made of, and its shape.
pub type Spec<'a> = (&'a str, Dtype, &'a [usize]);

/// The names under which a weight's two moments are kept.
pub fn moment_names(weight: &str) -> [String; 2] {
    ["exp_avg", "exp_avg_sq"].map(|moment| format!("{weight}.{moment}"))
}

/// The tensor files of a checkpoint to be written. Equal on all who write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    parts: Vec<(String, Layout)>,
    /// Indices of the parts, where there are several.
    indices: Vec<(String, Vec<u8>)>,
    /// Name to its part and its number among all tensors.
    places: HashMap<String, (usize, u32)>,
    /// By number.
    names: Vec<String>,
}

impl Plan {
    /// Weights go into `model*.safetensors`, the optimizer's tensors into `optimizer*.safetensors`. `dir` appears in
    /// errors.
    pub fn new<'a>(
        dir: &Path,
        weights: impl IntoIterator<Item = Spec<'a>>,
        optimizer: impl IntoIterator<Item = Spec<'a>>,
        max_part_bytes: u64,
    ) -> Result<Self> {
        let (mut parts, mut indices) = (Vec::new(), Vec::new());
        let weights = folder::Plan::new(dir, "model", weights, max_part_bytes)?;
        let optimizer = folder::Plan::new(dir, "optimizer", optimizer, max_part_bytes)?;
        for plan in [weights, optimizer] {
            indices.extend(plan.index());
            // A file without tensors is none.
            parts.extend(plan.into_parts().into_iter().filter(|(_, layout)| layout.tensors().len() > 0));
        }
        let (mut places, mut names) = (HashMap::new(), Vec::new());
        for (part, (file, layout)) in parts.iter().enumerate() {
            for (name, _) in layout.tensors() {
                if places.insert(name.to_string(), (part, names.len() as u32)).is_some() {
                    return Err(Error::entry(&dir.join(file), name, "it is listed twice"));
                }
                names.push(name.to_string());
            }
        }
        Ok(Plan { parts, indices, places, names })
    }

    /// File names and layouts, part by part.
    pub fn parts(&self) -> impl ExactSizeIterator<Item = (&str, &Layout)> {
        self.parts.iter().map(|(file, layout)| (file.as_str(), layout))
    }

    pub fn contains(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// Bytes of all tensors.
    pub fn data_bytes(&self) -> u64 {
        self.parts.iter().map(|(_, layout)| layout.data_bytes()).sum()
    }
}

/// Writes pieces of a checkpoint's tensors. Any thread may.
#[derive(Debug)]
pub struct Writer {
    draft: Draft,
    targets: Vec<Box<dyn Target>>,
    written: Mutex<Vec<Stretch>>,
    /// Whether it wrote the headers.
    created: bool,
}

impl Writer {
    /// Makes the temporary folder with all its files. What an earlier attempt left there is removed.
    pub fn create(storage: Arc<dyn Storage>, dir: &Path, plan: Plan) -> Result<Self> {
        let draft = Draft { storage, dir: dir.to_path_buf(), partial: beside(dir, "partial")?, plan };
        let partial = &draft.partial;
        draft.storage.remove(partial).map_err(Error::io(partial, "remove the leftover"))?;
        draft.storage.create_dir(partial).map_err(Error::io(partial, "create"))?;
        let mut targets = Vec::new();
        for (file, layout) in &draft.plan.parts {
            let path = partial.join(file);
            let made = draft.storage.create(&path, layout.file_bytes());
            let target = made.map_err(Error::io(&path, "create"))?;
            target.write_at(layout.header(), 0).map_err(Error::io(&path, "write the header of"))?;
            targets.push(target);
        }
        Ok(Writer { draft, targets, written: Mutex::default(), created: true })
    }

    /// Opens the files that another one has created with the same plan.
    pub fn join(storage: Arc<dyn Storage>, dir: &Path, plan: Plan) -> Result<Self> {
        let draft = Draft { storage, dir: dir.to_path_buf(), partial: beside(dir, "partial")?, plan };
        let mut targets = Vec::new();
        for (file, _) in &draft.plan.parts {
            let path = draft.partial.join(file);
            targets.push(draft.storage.open(&path).map_err(|e| match e.kind() {
                std::io::ErrorKind::NotFound => not_shared(&draft.partial, file),
                _ => Error::io(&path, "open")(e),
            })?);
        }
        Ok(Writer { draft, targets, written: Mutex::default(), created: false })
    }

    /// Writes a tensor's bytes from `byte_start` on.
    pub fn write(&self, name: &str, byte_start: u64, bytes: &[u8]) -> Result<()> {
        let Some(&(part, tensor)) = self.draft.plan.places.get(name) else {
            let (path, key) = (self.draft.partial.clone(), format!("tensor {name}"));
            return Err(Error::Missing { path, key, hint: " in the plan of this checkpoint".into() });
        };
        let (file, layout) = &self.draft.plan.parts[part];
        let path = self.draft.partial.join(file);
        let mut at = layout.position(&path, name, byte_start, bytes.len())?;
        let mut sum = crc32fast::Hasher::new();
        for block in bytes.chunks(BLOCK) {
            sum.update(block);
            self.targets[part].write_at(block, at).map_err(Error::io(&path, "write to"))?;
            at += block.len() as u64;
        }
        let (bytes, crc32) = (bytes.len() as u64, sum.finalize());
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.push(Stretch { tensor, start: byte_start, bytes, crc32 });
        Ok(())
    }

    /// Makes what was written outlast a crash, and says what it was.
    pub fn finish(self) -> Result<(Receipt, Draft)> {
        let written = self.written.into_inner().unwrap_or_else(PoisonError::into_inner);
        let plan = &self.draft.plan;
        let mut touched = vec![self.created; plan.parts.len()];
        for piece in &written {
            touched[plan.places[&plan.names[piece.tensor as usize]].0] = true;
        }
        for (part, _) in touched.iter().enumerate().filter(|(_, touched)| **touched) {
            let path = self.draft.partial.join(&plan.parts[part].0);
            self.targets[part].sync().map_err(Error::io(&path, "sync"))?;
        }
        Ok((Receipt(written), self.draft))
    }
}

fn not_shared(partial: &Path, file: &str) -> Error {
    let hint = ", which another writer has made: is the folder on a file system that all of them share?";
    Error::Missing { path: partial.to_path_buf(), key: file.to_string(), hint: hint.into() }
}

/// A checkpoint whose tensors are written, and which is not one yet.
#[derive(Debug)]
pub struct Draft {
    storage: Arc<dyn Storage>,
    dir: PathBuf,
    partial: PathBuf,
    plan: Plan,
}

impl Draft {
    /// Makes it a checkpoint: one of its writers does this, with the receipts of all. `plain` are the other files,
    /// by name. A checkpoint that was there before is replaced.
    pub fn commit(
        self,
        receipts: impl IntoIterator<Item = Receipt>,
        plain: &[(String, Vec<u8>)],
        label: Label,
    ) -> Result<()> {
        let mut files = self.prove(receipts)?;
        let mut folders = BTreeSet::from([self.partial.clone()]);
        for (name, bytes) in self.plan.indices.iter().chain(plain) {
            let path = self.partial.join(name);
            if let Some(parent) = path.parent().filter(|parent| *parent != self.partial) {
                self.storage.create_dir(parent).map_err(Error::io(parent, "create"))?;
                folders.insert(parent.to_path_buf());
            }
            self.write_plain(&path, bytes)?;
            let (bytes, crc32) = (bytes.len() as u64, crc32fast::hash(bytes));
            files.insert(name.clone(), Entry { bytes, crc32, tensors: BTreeMap::new() });
        }
        let path = self.partial.join(MANIFEST);
        let json = Manifest::new(label, files).to_json(&path)?;
        Manifest::parse(&path, &json)?;
        self.write_plain(&path, &json)?;
        for folder in &folders {
            self.storage.sync_dir(folder).map_err(Error::io(folder, "sync"))?;
        }
        self.put_in_place()
    }

    fn write_plain(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let target = self.storage.create(path, bytes.len() as u64).map_err(Error::io(path, "create"))?;
        target.write_at(bytes, 0).map_err(Error::io(path, "write to"))?;
        target.sync().map_err(Error::io(path, "sync"))
    }

    /// A folder cannot be renamed over another, so an older one steps aside first. [`recover`] brings it back where
    /// this was interrupted between the two.
    fn put_in_place(&self) -> Result<()> {
        let older = beside(&self.dir, "replaced")?;
        if self.dir.exists() {
            self.storage.remove(&older).map_err(Error::io(&older, "remove the leftover"))?;
            self.storage.rename(&self.dir, &older).map_err(Error::io(&self.dir, "rename"))?;
        }
        self.storage.rename(&self.partial, &self.dir).map_err(|e| {
            // Best effort: what was there is worth more than what was to come.
            let _ = self.storage.rename(&older, &self.dir);
            Error::io(&self.dir, "rename into")(e)
        })?;
        // The folder it lies in may be as new as itself.
        for above in self.dir.ancestors().skip(1).take(2) {
            let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
            self.storage.sync_dir(above).map_err(Error::io(above, "sync"))?;
        }
        self.storage.remove(&older).map_err(Error::io(&older, "remove the older"))
    }

    /// Proves that every byte of every tensor was written exactly once.
    fn prove(&self, receipts: impl IntoIterator<Item = Receipt>) -> Result<BTreeMap<String, Entry>> {
        let written = receipt::sorted(receipts);
        let (mut rest, mut files, mut number) = (written.as_slice(), BTreeMap::new(), 0);
        for (file, layout) in &self.plan.parts {
            let mut tensors = BTreeMap::new();
            for (name, info) in layout.tensors() {
                let mine = receipt::take_whole(&mut rest, number, info.num_bytes(), "written")
                    .map_err(|what| Error::entry(&self.partial.join(file), name, what))?;
                let pieces = mine.iter().map(|&Stretch { bytes, crc32, .. }| Piece { bytes, crc32 });
                tensors.insert(name.to_string(), pieces.collect());
                number += 1;
            }
            let (bytes, crc32) = (layout.file_bytes(), crc32fast::hash(layout.header()));
            files.insert(file.clone(), Entry { bytes, crc32, tensors });
        }
        match rest.first() {
            None => Ok(files),
            Some(stray) => {
                let what = format!("a receipt names tensor number {} of {number}", stray.tensor);
                Err(Error::format(&self.partial, what))
            }
        }
    }
}

/// After an interruption: removes what was never finished for `dir`, and brings back what had stepped aside for it.
pub fn recover(storage: &dyn Storage, dir: &Path) -> Result<()> {
    let (partial, older) = (beside(dir, "partial")?, beside(dir, "replaced")?);
    storage.remove(&partial).map_err(Error::io(&partial, "remove the leftover"))?;
    if older.exists() && !dir.exists() {
        return storage.rename(&older, dir).map_err(Error::io(&older, "rename"));
    }
    storage.remove(&older).map_err(Error::io(&older, "remove the leftover"))
}

/// `dir` with another ending.
pub(crate) fn beside(dir: &Path, ending: &str) -> Result<PathBuf> {
    let Some(name) = dir.file_name() else {
        return Err(Error::format(dir, "not the name of a folder to write"));
    };
    Ok(dir.with_file_name(format!("{}.{ending}", name.to_string_lossy())))
}
