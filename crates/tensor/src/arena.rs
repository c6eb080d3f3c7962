//! Where a step's tensors lie.
//!
//! A step is run once on the null device while the arena *records*: each tensor's size, and when it came and
//! went. [`Trace::place`] then gives every tensor an offset such that those alive together do not overlap.
//! The real run *replays*: the n-th tensor of the step gets the n-th offset, of one region taken beforehand.
//! So the plan is exact by construction, and a step that differs from its plan is caught at once.
//!
//! Time is the order in which the host issues things. That suffices although streams run concurrently,
//! because side streams wait for the compute stream where they are issued, and memory a side stream uses
//! becomes free only after the compute stream has waited for it.

use crate::{Result, Shape, Tensor};
use device::{Buffer, Device, Dtype, Memory};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Every tensor starts at a multiple of this.
pub const ALIGN_BYTES: usize = 256;

/// What a tensor is, for the plan's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Saved for the backward, or passed from operation to operation.
    Activation,
    /// Needed inside one operation.
    Scratch,
    /// A unit's gathered weights.
    Gathered,
    /// A unit's whole gradient, before it is reduced.
    GradientSlot,
    /// A shard's gradient, until the update.
    Gradient,
}

impl Kind {
    pub const ALL: [Kind; 5] =
        [Kind::Activation, Kind::Scratch, Kind::Gathered, Kind::GradientSlot, Kind::Gradient];

    pub const fn name(self) -> &'static str {
        match self {
            Kind::Activation => "activations",
            Kind::Scratch => "scratch",
            Kind::Gathered => "gathered weights",
            Kind::GradientSlot => "gradient slots",
            Kind::Gradient => "gradients",
        }
    }
}

/// One tensor's life in a step, in ticks of the arena's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Life {
    pub bytes: usize,
    pub kind: Kind,
    pub start: usize,
    pub end: usize,
}

/// The lives of all tensors of one step, in order of their coming.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    pub lives: Vec<Life>,
}

/// A trace with offsets.
#[derive(Clone, Debug)]
pub struct Placement {
    pub trace: Trace,
    pub offsets: Vec<usize>,
    /// Bytes from the first to the last one used.
    pub bytes: usize,
}

impl Placement {
    /// The same places for a smaller step: one that asks for the same tensors at the same times, none of them
    /// larger. None where it is not such a step.
    pub fn shrunk(&self, trace: Trace) -> Option<Placement> {
        let alike = |(small, large): (&Life, &Life)| {
            small.bytes <= large.bytes
                && (small.kind, small.start, small.end) == (large.kind, large.start, large.end)
        };
        let same = trace.lives.len() == self.trace.lives.len()
            && trace.lives.iter().zip(&self.trace.lives).all(alike);
        same.then(|| Placement { trace, offsets: self.offsets.clone(), bytes: self.bytes })
    }
}

