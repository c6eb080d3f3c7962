//! Documents into rows.
//!
//! Packed: the documents of an epoch, in an order of its own, lie end to end and are cut every `seq` tokens; the
//! rows so cut are then shuffled too, so that a long document's parts do not train together. A part of a
//! document that continues in the next row starts anew there. Padded: a row a document.

use super::corpus::Corpus;
use super::order::Permutation;
use crate::Result;

/// A label the loss does not count.
pub const IGNORED: i32 = -100;

/// Rows one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    pub ids: Vec<i32>,
    /// The next token of the same document; [`IGNORED`] where there is none.
    pub labels: Vec<i32>,
    /// Index within its row of the first token of each token's document.
    pub document_start: Vec<i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Rows full of documents, which do not see each other.
    Packed,
    /// One document a row, cut off or filled up to its length.
    Padded,
}

impl Packing {
    /// Rows of an epoch. What does not fill a row is left out; another epoch leaves out something else.
    pub fn num_rows(self, corpus: &Corpus, seq: usize) -> u64 {
        match self {
            Packing::Packed => corpus.num_tokens() / seq as u64,
            Packing::Padded => corpus.num_documents(),
        }
    }
}

/// The order of one epoch.
#[derive(Debug)]
pub struct Epoch {
    packing: Packing,
    seq: usize,
    rows: Permutation,
    /// Packed: of each document in this epoch's order, its start in the packed stream and in the corpus.
    documents: Vec<(u64, u64)>,
}

impl Epoch {
    pub fn new(corpus: &Corpus, packing: Packing, seq: usize, seed: u64, epoch: u64) -> Self {
        let seed = seed.wrapping_add(epoch);
        let rows = Permutation::new(packing.num_rows(corpus, seq), seed, 1);
        let mut documents = Vec::new();
        if packing == Packing::Packed {
            let order = Permutation::new(corpus.num_documents(), seed, 0);
            let mut at = 0;
            documents.reserve_exact(corpus.num_documents() as usize);
            for index in 0..corpus.num_documents() {
                let (start, end) = corpus.document(order.at(index));
                documents.push((at, start));
                at += end - start;
            }
        }
        Epoch { packing, seq, rows, documents }
    }

    /// Adds the row that comes at `place` in this epoch.
    pub fn append(&self, corpus: &Corpus, place: u64, out: &mut Rows) -> Result<()> {
        let row = self.rows.at(place);
        match self.packing {
            Packing::Packed => self.append_packed(corpus, row, out),
            Packing::Padded => self.append_padded(corpus, row, out),
        }
    }

    fn append_packed(&self, corpus: &Corpus, row: u64, out: &mut Rows) -> Result<()> {
        let (mut at, end) = (row * self.seq as u64, (row + 1) * self.seq as u64);
        let mut index = self.documents.partition_point(|(start, _)| *start <= at) - 1;
        while at < end {
            let (packed, start) = self.documents[index];
            let next = self.documents.get(index + 1).map_or(corpus.num_tokens(), |(next, _)| *next);
            let len = (next.min(end) - at) as usize;
            out.piece(corpus, start + (at - packed), len, next - at, self.seq)?;
            at += len as u64;
            index += 1;
        }
        Ok(())
    }

    fn append_padded(&self, corpus: &Corpus, row: u64, out: &mut Rows) -> Result<()> {
        let (start, end) = corpus.document(row);
        let len = (end - start).min(self.seq as u64) as usize;
        out.piece(corpus, start, len, end - start, self.seq)?;
        let first = out.document_start[out.document_start.len() - len];
        let padding = self.seq - len;
        out.ids.extend(std::iter::repeat_n(0, padding));
        out.labels.extend(std::iter::repeat_n(IGNORED, padding));
        out.document_start.extend(std::iter::repeat_n(first, padding));
        Ok(())
    }
}

