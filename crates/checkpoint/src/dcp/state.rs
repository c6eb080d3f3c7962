//! Weights and AdamW's state within a checkpoint, whatever program wrote it.
//!
//! | program | folders | weights | moments |
//! |---|---|---|---|
//! | torch, `{"model", "optimizer"}` | one | `model.NAME` | `optimizer.state.NAME.exp_avg` |
//! | torch, an app that wraps both | one | `app.model.NAME` | `app.optim.state.NAME.exp_avg` |
//! | accelerate | `pytorch_model_fsdp_0`, `optimizer_0` | `model.NAME` | `optimizer.state.NAME.exp_avg` |
//! | torchtitan | one | `NAME`, of its own | `optimizer.state.NAME.exp_avg` |
//!
//! Prefixes are not a list to be kept up: they are found by looking for the names that are wanted.

use super::checkpoint::{Checkpoint, METADATA};
use super::metadata::Item;
use super::write::Object;
use crate::{Dtype, Error, Result};
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// A weight that is wanted: its name, and its shape.
pub type Wanted<'a> = (&'a str, &'a [usize]);

/// What a program calls the weights that are wanted.
#[derive(Clone, Debug)]
pub struct Naming {
    /// One for each that is wanted, in their order.
    pub names: Vec<String>,
    /// What it may have beside them, as a tied head that is saved twice.
    pub also: Vec<String>,
}

/// Which tensor of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Weight,
    /// AdamW's running mean of gradients.
    ExpAvg,
    /// AdamW's running mean of their squares.
    ExpAvgSq,
}

/// The folders accelerate makes.
const ACCELERATE: [&str; 2] = ["pytorch_model_fsdp_0", "optimizer_0"];

/// What a weight's tensors are called.
#[derive(Debug)]
struct Keys {
    /// What the program calls the weight.
    theirs: String,
    weight: String,
    /// Of weights that were trained: mean, square, step.
    optimizer: Option<[String; 3]>,
}

/// Weights and optimizer state that were found, each of them whole.
#[derive(Debug)]
pub struct State {
    weights: Checkpoint,
    /// Where it is in a folder of its own.
    optimizer: Option<Checkpoint>,
    naming: usize,
    keys: BTreeMap<String, Keys>,
    step: Option<u64>,
    /// What stands before the settings of the optimizer.
    groups: Option<String>,
}

