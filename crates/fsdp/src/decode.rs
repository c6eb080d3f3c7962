//! Decoding on one rank: weights are made whole once and kept, and there is no state of an optimizer.
//!
//! Here too everything is placed before it runs. A pass over the longest chunk of tokens is traced on the null
//! device: it says which caches there are and where its tensors lie. A shorter pass asks for the same tensors,
//! none larger, so it lies in the same places.

use crate::engine::{take_constants, write_rounded};
use crate::plan::align;
use crate::{Error, Layout, Plan, Region, Result, Source, Wrap};
use device::{Buffer, Device, Dtype, Profile, Role, Stream, null::Null};
use std::collections::BTreeMap;
use std::sync::Arc;
use tensor::arena::{ALIGN_BYTES, Placement, Trace};
use tensor::ops::field;
use tensor::{Arena, Batch, Cache, Context, Grad, ItemId, Mode, Model, Slot, Tape, Tensor, Weights};

/// What a decoder is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decoding {
    /// Sequences decoded side by side; they have the same number of tokens.
    pub rows: usize,
    /// Tokens of a sequence at most. The model's tables must reach as far.
    pub max_len: usize,
    /// Tokens of a row taken in one pass at most; longer prompts take several.
    pub chunk: usize,
    pub vocab: usize,
    /// Dtype of weights, activations and cache.
    pub compute: Dtype,
}

/// What a decoder will hold, before anything is allocated.
#[derive(Clone, Debug)]
pub struct DecodePlan {
    pub decoding: Decoding,
    pub profile: Profile,
    pub layout: Layout,
    /// Elements of the keys (and of the values) of each attention.
    slots: Vec<usize>,
    placement: Arc<Placement>,
}

impl DecodePlan {
    pub fn new(model: &Arc<Model>, decoding: Decoding, profile: Profile) -> Result<DecodePlan> {
        let Decoding { rows, max_len, chunk, vocab, compute } = decoding;
        if rows == 0 || max_len == 0 || chunk == 0 || chunk > max_len || vocab == 0 {
            return Err(Error::Settings(format!("nothing can be decoded with {decoding:?}")));
        }
        if !compute.is_float() {
            return Err(Error::Settings(format!("{compute} is no precision to decode in")));
        }
        let layout = Layout::divided(model, &Wrap::Layer, 1)?;
        let (trace, slots) = trace(model, &layout, &decoding, profile, chunk)?;
        let placement = Arc::new(trace.place());
        Ok(DecodePlan { decoding, profile, layout, slots, placement })
    }

    /// Everything the decoder allocates on its device.
    pub fn regions(&self, model: &Model) -> Vec<Region> {
        let size = self.decoding.compute.bytes();
        let weights: usize = (0..self.layout.units.len()).map(|unit| self.layout.unit_len(unit)).sum();
        [
            ("weights", weights * size),
            ("cache", self.slots.iter().map(|slot| 2 * align(slot * size)).sum()),
            ("pass", self.placement.bytes),
            ("batch", batch_bytes(&self.decoding)),
            ("constants", Plan::constant_bytes(model)),
            ("workspace", self.profile.workspace_bytes()),
        ]
        .map(|(name, bytes)| Region { name, bytes })
        .into_iter()
        .filter(|region| region.bytes > 0)
        .collect()
    }
}

/// Ids and positions of a chunk, and one number for whoever asks for the loss's seed.
fn batch_bytes(decoding: &Decoding) -> usize {
    2 * align(decoding.rows * decoding.chunk * 4) + ALIGN_BYTES
}

/// A pass of `seq` tokens a row on the null device: its tensors' lives, and the caches it asks for.
fn trace(
    model: &Arc<Model>,
    layout: &Layout,
    decoding: &Decoding,
    profile: Profile,
    seq: usize,
) -> Result<(Trace, Vec<usize>)> {
    let device: Arc<dyn Device> = Arc::new(Null::new(profile));
    let cache = Cache::record(decoding.compute, decoding.max_len);
    let fixed = Fixed::new(device.clone(), model.clone(), layout.clone(), *decoding, cache)?;
    let arena = Arena::record(device);
    fixed.pass(&arena, seq)?;
    Ok((arena.finish(), fixed.cache.slot_elements()))
}

/// Decodes sequences token by token, or many tokens at once, on one device.
#[derive(Debug)]
pub struct Decoder {
    fixed: Fixed,
    plan: DecodePlan,
    region: Arc<dyn device::Memory>,
    /// One for each number of tokens that a pass has had.
    arenas: BTreeMap<usize, Arena>,
}

