//! The tape inside a unit: what the forward did and saved, to be walked backwards once.
//!
//! How much is saved is a choice ([`Keep`]): everything; everything but the results of operations that are
//! cheap to run again (norms, SwiGLU); or nothing at all, the whole forward being run again before the
//! backward. The numbers are the same, bit for bit, in every case: the same kernels run on the same inputs.
//!
//! An operation saves tensors it computed, and knows *which* weight it used; it never saves a weight. So a
//! unit's gathered weights can be freed after its forward and gathered again before its backward.

use crate::arena::Hold;
use crate::{Arena, Cache, Error, ItemId, Kind, Result, Shape, Tensor, Weights};
use device::{Device, Dtype, Stream};
use std::fmt;
use std::sync::Weak;

/// What a forward is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Saves what the backward needs.
    Train,
    /// Saves nothing; the loss is computed and that is all.
    Eval,
    /// Saves nothing; the last block gives logits instead of losses.
    Logits,
    /// Saves nothing; attention sees and extends the context's cache, and the last block gives logits of each
    /// row's last token.
    Decode,
}

/// What a forward keeps for its backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Keep {
    #[default]
    All,
    /// Not what cheap operations gave: that is made again from what they were given.
    Expensive,
    /// The carry alone.
    Nothing,
}

/// What a block computes on beside its carry: the fields of one micro-batch, by name.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    fields: Vec<(&'static str, Tensor)>,
}

impl Batch {
    pub fn set(&mut self, name: &'static str, tensor: Tensor) {
        self.fields.retain(|(field, _)| *field != name);
        self.fields.push((name, tensor));
    }

    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.find(name).ok_or_else(|| Error::NoField {
            name: name.to_string(),
            has: self.fields.iter().map(|(field, _)| *field).collect::<Vec<_>>().join(", "),
        })
    }

    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.fields.iter().find(|(field, _)| *field == name).map(|(_, tensor)| tensor)
    }
}

/// What decides random choices (dropout): they are the same whatever the number of ranks or micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Random {
    pub seed: u64,
    pub step: u64,
    /// Number of this micro-batch's first row of activations (its first token) within the step's whole batch.
    pub first_row: u64,
}

impl Random {
    /// A key for one operation of this step; `site` tells operations apart.
    pub fn key(&self, site: u64) -> u64 {
        // The finisher of splitmix64, once per word: close inputs give keys that have nothing in common.
        [self.seed, self.step, site].into_iter().fold(0x9e37_79b9_7f4a_7c15, |hash: u64, word| {
            let z = hash.wrapping_add(word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        })
    }
}

/// Everything an operation may touch.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    pub device: &'a dyn Device,
    pub stream: &'a Stream,
    pub arena: &'a Arena,
    pub weights: &'a dyn Weights,
    pub constants: &'a [Tensor],
    pub batch: &'a Batch,
    /// One f32 on the device: what the gradient of the summed loss starts from (1 / tokens of the whole
    /// batch, times the loss scale).
    pub seed: &'a Tensor,
    pub random: Random,
    pub mode: Mode,
    /// Dtype of activations and gathered weights.
    pub compute: Dtype,
    /// Tokens the loss turns at once: logits exist for that many only.
    pub loss_chunk: usize,
    /// What decoding remembers; given exactly in [`Mode::Decode`].
    pub cache: Option<&'a Cache>,
}

impl Context<'_> {
    pub fn tensor(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        self.arena.tensor(self.compute, shape, Kind::Activation)
    }

    pub fn f32(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        self.arena.tensor(Dtype::F32, shape, Kind::Activation)
    }

    pub fn scratch(&self, dtype: Dtype, len: usize) -> Result<Tensor> {
        self.arena.tensor(dtype, [len], Kind::Scratch)
    }
}

impl fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({}, {:?}, {})", self.device.name(), self.mode, self.compute)
    }
}

/// What an operation's forward gives: its results, and what its backward will want to see again.
#[derive(Debug)]
pub struct Outcome {
    pub outputs: Vec<Tensor>,
    pub saved: Vec<Tensor>,
}

/// An operation: forward, backward, what to save. Users' own operations are written the same way.
///
/// Inputs and gradients come by value: an operation may overwrite one in place where
/// [`Tensor::is_unique`] says that nobody else needs it.
pub trait Op: fmt::Debug + Send {
    fn name(&self) -> &'static str;

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Tensor>) -> Result<Outcome>;

    /// Gradients of the inputs from gradients of the outputs (None where nothing flows). Weight gradients go
    /// where [`Weights::grad`] says.
    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Vec<Tensor>,
        grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>>;

    /// For an operation that is cheap to run again: its last result, from what it saved. Others have None.
    fn again(&self, _cx: &Context<'_>, _saved: &[Saved]) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Whether [`Op::again`] gives something.
    fn is_cheap(&self) -> bool {
        false
    }

    /// For an operation whose backward needs its inputs alone: what [`Op::forward`] would give, with results that
    /// hold anything. Asked when a forward runs again for its backward, of operations whose results nothing in the
    /// unit takes. Others have None, and run.
    fn unseen(&self, _cx: &Context<'_>, _inputs: &[Tensor]) -> Result<Option<Outcome>> {
        Ok(None)
    }
}

