//! Where a run stood: what a checkpoint holds beside tensors.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// `state.json` of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Steps trained.
    pub step: u64,
    /// Steps the optimizer has made: fewer where some were skipped because a gradient overflowed.
    pub optimizer_step: u64,
    /// The next row to train on. None where it is not known, as after an import.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Position>,
    /// The loss scaler, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaler: Option<Scaler>,
    /// What random choices depend on, beside step and token.
    #[serde(default)]
    pub seed: u64,
    /// The run that was trained, resolved, for people and other programs.
    #[serde(default)]
    pub run: serde_json::Value,
    /// Programs and their versions.
    #[serde(default)]
    pub versions: BTreeMap<String, String>,
}

/// How far a run has come in its data, whatever the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    pub epoch: u64,
    /// Within the epoch.
    pub row: u64,
    /// Of what decides which row holds what; a position means nothing in other data.
    pub fingerprint: u64,
}

/// A loss scaler's state.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scaler {
    pub scale: f32,
    /// Steps since the scale last changed.
    pub good_steps: u64,
}

impl State {
    /// Its name within the folder.
    pub const FILE: &'static str = "state.json";

    /// The state after `step` steps of which nothing else is known.
    pub fn at(step: u64) -> Self {
        State {
            step,
            optimizer_step: step,
            data: None,
            scaler: None,
            seed: 0,
            run: serde_json::Value::Null,
            versions: BTreeMap::new(),
        }
    }

    pub fn to_json(&self) -> Result<Vec<u8>> {
        serde_json::to_vec_pretty(self)
            .map_err(|e| Error::format(Path::new(Self::FILE), format!("it cannot be written: {e}")))
    }

    pub(crate) fn parse(path: &Path, json: &[u8]) -> Result<Self> {
        serde_json::from_slice(json)
            .map_err(|e| Error::format(path, format!("not the state of a checkpoint: {e}")))
    }
}
