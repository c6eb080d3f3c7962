use super::harness::{Bed, FLOATS, Random, Tolerance, beds, check_gradient, dot, twice};
use super::reference;
use device::{Dtype, LayerNorm, LayerNormGrad};

const EPS: f32 = 1e-5;
const SIZES: [(usize, usize); 5] = [(1, 8), (7, 65), (33, 513), (300, 24), (3, 6000)];

#[test]
fn rows_are_normalised() {
    for bed in &beds() {
        for dtype in FLOATS {
            for (rows, cols) in SIZES {
                forward(bed, dtype, rows, cols, false);
                forward(bed, dtype, rows, cols, true);
            }
        }
    }
}

fn forward(bed: &Bed, dtype: Dtype, rows: usize, cols: usize, with_bias: bool) {
    let case = format!("{}: layer_norm {rows}×{cols} {dtype}, bias {with_bias}", bed.device.name());
    let mut random = Random::new((rows * cols) as u64);
    let shifted: Vec<f64> = random.values(rows * cols, 2.0).iter().map(|v| v + 1.0).collect();
    let x = bed.input(dtype, &shifted);
    let (weight, bias) =
        (bed.random(&mut random, dtype, cols, 1.5), bed.random(&mut random, dtype, cols, 1.0));
    let [out, statistics] = twice(&case, || {
        let (out, statistics) = (bed.poisoned(dtype, rows * cols), bed.poisoned(Dtype::F32, 2 * rows));
        let args = LayerNorm {
            x: &x.buffer,
            weight: &weight.buffer,
            bias: with_bias.then_some(&bias.buffer),
            out: &out,
            statistics: &statistics,
            rows,
            cols,
            eps: EPS,
        };
        bed.device.layer_norm(&bed.stream, &args).unwrap();
        [bed.read(&out), bed.read(&statistics)]
    });
    let zeros = vec![0.0; cols];
    let bias = if with_bias { &bias.values } else { &zeros };
    let (want, want_statistics) = reference::layer_norm(&x.values, &weight.values, bias, f64::from(EPS));
    Tolerance::new(Dtype::F32, 1).check(&format!("{case}: statistics"), &statistics, &want_statistics);
    Tolerance::new(dtype, 1).check(&case, &out, &want);
}

#[test]
fn the_norms_gradient() {
    for bed in &beds() {
        for dtype in FLOATS {
            for (rows, cols) in SIZES {
                backward(bed, dtype, dtype, rows, cols);
                backward(bed, dtype, Dtype::F32, rows, cols);
            }
        }
    }
}

fn backward(bed: &Bed, dtype: Dtype, grad_dtype: Dtype, rows: usize, cols: usize) {
    let case = format!("{}: layer_norm_grad {rows}×{cols} {dtype} → {grad_dtype}", bed.device.name());
    let mut random = Random::new((rows + cols) as u64);
    let x = bed.random(&mut random, dtype, rows * cols, 2.0);
    let dout = bed.random(&mut random, dtype, rows * cols, 1.0);
    let weight = bed.random(&mut random, dtype, cols, 1.5);
    let earlier = bed.random(&mut random, grad_dtype, cols, 1.0);
    let zeros = vec![0.0; cols];
    let (_, statistics) = reference::layer_norm(&x.values, &weight.values, &zeros, f64::from(EPS));
    let statistics = bed.input(Dtype::F32, &statistics);
    let (want_dx, want_dw, want_db) =
        reference::layer_norm_grad(&dout.values, &x.values, &weight.values, f64::from(EPS));
    for (in_place, accumulate, trains) in [(false, false, true), (true, true, true), (false, false, false)] {
        let [dx, dw, db] = twice(&case, || {
            let input = bed.copy_of(&dout);
            let dx = if in_place { input.clone() } else { bed.poisoned(dtype, rows * cols) };
            let grad = || if accumulate { bed.copy_of(&earlier) } else { bed.poisoned(grad_dtype, cols) };
            let (dw, db) = (grad(), grad());
            let scratch = bed.poisoned(Dtype::F32, 2 * bed.device.profile().norm_scratch(rows, cols));
            let args = LayerNormGrad {
                dout: &input,
                x: &x.buffer,
                weight: &weight.buffer,
                statistics: &statistics.buffer,
                dx: &dx,
                dweight: trains.then_some((&dw, accumulate)),
                dbias: trains.then_some((&db, accumulate)),
                scratch: &scratch,
                rows,
                cols,
            };
            bed.device.layer_norm_grad(&bed.stream, &args).unwrap();
            let grads = if trains { [bed.read(&dw), bed.read(&db)] } else { [vec![], vec![]] };
            let [dw, db] = grads;
            [bed.read(&dx), dw, db]
        });
        Tolerance::new(dtype, 1).check(&format!("{case}: dx"), &dx, &want_dx);
        if !trains {
            continue;
        }
        for (name, got, want) in [("dweight", dw, &want_dw), ("dbias", db, &want_db)] {
            let base = |i: usize| if accumulate { earlier.values[i] } else { 0.0 };
            let want: Vec<f64> = want.iter().enumerate().map(|(i, grad)| base(i) + grad).collect();
            Tolerance::new(grad_dtype, 1).check(&format!("{case}: {name}"), &got, &want);
        }
    }
}

#[test]
fn the_reference_gradient_is_the_slope() {
    let mut random = Random::new(3);
    let (x, w, b, dout) =
        (random.values(14, 2.0), random.values(7, 1.5), random.values(7, 1.0), random.values(14, 1.0));
    let (dx, dw, db) = reference::layer_norm_grad(&dout, &x, &w, 1e-5);
    let norm = |x: &[f64], w: &[f64], b: &[f64]| dot(&reference::layer_norm(x, w, b, 1e-5).0, &dout);
    check_gradient("layer norm, x", |x| norm(x, &w, &b), &x, &dx);
    check_gradient("layer norm, weight", |w| norm(&x, w, &b), &w, &dw);
    check_gradient("layer norm, bias", |b| norm(&x, &w, b), &b, &db);
}
