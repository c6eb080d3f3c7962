//! Ready-made batches.

use super::pack::Rows;
use crate::run::{Length, Run};
use crate::{Error, Result};
use checkpoint::Dtype;
use checkpoint::safetensors::File;
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

    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Whether a run can take its steps from here.
    pub fn check(&self, run: &Run, seq_len: Option<usize>) -> Result<()> {
        let wrong = |what: String| Err(Error::Config(what));
        let (path, rows, steps, seq) = (self.path().display(), self.rows, self.steps, self.seq);
        if rows != run.global_batch {
            return wrong(format!(
                "train.global_batch = {}, but {path} has {rows} rows a step",
                run.global_batch
            ));
        }
        if let Length::Steps(wanted) = run.length
            && wanted > steps
        {
            return wrong(format!("train.steps = {wanted}, but {path} has {steps} steps"));
        }
        if seq_len.is_some_and(|seq_len| seq_len != seq) {
            return wrong(format!("data.seq_len differs from the {seq} tokens a row of {path}"));
        }
        Ok(())
    }

    /// Adds a row, counted over all steps.
    pub fn append(&self, row: u64, out: &mut Rows) -> Result<()> {
        let first = row as usize * self.seq;
        out.ids.extend(self.read("input_ids", first, self.seq)?);
        out.labels.extend(self.read("labels", first, self.seq)?);
        out.document_start.resize(out.ids.len(), 0);
        Ok(())
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
