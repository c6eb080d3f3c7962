//! The optimizer's step.

use super::check;
use super::elementwise::{load_from, store_to};
use super::float::simd;
use crate::{AdamW, AdamWScalars, Dtype, Result, Stream};

/// Elements stepped at a time: five f32 runs that stay in the first-level cache.
const CHUNK: usize = 1024;

pub fn adamw(stream: &Stream, args: &AdamW<'_>) -> Result<()> {
    const OP: &str = "adamw";
    let AdamW { master, moment1, moment2, grad, clip, compute, scalars } = *args;
    for buffer in [Some(moment1), Some(moment2), Some(grad), compute].into_iter().flatten() {
        check::float(OP, buffer)?;
        check::same_len(OP, master, buffer)?;
    }
    check::float(OP, master)?;
    check::buffer(OP, "clip", clip, Dtype::F32, 1)?;
    check::stream(OP, stream)?.run(|| {
        let mut factor = [0.0];
        load_from(clip, 0, &mut factor)?;
        let all = [master, moment1, moment2, grad];
        let apart = (1..all.len()).all(|i| all[..i].iter().all(|other| !all[i].overlaps(other)));
        if apart && all.iter().all(|buffer| buffer.dtype() == Dtype::F32) {
            // SAFETY: stream order keeps others away, and no two of the four overlap.
            let (p, m, v, g) = unsafe {
                (
                    master.host_slice_mut::<f32>(),
                    moment1.host_slice_mut::<f32>(),
                    moment2.host_slice_mut::<f32>(),
                    grad.host_slice::<f32>(),
                )
            };
            // In place, where the divisions overlap with the waits for memory.
            step(p, m, v, g, factor[0], &scalars);
            return compute.map_or(Ok(()), |compute| store_to(compute, 0, p));
        }
        let (mut p, mut m, mut v, mut g) = ([0.0; CHUNK], [0.0; CHUNK], [0.0; CHUNK], [0.0; CHUNK]);
        for start in (0..master.len()).step_by(CHUNK) {
            let len = CHUNK.min(master.len() - start);
            let (p, m, v, g) = (&mut p[..len], &mut m[..len], &mut v[..len], &mut g[..len]);
            load_from(master, start, p)?;
            load_from(moment1, start, m)?;
            load_from(moment2, start, v)?;
            load_from(grad, start, g)?;
            step(p, m, v, g, factor[0], &scalars);
            store_to(master, start, p)?;
            store_to(moment1, start, m)?;
            store_to(moment2, start, v)?;
            compute.map_or(Ok(()), |compute| store_to(compute, start, p))?;
        }
        Ok(())
    })
}

simd! {
    fn step(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], clip: f32, s: &AdamWScalars) {
        let len = p.len();
        let (m, v, g) = (&mut m[..len], &mut v[..len], &g[..len]);
        for i in 0..len {
            let grad = g[i] * clip;
            m[i] = s.one_minus_beta1.mul_add(grad - m[i], m[i]);
            v[i] = (s.one_minus_beta2 * grad).mul_add(grad, v[i] * s.beta2);
            let denominator = v[i].sqrt() / s.bias2_sqrt + s.eps;
            p[i] = p[i] * s.keep + s.step_size * m[i] / denominator;
        }
    }
}