impl Trace {
    /// The most bytes alive at once: no placement can do with less.
    pub fn floor_bytes(&self) -> usize {
        self.peak_by_kind().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes of each kind at the moment at which most bytes are alive.
    pub fn peak_by_kind(&self) -> Vec<(Kind, usize)> {
        let ticks = self.lives.iter().map(|life| life.end).max().unwrap_or(0) + 1;
        let mut change = vec![0isize; ticks + 1];
        for life in &self.lives {
            change[life.start] += life.bytes as isize;
            change[life.end] -= life.bytes as isize;
        }
        let (mut alive, mut most, mut when) = (0, 0, 0);
        for (tick, delta) in change.iter().enumerate() {
            alive += delta;
            if alive > most {
                (most, when) = (alive, tick);
            }
        }
        Kind::ALL
            .iter()
            .map(|&kind| {
                let here = |life: &&Life| life.kind == kind && life.start <= when && when < life.end;
                (kind, self.lives.iter().filter(here).map(|life| life.bytes).sum())
            })
            .collect()
    }

    /// Offsets for every tensor. Two orders are tried (large ones first, and as they come), each tensor
    /// taking the lowest gap among those alive with it; the smaller result is kept.
    pub fn place(self) -> Placement {
        let mut by_size: Vec<usize> = (0..self.lives.len()).collect();
        by_size.sort_by_key(|&i| (std::cmp::Reverse(self.lives[i].bytes), i));
        let as_they_come: Vec<usize> = (0..self.lives.len()).collect();
        let best = [by_size, as_they_come].iter().map(|order| self.place_in_order(order)).min_by_key(|p| p.1);
        let (offsets, bytes) = best.expect("two orders were tried");
        Placement { trace: self, offsets, bytes }
    }

    fn place_in_order(&self, order: &[usize]) -> (Vec<usize>, usize) {
        let mut offsets = vec![0; self.lives.len()];
        // Sorted by offset, so that the lowest gap is found by one walk that ends at it.
        let (mut placed, mut total) = (Vec::<Placed>::with_capacity(order.len()), 0);
        for &index in order {
            let Life { bytes, start, end, .. } = self.lives[index];
            if bytes == 0 {
                continue;
            }
            let mut offset = 0;
            for other in placed.iter().filter(|other| other.start < end && start < other.end) {
                if offset + bytes <= other.from {
                    break;
                }
                offset = offset.max(other.to);
            }
            offsets[index] = offset;
            total = total.max(offset + bytes);
            let at = placed.partition_point(|other| other.from < offset);
            placed.insert(at, Placed { from: offset, to: offset + bytes, start, end });
        }
        (offsets, total)
    }
}

/// A tensor that has its place: bytes `from..to` from tick `start` to tick `end`.
struct Placed {
    from: usize,
    to: usize,
    start: usize,
    end: usize,
}

/// Gives tensors their storage. A handle; clones share it.
#[derive(Clone, Debug)]
pub struct Arena {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
enum State {
    Record { device: Arc<dyn Device>, clock: usize, trace: Trace },
    Replay { region: Arc<dyn Memory>, plan: Arc<Placement>, next: usize, high_bytes: usize },
}

/// Says to the arena that a tensor has gone.
#[derive(Debug)]
pub(crate) struct Hold {
    arena: Arena,
    index: usize,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.arena.release(self.index);
    }
}

impl Arena {
    /// An arena that records what a step on `device` (the null one) asks for.
    pub fn record(device: Arc<dyn Device>) -> Self {
        Self::with(State::Record { device, clock: 0, trace: Trace::default() })
    }

    /// An arena that lays tensors out in `region` as planned.
    pub fn replay(region: Arc<dyn Memory>, plan: Arc<Placement>) -> Self {
        assert!(region.bytes() >= plan.bytes, "the region is smaller than its plan");
        Self::with(State::Replay { region, plan, next: 0, high_bytes: 0 })
    }

