//! Working memory of kernels: one growing vector per thread, so that a kernel does not allocate twice.

use std::cell::Cell;

thread_local! {
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Pieces begin at multiples of a cache line.
const LINE: usize = 16;

/// Lends slices of the given lengths. What they hold is unspecified.
pub fn with<const N: usize, R>(lens: [usize; N], body: impl FnOnce([&mut [f32]; N]) -> R) -> R {
    // Taken, not borrowed: a kernel inside a kernel would only allocate anew.
    let mut scratch = SCRATCH.take();
    let total = lens.iter().map(|len| len.next_multiple_of(LINE)).sum();
    if scratch.len() < total {
        scratch.resize(total, 0.0);
    }
    let mut rest = scratch.as_mut_slice();
    let pieces = lens.map(|len| {
        let (piece, tail) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(LINE));
        rest = tail;
        &mut piece[..len]
    });
    let result = body(pieces);
    SCRATCH.set(scratch);
    result
}
