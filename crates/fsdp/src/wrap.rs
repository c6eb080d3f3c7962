//! Wrap policies: which consecutive blocks form a unit.

use crate::{Error, Result};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;
use tensor::{Block, Model};

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
    /// As a closure says, block by block (`lambda_auto_wrap_policy`).
    By(Cut),
}

/// Whether a unit ends after a block, given the block and its number.
#[derive(Clone)]
pub struct Cut(Arc<Ends>);

type Ends = dyn Fn(&dyn Block, usize) -> bool + Send + Sync;

impl Wrap {
    /// Units end after the blocks of which `ends` is true.
    pub fn by(ends: impl Fn(&dyn Block, usize) -> bool + Send + Sync + 'static) -> Wrap {
        Wrap::By(Cut(Arc::new(ends)))
    }
}

// Closures cannot be compared: two are equal when they are one. What they come to is in the layout, which ranks compare.
impl PartialEq for Cut {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Cut {}

impl Hash for Cut {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl fmt::Debug for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a closure")
    }
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
            Wrap::By(Cut(ends)) => blocks.clone().filter(|&at| ends(&*model.blocks[at], at)).collect(),
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
