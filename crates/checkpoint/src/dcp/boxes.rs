//! Pieces of tensors are boxes; what ranks own are flat ranges. This is how one becomes the other.

use std::ops::Range;

/// A stretch of elements that is contiguous in the whole tensor and in one of its boxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub tensor_start: u64,
    pub box_start: u64,
    pub len: u64,
}

impl Run {
    fn tensor_end(self) -> u64 {
        self.tensor_start + self.len
    }

    /// The part of it that lies in `range`.
    fn within(self, range: &Range<u64>) -> Run {
        let start = self.tensor_start.max(range.start);
        let end = self.tensor_end().min(range.end);
        let box_start = self.box_start + (start - self.tensor_start);
        Run { tensor_start: start, box_start, len: end.saturating_sub(start) }
    }
}

/// A box within a tensor, both of them sound: the box lies within, and elements can be counted in 64 bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Box<'a> {
    pub shape: &'a [usize],
    pub offsets: &'a [usize],
    pub sizes: &'a [usize],
}

/// The number of elements, if it can be counted.
pub(crate) fn num_elements(shape: &[usize]) -> Option<u64> {
    shape.iter().try_fold(1u64, |count, &dim| count.checked_mul(dim as u64))
}

impl<'a> Box<'a> {
    /// `None` unless it lies within the tensor.
    pub fn new(shape: &'a [usize], offsets: &'a [usize], sizes: &'a [usize]) -> Option<Self> {
        let same = shape.len() == offsets.len() && shape.len() == sizes.len();
        let inside = |dim: usize| offsets[dim].checked_add(sizes[dim]).is_some_and(|end| end <= shape[dim]);
        num_elements(shape)?;
        (same && (0..shape.len()).all(inside)).then_some(Box { shape, offsets, sizes })
    }

    fn num_elements(&self) -> u64 {
        num_elements(self.sizes).unwrap_or(0)
    }

    /// The dimension within which runs lie: all after it are whole.
    fn run_dim(&self) -> usize {
        let partial = (0..self.shape.len()).rev().find(|&dim| self.sizes[dim] != self.shape[dim]);
        partial.unwrap_or(0)
    }

