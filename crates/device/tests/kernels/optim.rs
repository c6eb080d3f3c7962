use super::harness::{Bed, Random, Tolerance, beds, round, twice};
use device::{AdamW, AdamWScalars, ByChance, Dtype, Error, Judge, Profile, SCALER, Scaling, VERDICT};

const LEN: usize = 2 * 1024 + 77;
const CLIP: f32 = 0.37;
const LR: f64 = 1e-2;
const BETAS: [f64; 2] = [0.9, 0.95];

/// lr 1e-2, decay 0.1, betas 0.9 and 0.95.
fn scalars() -> AdamWScalars {
    let [beta1, beta2] = BETAS;
    AdamWScalars {
        keep: (1.0 - LR * 0.1) as f32,
        one_minus_beta1: (1.0 - beta1) as f32,
        beta2: beta2 as f32,
        one_minus_beta2: (1.0 - beta2) as f32,
        eps: 1e-8,
    }
}

/// sqrt(1 − β2^t) and −lr / (1 − β1^t), of the third step.
fn biases(step: i32) -> [f64; 2] {
    let [beta1, beta2] = BETAS;
    [(1.0 - beta2.powi(step)).sqrt(), -LR / (1.0 - beta1.powi(step))]
}

/// The verdict of a third step.
fn verdict(applies: f64) -> Vec<f64> {
    let [bias2_sqrt, step_size] = biases(3);
    vec![1.0, f64::from(CLIP), applies, bias2_sqrt, step_size]
}

/// The documented order, one element: (p, m, v).
fn step(s: &AdamWScalars, p: f32, m: f32, v: f32, grad: f32) -> (f32, f32, f32) {
    let g = grad * CLIP;
    let p = p * s.keep;
    let m = s.one_minus_beta1.mul_add(g - m, m);
    let v = v * s.beta2;
    let v = (s.one_minus_beta2 * g).mul_add(g, v);
    let [bias2_sqrt, step_size] = biases(3).map(|value| value as f32);
    (p + (step_size * m) / (v.sqrt() / bias2_sqrt + s.eps), m, v)
}

#[test]
fn a_step_of_adamw() {
    for bed in &beds() {
        // (state, gradient, compute copy)
        case(bed, Dtype::F32, Dtype::F32, None);
        case(bed, Dtype::F32, Dtype::F32, Some(Dtype::Bf16));
        case(bed, Dtype::F32, Dtype::Bf16, Some(Dtype::F16));
        case(bed, Dtype::Bf16, Dtype::Bf16, None);
    }
}

fn case(bed: &Bed, state: Dtype, grad_dtype: Dtype, compute_dtype: Option<Dtype>) {
    let case =
        format!("{}: adamw {state}, gradient {grad_dtype}, compute {compute_dtype:?}", bed.device.name());
    let mut random = Random::new(17);
    let p = bed.random(&mut random, state, LEN, 1.0);
    let m = bed.random(&mut random, state, LEN, 0.1);
    let v = bed.input(state, &random.values(LEN, 0.1).iter().map(|v| v.abs()).collect::<Vec<_>>());
    let grad = bed.random(&mut random, grad_dtype, LEN, 2.0);
    let verdict = bed.input(Dtype::F32, &verdict(1.0));
    let scalars = scalars();
    let [got_p, got_m, got_v, compute] = twice(&case, || {
        let (p, m, v) = (bed.copy_of(&p), bed.copy_of(&m), bed.copy_of(&v));
        let compute = bed.poisoned(compute_dtype.unwrap_or(Dtype::F32), LEN);
        let args = AdamW {
            master: &p,
            moment1: &m,
            moment2: &v,
            grad: &grad.buffer,
            verdict: &verdict.buffer,
            compute: compute_dtype.map(|_| &compute),
            scalars,
            rounding: None,
        };
        bed.device.adamw(&bed.stream, &args).unwrap();
        let copy = if compute_dtype.is_some() { bed.read(&compute) } else { vec![] };
        [bed.read(&p), bed.read(&m), bed.read(&v), copy]
    });
    let mut want = [vec![], vec![], vec![]];
    for i in 0..LEN {
        let at = |values: &[f64]| values[i] as f32;
        let (p, m, v) = step(&scalars, at(&p.values), at(&m.values), at(&v.values), at(&grad.values));
        for (want, value) in want.iter_mut().zip([p, m, v]) {
            want.push(value);
        }
    }
    let stored =
        |values: &[f32]| -> Vec<f64> { values.iter().map(|&v| f64::from(round(state, v))).collect() };
    for (name, got, want) in [("p", &got_p, &want[0]), ("m", &got_m, &want[1]), ("v", &got_v, &want[2])] {
        if bed.device.profile() == Profile::Cpu {
            assert!(*got == stored(want), "{case}: {name} is not the documented order's to the bit");
        }
        Tolerance::new(state, 1).check(&format!("{case}: {name}"), got, &stored(want));
    }
    if let Some(dtype) = compute_dtype {
        // The copy is the very weight that was stored, rounded.
        let want: Vec<f64> = got_p.iter().map(|&p| f64::from(round(dtype, p as f32))).collect();
        assert!(compute == want, "{case}: compute copy");
    }
}