impl State {
    /// Looks for the wanted weights under any of the namings, with the optimizer's state beside them, and proves that
    /// the pieces of all these tensors are the whole of them, in the wanted shapes.
    pub fn open(dir: &Path, wanted: &[Wanted<'_>], namings: &[Naming]) -> Result<Self> {
        let (weights, optimizer) = open_folders(dir)?;
        let (naming, prefix) = find_weights(&weights, namings)?;
        let names = &namings[naming].names;
        let state_prefix = find_state(optimizer.as_ref().unwrap_or(&weights), names)?;
        let state_prefix = state_prefix.as_deref();
        let groups = state_prefix.and_then(|prefix| prefix.strip_suffix("state."));
        let groups = groups.map(|prefix| format!("{prefix}param_groups."));
        let mut state = State { weights, optimizer, naming, keys: BTreeMap::new(), step: None, groups };
        for ((name, shape), theirs) in wanted.iter().zip(names) {
            let keys = state.keys_of(&prefix, state_prefix, theirs);
            state.check(&keys, shape)?;
            state.keys.insert(name.to_string(), keys);
        }
        state.refuse_extra(&prefix, state_prefix, &namings[naming])?;
        state.step = state.find_step()?;
        Ok(state)
    }

    fn keys_of(&self, prefix: &str, state_prefix: Option<&str>, name: &str) -> Keys {
        let keys =
            |state: &str| ["exp_avg", "exp_avg_sq", "step"].map(|part| format!("{state}{name}.{part}"));
        // A weight that was frozen has none.
        let is_there =
            |keys: &[String; 3]| keys.iter().any(|key| self.moments().metadata().items.contains_key(key));
        let optimizer = state_prefix.map(keys).filter(is_there);
        Keys { theirs: name.to_string(), weight: format!("{prefix}{name}"), optimizer }
    }

    fn check(&self, keys: &Keys, shape: &[usize]) -> Result<()> {
        let moments = keys.optimizer.iter().flat_map(|keys| &keys[..2]).map(|key| (self.moments(), key));
        for (checkpoint, key) in [(&self.weights, &keys.weight)].into_iter().chain(moments) {
            let found = &checkpoint.tensor(key)?.shape;
            if found != shape {
                let what = format!("it has shape {found:?}, and the model wants {shape:?}");
                return Err(Error::entry(&checkpoint.dir().join(METADATA), key, what));
            }
            checkpoint.prove(key)?;
        }
        Ok(())
    }

    /// Weights beside those that are wanted mean another model.
    fn refuse_extra(&self, prefix: &str, state_prefix: Option<&str>, naming: &Naming) -> Result<()> {
        let known: HashSet<&str> = naming.names.iter().chain(&naming.also).map(String::as_str).collect();
        let is_state = |key: &str| state_prefix.is_some_and(|state| key.starts_with(state));
        let is_weight = |name: &str| name.ends_with(".weight") || name.ends_with(".bias");
        let tensors =
            self.weights.metadata().items.iter().filter(|(_, item)| matches!(item, Item::Tensor(_)));
        let names = tensors.filter(|(key, _)| !is_state(key)).filter_map(|(key, _)| key.strip_prefix(prefix));
        let extra: Vec<&str> = names.filter(|name| is_weight(name) && !known.contains(name)).collect();
        let Some(name) = extra.first() else { return Ok(()) };
        let what = match extra.len() {
            1 => "the model has no such weight".to_string(),
            count => format!("the model has no such weight, nor {} others that are here", count - 1),
        };
        Err(Error::entry(&self.weights.dir().join(METADATA), &format!("{prefix}{name}"), what))
    }

    /// The number of steps, which AdamW keeps for each weight and which must be one number.
    fn find_step(&self) -> Result<Option<u64>> {
        let broken = |key: &str, what: String| Error::entry(&self.moments().dir().join(METADATA), key, what);
        let mut known: Option<(f64, &str)> = None;
        for [_, _, key] in self.keys.values().filter_map(|keys| keys.optimizer.as_ref()) {
            let step = self.moments().number(key)?;
            if step.fract() != 0.0 || !(0.0..9e15).contains(&step) {
                return Err(broken(key, format!("{step} is not a number of steps")));
            }
            match known {
                Some((other, first)) if other != step => {
                    let what = format!("it is {step}, and {first} is {other}; they must be one number");
                    return Err(broken(key, what));
                }
                _ => known = Some((step, key)),
            }
        }
        Ok(known.map(|(step, _)| step as u64))
    }

    fn moments(&self) -> &Checkpoint {
        self.optimizer.as_ref().unwrap_or(&self.weights)
    }

    /// Which of the namings it has.
    pub fn naming(&self) -> usize {
        self.naming
    }

    /// Steps the optimizer has made; `None` where there is no state of one.
    pub fn step(&self) -> Option<u64> {
        self.step
    }

    /// Whether the optimizer has a state for this weight: it was trained.
    pub fn is_trained(&self, name: &str) -> bool {
        self.keys.get(name).is_some_and(|keys| keys.optimizer.is_some())
    }

    /// A setting of the optimizer for this weight, as "lr"; `None` where there is none.
    pub fn setting(&self, name: &str, setting: &str) -> Result<Option<Object>> {
        let (Some(groups), Some(keys)) = (&self.groups, self.keys.get(name)) else { return Ok(None) };
        let moments = self.moments();
        let find = |key: String| {
            moments.metadata().items.contains_key(&key).then(|| moments.object(&key)).transpose()
        };
        // Flattened by weights, or a list of groups that name theirs.
        if let Some(found) = find(format!("{groups}{}.{setting}", keys.theirs))? {
            return Ok(Some(found));
        }
        for number in 0.. {
            let Some(Object::List(params)) = find(format!("{groups}{number}.params"))? else { break };
            if params.iter().any(|param| matches!(param, Object::Text(text) if *text == keys.theirs)) {
                return find(format!("{groups}{number}.{setting}"));
            }
        }
        Ok(None)
    }

    /// The checkpoint and the key that hold a part of a weight.
    fn place(&self, name: &str, part: Part) -> Result<(&Checkpoint, &str)> {
        let keys = self.keys.get(name).map(|keys| match (part, &keys.optimizer) {
            (Part::Weight, _) => Some((&self.weights, keys.weight.as_str())),
            (_, None) => None,
            (Part::ExpAvg, Some([mean, _, _])) => Some((self.moments(), mean.as_str())),
            (Part::ExpAvgSq, Some([_, square, _])) => Some((self.moments(), square.as_str())),
        });
        keys.flatten().ok_or_else(|| Error::Missing {
            path: self.weights.dir().to_path_buf(),
            key: format!("{part:?} of {name}"),
            hint: String::new(),
        })
    }

    pub fn dtype(&self, name: &str, part: Part) -> Result<Dtype> {
        let (checkpoint, key) = self.place(name, part)?;
        checkpoint.dtype(key)
    }

    /// Fills `out` with bytes of a part of a weight, from `byte_start` on.
    pub fn read_range(&self, name: &str, part: Part, byte_start: u64, out: &mut [u8]) -> Result<()> {
        let (checkpoint, key) = self.place(name, part)?;
        checkpoint.read_range(key, byte_start, out)
    }

    /// Reads a part of a weight and holds its bytes against their checksums.
    pub fn verify(&self, name: &str, part: Part) -> Result<()> {
        let (checkpoint, key) = self.place(name, part)?;
        checkpoint.verify(key)
    }
}

/// The folder of weights, and that of the optimizer where it is another one.
fn open_folders(dir: &Path) -> Result<(Checkpoint, Option<Checkpoint>)> {
    let [model, optimizer] = ACCELERATE.map(|name| dir.join(name));
    let has_metadata = |dir: &Path| dir.join(METADATA).exists();
    if has_metadata(dir) || !has_metadata(&model) {
        return Ok((Checkpoint::open(dir)?, None));
    }
    let optimizer = has_metadata(&optimizer).then(|| Checkpoint::open(optimizer)).transpose()?;
    Ok((Checkpoint::open(model)?, optimizer))
}

/// Everything that stands before `name` in a tensor's key.
fn prefixes<'c>(checkpoint: &'c Checkpoint, name: &str) -> Vec<&'c str> {
    let tensors = checkpoint.metadata().items.iter().filter(|(_, item)| matches!(item, Item::Tensor(_)));
    let prefixes = tensors.filter_map(|(key, _)| key.strip_suffix(name));
    prefixes.filter(|prefix| prefix.is_empty() || prefix.ends_with('.')).collect()
}

