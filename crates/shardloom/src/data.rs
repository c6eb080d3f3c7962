//! Training data.

use crate::{Error, Result};
use checkpoint::Dtype;
use checkpoint::safetensors::File;
use fsdp::HostBatch;
use std::path::Path;

/// Ready-made batches: `input_ids` and `labels` of shape `[steps, rows, length]` in a safetensors file. Labels
/// are already shifted; −100 is ignored. Step s trains on `[s]`, rows split evenly over ranks in order.
#[derive(Debug)]
pub struct Batches {
    file: File,
    pub steps: u64,
    pub rows: usize,
    pub seq: usize,
}

impl Batches {
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path)?;
        let shape_of = |name: &str| -> Result<[usize; 3]> {
            let info = file.info(name)?;
            if !matches!(info.dtype, Dtype::I64 | Dtype::I32) {
                return Err(Error::file(path, format!("{name} is {}, expected I64 or I32", info.dtype)));
            }
            let shape = info.shape.as_slice().try_into();
            shape.map_err(|_| {
                Error::file(
                    path,
                    format!("{name} has shape {:?}, expected [steps, rows, length]", info.shape),
                )
            })
        };
        let shape = shape_of("input_ids")?;
        if shape_of("labels")? != shape {
            return Err(Error::file(path, "labels and input_ids differ in shape"));
        }
        let [steps, rows, seq] = shape;
        if steps * rows * seq == 0 {
            return Err(Error::file(
                path,
                format!("input_ids has shape {shape:?}: there is nothing to train on"),
            ));
        }
        Ok(Batches { file, steps: steps as u64, rows, seq })
    }

    /// The micro-batches of `rank` at `step` (from 0).
    pub fn step(
        &self,
        step: u64,
        rank: usize,
        ranks: usize,
        micro: usize,
        vocab: usize,
    ) -> Result<Vec<HostBatch>> {
        let rows = self.rows / ranks;
        let first = step as usize * self.rows + rank * rows;
        let ids = self.read("input_ids", first * self.seq, rows * self.seq)?;
        let labels = self.read("labels", first * self.seq, rows * self.seq)?;
        let size = micro * self.seq;
        let batches = ids.chunks(size).zip(labels.chunks(size));
        batches
            .map(|(ids, labels)| HostBatch::tokens(ids, labels, self.seq, vocab))
            .collect::<fsdp::Result<Vec<_>>>()
            .map_err(|error| Error::file(self.file.path(), format!("step {}: {error}", step + 1)))
    }

    fn read(&self, name: &str, start: usize, len: usize) -> Result<Vec<i32>> {
        let info = self.file.info(name)?;
        let size = info.dtype.bytes();
        let mut bytes = vec![0; len * size];
        self.file.read_range(name, (start * size) as u64, &mut bytes)?;
        let values = bytes.chunks_exact(size).map(|chunk| match chunk.try_into() {
            Ok(eight) => i64::from_le_bytes(eight),
            Err(_) => i64::from(i32::from_le_bytes(chunk.try_into().expect("chunks of four"))),
        });
        values
            .map(|value| {
                i32::try_from(value)
                    .map_err(|_| Error::file(self.file.path(), format!("{name}: {value} is no token id")))
            })
            .collect()
    }
}
