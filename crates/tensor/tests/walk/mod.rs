//! A model on one device without an engine: all weights in memory, one forward, one backward. It shows how
//! little the tensor crate asks of whoever uses it.
#![allow(dead_code, reason = "each test file uses a part of it")]

use device::cpu::Cpu;
use device::{Buffer, Device, Dtype, Role, Stream};
use half::{bf16, f16};
use std::cell::RefCell;
use std::sync::Arc;
use tensor::ops::field;
use tensor::{Arena, Batch, Context, Grad, ItemId, Mode, Model, Random, Result, Tape, Tensor, Weights};

pub struct Walk {
    pub model: Model,
    pub batch: Batch,
    device: Arc<dyn Device>,
    stream: Stream,
    compute: Dtype,
    constants: Vec<Tensor>,
    seed: Tensor,
    held: Held,
    pub random: Random,
}

/// Every item's values and gradient, whole.
struct Held {
    values: Vec<Buffer>,
    grads: Vec<Buffer>,
    written: RefCell<Vec<bool>>,
    frozen: Vec<bool>,
}

impl Weights for Held {
    fn get(&self, item: ItemId) -> Result<Buffer> {
        Ok(self.values[item.0].clone())
    }

    fn grad(&self, item: ItemId) -> Result<Option<Grad>> {
        if self.frozen[item.0] {
            return Ok(None);
        }
        let accumulate = std::mem::replace(&mut self.written.borrow_mut()[item.0], true);
        Ok(Some(Grad { buffer: self.grads[item.0].clone(), accumulate }))
    }
}

impl Walk {
    /// `weight` gives each named weight's values.
    pub fn new(model: Model, compute: Dtype, mut weight: impl FnMut(&str) -> Vec<f32>) -> Self {
        let device: Arc<dyn Device> = Arc::new(Cpu::new());
        let stream = device.stream("test", Role::Compute).unwrap();
        let put = |values: &[f32], dtype: Dtype| {
            let exact = device.alloc_buffer(Dtype::F32, values.len(), "exact").unwrap();
            device.write_slice(&stream, values, &exact).unwrap();
            let rounded = device.alloc_buffer(dtype, values.len(), "rounded").unwrap();
            device.cast(&stream, &exact, &rounded).unwrap();
            rounded
        };
        let values: Vec<Buffer> = model
            .items
            .iter()
            .map(|item| item.members.iter().flat_map(|member| weight(&member.name)).collect::<Vec<f32>>())
            .map(|values| put(&values, compute))
            .collect();
        let nan = |buffer: &Buffer| put(&vec![f32::NAN; buffer.len()], compute);
        let constants = model
            .constants
            .iter()
            .map(|c| Tensor::over(put(&(c.values)(), Dtype::F32), c.shape.clone()).unwrap())
            .collect();
        let held = Held {
            grads: values.iter().map(nan).collect(),
            written: RefCell::new(vec![false; values.len()]),
            frozen: vec![false; values.len()],
            values,
        };
        let seed = Tensor::over(put(&[1.0], Dtype::F32), [1]).unwrap();
        let (batch, random) = (Batch::default(), Random::default());
        Walk { model, batch, compute, constants, seed, held, random, device, stream }
    }

    /// Sets a field of integers.
    pub fn ints(&mut self, name: &'static str, shape: [usize; 2], values: &[i32]) {
        let buffer = self.device.alloc_buffer(Dtype::I32, values.len(), name).unwrap();
        self.device.write_slice(&self.stream, values, &buffer).unwrap();
        self.batch.set(name, Tensor::over(buffer, shape).unwrap());
    }

    /// Sets a field of floats in the compute dtype.
    pub fn floats(&mut self, name: &'static str, shape: [usize; 2], values: &[f32]) {
        let exact = self.device.alloc_buffer(Dtype::F32, values.len(), name).unwrap();
        self.device.write_slice(&self.stream, values, &exact).unwrap();
        let rounded = self.device.alloc_buffer(self.compute, values.len(), name).unwrap();
        self.device.cast(&self.stream, &exact, &rounded).unwrap();
        self.batch.set(name, Tensor::over(rounded, shape).unwrap());
    }

