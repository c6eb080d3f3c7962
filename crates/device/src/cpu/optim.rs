//! The optimizer's step, and the decision whether it is made.

use super::check;
use super::elementwise::{load_from, store_to};
use super::float::simd;
use crate::{AdamW, AdamWScalars, Buffer, ByChance, Dtype, Judge, Result, SCALER, Stream, VERDICT};

/// Elements stepped at a time: five f32 runs that stay in the first-level cache.
const CHUNK: usize = 1024;

pub fn judge(stream: &Stream, args: &Judge<'_>) -> Result<()> {
    const OP: &str = "judge";
    check::buffer(OP, "sum_squares", args.sum_squares, Dtype::F32, 1)?;
    check::buffer(OP, "scaler", args.scaler, Dtype::F32, SCALER)?;
    check::buffer(OP, "verdict", args.verdict, Dtype::F32, VERDICT)?;
    check::stream(OP, stream)?.run(|| {
        let (mut squares, mut state) = ([0.0], [0.0; SCALER]);
        load_from(args.sum_squares, 0, &mut squares)?;
        load_from(args.scaler, 0, &mut state)?;
        let [mut scale, mut good, mut skipped, mut ended] = state;
        let norm = squares[0].sqrt() / scale;
        let clip = args.max_norm / (norm + 1e-6);
        let clip = if args.max_norm == 0.0 || clip > 1.0 { 1.0 } else { clip } / scale;
        let applies = squares[0].is_finite() && ended == 0.0;
        match (applies, args.scaling) {
            (true, None) => {}
            (true, Some(scaling)) => {
                good += 1.0;
                if good >= scaling.interval as f32 {
                    let grown = scale * scaling.growth;
                    scale = if grown.is_finite() { grown } else { scale };
                    good = 0.0;
                }
            }
            (false, scaling) => {
                skipped += 1.0;
                good = 0.0;
                match scaling {
                    Some(scaling) => scale *= scaling.backoff,
                    None if ended == 0.0 => ended = args.step as f32,
                    None => {}
                }
            }
        }
        let adam_step = (args.step as f64 - f64::from(skipped)).max(1.0);
        let [bias1, bias2] = args.betas.map(|beta| 1.0 - beta.powf(adam_step));
        let applies = if applies { 1.0 } else { 0.0 };
        store_to(args.scaler, 0, &[scale, good, skipped, ended])?;
        store_to(args.verdict, 0, &[norm, clip, applies, bias2.sqrt() as f32, (-args.lr / bias1) as f32])
    })
}

pub fn adamw(stream: &Stream, args: &AdamW<'_>) -> Result<()> {
    let step = Step::new(args)?;
    check::stream(OP, stream)?.submit(move || step.run())
}

const OP: &str = "adamw";

/// A step that owns what it touches, so that a worker can make it.
#[derive(Clone, Debug)]
pub struct Step {
    master: Buffer,
    moment1: Buffer,
    moment2: Buffer,
    grad: Buffer,
    verdict: Buffer,
    compute: Option<Buffer>,
    scalars: AdamWScalars,
    rounding: Option<ByChance>,
}

/// What one element's step takes beside the element.
#[derive(Clone, Copy, Debug)]
struct Factors {
    clip: f32,
    bias2_sqrt: f32,
    step_size: f32,
    fixed: AdamWScalars,
}

impl Step {
    pub fn new(args: &AdamW<'_>) -> Result<Self> {
        let AdamW { master, moment1, moment2, grad, verdict, compute, scalars, rounding } = *args;
        args.check_rounding()?;
        for buffer in [Some(moment1), Some(moment2), Some(grad), compute].into_iter().flatten() {
            check::float(OP, buffer)?;
            check::same_len(OP, master, buffer)?;
        }
        check::float(OP, master)?;
        check::buffer(OP, "verdict", verdict, Dtype::F32, VERDICT)?;
        Ok(Step {
            master: master.clone(),
            moment1: moment1.clone(),
            moment2: moment2.clone(),
            grad: grad.clone(),
            verdict: verdict.clone(),
            compute: compute.cloned(),
            scalars,
            rounding,
        })
    }

    pub fn run(&self) -> Result<()> {
        let mut verdict = [0.0; VERDICT];
        load_from(&self.verdict, 0, &mut verdict)?;
        let [_, clip, applies, bias2_sqrt, step_size] = verdict;
        if applies == 0.0 {
            return Ok(());
        }
        let factors = Factors { clip, bias2_sqrt, step_size, fixed: self.scalars };
        let all = [&self.master, &self.moment1, &self.moment2, &self.grad];
        let apart = (1..all.len()).all(|i| all[..i].iter().all(|other| !all[i].overlaps(other)));
        if apart && all.iter().all(|buffer| buffer.dtype() == Dtype::F32) {
            return self.run_in_place(&factors);
        }
        let (mut p, mut m, mut v, mut g) = ([0.0; CHUNK], [0.0; CHUNK], [0.0; CHUNK], [0.0; CHUNK]);
        for start in (0..self.master.len()).step_by(CHUNK) {
            let len = CHUNK.min(self.master.len() - start);
            let (p, m, v, g) = (&mut p[..len], &mut m[..len], &mut v[..len], &mut g[..len]);
            load_from(&self.master, start, p)?;
            load_from(&self.moment1, start, m)?;
            load_from(&self.moment2, start, v)?;
            load_from(&self.grad, start, g)?;
            step(p, m, v, g, &factors);
            if let Some(rounding) = self.rounding {
                p.iter_mut().enumerate().for_each(|(i, p)| *p = rounding.round(*p, start + i));
            }
            store_to(&self.master, start, p)?;
            store_to(&self.moment1, start, m)?;
            store_to(&self.moment2, start, v)?;
            self.compute.as_ref().map_or(Ok(()), |compute| store_to(compute, start, p))?;
        }
        Ok(())
    }

    /// Where everything is f32 and apart: the divisions then overlap with the waits for memory.
    fn run_in_place(&self, factors: &Factors) -> Result<()> {
        // SAFETY: stream order keeps others away, and no two of the four overlap.
        let (p, m, v, g) = unsafe {
            (
                self.master.host_slice_mut::<f32>(),
                self.moment1.host_slice_mut::<f32>(),
                self.moment2.host_slice_mut::<f32>(),
                self.grad.host_slice::<f32>(),
            )
        };
        step(p, m, v, g, factors);
        self.compute.as_ref().map_or(Ok(()), |compute| store_to(compute, 0, p))
    }
}

simd! {
    fn step(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], factors: &Factors) {
        let Factors { clip, bias2_sqrt, step_size, fixed: s } = *factors;
        let len = p.len();
        let (m, v, g) = (&mut m[..len], &mut v[..len], &g[..len]);
        for i in 0..len {
            let grad = g[i] * clip;
            m[i] = s.one_minus_beta1.mul_add(grad - m[i], m[i]);
            v[i] = (s.one_minus_beta2 * grad).mul_add(grad, v[i] * s.beta2);
            let denominator = v[i].sqrt() / bias2_sqrt + s.eps;
            p[i] = p[i] * s.keep + step_size * m[i] / denominator;
        }
    }
}
