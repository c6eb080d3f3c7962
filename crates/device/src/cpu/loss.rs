//! Cross-entropy, and the logits' gradient in their place.

use super::float::{Float, by_dtype, exp, load, max_of, simd, sum_over};
use super::{check, scratch};
use crate::{CrossEntropy, Dtype, Error, Result, Stream};

pub fn cross_entropy(stream: &Stream, args: &CrossEntropy<'_>) -> Result<()> {
    const OP: &str = "cross_entropy";
    let CrossEntropy { logits, labels, losses, seed, rows, vocab, stride } = *args;
    let dtype = check::float(OP, logits)?;
    if stride < vocab || vocab == 0 {
        return Err(Error::argument(OP, format!("rows of {vocab} values {stride} apart")));
    }
    if rows == 0 {
        return Ok(());
    }
    check::buffer(OP, "logits", logits, dtype, (rows - 1) * stride + vocab)?;
    check::buffer(OP, "labels", labels, Dtype::I32, rows)?;
    check::buffer(OP, "losses", losses, Dtype::F32, rows)?;
    seed.map_or(Ok(()), |seed| check::buffer(OP, "seed", seed, Dtype::F32, 1))?;
    check::stream(OP, stream)?.run(|| by_dtype!(OP, dtype, T => all_rows::<T>(args)))
}

fn all_rows<T: Float>(args: &CrossEntropy<'_>) -> Result<()> {
    let (rows, vocab) = (args.rows, args.vocab);
    // SAFETY: stream order keeps others away from what is written and writers from what is read.
    let (logits, labels, losses, seed) = unsafe {
        (
            args.logits.host_slice_mut::<T>(),
            &args.labels.host_slice::<i32>()[..rows],
            &mut args.losses.host_slice_mut::<f32>()[..rows],
            args.seed.map(|seed| seed.host_slice::<f32>()[0]),
        )
    };
    if let Some(label) = labels.iter().find(|&&label| label >= 0 && label as usize >= vocab) {
        return Err(Error::argument("cross_entropy", format!("label {label} of a vocabulary of {vocab}")));
    }
    scratch::with([vocab], |[values]| {
        for ((stored, &label), loss) in logits.chunks_mut(args.stride).zip(labels).zip(losses) {
            let stored = &mut stored[..vocab];
            let Ok(label) = usize::try_from(label) else {
                *loss = 0.0;
                seed.inspect(|_| stored.fill(T::ZERO));
                continue;
            };
            load(stored, values);
            let max = max_of(values);
            let sum = sum_exp(values, max);
            *loss = (max - values[label]) + sum.ln();
            if let Some(seed) = seed {
                scale_exp(values, stored, max, seed / sum);
                stored[label] = T::store((exp(values[label] - max) / sum - 1.0) * seed);
            }
        }
    });
    Ok(())
}

simd! {
    fn sum_exp(values: &[f32], max: f32) -> f32 {
        sum_over(values.len(), |i| exp(values[i] - max))
    }
}

simd! {
    fn scale_exp<T>(values: &[f32], dst: &mut [T], max: f32, scale: f32) {
        for (dst, value) in dst.iter_mut().zip(values) {
            *dst = T::store(exp(value - max) * scale);
        }
    }
}
