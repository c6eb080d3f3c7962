//! Micro-batches on the host.

use crate::{Error, Result};
use device::Dtype;
use tensor::Shape;
use tensor::ops::field;

/// The name, type and shape of one field of a micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub name: &'static str,
    pub dtype: Dtype,
    pub shape: Shape,
}

impl Field {
    pub fn new(name: &'static str, dtype: Dtype, shape: impl Into<Shape>) -> Self {
        Field { name, dtype, shape: shape.into() }
    }

    pub fn num_bytes(&self) -> usize {
        self.shape.numel() * self.dtype.bytes()
    }

    /// The fields of a token model's micro-batch.
    pub fn tokens(rows: usize, seq: usize) -> Vec<Field> {
        [field::IDS, field::ORDER, field::POSITIONS, field::LABELS]
            .map(|name| Field { name, dtype: Dtype::I32, shape: [rows, seq].into() })
            .to_vec()
    }

    /// As [`Field::tokens`], for rows that hold several documents.
    pub fn packed(rows: usize, seq: usize) -> Vec<Field> {
        let mut fields = Self::tokens(rows, seq);
        fields.push(Field { name: field::DOCUMENT_START, dtype: Dtype::I32, shape: [rows, seq].into() });
        fields
    }
}

/// The numbers of one field, of a model of a user's own.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    F32(&'a [f32]),
    I32(&'a [i32]),
}

/// One micro-batch of one rank: bytes for each field, in the plan's order, and how many targets its loss
/// counts.
#[derive(Clone, Debug)]
pub struct HostBatch {
    pub fields: Vec<Vec<u8>>,
    pub num_targets: usize,
}

impl HostBatch {
    /// A micro-batch of any model: the numbers of each field, in the plan's order, and how many targets they hold
    /// (what the loss is divided by, summed over ranks and micro-batches).
    pub fn of(fields: &[Values<'_>], num_targets: usize) -> Self {
        let fields = fields.iter().map(|values| match values {
            Values::F32(values) => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
            Values::I32(values) => bytes(values),
        });
        HostBatch { fields: fields.collect(), num_targets }
    }

    /// A micro-batch of a token model: rows of `seq` tokens, each row one document. Labels are already
    /// shifted; negative ones are ignored. Ids are checked against the vocabulary here, once.
    pub fn tokens(ids: &[i32], labels: &[i32], seq: usize, vocab: usize) -> Result<Self> {
        check_tokens(ids, labels, seq, vocab)?;
        let positions: Vec<i32> = (0..ids.len()).map(|at| (at % seq) as i32).collect();
        Ok(HostBatch {
            fields: [ids, &order(ids), &positions, labels].map(bytes).to_vec(),
            num_targets: num_targets(labels),
        })
    }

    /// A micro-batch whose rows hold several documents (fields as of [`Field::packed`]). `document_start` has
    /// for each token the index within its row of its document's first token; positions count from there.
    pub fn packed(
        ids: &[i32],
        labels: &[i32],
        document_start: &[i32],
        seq: usize,
        vocab: usize,
    ) -> Result<Self> {
        check_tokens(ids, labels, seq, vocab)?;
        if document_start.len() != ids.len() {
            let what = format!("{} document starts for {} ids", document_start.len(), ids.len());
            return Err(Error::Batch { name: field::DOCUMENT_START.into(), what });
        }
        let place = |at: usize| (at % seq) as i32;
        if let Some(at) = (0..ids.len()).find(|&at| !(0..=place(at)).contains(&document_start[at])) {
            let what = format!("token {} of its row cannot start at {}", place(at), document_start[at]);
            return Err(Error::Batch { name: field::DOCUMENT_START.into(), what });
        }
        // A token begins a document or goes on with that of the token before; kernels count on it.
        let goes_on = |at: usize| place(at) > 0 && document_start[at] == document_start[at - 1];
        if let Some(at) = (0..ids.len()).find(|&at| document_start[at] != place(at) && !goes_on(at)) {
            let (place, start) = (place(at), document_start[at]);
            let what = format!(
                "token {place} of its row starts at {start}, as neither it nor the token before does"
            );
            return Err(Error::Batch { name: field::DOCUMENT_START.into(), what });
        }
        let positions: Vec<i32> = (0..ids.len()).map(|at| place(at) - document_start[at]).collect();
        Ok(HostBatch {
            fields: [ids, &order(ids), &positions, labels, document_start].map(bytes).to_vec(),
            num_targets: num_targets(labels),
        })
    }
}

fn check_tokens(ids: &[i32], labels: &[i32], seq: usize, vocab: usize) -> Result<()> {
    let fail = |name: &str, what: String| Err(Error::Batch { name: name.into(), what });
    if ids.len() != labels.len() || seq == 0 || !ids.len().is_multiple_of(seq) {
        return fail("labels", format!("{} ids, {} labels, rows of {seq}", ids.len(), labels.len()));
    }
    let outside = |id: &i32| *id < 0 || *id as usize >= vocab;
    if let Some(at) = ids.iter().position(outside) {
        return fail("ids", format!("token {} at {at} is outside the vocabulary of {vocab}", ids[at]));
    }
    if let Some(at) = labels.iter().position(|label| *label >= 0 && *label as usize >= vocab) {
        return fail("labels", format!("label {} at {at} is outside the vocabulary of {vocab}", labels[at]));
    }
    Ok(())
}

/// Positions of tokens sorted by id.
fn order(ids: &[i32]) -> Vec<i32> {
    let mut order: Vec<i32> = (0..ids.len() as i32).collect();
    order.sort_by_key(|&at| ids[at as usize]);
    order
}

fn num_targets(labels: &[i32]) -> usize {
    labels.iter().filter(|label| **label >= 0).count()
}

fn bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_count_from_the_start_of_a_document() {
        let ids = [5, 6, 7, 8, 5, 6, 7, 8];
        let batch = HostBatch::packed(&ids, &[-100; 8], &[0, 0, 2, 2, 0, 1, 1, 1], 4, 9).unwrap();
        assert_eq!(batch.fields.len(), Field::packed(2, 4).len());
        assert_eq!(batch.fields[2], bytes(&[0, 1, 0, 1, 0, 0, 1, 2]));
        assert_eq!(batch.num_targets, 0);
    }

    #[test]
    fn fields_of_ones_own_are_their_bytes() {
        let batch = HostBatch::of(&[Values::F32(&[1.0, 2.0]), Values::I32(&[3])], 1);
        assert_eq!(batch.fields[0], [1.0f32.to_ne_bytes(), 2.0f32.to_ne_bytes()].concat());
        assert_eq!(batch.fields[1], bytes(&[3]));
        assert_eq!(Field::new("x", Dtype::F32, [2]).num_bytes(), batch.fields[0].len());
    }

    #[test]
    fn documents_that_start_outside_their_row_or_go_back_are_refused() {
        for starts in [&[0, 2, 2, 2][..], &[0, -1, 0, 0], &[0, 0, 0], &[0, 1, 0, 0], &[0, 0, 1, 1]] {
            let error = HostBatch::packed(&[1; 4], &[1; 4], starts, 4, 9).unwrap_err();
            assert!(matches!(&error, Error::Batch { name, .. } if name == field::DOCUMENT_START), "{error}");
        }
    }
}