impl Decoder {
    /// Takes the plan's memory and reads the weights; the host holds one unit at a time.
    pub fn new(
        device: Arc<dyn Device>,
        plan: DecodePlan,
        model: Arc<Model>,
        source: &dyn Source,
    ) -> Result<Decoder> {
        let Decoding { compute, max_len, .. } = plan.decoding;
        let cache = Cache::new(take_slots(&*device, &plan)?, compute, max_len);
        let region = device.alloc(plan.placement.bytes, "pass")?;
        let fixed = Fixed::new(device, model, plan.layout.clone(), plan.decoding, cache)?;
        fixed.fill(source)?;
        Ok(Decoder { fixed, plan, region, arenas: BTreeMap::new() })
    }

    /// Tokens of each row so far.
    pub fn len(&self) -> usize {
        self.fixed.cache.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets all tokens but the first `len` of each row.
    pub fn rewind(&mut self, len: usize) {
        self.fixed.cache.rewind(len);
    }

    pub fn plan(&self) -> &DecodePlan {
        &self.plan
    }

    pub fn device(&self) -> &dyn Device {
        &*self.fixed.device
    }

    /// Takes the next tokens, `[rows, any number]`, and returns the logits of what comes after them,
    /// `[rows, vocab]`.
    pub fn feed(&mut self, tokens: &[i32]) -> Result<Vec<f32>> {
        let Decoding { rows, max_len, chunk, vocab, .. } = self.plan.decoding;
        let fail = |what: String| Err(Error::Batch { name: field::IDS.into(), what });
        if tokens.is_empty() || !tokens.len().is_multiple_of(rows) {
            return fail(format!("{} tokens do not make {rows} rows", tokens.len()));
        }
        if let Some(id) = tokens.iter().find(|&&id| id < 0 || id as usize >= vocab) {
            return fail(format!("token {id} is outside the vocabulary of {vocab}"));
        }
        let seq = tokens.len() / rows;
        if self.len() + seq > max_len {
            return fail(format!("{seq} tokens after {} are more than the {max_len} planned", self.len()));
        }
        let mut logits = None;
        for start in (0..seq).step_by(chunk) {
            let end = seq.min(start + chunk);
            let row = |row: usize| &tokens[row * seq + start..row * seq + end];
            logits = Some(self.feed_chunk(&(0..rows).flat_map(row).copied().collect::<Vec<_>>())?);
        }
        let fixed = &self.fixed;
        let logits = logits.expect("there is at least one chunk");
        Ok(fixed.device.read_vec(&fixed.stream, logits.buffer())?)
    }

    fn feed_chunk(&mut self, tokens: &[i32]) -> Result<Tensor> {
        let fixed = &self.fixed;
        let (rows, len) = (self.plan.decoding.rows, fixed.cache.len());
        let seq = tokens.len() / rows;
        let positions: Vec<i32> = (0..tokens.len()).map(|at| (len + at % seq) as i32).collect();
        let arena = match self.arenas.get(&seq) {
            Some(arena) => arena.clone(),
            None => self.place(seq)?,
        };
        let fixed = &self.fixed;
        let write = |values: &[i32], to: &Buffer| {
            fixed.device.write_slice(&fixed.stream, values, &to.slice(0, values.len())?)
        };
        write(tokens, &fixed.ids)?;
        write(&positions, &fixed.positions)?;
        arena.restart();
        fixed.cache.rewind(len);
        let logits = fixed.pass(&arena, seq)?;
        fixed.cache.advance(seq);
        Ok(logits)
    }

    /// Places a pass of `seq` tokens where the longest one lies.
    fn place(&mut self, seq: usize) -> Result<Arena> {
        let plan = &self.plan;
        let (trace, _) = trace(&self.fixed.model, &plan.layout, &plan.decoding, plan.profile, seq)?;
        let placed = plan.placement.shrunk(trace).ok_or_else(|| {
            Error::Settings(format!(
                "this model's pass over {seq} tokens is not its pass over {} on a smaller scale, so it was \
                 not planned",
                plan.decoding.chunk
            ))
        })?;
        let arena = Arena::replay(self.region.clone(), Arc::new(placed));
        self.arenas.insert(seq, arena.clone());
        Ok(arena)
    }
}

/// What stays the same from pass to pass.
#[derive(Debug)]
struct Fixed {
    device: Arc<dyn Device>,
    stream: Stream,
    model: Arc<Model>,
    weights: Whole,
    constants: Vec<Tensor>,
    decoding: Decoding,
    cache: Cache,
    ids: Buffer,
    positions: Buffer,
    seed: Tensor,
}

/// Every unit's weights.
#[derive(Debug)]
struct Whole {
    layout: Layout,
    units: Vec<Buffer>,
}

impl Weights for Whole {
    fn get(&self, item: ItemId) -> tensor::Result<Buffer> {
        let (unit, at) = self.layout.owner[item.0];
        let place = self.layout.units[unit].places[at];
        Ok(self.units[unit].slice(place.offset, place.len)?)
    }