    /// Sets the fields of a token model. The loss is the mean over labels that are not negative.
    pub fn tokens(&mut self, seq: usize, ids: &[i32], labels: &[i32]) {
        let shape = [ids.len() / seq, seq];
        let mut order: Vec<i32> = (0..ids.len() as i32).collect();
        order.sort_by_key(|&at| ids[at as usize]);
        let positions: Vec<i32> = (0..ids.len()).map(|at| (at % seq) as i32).collect();
        self.ints(field::IDS, shape, ids);
        self.ints(field::ORDER, shape, &order);
        self.ints(field::POSITIONS, shape, &positions);
        self.ints(field::LABELS, shape, labels);
        self.mean_over(labels.iter().filter(|label| **label >= 0).count());
    }

    pub fn mean_over(&mut self, targets: usize) {
        self.device.fill(&self.stream, self.seed.buffer(), 1.0 / targets as f32).unwrap();
    }

    /// No gradient is wanted of the item that holds this weight.
    pub fn freeze(&mut self, name: &str) {
        let at = self.place(name).0;
        self.held.frozen[at] = true;
    }

    fn context<'a>(&'a self, arena: &'a Arena, mode: Mode) -> Context<'a> {
        Context {
            device: &*self.device,
            stream: &self.stream,
            arena,
            weights: &self.held,
            constants: &self.constants,
            batch: &self.batch,
            seed: &self.seed,
            random: self.random,
            mode,
            compute: self.compute,
            loss_chunk: 37,
            cache: None,
        }
    }

    /// Forward, and what the last block gives.
    pub fn forward(&self, mode: Mode) -> Vec<f32> {
        // A recording arena takes fresh memory for every tensor, which is all a test needs.
        let arena = Arena::record(self.device.clone());
        let cx = self.context(&arena, mode);
        let blocks = self.model.blocks.iter().map(|block| &**block);
        let out = Tape::default().forward(cx, blocks, vec![]).unwrap();
        self.read(out[0].buffer())
    }

    /// Forward and backward: the losses, one per token. Gradients are then in [`Walk::grad`].
    pub fn train(&self) -> Vec<f32> {
        self.held.written.borrow_mut().fill(false);
        let arena = Arena::record(self.device.clone());
        let cx = self.context(&arena, Mode::Train);
        let mut tape = Tape::default();
        let blocks = self.model.blocks.iter().map(|block| &**block);
        let losses = tape.forward(cx, blocks, vec![]).unwrap();
        let losses: Vec<f32> = losses.iter().flat_map(|losses| self.read(losses.buffer())).collect();
        tape.backward(cx, vec![None]).unwrap();
        losses
    }

    /// Item, first element and length of a named weight.
    fn place(&self, name: &str) -> (usize, usize, usize) {
        for (index, item) in self.model.items.iter().enumerate() {
            let mut start = 0;
            for member in &item.members {
                let len = member.shape.numel();
                if member.name == name {
                    return (index, start, len);
                }
                start += len;
            }
        }
        panic!("no weight {name}")
    }

    /// The named weight's gradient, NaN where none was written.
    pub fn grad(&self, name: &str) -> Vec<f32> {
        let (item, start, len) = self.place(name);
        self.read(&self.held.grads[item].slice(start, len).unwrap())
    }

    pub fn value(&self, name: &str) -> Vec<f32> {
        let (item, start, len) = self.place(name);
        self.read(&self.held.values[item].slice(start, len).unwrap())
    }

    /// Changes one element of a weight (in f32).
    pub fn set(&self, name: &str, at: usize, value: f32) {
        let (item, start, _) = self.place(name);
        let element = self.held.values[item].slice(start + at, 1).unwrap();
        self.device.write_slice(&self.stream, &[value], &element).unwrap();
    }

    fn read(&self, buffer: &Buffer) -> Vec<f32> {
        let (device, stream) = (&*self.device, &self.stream);
        match buffer.dtype() {
            Dtype::Bf16 => {
                device.read_vec::<bf16>(stream, buffer).unwrap().iter().map(|v| v.to_f32()).collect()
            }
            Dtype::F16 => {
                device.read_vec::<f16>(stream, buffer).unwrap().iter().map(|v| v.to_f32()).collect()
            }
            _ => device.read_vec(stream, buffer).unwrap(),
        }
    }
}

/// ‖a − b‖ / ‖b‖
pub fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let error = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    error / norm(&mut b.iter().map(|b| f64::from(*b))).max(1e-300)
}
