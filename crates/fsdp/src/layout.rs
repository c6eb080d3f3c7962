//! Which bytes of a unit each rank owns.
//!
//! A unit is one flat buffer: its items one after another, each aligned, the whole padded to equal ranges per
//! rank. A gather lands in place, weights are views into it, and gradients are written where the reduce takes
//! them from. Only names need a map, and that is [`Layout::pieces`].

use crate::{AfterForward, Error, Result, Settings, UnitRule, Wrap};
use std::collections::BTreeSet;
use std::ops::Range;
use tensor::{ItemId, Model};

/// Items and range cuts lie at multiples of this many elements: 256 bytes in the smallest dtype.
pub const ALIGN: usize = 128;

/// Where an item lies in its unit, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub item: ItemId,
    pub offset: usize,
    pub len: usize,
    pub is_matrix: bool,
}

/// Weights gathered together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    pub name: String,
    pub blocks: Range<usize>,
    /// Items it owns, in order of their offsets. A tied item is owned by its first user's unit.
    pub places: Vec<Place>,
    /// Units whose items its blocks use: itself, the owners of tied items, and of its frozen ones.
    pub needs: BTreeSet<usize>,
    /// Whether its weights have gradients and are updated.
    pub trainable: bool,
    /// What becomes of its gathered weights until its backward: never `Auto`.
    pub after_forward: AfterForward,
    /// Elements each rank owns; the unit has `num_shards` times as many, padding included.
    pub shard_len: usize,
}

/// A stretch of a shard that holds weights and no padding, all of which decay or all of which do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub start: usize,
    pub len: usize,
    pub is_matrix: bool,
}

/// A stretch of one weight that one rank owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub name: String,
    /// First element within the weight.
    pub start: usize,
    pub len: usize,
    /// First element within the rank's shard.
    pub at: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub units: Vec<Unit>,
    /// Which unit and place holds each item.
    pub owner: Vec<(usize, usize)>,
    pub num_shards: usize,
    /// Units with blocks; those after them only hold frozen weights of these.
    pub num_walked: usize,
}

impl Layout {
    pub fn new(model: &Model, settings: &Settings) -> Result<Self> {
        let mut layout = Self::divided(model, &settings.wrap, settings.num_shards())?;
        for unit in 0..layout.num_walked {
            let blocks = layout.units[unit].blocks.clone();
            let rule = settings.units.iter().rev().find(|rule| fits(rule, model, blocks.clone()));
            let after = rule.map_or(settings.after_forward, |rule| rule.after_forward);
            // Its frozen weights go the same way.
            let with = layout.units[unit].needs.range(layout.num_walked..).copied().collect::<Vec<_>>();
            for unit in with.into_iter().chain([unit]) {
                layout.units[unit].after_forward = settings.resolve(after);
            }
        }
        for rule in &settings.units {
            if !fits(rule, model, 0..model.blocks.len()) {
                let mut kinds: Vec<&str> = model.blocks.iter().map(|block| block.kind()).collect();
                kinds.dedup();
                let wanted = format!("{} {:?}", rule.kinds.join(", "), rule.blocks);
                return Err(Error::RuleMatchesNothing { wanted, kinds: kinds.join(", ") });
            }
        }
        Ok(layout)
    }

    /// Units by `wrap`, each in `num_shards` parts.
    pub fn divided(model: &Model, wrap: &Wrap, num_shards: usize) -> Result<Self> {
        let ranges = wrap.units(model)?;
        let num_walked = ranges.len();
        let mut owner: Vec<Option<(usize, usize)>> = vec![None; model.items.len()];
        let (mut units, mut frozen_units) = (Vec::with_capacity(num_walked), Vec::new());
        for (index, blocks) in ranges.into_iter().enumerate() {
            let used: Vec<ItemId> =
                model.blocks[blocks.clone()].iter().flat_map(|block| block.items()).collect();
            let new = used.iter().copied().filter(|item| owner[item.0].is_none());
            let (trained, frozen): (Vec<_>, Vec<_>) = new.partition(|item| model.items[item.0].trainable);
            let name = unit_name(model, &blocks);
            let mut take = |items: Vec<ItemId>, index: usize| {
                let places = places(model, items.into_iter());
                for (at, place) in places.iter().enumerate() {
                    owner[place.item.0] = Some((index, at));
                }
                let numel = places.last().map_or(0, |place| place.offset + place.len);
                (places, numel.div_ceil(num_shards).next_multiple_of(ALIGN))
            };
            let (places, shard_len) = take(trained, index);
            if !frozen.is_empty() {
                let (places, shard_len) = take(frozen, num_walked + frozen_units.len());
                let (name, needs) = (format!("{name} (frozen)"), BTreeSet::new());
                let (blocks, after_forward) = (0..0, AfterForward::Free);
                let unit = Unit { name, blocks, places, needs, trainable: false, after_forward, shard_len };
                frozen_units.push(unit);
            }
            let needs = used.iter().filter_map(|item| owner[item.0]).map(|(unit, _)| unit).collect();
            let after_forward = AfterForward::Free;
            units.push(Unit { name, blocks, places, needs, trainable: true, after_forward, shard_len });
        }
        units.extend(frozen_units);
        let owner = owner.into_iter().map(|owner| owner.expect("every item is some block's")).collect();
        Ok(Layout { units, owner, num_shards, num_walked })
    }