    fn grad(&self, _item: ItemId) -> tensor::Result<Option<Grad>> {
        Ok(None)
    }
}

impl Fixed {
    fn new(
        device: Arc<dyn Device>,
        model: Arc<Model>,
        layout: Layout,
        decoding: Decoding,
        cache: Cache,
    ) -> Result<Fixed> {
        let stream = device.stream("compute", Role::Compute)?;
        let lens: Vec<usize> = (0..layout.units.len()).map(|unit| layout.unit_len(unit)).collect();
        let all = device.alloc_buffer(decoding.compute, lens.iter().sum(), "weights")?;
        let mut start = 0;
        let mut units = Vec::with_capacity(lens.len());
        for len in lens {
            units.push(all.slice(start, len)?);
            start += len;
        }
        let constants = take_constants(&*device, &stream, &model)?;
        let tokens = decoding.rows * decoding.chunk;
        let batch = device.alloc(batch_bytes(&decoding), "batch")?;
        let ids = Buffer::new(batch.clone(), 0, Dtype::I32, tokens)?;
        let positions = Buffer::new(batch.clone(), align(tokens * 4), Dtype::I32, tokens)?;
        let seed = Tensor::over(Buffer::new(batch, 2 * align(tokens * 4), Dtype::F32, 1)?, [1])?;
        let weights = Whole { layout, units };
        Ok(Fixed { device, stream, model, weights, constants, decoding, cache, ids, positions, seed })
    }

    fn fill(&self, source: &dyn Source) -> Result<()> {
        let layout = &self.weights.layout;
        for (unit, weights) in self.weights.units.iter().enumerate() {
            let mut values = vec![0.0f32; layout.unit_len(unit)];
            for piece in layout.pieces(&self.model, unit, 0) {
                source.read(&piece.name, piece.start, &mut values[piece.at..piece.at + piece.len])?;
            }
            write_rounded(&*self.device, &self.stream, &values, weights)?;
        }
        Ok(self.stream.synchronize()?)
    }

    /// All blocks over the `seq` tokens a row that ids and positions hold: the logits of the next ones.
    fn pass(&self, arena: &Arena, seq: usize) -> Result<Tensor> {
        let rows = self.decoding.rows;
        let mut batch = Batch::default();
        for (name, buffer) in [(field::IDS, &self.ids), (field::POSITIONS, &self.positions)] {
            batch.set(name, Tensor::over(buffer.slice(0, rows * seq)?, [rows, seq])?);
        }
        let context = Context {
            device: &*self.device,
            stream: &self.stream,
            arena,
            weights: &self.weights,
            constants: &self.constants,
            batch: &batch,
            random: tensor::Random::default(),
            seed: &self.seed,
            mode: Mode::Decode,
            compute: self.decoding.compute,
            loss_chunk: 1,
            cache: Some(&self.cache),
        };
        let blocks = self.model.blocks.iter().map(|block| &**block);
        let carry = Tape::default().forward(context, blocks, vec![])?;
        let [logits] = <[Tensor; 1]>::try_from(carry).map_err(|carry| {
            Error::Settings(format!("the model ends in {} tensors where its logits belong", carry.len()))
        })?;
        if logits.shape().dims() != [rows, self.decoding.vocab] || logits.dtype() != Dtype::F32 {
            let expected = format!("f32 [{rows}, {}]", self.decoding.vocab);
            return Err(tensor::Error::shape("decode", expected, logits.shape()).into());
        }
        Ok(logits)
    }
}

/// One region for all keys and values.
fn take_slots(device: &dyn Device, plan: &DecodePlan) -> Result<Vec<Slot>> {
    let dtype = plan.decoding.compute;
    let each = |elements: usize| align(elements * dtype.bytes());
    let region = device.alloc(plan.slots.iter().map(|slot| 2 * each(*slot)).sum(), "cache")?;
    let mut offset = 0;
    let mut take = |elements: usize| {
        let buffer = Buffer::new(region.clone(), offset, dtype, elements);
        offset += each(elements);
        buffer
    };
    let slots = plan.slots.iter().map(|&slot| Ok(Slot { keys: take(slot)?, values: take(slot)? }));
    slots.collect()
}
