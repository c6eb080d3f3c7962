//! What decoding remembers: keys and values of the tokens already seen.
//!
//! A cache has one slot for each attention of the model, in the order in which a pass comes to them: the n-th
//! attention of a pass takes the n-th slot. As with the arena, a pass on the null device *records* which slots
//! there will be, so that their room is known before anything runs.

use crate::{Error, Result};
use device::{AttentionShape, Buffer, Device, Dtype};
use std::cell::{Cell, RefCell};

/// One attention's keys and values: each `[rows, kv_heads, max_len, head_dim]`.
#[derive(Clone, Debug)]
pub struct Slot {
    pub keys: Buffer,
    pub values: Buffer,
}

/// Keys and values of up to `max_len` tokens a row. All rows have the same number of tokens.
#[derive(Debug)]
pub struct Cache {
    slots: RefCell<Vec<Slot>>,
    recording: bool,
    dtype: Dtype,
    max_len: usize,
    len: Cell<usize>,
    next: Cell<usize>,
}

impl Cache {
    /// A cache that makes a slot wherever one is asked for; for the null device.
    pub fn record(dtype: Dtype, max_len: usize) -> Self {
        Self::with(vec![], true, dtype, max_len)
    }

    /// A cache over slots taken beforehand.
    pub fn new(slots: Vec<Slot>, dtype: Dtype, max_len: usize) -> Self {
        Self::with(slots, false, dtype, max_len)
    }

    fn with(slots: Vec<Slot>, recording: bool, dtype: Dtype, max_len: usize) -> Self {
        let (slots, len, next) = (RefCell::new(slots), Cell::new(0), Cell::new(0));
        Cache { slots, recording, dtype, max_len, len, next }
    }

    /// Tokens of each row that have been seen.
    pub fn len(&self) -> usize {
        self.len.get()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Forgets all tokens but the first `len`, and begins a pass anew.
    pub fn rewind(&self, len: usize) {
        self.len.set(self.len().min(len));
        self.next.set(0);
    }

    /// Ends a pass that brought `tokens` new ones to every row. Every attention has taken its slot.
    pub fn advance(&self, tokens: usize) {
        self.len.set(self.len() + tokens);
        self.next.set(0);
    }

    /// The slot of the attention that asks next.
    pub fn slot(&self, device: &dyn Device, shape: &AttentionShape) -> Result<Slot> {
        let wrong = |what: String| Err(Error::Argument { op: "cache", what });
        let index = self.next.replace(self.next.get() + 1);
        let elements = shape.rows * shape.kv_heads * self.max_len * shape.head_dim;
        let mut slots = self.slots.borrow_mut();
        if self.recording && index == slots.len() {
            let take = || device.alloc_buffer(self.dtype, elements, "a recorded cache");
            slots.push(Slot { keys: take()?, values: take()? });
        }
        match slots.get(index) {
            Some(slot) if slot.keys.len() == elements => Ok(slot.clone()),
            Some(slot) => {
                wrong(format!("slot {index} has {} elements where {elements} belong", slot.keys.len()))
            }
            None => wrong(format!("a pass has more attentions than the {} planned", slots.len())),
        }
    }

    /// Elements of each slot's keys, in order; values have as many.
    pub fn slot_elements(&self) -> Vec<usize> {
        self.slots.borrow().iter().map(|slot| slot.keys.len()).collect()
    }
}