/// What the tape holds of an operation's saved tensors.
#[derive(Debug)]
pub enum Saved {
    Value(Tensor),
    /// The last result of a cheap operation, by its place on the tape.
    Again(usize),
}

impl Saved {
    /// The tensor itself, where the tape holds it.
    pub fn value(&self) -> Option<&Tensor> {
        match self {
            Saved::Value(tensor) => Some(tensor),
            Saved::Again(_) => None,
        }
    }
}

/// A tensor with its place on the tape.
#[derive(Clone, Debug)]
pub struct Var {
    id: usize,
    tensor: Tensor,
}

impl Var {
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }
}

#[derive(Debug)]
struct Node {
    op: Box<dyn Op>,
    inputs: Vec<usize>,
    outputs: Vec<usize>,
    saved: Vec<Saved>,
}

/// What one forward of a unit recorded.
#[derive(Debug, Default)]
pub struct Tape {
    keep: Keep,
    nodes: Vec<Node>,
    /// The last results of cheap operations, while the forward runs: (mark of the tensor, place of its operation).
    cheap: Vec<(Weak<Hold>, usize)>,
    entries: Vec<usize>,
    exits: Vec<usize>,
    /// By variable: the number of the operation that gave it, None for what came in with the carry.
    makers: Vec<Option<usize>>,
    /// By operation: whether a later one took a result of it.
    taken: Vec<bool>,
    /// The same of the first run, when this is the second.
    taken_before: Vec<bool>,
}

impl Tape {
    pub fn new(keep: Keep) -> Self {
        Tape { keep, ..Tape::default() }
    }

    /// A tape for running the same forward again, now for its backward. What only the next unit took, and no
    /// backward needs, is not computed a second time.
    pub fn second(first: Tape) -> Self {
        Tape { keep: Keep::All, taken_before: first.taken, ..Tape::default() }
    }

    fn enter(&mut self, tensor: Tensor, maker: Option<usize>) -> Var {
        self.makers.push(maker);
        Var { id: self.makers.len() - 1, tensor }
    }

    /// An operation is about to run on these variables: its number.
    fn begin(&mut self, inputs: &[usize]) -> usize {
        for maker in inputs.iter().filter_map(|&id| self.makers[id]) {
            self.taken[maker] = true;
        }
        self.taken.push(false);
        self.taken.len() - 1
    }

    /// Whether nothing in the unit will take the results of this operation.
    fn is_unseen(&self, op: usize) -> bool {
        self.taken_before.get(op) == Some(&false)
    }

    /// Runs `blocks` forward over `carry`, recording in `Train` mode.
    pub fn forward<'b>(
        &mut self,
        cx: Context<'_>,
        blocks: impl Iterator<Item = &'b dyn Block>,
        carry: Vec<Tensor>,
    ) -> Result<Vec<Tensor>> {
        let mut carry: Vec<Var> = carry.into_iter().map(|tensor| self.enter(tensor, None)).collect();
        self.entries = carry.iter().map(|var| var.id).collect();
        let mut pass = Pass { cx, tape: self };
        for block in blocks {
            carry = block.forward(&mut pass, carry)?;
        }
        self.cheap.clear();
        self.exits = carry.iter().map(|var| var.id).collect();
        Ok(carry.into_iter().map(Var::into_tensor).collect())
    }

    /// Walks back from gradients of what the forward returned to gradients of its carry. Each operation's
    /// saved tensors go as soon as they have been used.
    pub fn backward(mut self, cx: Context<'_>, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let mut by_var: Vec<Option<Tensor>> = vec![None; self.makers.len()];
        for (id, grad) in self.exits.iter().zip(grads) {
            accumulate(&cx, &mut by_var[*id], grad)?;
        }
        while let Some(node) = self.nodes.pop() {
            let arriving: Vec<_> = node.outputs.iter().map(|&id| by_var[id].take()).collect();
            let saved = self.restore(&cx, node.saved)?;
            let leaving = node.op.backward(&cx, saved, arriving)?;
            for (id, grad) in node.inputs.iter().zip(leaving) {
                accumulate(&cx, &mut by_var[*id], grad)?;
            }
        }
        Ok(self.entries.iter().map(|&id| by_var[id].take()).collect())
    }
}

impl Tape {
    /// Saved tensors, those of cheap operations made again. An operation's sources come before it on the tape, so
    /// they are still there.
    fn restore(&self, cx: &Context<'_>, saved: Vec<Saved>) -> Result<Vec<Tensor>> {
        let restored = saved.into_iter().map(|saved| match saved {
            Saved::Value(tensor) => Ok(tensor),
            Saved::Again(index) => {
                let node = &self.nodes[index];
                let missing = || Error::Argument { op: node.op.name(), what: "it cannot run again".into() };
                node.op.again(cx, &node.saved)?.ok_or_else(missing)
            }
        });
        restored.collect()
    }