    /// The first unit that uses a weight with a gradient: no backward goes below it.
    pub fn lowest_trained(&self) -> usize {
        let trains = |unit: &Unit| unit.needs.iter().any(|&need| self.units[need].trainable);
        self.units[..self.num_walked].iter().position(trains).unwrap_or(self.num_walked)
    }

    /// Elements a rank owns of units that are trained, or of those that are not.
    pub fn owned(&self, trainable: bool) -> usize {
        self.units.iter().filter(|unit| unit.trainable == trainable).map(|unit| unit.shard_len).sum()
    }

    /// Elements of the whole unit, padding included.
    pub fn unit_len(&self, unit: usize) -> usize {
        self.units[unit].shard_len * self.num_shards
    }

    /// The stretches of `shard`'s part of a unit that hold weights.
    pub fn spans(&self, unit: usize, shard: usize) -> Vec<Span> {
        let len = self.units[unit].shard_len;
        self.spans_in(unit, len * shard..len * (shard + 1))
    }

    /// The stretches of a whole unit that hold weights.
    pub fn whole_spans(&self, unit: usize) -> Vec<Span> {
        self.spans_in(unit, 0..self.unit_len(unit))
    }

    fn spans_in(&self, unit: usize, mine: Range<usize>) -> Vec<Span> {
        let unit = &self.units[unit];
        let mut spans: Vec<Span> = Vec::new();
        for place in &unit.places {
            let start = place.offset.max(mine.start);
            let end = (place.offset + place.len).min(mine.end);
            if start >= end {
                continue;
            }
            let span = Span { start: start - mine.start, len: end - start, is_matrix: place.is_matrix };
            match spans.last_mut() {
                Some(last) if last.start + last.len == span.start && last.is_matrix == span.is_matrix => {
                    last.len += span.len;
                }
                _ => spans.push(span),
            }
        }
        spans
    }

    /// The stretches of named weights that `shard`'s part of a unit holds.
    pub fn pieces(&self, model: &Model, unit: usize, shard: usize) -> Vec<Piece> {
        let unit = &self.units[unit];
        let mine = unit.shard_len * shard..unit.shard_len * (shard + 1);
        let mut pieces = Vec::new();
        for place in &unit.places {
            let mut offset = place.offset;
            for member in &model.items[place.item.0].members {
                let len = member.shape.numel();
                let (start, end) = (offset.max(mine.start), (offset + len).min(mine.end));
                if start < end {
                    let name = member.name.clone();
                    let piece =
                        Piece { name, start: start - offset, len: end - start, at: start - mine.start };
                    pieces.push(piece);
                }
                offset += len;
            }
        }
        pieces
    }
}

/// Whether a rule means one of these blocks.
fn fits(rule: &UnitRule, model: &Model, mut blocks: Range<usize>) -> bool {
    blocks.any(|block| {
        let named = rule.blocks.as_ref().is_none_or(|range| range.contains(&block));
        named && (rule.kinds.is_empty() || rule.kinds.iter().any(|kind| kind == model.blocks[block].kind()))
    })
}

/// Vectors first, then matrices: a shard then has few spans.
fn places(model: &Model, items: impl Iterator<Item = ItemId>) -> Vec<Place> {
    let mut items: Vec<ItemId> = items.collect::<BTreeSet<_>>().into_iter().collect();
    items.sort_by_key(|item| model.items[item.0].members[0].is_matrix());
    let mut offset = 0usize;
    items
        .into_iter()
        .map(|id| {
            let item = &model.items[id.0];
            let place = Place {
                item: id,
                offset: offset.next_multiple_of(ALIGN),
                len: item.numel(),
                is_matrix: item.members[0].is_matrix(),
            };
            offset = place.offset + place.len;
            place
        })
        .collect()
}

/// "Embedding", "LlamaDecoderLayer 3", "Embedding…Head".
fn unit_name(model: &Model, blocks: &Range<usize>) -> String {
    let name = |index: usize| {
        let kind = model.blocks[index].kind();
        let count = |end: usize| model.blocks[..end].iter().filter(|other| other.kind() == kind).count();
        match count(model.blocks.len()) {
            1 => kind.to_string(),
            _ => format!("{kind} {}", count(index)),
        }
    };
    match blocks.len() {
        1 => name(blocks.start),
        _ => format!("{}…{}", name(blocks.start), name(blocks.end - 1)),
    }
}