    /// The runs that lie in a flat range of the tensor, cut to it, in order.
    pub fn runs(self, range: Range<u64>) -> impl Iterator<Item = Run> + 'a {
        let total = self.num_elements();
        let len = match total {
            0 => 1,
            _ => self.sizes[self.run_dim()..].iter().map(|&dim| dim as u64).product(),
        };
        let count = total / len;
        let run =
            move |number: u64| Run { tensor_start: self.start_of(number), box_start: number * len, len };
        // Runs are in the order of the tensor's elements: look for the first that ends within the range.
        let (mut low, mut high) = (0, count);
        while low < high {
            let middle = low + (high - low) / 2;
            match run(middle).tensor_end() <= range.start {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        let end = range.end;
        let found = (low..count).map(run).take_while(move |run| run.tensor_start < end);
        found.map(move |run| run.within(&range)).filter(|run| run.len > 0)
    }

    /// The tensor's element at which a run starts.
    fn start_of(&self, number: u64) -> u64 {
        let dims = self.shape.len();
        let last = self.run_dim();
        let (mut start, mut stride, mut rest) = (0, 1, number);
        for dim in (0..dims).rev() {
            let mut at = self.offsets[dim] as u64;
            if dim < last {
                at += rest % self.sizes[dim] as u64;
                rest /= self.sizes[dim] as u64;
            }
            start += at * stride;
            stride *= self.shape[dim] as u64;
        }
        start
    }

    fn meets(&self, other: &Box<'_>) -> bool {
        (0..self.shape.len()).all(|dim| {
            self.offsets[dim] < other.offsets[dim] + other.sizes[dim]
                && other.offsets[dim] < self.offsets[dim] + self.sizes[dim]
        })
    }
}

/// Pairs of boxes that may be held against each other before a checkpoint counts as made to waste time.
const MAX_PAIRS: u64 = 1 << 32;

/// Proves that boxes cover every element of a tensor exactly once. Empty boxes are nothing.
pub(crate) fn prove_cover(shape: &[usize], boxes: &[Box<'_>]) -> Result<(), String> {
    let mut boxes: Vec<&Box<'_>> = boxes.iter().filter(|piece| piece.num_elements() > 0).collect();
    let total = num_elements(shape).ok_or("its elements cannot be counted")?;
    let sum = boxes.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.num_elements()));
    if sum.is_none_or(|sum| sum < total) {
        return Err(format!("its pieces have {} of its {total} elements", sum.unwrap_or(0)));
    }
    // None may overlap: then the sum is the proof. A sweep along the dimension that tells most of them apart.
    let starts = |dim: usize| {
        let mut starts: Vec<usize> = boxes.iter().map(|piece| piece.offsets[dim]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let sweep = (0..shape.len()).max_by_key(|&dim| starts(dim));
    let Some(sweep) = sweep else {
        return match boxes.len() {
            1 => Ok(()),
            count => Err(format!("it has {count} pieces for its one element")),
        };
    };
    boxes.sort_unstable_by_key(|piece| piece.offsets[sweep]);
    let (mut open, mut pairs): (Vec<&Box<'_>>, u64) = (Vec::new(), 0);
    for piece in boxes {
        open.retain(|earlier| earlier.offsets[sweep] + earlier.sizes[sweep] > piece.offsets[sweep]);
        if let Some(other) = open.iter().find(|earlier| earlier.meets(piece)) {
            let (a, b) = (other.offsets, piece.offsets);
            return Err(format!("its pieces at {a:?} and {b:?} overlap"));
        }
        open.push(piece);
        pairs += open.len() as u64;
        if pairs > MAX_PAIRS {
            return Err("its pieces are too many to be told apart".into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Piece = (Vec<usize>, Vec<usize>);

    fn boxes<'a>(shape: &'a [usize], pieces: &'a [Piece]) -> Vec<Box<'a>> {
        pieces.iter().map(|(offsets, sizes)| Box::new(shape, offsets, sizes).unwrap()).collect()
    }

    /// The elements of a box one by one, as (element of the tensor, element of the box).
    fn elements(piece: &Box<'_>) -> Vec<(u64, u64)> {
        let dims = piece.shape.len();
        let all = 0..piece.num_elements();
        all.map(|number| {
            let (mut rest, mut element, mut stride) = (number, 0, 1);
            for dim in (0..dims).rev() {
                element += (piece.offsets[dim] as u64 + rest % piece.sizes[dim] as u64) * stride;
                rest /= piece.sizes[dim] as u64;
                stride *= piece.shape[dim] as u64;
            }
            (element, number)
        })
        .collect()
    }

    #[test]
    fn runs_are_the_elements_of_a_box_in_any_range() {
        let shape = [4, 3, 5];
        let pieces: [Piece; 6] = [
            (vec![0, 0, 0], vec![4, 3, 5]),
            (vec![1, 0, 0], vec![2, 3, 5]),
            (vec![0, 1, 0], vec![4, 2, 5]),
            (vec![2, 0, 3], vec![2, 3, 2]),
            (vec![1, 1, 1], vec![2, 1, 3]),
            (vec![4, 0, 0], vec![0, 3, 5]),
        ];
        for piece in boxes(&shape, &pieces) {
            let all = elements(&piece);
            for start in 0..=60 {
                for end in start..=60 {
                    let found: Vec<(u64, u64)> = piece
                        .runs(start..end)
                        .flat_map(|run| (0..run.len).map(move |i| (run.tensor_start + i, run.box_start + i)))
                        .collect();
                    let expected: Vec<_> =
                        all.iter().copied().filter(|(at, _)| (start..end).contains(at)).collect();
                    assert_eq!(found, expected, "{piece:?} in {start}..{end}");
                }
            }
        }
        let scalar = Box::new(&[], &[], &[]).unwrap();
        assert_eq!(scalar.runs(0..1).collect::<Vec<_>>(), [Run { tensor_start: 0, box_start: 0, len: 1 }]);
    }

    #[test]
    fn covers_are_proved_and_holes_and_overlaps_found() {
        let cover = |shape: &[usize], pieces: &[Piece]| prove_cover(shape, &boxes(shape, pieces));
        let rows = [(vec![0, 0], vec![2, 4]), (vec![2, 0], vec![1, 4]), (vec![3, 0], vec![0, 4])];
        cover(&[3, 4], &rows).unwrap();
        let grid = [(vec![0, 0], vec![2, 3]), (vec![0, 3], vec![2, 1]), (vec![2, 0], vec![1, 4])];
        cover(&[3, 4], &grid).unwrap();
        assert!(cover(&[3, 4], &grid[..2]).unwrap_err().contains("8 of its 12"));
        let overlap = [(vec![0, 0], vec![2, 4]), (vec![1, 0], vec![1, 4])];
        assert!(cover(&[3, 4], &overlap).unwrap_err().contains("overlap"));
        let twice = [(vec![0, 0], vec![3, 4]), (vec![0, 0], vec![3, 4])];
        assert!(cover(&[3, 4], &twice).unwrap_err().contains("overlap"));
        cover(&[], &[(vec![], vec![])]).unwrap();
        assert!(cover(&[], &[(vec![], vec![]), (vec![], vec![])]).is_err());
        assert!(cover(&[], &[]).is_err());
        cover(&[0, 4], &[]).unwrap();
        assert!(Box::new(&[3], &[2], &[2]).is_none() && Box::new(&[3], &[usize::MAX], &[2]).is_none());
    }
}