/// Weights of bf16 after one step by a gradient of 1, from all the same weight, rounded by chance.
fn by_chance(bed: &Bed, weight: f64, lr: f64, rounding: ByChance, len: usize) -> Vec<f64> {
    let [p, m, v, grad] = [weight, 0.0, 0.0, 1.0].map(|value| bed.input(Dtype::Bf16, &vec![value; len]));
    // So that a step is lr exactly: m = 1/2, v = 1/4, no decay.
    let scalars =
        AdamWScalars { keep: 1.0, one_minus_beta1: 0.5, beta2: 0.75, one_minus_beta2: 0.25, eps: 0.0 };
    let verdict = bed.input(Dtype::F32, &[1.0, 1.0, 1.0, 0.5, -2.0 * lr]);
    let args = AdamW {
        master: &p.buffer,
        moment1: &m.buffer,
        moment2: &v.buffer,
        grad: &grad.buffer,
        verdict: &verdict.buffer,
        compute: None,
        scalars,
        rounding: Some(rounding),
    };
    bed.device.adamw(&bed.stream, &args).unwrap();
    bed.read(&p.buffer)
}

#[test]
fn rounding_by_chance_keeps_small_updates_on_average() {
    const LEN: usize = 100_003;
    for bed in &beds() {
        let name = bed.device.name();
        // A step of 1/9 of the distance to the next bf16 below, which is 2^-8 of 1.5: to the nearest it is lost.
        let (weight, gap) = (1.5, 1.0 / 128.0);
        let lr = gap / 9.0;
        let got = by_chance(bed, weight, lr, ByChance { key: 7, first: 11 }, LEN);
        assert!(got.iter().all(|&p| p == weight || p == weight - gap), "{name}: only neighbours are reached");
        let mean = got.iter().sum::<f64>() / LEN as f64;
        let deviation = gap * (1.0 / 9.0f64 * 8.0 / 9.0 / LEN as f64).sqrt();
        assert!((mean - (weight - lr)).abs() < 5.0 * deviation, "{name}: mean {mean}, deviation {deviation}");
        // Parts of the range come out as in the whole, whoever computes them.
        for start in [0, 8, 1003] {
            let part = by_chance(bed, weight, lr, ByChance { key: 7, first: 11 + start as u64 }, 500);
            assert!(part == got[start..start + 500], "{name}: a part from {start} on");
        }
        let want: Vec<f64> = (0..LEN)
            .map(|i| f64::from(ByChance { key: 7, first: 11 }.round((weight - lr) as f32, i)))
            .collect();
        assert!(got == want, "{name}: rounded otherwise than documented");
        assert!(
            by_chance(bed, weight, lr, ByChance { key: 8, first: 11 }, LEN) != got,
            "{name}: another key"
        );
        let infinite = by_chance(bed, f64::INFINITY, lr, ByChance { key: 7, first: 0 }, 100);
        assert!(infinite.iter().all(|p| *p == f64::INFINITY), "{name}: infinity stays");
    }
}

#[test]
fn rounding_by_chance_is_for_bf16() {
    let largest = f32::from_bits(0x7f7f_ffff);
    assert!((0..1000).all(|i| ByChance { key: 1, first: 0 }.round(largest, i).is_finite()));
    for bed in &beds() {
        let [p, verdict] = [9, VERDICT].map(|len| bed.poisoned(Dtype::F32, len));
        let rounding = Some(ByChance { key: 0, first: 0 });
        let (grad, verdict, compute, scalars) = (&p, &verdict, None, scalars());
        let args = AdamW { master: &p, moment1: &p, moment2: &p, grad, verdict, compute, scalars, rounding };
        let refused = bed.device.adamw(&bed.stream, &args);
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{}", bed.device.name());
    }
}

#[test]
fn lengths_must_agree() {
    for bed in &beds() {
        let (long, short) = (bed.poisoned(Dtype::F32, 9), bed.poisoned(Dtype::F32, 8));
        let args = AdamW {
            master: &long,
            moment1: &long,
            moment2: &long,
            grad: &short,
            verdict: &long,
            compute: None,
            scalars: scalars(),
            rounding: None,
        };
        assert!(bed.device.adamw(&bed.stream, &args).is_err(), "{}", bed.device.name());
    }
}

