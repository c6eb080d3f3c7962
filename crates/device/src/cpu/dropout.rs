//! Dropout by a counter: which elements go depends on their number, not on who asks.

use super::elementwise::{CHUNK, load_from, store_to};
use super::float::simd;
use super::{check, scratch};
use crate::{Dropout, Result, Stream};

pub fn dropout(stream: &Stream, args: &Dropout<'_>) -> Result<()> {
    const OP: &str = "dropout";
    let Dropout { x, out, p, key, first } = *args;
    let dtype = check::float(OP, x)?;
    check::buffer(OP, "out", out, dtype, 0)?;
    check::same_len(OP, x, out)?;
    let (threshold, scale) = (args.threshold()?, 1.0 / (1.0 - p));
    check::stream(OP, stream)?.run(|| {
        scratch::with([CHUNK], |[values]| {
            (0..x.len()).step_by(CHUNK).try_for_each(|start| {
                let values = &mut values[..CHUNK.min(x.len() - start)];
                load_from(x, start, values)?;
                drop_some(values, key, first.wrapping_add(start as u64), threshold, scale);
                store_to(out, start, values)
            })
        })
    })
}

simd! {
    fn drop_some(values: &mut [f32], key: u64, first: u64, threshold: u64, scale: f32) {
        for (i, x) in values.iter_mut().enumerate() {
            let bits = Dropout::bits(key, first.wrapping_add(i as u64));
            *x = if u64::from(bits) < threshold { 0.0 } else { *x * scale };
        }
    }
}
