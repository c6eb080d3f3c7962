//! The order of a step, as data.
//!
//! The same list on every rank, made before the first step. Compute goes forward through the units, turns at
//! the last one (whose forward and backward are one action), and goes back. Around that walk are the gathers
//! that bring weights in time, the frees, and the reduces of gradients.

use crate::{AfterForward, Layout, Settings};
use std::collections::{BTreeSet, VecDeque};
use tensor::Mode;

/// One step of a schedule. Numbers are units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// All ranks agree on the number of targets of the whole batch, which seeds the loss's gradient.
    Count,
    /// Brings weights that the host has updated to the device's shard. In flight as a gather is.
    Fetch(usize),
    /// Makes a unit's weights whole. In flight until the compute that needs them.
    Gather(usize),
    Forward(usize),
    /// Releases a unit's gathered weights.
    Free(usize),
    /// Keeps a part of a unit's gathered weights, to be gathered among neighbours again.
    Narrow(usize),
    /// Makes a narrowed unit's weights whole, among the neighbours that keep them.
    Widen(usize),
    /// Forward and backward of the last unit, loss included.
    Turn(usize),
    /// Evaluation's half of the turn: forward of the last unit, and its losses summed.
    Score(usize),
    Backward(usize),
    /// Sums a unit's gradient over ranks into the shards, wherever they are kept. In flight until it is settled.
    Reduce(usize),
    /// Waits for a unit's reduce; its gradient slot is free again.
    Settle(usize),
    /// The global gradient norm and the clip scale; also sums the loss over ranks.
    Norm,
    /// Evaluation's end: losses and targets are summed over ranks.
    Total,
    Update(usize),
}

impl Action {
    pub const fn name(self) -> &'static str {
        match self {
            Action::Count => "count",
            Action::Fetch(_) => "fetch",
            Action::Gather(_) => "gather",
            Action::Forward(_) => "forward",
            Action::Free(_) => "free",
            Action::Narrow(_) => "narrow",
            Action::Widen(_) => "widen",
            Action::Turn(_) => "turn",
            Action::Score(_) => "score",
            Action::Backward(_) => "backward",
            Action::Reduce(_) => "reduce",
            Action::Settle(_) => "settle",
            Action::Norm => "norm",
            Action::Total => "total",
            Action::Update(_) => "update",
        }
    }

    pub const fn unit(self) -> Option<usize> {
        match self {
            Action::Count | Action::Norm | Action::Total => None,
            Action::Fetch(unit)
            | Action::Gather(unit)
            | Action::Forward(unit)
            | Action::Free(unit)
            | Action::Narrow(unit)
            | Action::Widen(unit)
            | Action::Turn(unit)
            | Action::Score(unit)
            | Action::Backward(unit)
            | Action::Reduce(unit)
            | Action::Settle(unit)
            | Action::Update(unit) => Some(unit),
        }
    }
}

/// What a schedule is for: one of a step's micro-batches, or evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The only one.
    Only,
    First,
    Middle,
    Last,
    /// A micro-batch that is only evaluated. Each is complete in itself.
    Eval,
}

impl Part {
    pub fn of(index: usize, micro_batches: usize) -> Part {
        match (index, index + 1 == micro_batches) {
            (0, true) => Part::Only,
            (0, false) => Part::First,
            (_, false) => Part::Middle,
            (_, true) => Part::Last,
        }
    }

    pub const fn mode(self) -> Mode {
        match self {
            Part::Only | Part::First | Part::Middle | Part::Last => Mode::Train,
            Part::Eval => Mode::Eval,
        }
    }

    pub const fn begins(self) -> bool {
        matches!(self, Part::Only | Part::First)
    }

    pub const fn ends(self) -> bool {
        matches!(self, Part::Only | Part::Last)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Schedule {
    pub part: Part,
    pub actions: Vec<Action>,
}

impl Schedule {
    pub fn new(layout: &Layout, settings: &Settings, part: Part) -> Self {
        Builder::new(layout, settings, part).build()
    }
}

/// The walk through the units: forward, turn, and backward as far down as there is something to train; in
/// evaluation forward and score.
fn walk(layout: &Layout, mode: Mode) -> Vec<Action> {
    let last = layout.num_walked - 1;
    let forward = (0..last).map(Action::Forward);
    if mode != Mode::Train {
        return forward.chain([Action::Score(last)]).collect();
    }
    let backward = (layout.lowest_trained()..last).rev().map(Action::Backward);
    forward.chain([Action::Turn(last)]).chain(backward).collect()
}

struct Builder<'a> {
    layout: &'a Layout,
    settings: &'a Settings,
    part: Part,
    walk: Vec<Action>,
    /// Units that are fetched already.
    fetched: BTreeSet<usize>,
    gathered: BTreeSet<usize>,
    /// Units of which a part is kept for a gather among neighbours.
    narrowed: BTreeSet<usize>,
    /// Units whose reduce has not been settled, oldest first.
    reducing: VecDeque<usize>,
    actions: Vec<Action>,
}

impl<'a> Builder<'a> {
    fn new(layout: &'a Layout, settings: &'a Settings, part: Part) -> Self {
        let walk = walk(layout, part.mode());
        Builder {
            layout,
            settings,
            part,
            walk,
            fetched: BTreeSet::new(),
            gathered: BTreeSet::new(),
            narrowed: BTreeSet::new(),
            reducing: VecDeque::new(),
            actions: vec![],
        }
    }

