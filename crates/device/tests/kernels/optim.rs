use super::harness::{Bed, Random, Tolerance, beds, round, twice};
use device::{AdamW, AdamWScalars, Dtype, Profile};

const LEN: usize = 2 * 1024 + 77;
const CLIP: f32 = 0.37;

/// lr 1e-2, decay 0.1, betas 0.9 and 0.95, third step.
fn scalars() -> AdamWScalars {
    let (lr, decay, beta1, beta2, t) = (1e-2f64, 0.1, 0.9f64, 0.95f64, 3);
    AdamWScalars {
        keep: (1.0 - lr * decay) as f32,
        one_minus_beta1: (1.0 - beta1) as f32,
        beta2: beta2 as f32,
        one_minus_beta2: (1.0 - beta2) as f32,
        bias2_sqrt: (1.0 - beta2.powi(t)).sqrt() as f32,
        eps: 1e-8,
        step_size: (-lr / (1.0 - beta1.powi(t))) as f32,
    }
}

/// The documented order, one element: (p, m, v).
fn step(s: &AdamWScalars, p: f32, m: f32, v: f32, grad: f32) -> (f32, f32, f32) {
    let g = grad * CLIP;
    let p = p * s.keep;
    let m = s.one_minus_beta1.mul_add(g - m, m);
    let v = v * s.beta2;
    let v = (s.one_minus_beta2 * g).mul_add(g, v);
    (p + (s.step_size * m) / (v.sqrt() / s.bias2_sqrt + s.eps), m, v)
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
    let clip = bed.input(Dtype::F32, &[f64::from(CLIP)]);
    let scalars = scalars();
    let [got_p, got_m, got_v, compute] = twice(&case, || {
        let (p, m, v) = (bed.copy_of(&p), bed.copy_of(&m), bed.copy_of(&v));
        let compute = bed.poisoned(compute_dtype.unwrap_or(Dtype::F32), LEN);
        let args = AdamW {
            master: &p,
            moment1: &m,
            moment2: &v,
            grad: &grad.buffer,
            clip: &clip.buffer,
            compute: compute_dtype.map(|_| &compute),
            scalars,
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

#[test]
fn lengths_must_agree() {
    for bed in &beds() {
        let (long, short) = (bed.poisoned(Dtype::F32, 9), bed.poisoned(Dtype::F32, 8));
        let args = AdamW {
            master: &long,
            moment1: &long,
            moment2: &long,
            grad: &short,
            clip: &long,
            compute: None,
            scalars: scalars(),
        };
        assert!(bed.device.adamw(&bed.stream, &args).is_err(), "{}", bed.device.name());
    }
}