    /// Remembers an operation that has run.
    fn record(&mut self, op: impl Op + 'static, inputs: Vec<usize>, outputs: &[Var], saved: Vec<Tensor>) {
        let made_again = |tensor: &Tensor| {
            self.cheap.iter().find(|(mark, _)| tensor.is_marked(mark)).map(|(_, index)| *index)
        };
        let saved = saved.into_iter().map(|tensor| match made_again(&tensor) {
            Some(index) => Saved::Again(index),
            None => Saved::Value(tensor),
        });
        let saved = saved.collect();
        if self.keep == Keep::Expensive
            && op.is_cheap()
            && let Some(mark) = outputs.last().and_then(|last| last.tensor.mark())
        {
            self.cheap.push((mark, self.nodes.len()));
        }
        let outputs = outputs.iter().map(|var| var.id).collect();
        self.nodes.push(Node { op: Box::new(op), inputs, outputs, saved });
    }
}

/// Adds `grad` to what is there, in place where one of the two is nobody else's.
fn accumulate(cx: &Context<'_>, place: &mut Option<Tensor>, grad: Option<Tensor>) -> Result<()> {
    let Some(grad) = grad else { return Ok(()) };
    *place = Some(match place.take() {
        None => grad,
        Some(there) if there.is_unique() => {
            cx.device.add(cx.stream, grad.buffer(), there.buffer())?;
            there
        }
        Some(there) if grad.is_unique() => {
            cx.device.add(cx.stream, there.buffer(), grad.buffer())?;
            grad
        }
        Some(there) => {
            let sum = cx.tensor(there.shape().clone())?;
            cx.device.copy(cx.stream, there.buffer(), sum.buffer())?;
            cx.device.add(cx.stream, grad.buffer(), sum.buffer())?;
            sum
        }
    });
    Ok(())
}

/// One forward in progress: what a block's `forward` is given.
#[derive(Debug)]
pub struct Pass<'a> {
    pub cx: Context<'a>,
    tape: &'a mut Tape,
}

impl Pass<'_> {
    /// Runs an operation and, when training, remembers it.
    pub fn apply(&mut self, op: impl Op + 'static, inputs: Vec<Var>) -> Result<Vec<Var>> {
        let ids: Vec<usize> = inputs.iter().map(|var| var.id).collect();
        let number = self.tape.begin(&ids);
        let inputs: Vec<Tensor> = inputs.into_iter().map(Var::into_tensor).collect();
        let unseen = if self.tape.is_unseen(number) { op.unseen(&self.cx, &inputs)? } else { None };
        let outcome = match unseen {
            Some(outcome) => outcome,
            None => op.forward(&self.cx, inputs)?,
        };
        let enter = |tensor| self.tape.enter(tensor, Some(number));
        let outputs: Vec<Var> = outcome.outputs.into_iter().map(enter).collect();
        if self.cx.mode == Mode::Train && self.tape.keep != Keep::Nothing {
            self.tape.record(op, ids, &outputs, outcome.saved);
        }
        Ok(outputs)
    }

    /// As [`Pass::apply`], for an operation with one result.
    pub fn apply1(&mut self, op: impl Op + 'static, inputs: Vec<Var>) -> Result<Var> {
        let name = op.name();
        let mut outputs = self.apply(op, inputs)?;
        match (outputs.pop(), outputs.is_empty()) {
            (Some(var), true) => Ok(var),
            _ => Err(Error::Argument { op: name, what: "expected to give one result".into() }),
        }
    }

    /// Enters a part of a layer that tensor parallelism splits (attention, MLP): the same on every rank
    /// before, a rank's own part after. An identity on one rank.
    pub fn enter(&mut self, x: Var) -> Result<Var> {
        Ok(x)
    }

    /// Leaves such a part: each rank's partial sums before, the whole after.
    pub fn exit(&mut self, x: Var) -> Result<Var> {
        Ok(x)
    }
}

/// A piece of a model: the smallest thing a unit can be made of. It owns named weights and has one forward
/// over a small carry of activations. The first block's carry is empty; the last one's result is one f32 loss
/// per token, all logits in [`Mode::Logits`], or f32 logits `[rows, vocab]` of each row's last token when decoding.
pub trait Block: fmt::Debug + Send + Sync {
    /// The kind wrap policies go by, a Hugging Face class name where there is one.
    fn kind(&self) -> &str;

    /// The items it uses, tied ones included.
    fn items(&self) -> Vec<ItemId>;

    fn forward(&self, pass: &mut Pass<'_>, carry: Vec<Var>) -> Result<Vec<Var>>;
}