    fn build(mut self) -> Schedule {
        if self.part.begins() {
            self.actions.push(Action::Count);
        }
        for at in 0..self.walk.len() {
            self.gather_for(at);
            self.settle_all_but(1);
            self.actions.push(self.walk[at]);
            self.free_after(at);
            self.reduce_after(at);
        }
        self.settle_all_but(0);
        if self.part == Part::Eval {
            self.actions.push(Action::Total);
        }
        if self.part.ends() {
            self.actions.push(Action::Norm);
            let trained = (0..self.layout.units.len()).filter(|unit| self.layout.units[*unit].trainable);
            self.actions.extend(trained.map(Action::Update));
        }
        Schedule { part: self.part, actions: self.actions }
    }

    /// The units that walk positions `from..=to` need.
    fn needs(&self, from: usize, to: usize) -> BTreeSet<usize> {
        let end = (to + 1).min(self.walk.len());
        let units = self.walk[from.min(end)..end].iter().filter_map(|action| action.unit());
        units.flat_map(|unit| self.layout.units[unit].needs.iter().copied()).collect()
    }

    fn gather_for(&mut self, at: usize) {
        // Between micro-batches nothing is updated.
        let fetches = self.settings.fetches() && (self.part.begins() || self.part == Part::Eval);
        // What is needed first is gathered first.
        for ahead in at..=at + self.settings.prefetch {
            for unit in self.needs(ahead, ahead) {
                if fetches && self.layout.units[unit].trainable && self.fetched.insert(unit) {
                    self.actions.push(Action::Fetch(unit));
                }
                if self.settings.gathers() && !self.gathered.contains(&unit) {
                    if !self.make_room(at, ahead) {
                        return;
                    }
                    self.gathered.insert(unit);
                    let near = self.narrowed.remove(&unit);
                    self.actions.push(if near { Action::Widen(unit) } else { Action::Gather(unit) });
                }
            }
        }
    }

    /// Room for one more unit at position `at`, which is wanted at `ahead`. Of those kept, the one needed last makes room;
    /// where all are needed before that, there is none.
    fn make_room(&mut self, at: usize, ahead: usize) -> bool {
        let cap = self.settings.max_gathered.unwrap_or(usize::MAX);
        while self.gathered.len() >= cap {
            let needed = |unit: usize| (at..self.walk.len()).find(|&at| self.needs(at, at).contains(&unit));
            let last = self.gathered.iter().map(|&unit| (needed(unit), unit)).max();
            match last {
                Some((Some(when), unit)) if when > ahead => self.let_go(unit, true),
                // What a position needs it gets, whatever the cap.
                _ => return ahead == at,
            }
        }
        true
    }

    /// Lets go of what the next positions would not gather at once anyway: for good, or, where it will be needed
    /// again, as its unit says.
    fn free_after(&mut self, at: usize) {
        let soon = self.needs(at + 1, at + 1 + self.settings.prefetch);
        let later = self.needs(at + 1, self.walk.len());
        for unit in self.gathered.difference(&soon).copied().collect::<Vec<_>>() {
            match (later.contains(&unit), self.layout.units[unit].after_forward) {
                (true, AfterForward::Keep) => {}
                (again, _) => self.let_go(unit, again),
            }
        }
    }

    /// Frees a gathered unit, or narrows it where it will be needed `again` and is to stay with neighbours.
    fn let_go(&mut self, unit: usize, again: bool) {
        self.gathered.remove(&unit);
        self.actions.push(match self.layout.units[unit].after_forward {
            AfterForward::Group(_) if again => {
                self.narrowed.insert(unit);
                Action::Narrow(unit)
            }
            _ => Action::Free(unit),
        });
    }

    /// Reduces the units whose gradients are complete: no later backward adds to them.
    fn reduce_after(&mut self, at: usize) {
        let skip = self.settings.reduces_once() && !self.part.ends();
        let adds = matches!(self.walk[at], Action::Turn(_) | Action::Backward(_));
        let stays = self.settings.ranks == 1 && !self.settings.grads_on_host();
        if stays || skip || !adds {
            return;
        }
        let later = self.needs(at + 1, self.walk.len());
        let complete = self.needs(at, at).difference(&later).copied().collect::<Vec<_>>();
        // As the backward comes to them: the last first.
        for unit in complete.iter().rev().filter(|unit| self.layout.units[**unit].trainable) {
            self.actions.push(Action::Reduce(*unit));
            self.reducing.push_back(*unit);
        }
    }

    /// At most `left` reduces stay in flight, so that gradient slots are bounded.
    fn settle_all_but(&mut self, left: usize) {
        while self.reducing.len() > left {
            self.actions.extend(self.reducing.pop_front().map(Action::Settle));
        }
    }
}