/// The naming and the prefix under which all weights are, or an error that says what is missing under the best.
fn find_weights(checkpoint: &Checkpoint, namings: &[Naming]) -> Result<(usize, String)> {
    let path = checkpoint.dir().join(METADATA);
    let mut best: Option<(usize, usize, &str)> = None;
    let mut whole = Vec::new();
    for (number, naming) in namings.iter().enumerate() {
        let Some(first) = naming.names.first() else { continue };
        for prefix in prefixes(checkpoint, first) {
            let is_there =
                |name: &&String| checkpoint.metadata().tensor(&format!("{prefix}{name}")).is_some();
            let count = naming.names.iter().filter(is_there).count();
            if count == naming.names.len() {
                whole.push((number, prefix.to_string()));
            }
            if best.is_none_or(|(most, _, _)| count > most) {
                best = Some((count, number, prefix));
            }
        }
    }
    if whole.len() > 1 {
        // Copies, as of averaged weights: the one that stands where torch's own recipes put the model.
        whole.sort_by_key(|(_, prefix)| !matches!(prefix.as_str(), "" | "model." | "app.model."));
        let [(_, first), (_, second), ..] = &whole[..] else { unreachable!("there are two") };
        let usual = |prefix: &str| matches!(prefix, "" | "model." | "app.model.");
        if !usual(first) || usual(second) {
            let what = format!("the model's weights are there twice, under {first:?} and {second:?}");
            return Err(Error::format(&path, what));
        }
    }
    if let Some(found) = whole.into_iter().next() {
        return Ok(found);
    }
    let Some((count, number, prefix)) = best else {
        let key = namings.first().and_then(|naming| naming.names.first()).cloned().unwrap_or_default();
        let hint = ", under any prefix: are these the weights of another model?".to_string();
        return Err(Error::Missing { path, key, hint });
    };
    let names = &namings[number].names;
    let missing = names.iter().map(|name| format!("{prefix}{name}"));
    let missing = missing.into_iter().find(|key| checkpoint.metadata().tensor(key).is_none());
    let hint = format!("; it has {count} of the model's {} weights", names.len());
    Err(Error::Missing { path, key: missing.unwrap_or_default(), hint })
}

/// What stands before a weight's name in the keys of its optimizer state; `None` where there is no such state.
fn find_state(checkpoint: &Checkpoint, names: &[String]) -> Result<Option<String>> {
    let path = checkpoint.dir().join(METADATA);
    let mut found: Vec<String> = Vec::new();
    for name in names {
        let state = prefixes(checkpoint, &format!("{name}.exp_avg"));
        found.extend(state.into_iter().filter(|prefix| prefix.ends_with("state.")).map(String::from));
        if !prefixes(checkpoint, &format!("{name}.max_exp_avg_sq")).is_empty() {
            return Err(Error::entry(
                &path,
                name,
                "it was trained with amsgrad=True, which is not supported",
            ));
        }
        if !found.is_empty() {
            break;
        }
    }
    match &found[..] {
        [] => Ok(None),
        [prefix] => Ok(Some(prefix.clone())),
        [first, second, ..] => {
            let what = format!("there are two optimizers' states, under {first:?} and {second:?}");
            Err(Error::format(&path, what))
        }
    }
}