    fn with(state: State) -> Self {
        Arena { state: Arc::new(Mutex::new(state)) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Storage for a tensor. Contents are unspecified.
    ///
    /// Panics when the step asks for something else than its plan says: the plan is made by running the
    /// same code, so that is a broken invariant and not a user's mistake.
    pub fn tensor(&self, dtype: Dtype, shape: impl Into<Shape>, kind: Kind) -> Result<Tensor> {
        let shape = shape.into();
        let len = shape.numel();
        let bytes = (len * dtype.bytes()).next_multiple_of(ALIGN_BYTES);
        let (buffer, index) = match &mut *self.lock() {
            State::Record { device, clock, trace } => {
                let memory = device.alloc(bytes, "a traced tensor")?;
                trace.lives.push(Life { bytes, kind, start: *clock, end: usize::MAX });
                *clock += 1;
                (Buffer::new(memory, 0, dtype, len)?, trace.lives.len() - 1)
            }
            State::Replay { region, plan, next, high_bytes } => {
                let index = *next;
                let planned = plan.trace.lives.get(index).map(|life| (life.bytes, life.kind));
                assert_eq!(planned, Some((bytes, kind)), "tensor {index} of the step differs from its plan");
                let offset = plan.offsets[index];
                *high_bytes = (*high_bytes).max(offset + bytes);
                *next += 1;
                (Buffer::new(region.clone(), offset, dtype, len)?, index)
            }
        };
        Tensor::held(buffer, shape, Hold { arena: self.clone(), index })
    }

    fn release(&self, index: usize) {
        if let State::Record { clock, trace, .. } = &mut *self.lock()
            && let Some(life) = trace.lives.get_mut(index)
        {
            life.end = *clock;
            *clock += 1;
        }
    }

    /// Begins the step anew (when replaying).
    pub fn restart(&self) {
        if let State::Replay { next, .. } = &mut *self.lock() {
            *next = 0;
        }
    }

    /// The farthest byte used so far (when replaying).
    pub fn high_bytes(&self) -> usize {
        match &*self.lock() {
            State::Replay { high_bytes, .. } => *high_bytes,
            State::Record { .. } => 0,
        }
    }

    /// Ends the recording. Tensors still alive count as living to the end.
    pub fn finish(&self) -> Trace {
        match &mut *self.lock() {
            State::Record { clock, trace, .. } => {
                let mut trace = std::mem::take(trace);
                for life in &mut trace.lives {
                    life.end = life.end.min(*clock);
                }
                trace
            }
            State::Replay { .. } => Trace::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::{Profile, null::Null};

    fn overlap(p: &Placement, a: usize, b: usize) -> bool {
        let (la, lb) = (&p.trace.lives[a], &p.trace.lives[b]);
        let meet = la.start < lb.end && lb.start < la.end;
        meet && p.offsets[a] < p.offsets[b] + lb.bytes && p.offsets[b] < p.offsets[a] + la.bytes
    }

    #[test]
    fn tensors_alive_together_never_overlap_and_dead_ones_make_room() {
        // A small multiplicative generator: lives of random length and size.
        let mut seed = 1u64;
        let mut random = |below: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as usize % below
        };
        for _ in 0..50 {
            let lives = (0..60)
                .map(|start| Life {
                    bytes: (1 + random(20)) * ALIGN_BYTES,
                    kind: Kind::Activation,
                    start: 2 * start,
                    end: 2 * start + 1 + random(60),
                })
                .collect();
            let trace = Trace { lives };
            let (floor, all) = (trace.floor_bytes(), trace.lives.iter().map(|l| l.bytes).sum::<usize>());
            let placed = trace.place();
            for a in 0..60 {
                for b in 0..a {
                    assert!(!overlap(&placed, a, b), "{a} and {b} overlap");
                }
            }
            assert!(placed.bytes >= floor && placed.bytes < all);
            assert!(placed.bytes < floor * 3 / 2, "{} bytes placed where {floor} are alive", placed.bytes);
        }
    }

    #[test]
    fn a_replay_gives_the_planned_offsets_and_refuses_another_step() {
        let null: Arc<dyn Device> = Arc::new(Null::new(Profile::Cpu));
        let step = |arena: &Arena, last: usize| {
            let a = arena.tensor(Dtype::F32, [100], Kind::Activation).unwrap();
            let b = arena.tensor(Dtype::Bf16, [4, 64], Kind::Scratch).unwrap();
            drop(a);
            let c = arena.tensor(Dtype::F32, [last], Kind::Activation).unwrap();
            (b, c)
        };
        let recording = Arena::record(null.clone());
        drop(step(&recording, 90));
        let plan = Arc::new(recording.finish().place());
        assert_eq!(plan.bytes, 512 + 512, "c takes a's room");
        let arena = Arena::replay(null.alloc(plan.bytes, "step").unwrap(), plan.clone());
        for _ in 0..3 {
            arena.restart();
            let (b, c) = step(&arena, 90);
            assert!(!b.buffer().overlaps(c.buffer()));
        }
        assert_eq!(arena.high_bytes(), plan.bytes);
        arena.restart();
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| step(&arena, 900))).is_err());
    }
}
