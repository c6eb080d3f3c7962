//! Cross-entropy and losses that are sums, and the gradient in their input's place.

use super::elementwise::{load_from, store_to};
use super::float::{Float, by_dtype, exp, load, max_of, simd, sum_over};
use super::{check, scratch};
use crate::{CrossEntropy, Dtype, Error, Result, Stream, SumLoss};

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
            let chosen = values[label];
            let (max, sum) = exponentials(values);
            *loss = (max - chosen) + sum.ln();
            if let Some(seed) = seed {
                scaled(values, seed / sum, stored);
                stored[label] = T::store((values[label] / sum - 1.0) * seed);
            }
        }
    });
    Ok(())
}

simd! {
    /// Values become their exponentials under the largest of them. Returns that one, and the sum.
    fn exponentials(values: &mut [f32]) -> (f32, f32) {
        let max = max_of(values);
        for value in values.iter_mut() {
            *value = exp(*value - max);
        }
        (max, sum_over([values], |[value]| value))
    }
}

simd! {
    fn scaled<T>(values: &[f32], factor: f32, dst: &mut [T]) {
        for (dst, value) in dst.iter_mut().zip(values) {
            *dst = T::store(value * factor);
        }
    }
}

pub fn sum_loss(stream: &Stream, args: &SumLoss<'_>) -> Result<()> {
    const OP: &str = "sum_loss";
    let SumLoss { x, target, losses, seed, scale, rows, cols } = *args;
    let dtype = check::float(OP, x)?;
    check::buffer(OP, "x", x, dtype, rows * cols)?;
    target.map_or(Ok(()), |target| check::buffer(OP, "target", target, dtype, rows * cols))?;
    check::buffer(OP, "losses", losses, Dtype::F32, rows)?;
    seed.map_or(Ok(()), |seed| check::buffer(OP, "seed", seed, Dtype::F32, 1))?;
    check::stream(OP, stream)?.run(|| {
        let mut seed_value = [0.0];
        seed.map_or(Ok(()), |seed| load_from(seed, 0, &mut seed_value))?;
        let slope = scale * seed_value[0];
        scratch::with([cols, cols], |[row, wanted]| {
            for r in 0..rows {
                load_from(x, r * cols, row)?;
                let sum = match target {
                    None => sum_of(row),
                    Some(target) => {
                        load_from(target, r * cols, wanted)?;
                        squared_errors(row, wanted, 2.0 * slope)
                    }
                };
                store_to(losses, r, &[scale * sum])?;
                if target.is_none() {
                    row.fill(slope);
                }
                seed.map_or(Ok(()), |_| store_to(x, r * cols, row))?;
            }
            Ok(())
        })
    })
}

simd! {
    fn sum_of(values: &[f32]) -> f32 {
        sum_over([values], |[value]| value)
    }
}

simd! {
    /// Σ (x − target)²; `x` becomes `slope · (x − target)`.
    fn squared_errors(x: &mut [f32], target: &[f32], slope: f32) -> f32 {
        let sum = sum_over([x, target], |[x, target]| (x - target) * (x - target));
        for (x, target) in x.iter_mut().zip(target) {
            *x = (*x - target) * slope;
        }
        sum
    }
}
