use super::harness::{Bed, FLOATS, Random, Tolerance, beds, check_gradient, dot, twice};
use super::reference;
use device::{Dtype, HeadNorm, HeadNormGrad};

const EPS: f32 = 1e-5;

/// Tokens and heads of a case.
#[derive(Clone, Copy)]
struct Shape {
    tokens: usize,
    heads: [usize; 2],
    head_dim: usize,
    stride: usize,
}

fn cases() -> impl Iterator<Item = Shape> {
    let shape = |tokens, heads: [usize; 2], head_dim, more| Shape {
        tokens,
        heads,
        head_dim,
        stride: (heads[0] + heads[1]) * head_dim + more,
    };
    [
        shape(1, [1, 1], 8, 0),
        shape(7, [4, 2], 16, 32),
        shape(33, [3, 1], 20, 1),
        shape(5, [2, 2], 65, 7),
        shape(300, [8, 2], 128, 256),
        shape(3, [1, 0], 513, 0),
    ]
    .into_iter()
}

impl Shape {
    fn cols(&self) -> usize {
        (self.heads[0] + self.heads[1]) * self.head_dim
    }

    /// The normalised heads of packed rows, one after another, with their weights.
    fn heads_of<'a>(&self, x: &'a [f64], stride: usize) -> impl Iterator<Item = (usize, &'a [f64])> {
        let Shape { tokens, heads, head_dim, .. } = *self;
        (0..tokens).flat_map(move |token| {
            (0..heads[0] + heads[1]).map(move |head| {
                (usize::from(head >= heads[0]), &x[token * stride + head * head_dim..][..head_dim])
            })
        })
    }

    fn forward(&self, x: &[f64], stride: usize, weight: &[f64]) -> Vec<f64> {
        self.heads_of(x, stride)
            .flat_map(|(which, head)| {
                reference::rms_norm(head, &weight[which * self.head_dim..][..self.head_dim], f64::from(EPS)).0
            })
            .collect()
    }

    /// (dx of the heads, dweight) from packed gradients and the heads before.
    fn backward(&self, dout: &[f64], stride: usize, before: &[f64], weight: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (mut dx, mut dweight) = (Vec::new(), vec![0.0; 2 * self.head_dim]);
        for ((which, dout), (_, x)) in self.heads_of(dout, stride).zip(self.heads_of(before, self.cols())) {
            let at = which * self.head_dim;
            let w = &weight[at..at + self.head_dim];
            let (one, dw) = reference::rms_norm_grad(dout, x, w, f64::from(EPS));
            dx.extend(one);
            dweight[at..].iter_mut().zip(dw).for_each(|(sum, dw)| *sum += dw);
        }
        (dx, dweight)
    }
}

#[test]
fn heads_are_normalised_in_place() {
    for bed in &beds() {
        for dtype in FLOATS {
            cases().for_each(|shape| forward(bed, dtype, shape));
        }
    }
}

fn forward(bed: &Bed, dtype: Dtype, shape: Shape) {
    let Shape { tokens, heads, head_dim, stride } = shape;
    let case = format!("{}: head_norm {tokens}×{heads:?}×{head_dim} {dtype}", bed.device.name());
    let mut random = Random::new((tokens * stride) as u64);
    let x = bed.random(&mut random, dtype, tokens * stride, 2.0);
    let weight = bed.random(&mut random, dtype, 2 * head_dim, 1.5);
    for keep in [false, true] {
        let [got, before] = twice(&case, || {
            let (rows, before) = (bed.copy_of(&x), bed.poisoned(dtype, tokens * shape.cols()));
            let args = HeadNorm {
                x: &rows,
                weight: &weight.buffer,
                before: keep.then_some(&before),
                tokens,
                heads,
                head_dim,
                stride,
                eps: EPS,
            };
            bed.device.head_norm(&bed.stream, &args).unwrap();
            [bed.read(&rows), if keep { bed.read(&before) } else { vec![] }]
        });
        let normed: Vec<f64> = got.chunks(stride).flat_map(|row| row[..shape.cols()].to_vec()).collect();
        Tolerance::new(dtype, 2).check(&case, &normed, &shape.forward(&x.values, stride, &weight.values));
        for (row, was) in got.chunks(stride).zip(x.values.chunks(stride)) {
            assert_eq!(row[shape.cols()..], was[shape.cols()..], "{case}: wrote behind the heads");
        }
        if keep {
            let was: Vec<f64> =
                x.values.chunks(stride).flat_map(|row| row[..shape.cols()].to_vec()).collect();
            assert_eq!(before, was, "{case}: what was before");
        }
    }
}