impl Rows {
    /// Adds `len` tokens of a document that has `left` from `start` on.
    fn piece(&mut self, corpus: &Corpus, start: u64, len: usize, left: u64, seq: usize) -> Result<()> {
        let place = self.ids.len();
        corpus.read(start, len.saturating_add(1).min(left as usize), &mut self.ids)?;
        self.labels.extend(&self.ids[place + 1..]);
        self.labels.resize(place + len, IGNORED);
        self.ids.truncate(place + len);
        self.document_start.resize(place + len, (place % seq) as i32);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small numbers without end.
    struct Random(u64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) % n
        }
    }

    /// Documents of random lengths. Token ids are unique, so that every token can be traced.
    fn corpus(random: &mut Random) -> Corpus {
        let mut corpus = Corpus::default();
        let mut id = 0u32;
        let longest = [1, 3, 10, 100][random.below(4) as usize];
        for _ in 0..1 + random.below(40) {
            let len = 1 + random.below(longest) as u32;
            corpus.push(&(id..id + len).collect::<Vec<_>>());
            id += len;
        }
        corpus
    }

    fn all(corpus: &Corpus, packing: Packing, seq: usize, seed: u64, epoch: u64) -> Rows {
        let order = Epoch::new(corpus, packing, seq, seed, epoch);
        let mut rows = Rows::default();
        for place in 0..packing.num_rows(corpus, seq) {
            order.append(corpus, place, &mut rows).unwrap();
            assert_eq!(rows.ids.len(), (place as usize + 1) * seq);
            assert_eq!(rows.labels.len(), rows.ids.len());
            assert_eq!(rows.document_start.len(), rows.ids.len());
        }
        rows
    }

    fn document_of(corpus: &Corpus, token: i32) -> u64 {
        (0..corpus.num_documents()).find(|d| corpus.document(*d).1 > token as u64).unwrap()
    }

    #[test]
    fn packed_rows_keep_their_promises_for_any_lengths() {
        let mut random = Random(1);
        for case in 0..300 {
            let corpus = corpus(&mut random);
            let seq = 1 + random.below(33) as usize;
            let rows = all(&corpus, Packing::Packed, seq, case, case % 3);
            // Every token trains at most once an epoch, and fewer than a row's worth not at all.
            let mut ids = rows.ids.clone();
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len(), rows.ids.len());
            assert!(corpus.num_tokens() - (ids.len() as u64) < seq as u64);
            for at in 0..rows.ids.len() {
                let (place, id) = (at % seq, rows.ids[at]);
                let (start, end) = corpus.document(document_of(&corpus, id));
                // The label is the document's next token, and nothing at its end.
                let next = if id as u64 + 1 < end { id + 1 } else { IGNORED };
                assert_eq!(rows.labels[at], next);
                // Back to the document start all tokens are the document's, in order; none before it is.
                let first = rows.document_start[at] as usize;
                assert!(first <= place);
                assert_eq!(rows.ids[at - (place - first)], id - (place - first) as i32);
                assert!(rows.ids[at - (place - first)] as u64 >= start);
                if first > 0 {
                    assert_eq!(
                        rows.ids[at - (place - first)] as u64,
                        start,
                        "a document starts inside a row"
                    );
                }
            }
        }
    }

    #[test]
    fn padded_rows_are_documents() {
        let mut random = Random(2);
        for case in 0..100 {
            let corpus = corpus(&mut random);
            let seq = 1 + random.below(20) as usize;
            let rows = all(&corpus, Packing::Padded, seq, case, 0);
            let mut seen = vec![];
            for row in 0..rows.ids.len() / seq {
                let row = row * seq..(row + 1) * seq;
                let document = document_of(&corpus, rows.ids[row.start]);
                seen.push(document);
                let (start, end) = corpus.document(document);
                for (place, at) in row.enumerate() {
                    let token = start + place as u64;
                    let id = if token < end { token as i32 } else { 0 };
                    let label = if token + 1 < end { token as i32 + 1 } else { IGNORED };
                    assert_eq!((rows.ids[at], rows.labels[at], rows.document_start[at]), (id, label, 0));
                }
            }
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..corpus.num_documents()));
        }
    }

    #[test]
    fn epochs_and_seeds_have_orders_of_their_own() {
        let corpus = {
            let mut corpus = Corpus::default();
            (0..50u32).for_each(|d| corpus.push(&(d * 10..d * 10 + 10).collect::<Vec<_>>()));
            corpus
        };
        for packing in [Packing::Packed, Packing::Padded] {
            let [a, again, b, c] =
                [(1, 0), (1, 0), (1, 1), (7, 0)].map(|(seed, epoch)| all(&corpus, packing, 16, seed, epoch));
            assert_eq!(a, again);
            assert_ne!(a, b);
            assert_ne!(a, c);
        }
    }
}
