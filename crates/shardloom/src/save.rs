//! The final model as a Hugging Face folder. Every rank writes the bytes it owns.

use crate::data::tokenizer::TokenizerSource;
use crate::run::{DataSource, DocumentSource, ModelSource, Run};
use crate::{Error, Result};
use checkpoint::folder::Plan;
use comm::Group;
use device::Dtype;
use fsdp::{Engine, Source};
use half::bf16;
use std::path::Path;
use tensor::Model;

/// Parts of a folder have at most this many bytes, as Hugging Face's do.
const MAX_PART_BYTES: u64 = 5_000_000_000;

/// Files that go along with a model, copied as they are.
const COMPANIONS: [&str; 6] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
];

/// Writes `output/model`: config, companions, weights in the master's dtype.
pub fn final_model(
    run: &Run,
    model: &Model,
    engine: &Engine,
    source: &dyn Source,
    ranks: &dyn Group,
) -> Result<()> {
    let dir = run.output.join("model");
    let rank = ranks.rank();
    let dtype = match run.precision.master {
        Dtype::Bf16 => checkpoint::Dtype::Bf16,
        _ => checkpoint::Dtype::F32,
    };
    let specs = || model.items.iter().flat_map(|item| &item.members);
    let tensors = specs().map(|spec| (spec.name.as_str(), dtype, spec.shape.dims()));
    let plan = Plan::new(&dir, tensors, MAX_PART_BYTES)?;
    if rank == 0 {
        std::fs::create_dir_all(&dir).map_err(|e| Error::file(&dir, e))?;
        write_companions(run, &dir)?;
    }
    let parts = 0..plan.parts().len();
    let mut writers = Vec::new();
    if rank == 0 {
        writers = parts.clone().map(|part| plan.create(part)).collect::<checkpoint::Result<Vec<_>>>()?;
    }
    ranks.exchange(&[], "files created")?;
    if rank != 0 {
        writers = parts.map(|part| plan.join(part)).collect::<checkpoint::Result<Vec<_>>>()?;
    }
    // Of ranks that hold the same shard, one writes.
    if engine.is_counted() {
        engine.read_weights(source, |name, start, values| {
            let part = plan.part_of(name).expect("every weight was planned");
            let bytes = encode(values, dtype);
            let at = (start * dtype.bytes()) as u64;
            let fail = |e: checkpoint::Error| fsdp::Error::Weight { name: name.into(), what: e.to_string() };
            writers[part].write_range(name, at, &bytes).map_err(fail)
        })?;
    }
    writers.iter().try_for_each(|writer| writer.sync())?;
    ranks.exchange(&[], "weights written")?;
    if rank == 0 {
        writers.into_iter().try_for_each(|writer| writer.finish())?;
        plan.finish()?;
    }
    Ok(())
}

fn encode(values: &[f32], dtype: checkpoint::Dtype) -> Vec<u8> {
    match dtype {
        checkpoint::Dtype::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

fn write_companions(run: &Run, dir: &Path) -> Result<()> {
    let config = dir.join("config.json");
    std::fs::write(&config, &run.config_text).map_err(|e| Error::file(&config, e))?;
    let source = match (&run.source, &run.data) {
        (ModelSource::Folder(folder), _) => folder,
        // A model from nothing takes the tokenizer it was trained with along.
        (_, DataSource::Documents { source: DocumentSource::Text { tokenizer, .. }, .. }) => {
            match tokenizer {
                TokenizerSource::Folder(folder) => folder,
                TokenizerSource::Bytes => return Ok(()),
            }
        }
        _ => return Ok(()),
    };
    for name in COMPANIONS {
        let from = source.join(name);
        if from.exists() {
            std::fs::copy(&from, dir.join(name)).map_err(|e| Error::file(from, e))?;
        }
    }
    Ok(())
}