#[test]
fn the_gradient_of_normalised_heads() {
    for bed in &beds() {
        for dtype in FLOATS {
            for shape in cases() {
                backward(bed, dtype, dtype, shape);
                backward(bed, dtype, Dtype::F32, shape);
            }
        }
    }
}

fn backward(bed: &Bed, dtype: Dtype, dweight_dtype: Dtype, shape: Shape) {
    let Shape { tokens, heads, head_dim, stride } = shape;
    let case = format!("{}: head_norm_grad {tokens}×{heads:?}×{head_dim} {dtype}", bed.device.name());
    let mut random = Random::new((tokens + stride) as u64);
    let dout = bed.random(&mut random, dtype, tokens * stride, 1.0);
    let before = bed.random(&mut random, dtype, tokens * shape.cols(), 2.0);
    let weight = bed.random(&mut random, dtype, 2 * head_dim, 1.5);
    let earlier = bed.random(&mut random, dweight_dtype, 2 * head_dim, 1.0);
    let (want_dx, want_dw) = shape.backward(&dout.values, stride, &before.values, &weight.values);
    for (trains, accumulate) in [(true, false), (true, true), (false, false)] {
        let [got, dweight] = twice(&case, || {
            let dx = bed.copy_of(&dout);
            let dweight =
                if accumulate { bed.copy_of(&earlier) } else { bed.poisoned(dweight_dtype, 2 * head_dim) };
            let scratch = bed.poisoned(Dtype::F32, bed.device.profile().norm_scratch(tokens, 2 * head_dim));
            let args = HeadNormGrad {
                dx: &dx,
                before: &before.buffer,
                weight: &weight.buffer,
                dweight: trains.then_some(&dweight),
                scratch: &scratch,
                tokens,
                heads,
                head_dim,
                stride,
                eps: EPS,
                accumulate,
            };
            bed.device.head_norm_grad(&bed.stream, &args).unwrap();
            [bed.read(&dx), if trains { bed.read(&dweight) } else { vec![] }]
        });
        let dx: Vec<f64> = got.chunks(stride).flat_map(|row| row[..shape.cols()].to_vec()).collect();
        Tolerance::new(dtype, 1).check(&format!("{case}: dx"), &dx, &want_dx);
        for (row, was) in got.chunks(stride).zip(dout.values.chunks(stride)) {
            assert_eq!(row[shape.cols()..], was[shape.cols()..], "{case}: wrote behind the heads");
        }
        if trains {
            let base = |i: usize| if accumulate { earlier.values[i] } else { 0.0 };
            let want: Vec<f64> = want_dw.iter().enumerate().map(|(i, dw)| base(i) + dw).collect();
            Tolerance::new(dweight_dtype, 1).check(&format!("{case}: dweight"), &dweight, &want);
        }
    }
}

#[test]
fn the_reference_gradient_is_the_slope() {
    let shape = Shape { tokens: 2, heads: [2, 1], head_dim: 6, stride: 18 };
    let mut random = Random::new(6);
    let (x, w, dout) = (random.values(36, 2.0), random.values(12, 1.5), random.values(36, 1.0));
    let (dx, dw) = shape.backward(&dout, 18, &x, &w);
    check_gradient("head norm, x", |x| dot(&shape.forward(x, 18, &w), &dout), &x, &dx);
    check_gradient("head norm, weight", |w| dot(&shape.forward(&x, 18, w), &dout), &w, &dw);
}
