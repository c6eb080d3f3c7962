use super::harness::{Bed, FLOATS, Random, Tolerance, beds, check_gradient, dot, round, twice};
use super::reference::{self, RopeShape};
use device::{Dtype, Rope, Rotation};

const POSITIONS: usize = 50;

/// cos and sin of every position, f32 values.
fn tables(head_dim: usize) -> (Vec<f64>, Vec<f64>) {
    let half = head_dim / 2;
    let angle = |i: usize| (i / half) as f64 * 10_000f64.powf(-((i % half) as f64) / half as f64);
    let f32_of = |value: f64| f64::from(value as f32);
    let angles = (0..POSITIONS * half).map(angle);
    (angles.clone().map(|a| f32_of(a.cos())).collect(), angles.map(|a| f32_of(a.sin())).collect())
}

#[test]
fn heads_are_rotated_and_rotated_back() {
    for bed in &beds() {
        for dtype in FLOATS {
            for head_dim in [16, 20, 64, 128] {
                for (tokens, heads, more) in [(1, 1, 0), (7, 3, 20), (33, 6, 1)] {
                    for direction in [Rotation::Forward, Rotation::Inverse] {
                        let shape = RopeShape { heads, head_dim, stride: heads * head_dim + more };
                        case(bed, dtype, shape, tokens, direction);
                    }
                }
            }
        }
    }
}

fn case(bed: &Bed, dtype: Dtype, shape: RopeShape, tokens: usize, direction: Rotation) {
    let RopeShape { heads, head_dim, stride } = shape;
    let case = format!("{}: rope {tokens}×{heads}×{head_dim} {dtype} {direction:?}", bed.device.name());
    let mut random = Random::new((tokens * stride) as u64);
    let x = bed.random(&mut random, dtype, tokens * stride, 2.0);
    let positions: Vec<i32> = (0..tokens).map(|_| random.below(POSITIONS) as i32).collect();
    let (cos, sin) = tables(head_dim);
    let (cos_table, sin_table) = (bed.input(Dtype::F32, &cos), bed.input(Dtype::F32, &sin));
    let position_buffer = bed.ints(&positions);
    let [got] = twice(&case, || {
        let rotated = bed.copy_of(&x);
        let args = Rope {
            x: &rotated,
            positions: &position_buffer,
            cos: &cos_table.buffer,
            sin: &sin_table.buffer,
            tokens,
            heads,
            head_dim,
            stride,
            direction,
        };
        bed.device.rope(&bed.stream, &args).unwrap();
        [bed.read(&rotated)]
    });
    let sign = if direction == Rotation::Forward { 1.0 } else { -1.0 };
    let want = reference::rope(shape, &x.values, &positions, &cos, &sin, sign);
    // The angle's cosine, the product and the sum are rounded.
    Tolerance::new(dtype, 3).check(&case, &got, &want);
    if dtype != Dtype::F32 {
        // Products of 16-bit values are exact in f32, so the rounding is the same on every device.
        let want = rounded(dtype, shape, &x.values, &positions, (&cos, &sin), sign);
        assert!(got == want, "{case}: rounding");
    }
    for (token, row) in got.chunks(stride).enumerate() {
        let rest = token * stride + heads * head_dim..(token + 1) * stride;
        assert_eq!(row[heads * head_dim..], x.values[rest], "{case}: wrote behind the heads");
    }
}

/// The rotation with each rounding written out.
fn rounded(
    dtype: Dtype,
    shape: RopeShape,
    x: &[f64],
    positions: &[i32],
    (cos, sin): (&[f64], &[f64]),
    sign: f64,
) -> Vec<f64> {
    let half = shape.head_dim / 2;
    let mut out = x.to_vec();
    let product = |a: f64, b: f32| round(dtype, a as f32 * b);
    for (token, &position) in positions.iter().enumerate() {
        for pair in 0..shape.heads * half {
            let (head, i) = (pair / half, pair % half);
            let first = token * shape.stride + head * shape.head_dim + i;
            let c = round(dtype, cos[position as usize * half + i] as f32);
            let s = round(dtype, (sign * sin[position as usize * half + i]) as f32);
            let (a, b) = (x[first], x[first + half]);
            out[first] = f64::from(round(dtype, product(a, c) - product(b, s)));
            out[first + half] = f64::from(round(dtype, product(b, c) + product(a, s)));
        }
    }
    out
}

#[test]
fn the_inverse_is_the_gradient() {
    let shape = RopeShape { heads: 2, head_dim: 6, stride: 12 };
    let (positions, (cos, sin)) = ([3, 0, 41], tables(6));
    let mut random = Random::new(5);
    let (x, dout) = (random.values(36, 2.0), random.values(36, 1.0));
    let rotate = |x: &[f64], sign| reference::rope(shape, x, &positions, &cos, &sin, sign);
    check_gradient("rope", |x| dot(&rotate(x, 1.0), &dout), &x, &rotate(&dout, -1.0));
}

#[test]
fn a_position_beyond_the_table_is_an_error_where_the_host_can_see_it() {
    let bed = &beds()[0];
    let (cos, sin) = tables(16);
    let (cos, sin) = (bed.input(Dtype::F32, &cos), bed.input(Dtype::F32, &sin));
    let x = bed.poisoned(Dtype::F32, 16);
    for position in [-1, POSITIONS as i32] {
        let positions = bed.ints(&[position]);
        let args = Rope {
            x: &x,
            positions: &positions,
            cos: &cos.buffer,
            sin: &sin.buffer,
            tokens: 1,
            heads: 1,
            head_dim: 16,
            stride: 16,
            direction: Rotation::Forward,
        };
        assert!(bed.device.rope(&bed.stream, &args).is_err());
    }
}
