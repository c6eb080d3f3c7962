//! A user's own model from operations no model of ours uses, held against finite differences.

mod walk;

use device::Dtype;
use tensor::ops;
use tensor::{Block, Init, ItemId, Mode, Model, Pass, Random, Result, Var, WeightSpec};
use walk::Walk;

const ROWS: usize = 6;
const COLS: usize = 10;
const INNER: usize = 14;
const TARGET: &str = "target";

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    CrossEntropy,
    SquaredError,
    Sum,
}

#[derive(Clone, Copy, Debug)]
enum Inner {
    Relu,
    Gelu,
    GeluTanh,
}

/// Embedding, LayerNorm, an MLP with biases and dropout, a loss.
#[derive(Debug)]
struct Mlp {
    table: ItemId,
    norm: [ItemId; 2],
    up: [ItemId; 2],
    down: [ItemId; 2],
    inner: Inner,
    end: End,
    p: f32,
}

impl Block for Mlp {
    fn kind(&self) -> &str {
        "Mlp"
    }

    fn items(&self) -> Vec<ItemId> {
        [&[self.table][..], &self.norm, &self.up, &self.down].concat()
    }

    fn forward(&self, pass: &mut Pass<'_>, _carry: Vec<Var>) -> Result<Vec<Var>> {
        let x = ops::embedding(pass, self.table, 9, COLS)?;
        let x = ops::layer_norm(pass, x, self.norm[0], Some(self.norm[1]), 1e-5)?;
        let x = ops::dropout(pass, x, self.p, 1)?;
        let x = ops::linear(pass, x, self.up[0], Some(self.up[1]), INNER)?;
        let x = match self.inner {
            Inner::Relu => ops::relu(pass, x)?,
            Inner::Gelu => ops::gelu(pass, x)?,
            Inner::GeluTanh => ops::gelu_tanh(pass, x)?,
        };
        let x = ops::dropout(pass, x, self.p, 2)?;
        let x = ops::linear(pass, x, self.down[0], Some(self.down[1]), COLS)?;
        Ok(vec![match (pass.cx.mode, self.end) {
            (Mode::Logits, _) => x,
            (_, End::CrossEntropy) => ops::cross_entropy(pass, x)?,
            (_, End::SquaredError) => ops::squared_error(pass, x, TARGET)?,
            (_, End::Sum) => ops::sum_loss(pass, x, 0.5)?,
        }])
    }
}

/// Numbers in ±1 that depend on a name and an index.
fn number(name: &str, index: usize) -> f32 {
    let hash = name.bytes().fold(index as u64 + 1, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    (hash >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

fn walk(inner: Inner, end: End, p: f32) -> Walk {
    let mut model = Model::default();
    let mut weight = |name: &str, shape: &[usize]| {
        let init = Init::Normal { std: 1.0 };
        model.item(vec![WeightSpec { name: name.into(), shape: shape.to_vec().into(), init }])
    };
    let block = Mlp {
        table: weight("table", &[9, COLS]),
        norm: [weight("norm.weight", &[COLS]), weight("norm.bias", &[COLS])],
        up: [weight("up.weight", &[INNER, COLS]), weight("up.bias", &[INNER])],
        down: [weight("down.weight", &[COLS, INNER]), weight("down.bias", &[COLS])],
        inner,
        end,
        p,
    };
    model.block(block);
    let len = |model: &Model, name: &str| {
        model.items.iter().find(|item| item.members[0].name == name).unwrap().numel()
    };
    let lens: Vec<(String, usize)> = model
        .items
        .iter()
        .map(|item| (item.members[0].name.clone(), len(&model, &item.members[0].name)))
        .collect();
    let values = |name: &str| {
        let len = lens.iter().find(|(other, _)| other == name).unwrap().1;
        (0..len).map(|i| number(name, i)).collect()
    };
    let mut walk = Walk::new(model, Dtype::F32, values);
    walk.tokens(ROWS, &[3, 1, 4, 1, 5, 8], &[2, 7, -100, 8, 9, 0]);
    let target: Vec<f32> = (0..ROWS * COLS).map(|i| number(TARGET, i)).collect();
    walk.floats(TARGET, [ROWS, COLS], &target);
    walk.random = Random { seed: 7, step: 3, first_row: 0 };
    walk
}

/// The seeded loss: what the gradients are slopes of.
fn seeded(walk: &Walk) -> f64 {
    walk.train().iter().map(|loss| f64::from(*loss)).sum::<f64>() / 5.0
}

const WEIGHTS: [&str; 7] =
    ["table", "norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"];

#[test]
fn gradients_are_slopes() {
    for end in [End::CrossEntropy, End::SquaredError, End::Sum] {
        for (inner, p) in [(Inner::Gelu, 0.0), (Inner::GeluTanh, 0.3), (Inner::Relu, 0.3)] {
            let walk = walk(inner, end, p);
            for name in WEIGHTS {
                seeded(&walk);
                let (grad, values) = (walk.grad(name), walk.value(name));
                for at in (0..values.len()).step_by(3) {
                    let step = 4e-3;
                    let loss_at = |value: f32| {
                        walk.set(name, at, value);
                        seeded(&walk)
                    };
                    let slope =
                        (loss_at(values[at] + step) - loss_at(values[at] - step)) / f64::from(2.0 * step);
                    walk.set(name, at, values[at]);
                    // In f32, and ReLU may have a corner within the step.
                    let allowed =
                        2e-3 * (1.0 + slope.abs()) * if matches!(inner, Inner::Relu) { 5.0 } else { 1.0 };
                    let near = (f64::from(grad[at]) - slope).abs() <= allowed;
                    assert!(near, "{end:?} {inner:?}: {name}[{at}] is {}, not {slope}", grad[at]);
                }
            }
        }
    }
}

#[test]
fn frozen_weights_are_left_alone() {
    for frozen in WEIGHTS {
        let mut walk = walk(Inner::Gelu, End::CrossEntropy, 0.2);
        walk.freeze(frozen);
        walk.train();
        for name in WEIGHTS {
            let untouched = walk.grad(name).iter().all(|grad| grad.is_nan());
            assert_eq!(untouched, name == frozen, "{name} with {frozen} frozen");
        }
    }
}

/// Rows on two ranks, with the place each has in the whole batch, lose what they lose on one.
#[test]
fn dropout_is_the_same_on_any_number_of_ranks() {
    let whole = walk(Inner::Gelu, End::SquaredError, 0.4);
    let losses = whole.train();
    let evaluated = whole.forward(Mode::Eval);
    assert_ne!(losses, evaluated);
    let target: Vec<f32> = (0..ROWS * COLS).map(|i| number(TARGET, i)).collect();
    let mut parts = Vec::new();
    for rank in 0..2 {
        let mut part = walk(Inner::Gelu, End::SquaredError, 0.4);
        let rows = rank * 3..rank * 3 + 3;
        part.tokens(3, &[3, 1, 4, 1, 5, 8][rows.clone()], &[2, 7, -100, 8, 9, 0][rows.clone()]);
        part.floats(TARGET, [3, COLS], &target[rows.start * COLS..rows.end * COLS]);
        part.random.first_row = rows.start as u64;
        parts.extend(part.train());
    }
    assert_eq!(parts, losses);
    let mut next = walk(Inner::Gelu, End::SquaredError, 0.4);
    next.random.step += 1;
    assert_ne!(next.train(), losses, "another step drops others");
    assert_eq!(next.forward(Mode::Eval), evaluated, "evaluation drops none");
}