#[test]
fn a_step_that_is_not_to_be_made_touches_nothing() {
    for bed in &beds() {
        let [p, m, v] = [1.0, 2.0, 3.0].map(|value| bed.input(Dtype::F32, &[value; 70]));
        let grad = bed.input(Dtype::F32, &[f64::NAN; 70]);
        let copy = bed.input(Dtype::Bf16, &[4.0; 70]);
        let verdict = bed.input(Dtype::F32, &verdict(0.0));
        let args = AdamW {
            master: &p.buffer,
            moment1: &m.buffer,
            moment2: &v.buffer,
            grad: &grad.buffer,
            verdict: &verdict.buffer,
            compute: Some(&copy.buffer),
            scalars: scalars(),
            rounding: None,
        };
        bed.device.adamw(&bed.stream, &args).unwrap();
        for input in [p, m, v, copy] {
            assert_eq!(bed.read(&input.buffer), input.values, "{}", bed.device.name());
        }
    }
}

/// Judges one step; returns (verdict, scaler).
fn judged(
    bed: &Bed,
    squares: f64,
    scaler: [f64; SCALER],
    max_norm: f32,
    scaling: Option<Scaling>,
) -> (Vec<f64>, Vec<f64>) {
    let (squares, scaler) = (bed.input(Dtype::F32, &[squares]), bed.input(Dtype::F32, &scaler));
    let verdict = bed.poisoned(Dtype::F32, VERDICT);
    let args = Judge {
        sum_squares: &squares.buffer,
        scaler: &scaler.buffer,
        verdict: &verdict,
        max_norm,
        step: 5,
        betas: BETAS,
        lr: LR,
        scaling,
    };
    bed.device.judge(&bed.stream, &args).unwrap();
    (bed.read(&verdict), bed.read(&scaler.buffer))
}

#[test]
fn the_clip_factor_and_adams_step() {
    for bed in &beds() {
        for (squares, max_norm, clip) in
            [(16.0, 1.0, 0.25), (16.0, 5.0, 1.0), (16.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
        {
            let (verdict, scaler) = judged(bed, squares, [1.0, 0.0, 0.0, 0.0], max_norm, None);
            let [bias2_sqrt, step_size] = biases(5);
            let want = [f64::sqrt(squares), clip, 1.0, bias2_sqrt, step_size];
            Tolerance::new(Dtype::F32, 1).check(&format!("clip {squares} {max_norm}"), &verdict, &want);
            assert_eq!(scaler, [1.0, 0.0, 0.0, 0.0]);
        }
    }
}

#[test]
fn a_scale_falls_with_an_overflow_and_grows_with_good_steps() {
    let scaling = Some(Scaling { growth: 2.0, backoff: 0.5, interval: 3 });
    for bed in &beds() {
        // Norm 4 under a scale of 8; two steps were skipped before, so Adam is at its third.
        let (verdict, scaler) = judged(bed, 1024.0, [8.0, 1.0, 2.0, 0.0], 1.0, scaling);
        let [bias2_sqrt, step_size] = biases(3);
        Tolerance::new(Dtype::F32, 1).check(
            "scaled",
            &verdict,
            &[4.0, 0.25 / 8.0, 1.0, bias2_sqrt, step_size],
        );
        assert_eq!(scaler, [8.0, 2.0, 2.0, 0.0]);
        assert_eq!(judged(bed, 1024.0, [8.0, 2.0, 2.0, 0.0], 1.0, scaling).1, [16.0, 0.0, 2.0, 0.0]);
        for bad in [f64::INFINITY, f64::NAN] {
            let (verdict, scaler) = judged(bed, bad, [8.0, 2.0, 2.0, 0.0], 1.0, scaling);
            assert_eq!((verdict[2], scaler), (0.0, vec![4.0, 0.0, 3.0, 0.0]), "{}", bed.device.name());
        }
        // The largest scale stays.
        let largest = f64::from(2.0f32.powi(127));
        assert_eq!(judged(bed, 1.0, [largest, 2.0, 0.0, 0.0], 1.0, scaling).1[0], largest);
    }
}

#[test]
fn without_scaling_the_first_bad_step_is_the_last() {
    for bed in &beds() {
        let (verdict, scaler) = judged(bed, f64::NAN, [1.0, 0.0, 0.0, 0.0], 1.0, None);
        assert!(verdict[0].is_nan() && verdict[2] == 0.0);
        assert_eq!(scaler, [1.0, 0.0, 1.0, 5.0]);
        let (verdict, scaler) = judged(bed, 4.0, [1.0, 0.0, 1.0, 3.0], 1.0, None);
        assert_eq!((verdict[0], verdict[2], scaler), (2.0, 0.0, vec![1.0, 0.0, 2.0, 3.0]));
    }
}
