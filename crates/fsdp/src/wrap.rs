//! Wrap policies: which consecutive blocks form a unit.

use crate::{Error, Result};
use std::ops::Range;
use tensor::Model;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Wrap {
    /// Every block is a unit: embedding, each layer, head.
    Layer,
    /// The whole model is one unit.
    None,
    /// Blocks are collected until they have this many parameters.
    MinParams(usize),
    /// Blocks of these kinds are units; runs of other blocks between them are units too.
    Kinds(Vec<String>),
}

impl Wrap {
    /// The units as ranges of blocks, covering all of them in order.
    pub fn units(&self, model: &Model) -> Result<Vec<Range<usize>>> {
        let blocks = 0..model.blocks.len();
        // A unit ends after block `i` where `cut(i)` says so, and at the end.
        let ends: Vec<usize> = match self {
            Wrap::Layer => blocks.clone().collect(),
            Wrap::None => vec![],
            Wrap::MinParams(min) => cuts_by_size(model, *min),
            Wrap::Kinds(kinds) => cuts_by_kind(model, kinds)?,
        };
        let mut units = Vec::new();
        let mut start = 0;
        for end in ends.into_iter().map(|end| end + 1).chain([blocks.end]) {
            if end > start {
                units.push(start..end);
                start = end;
            }
        }
        Ok(units)
    }
}

fn cuts_by_size(model: &Model, min: usize) -> Vec<usize> {
    let mut params = 0;
    let mut cuts = Vec::new();
    for (index, block) in model.blocks.iter().enumerate() {
        params += block.items().iter().map(|item| model.items[item.0].numel()).sum::<usize>();
        if params >= min {
            cuts.push(index);
            params = 0;
        }
    }
    cuts
}

fn cuts_by_kind(model: &Model, kinds: &[String]) -> Result<Vec<usize>> {
    let chosen: Vec<bool> =
        model.blocks.iter().map(|block| kinds.iter().any(|kind| kind == block.kind())).collect();
    if !chosen.contains(&true) {
        let mut present: Vec<&str> = model.blocks.iter().map(|block| block.kind()).collect();
        present.dedup();
        return Err(Error::WrapMatchesNothing { wanted: kinds.join(", "), kinds: present.join(", ") });
    }
    Ok((0..chosen.len()).filter(|&i| chosen[i] || chosen.get(i + 1) == Some(&true)).collect())
}
