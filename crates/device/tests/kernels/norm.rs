use super::harness::{Bed, FLOATS, Random, Tolerance, beds, check_gradient, dot, round, twice};
use super::reference;
use device::{Dtype, RmsNorm, RmsNormGrad};

const EPS: f32 = 1e-5;
const ROWS: [usize; 3] = [1, 7, 33];
const COLS: [usize; 3] = [8, 65, 513];

fn cases() -> impl Iterator<Item = (usize, usize)> {
    ROWS.into_iter().flat_map(|rows| COLS.map(|cols| (rows, cols)))
}

#[test]
fn the_norm_adds_the_residual_and_normalises() {
    for bed in &beds() {
        for dtype in FLOATS {
            for (rows, cols) in cases() {
                forward(bed, dtype, rows, cols, false);
                forward(bed, dtype, rows, cols, true);
            }
        }
    }
}

fn forward(bed: &Bed, dtype: Dtype, rows: usize, cols: usize, with_delta: bool) {
    let case = format!("{}: rms_norm {rows}×{cols} {dtype}, delta {with_delta}", bed.device.name());
    let mut random = Random::new((rows * cols) as u64);
    let x = bed.random(&mut random, dtype, rows * cols, 2.0);
    let delta = bed.random(&mut random, dtype, rows * cols, 1.0);
    let weight = bed.random(&mut random, dtype, cols, 1.5);
    // The sum may go where x was.
    for in_place in [false, true] {
        let [out, rstd, sum] = twice(&case, || {
            let (out, rstd) = (bed.poisoned(dtype, rows * cols), bed.poisoned(Dtype::F32, rows));
            let input = bed.copy_of(&x);
            let sum = if in_place { input.clone() } else { bed.poisoned(dtype, rows * cols) };
            let args = RmsNorm {
                x: &input,
                delta: with_delta.then_some(&delta.buffer),
                weight: &weight.buffer,
                sum: with_delta.then_some(&sum),
                out: &out,
                rstd: &rstd,
                rows,
                cols,
                eps: EPS,
            };
            bed.device.rms_norm(&bed.stream, &args).unwrap();
            [bed.read(&out), bed.read(&rstd), bed.read(if with_delta { &sum } else { &input })]
        });
        if with_delta {
            let want: Vec<f64> = x.values.iter().zip(&delta.values).map(|(x, d)| x + d).collect();
            Tolerance::new(dtype, 1).check(&format!("{case}: sum"), &sum, &want);
        } else {
            assert_eq!(sum, x.values, "{case}: x changed");
        }
        let (want, want_rstd) = reference::rms_norm(&sum, &weight.values, f64::from(EPS));
        Tolerance::new(Dtype::F32, 1).check(&format!("{case}: rstd"), &rstd, &want_rstd);
        Tolerance::new(dtype, 2).check(&format!("{case}: out"), &out, &want);
        // Rounded before the weight and after it, to the bit.
        for (i, &out) in out.iter().enumerate() {
            let normal = round(dtype, sum[i] as f32 * rstd[i / cols] as f32);
            let want = round(dtype, normal * weight.values[i % cols] as f32);
            assert_eq!(out, f64::from(want), "{case}: rounding of element {i}");
        }
    }
}

#[test]
fn the_norms_gradient() {
    for bed in &beds() {
        for dtype in FLOATS {
            for (rows, cols) in cases() {
                backward(bed, dtype, dtype, rows, cols);
                backward(bed, dtype, Dtype::F32, rows, cols);
            }
        }
    }
}

fn backward(bed: &Bed, dtype: Dtype, dweight_dtype: Dtype, rows: usize, cols: usize) {
    let case = format!("{}: rms_norm_grad {rows}×{cols} {dtype} → {dweight_dtype}", bed.device.name());
    let mut random = Random::new((rows + cols) as u64);
    let x = bed.random(&mut random, dtype, rows * cols, 2.0);
    let dout = bed.random(&mut random, dtype, rows * cols, 1.0);
    let residual = bed.random(&mut random, dtype, rows * cols, 1.0);
    let weight = bed.random(&mut random, dtype, cols, 1.5);
    let before = bed.random(&mut random, dweight_dtype, cols, 1.0);
    let (_, rstd) = reference::rms_norm(&x.values, &weight.values, f64::from(EPS));
    let rstd = bed.input(Dtype::F32, &rstd);
    let (want_dx, want_dw) =
        reference::rms_norm_grad(&dout.values, &x.values, &weight.values, f64::from(EPS));
    for (with_residual, in_place, accumulate) in
        [(false, false, false), (true, false, true), (true, true, false)]
    {
        let [dx, dweight] = twice(&case, || {
            let input = bed.copy_of(&residual);
            let dx = if in_place { input.clone() } else { bed.poisoned(dtype, rows * cols) };
            let dweight = if accumulate { bed.copy_of(&before) } else { bed.poisoned(dweight_dtype, cols) };
            let scratch = bed.poisoned(Dtype::F32, bed.device.profile().norm_scratch(rows, cols));
            let args = RmsNormGrad {
                dout: &dout.buffer,
                x: &x.buffer,
                weight: &weight.buffer,
                rstd: &rstd.buffer,
                dresidual: with_residual.then_some(&input),
                dx: &dx,
                dweight: Some(&dweight),
                scratch: &scratch,
                rows,
                cols,
                accumulate,
            };
            bed.device.rms_norm_grad(&bed.stream, &args).unwrap();
            [bed.read(&dx), bed.read(&dweight)]
        });
        let plus = |values: &[f64], more: &[f64], on: bool| -> Vec<f64> {
            values.iter().zip(more).map(|(v, more)| if on { v + more } else { *v }).collect()
        };
        let want = plus(&want_dx, &residual.values, with_residual);
        Tolerance::new(dtype, 1).check(&format!("{case}: dx"), &dx, &want);
        let want = plus(&want_dw, &before.values, accumulate);
        Tolerance::new(dweight_dtype, 1).check(&format!("{case}: dweight"), &dweight, &want);
    }
}

#[test]
fn the_reference_gradient_is_the_slope() {
    let mut random = Random::new(3);
    let (x, w, dout) = (random.values(14, 2.0), random.values(7, 1.5), random.values(14, 1.0));
    let (dx, dw) = reference::rms_norm_grad(&dout, &x, &w, 1e-5);
    check_gradient("norm, x", |x| dot(&reference::rms_norm(x, &w, 1e-5).0, &dout), &x, &dx);
    check_gradient("norm, weight", |w| dot(&reference::rms_norm(&x, w, 1e-5).0, &dout), &w, &dw);
}
