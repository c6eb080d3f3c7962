//! What a checkpoint of a run holds.

use crate::data::tokenizer::TokenizerSource;
use crate::floats::file_dtype;
use crate::run::{DataSource, DocumentSource, ModelSource, Run, SavedAs};
use crate::{Error, Result};
use checkpoint::{Dtype, Plan, Spec, moment_names};
use std::path::Path;
use tensor::Model;

/// Parts of a folder have at most this many bytes, as Hugging Face's do.
pub const MAX_PART_BYTES: u64 = 5_000_000_000;

/// Files that go along with a model, copied as they are.
const COMPANIONS: [&str; 6] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
];
/// A folder that goes along too.
const TEMPLATES: &str = "additional_chat_templates";

/// The name and shape of a tensor.
pub type Named = (String, Vec<usize>);

/// Every weight, and the two moments of those that are trained.
pub fn tensors(model: &Model) -> (Vec<Named>, Vec<Named>) {
    let (mut weights, mut moments) = (Vec::new(), Vec::new());
    for item in &model.items {
        for spec in &item.members {
            let shape = spec.shape.dims().to_vec();
            if item.trainable {
                moments.extend(moment_names(&spec.name).map(|name| (name, shape.clone())));
            }
            weights.push((spec.name.clone(), shape));
        }
    }
    (weights, moments)
}

/// The dtypes in which a run's weights and moments are saved.
pub fn dtypes(run: &Run) -> (Dtype, Dtype) {
    let weights = match run.checkpoint.dtype {
        SavedAs::Master => run.precision.master,
        SavedAs::Compute => run.precision.compute,
    };
    (file_dtype(weights), file_dtype(run.precision.moments))
}

/// Bytes a rank copies to host memory when it saves, padding included. Those that hold the same shard share it out.
pub fn snapshot_bytes(run: &Run, plan: &fsdp::Plan) -> usize {
    let (weights, moments) = dtypes(run);
    let settings = &plan.settings;
    let holders = if settings.is_sharded() { settings.replicate } else { settings.ranks };
    plan.layout.owned(true).div_ceil(holders) * (weights.bytes() + 2 * moments.bytes())
}

/// The plans of a checkpoint, and of a folder of the weights alone. `dir` appears in errors.
pub fn plans(run: &Run, model: &Model, dir: &Path) -> Result<(Plan, Plan)> {
    let ((weights, moments), (weight_dtype, moment_dtype)) = (tensors(model), dtypes(run));
    let weights: Vec<Spec<'_>> = specs(&weights, weight_dtype);
    let moments = specs(&moments, moment_dtype);
    let whole = Plan::new(dir, weights.iter().copied(), moments, MAX_PART_BYTES)?;
    Ok((whole, Plan::new(dir, weights, [], MAX_PART_BYTES)?))
}

fn specs(tensors: &[Named], dtype: Dtype) -> Vec<Spec<'_>> {
    tensors.iter().map(|(name, shape)| (name.as_str(), dtype, shape.as_slice())).collect()
}

/// The model's configuration, and the files of its folder that go along with it, by name.
pub fn plain_files(run: &Run) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = vec![("config.json".to_string(), run.config_text.clone().into_bytes())];
    match (&run.source, &run.data) {
        (ModelSource::Folder(folder), _) => files.extend(companions(folder)?),
        // A model from nothing takes the tokenizer it was trained with along.
        (
            _,
            DataSource::Documents {
                source: DocumentSource::Text { tokenizer: TokenizerSource::Folder(folder), .. },
                ..
            },
        ) => files.extend(companions(folder)?),
        _ => {}
    }
    Ok(files)
}

/// What a folder has of the files that go along with a model.
pub(super) fn companions(folder: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let mut names: Vec<String> = COMPANIONS.iter().map(|name| name.to_string()).collect();
    let templates = folder.join(TEMPLATES);
    if templates.is_dir() {
        for entry in std::fs::read_dir(&templates).map_err(|e| Error::file(&templates, e))? {
            let name = entry.map_err(|e| Error::file(&templates, e))?.file_name();
            names.push(format!("{TEMPLATES}/{}", name.to_string_lossy()));
        }
    }
    let mut files = Vec::new();
    for name in names {
        let path = folder.join(&name);
        if path.is_file() {
            files.push((name, std::fs::read(&path).map_err(|e| Error::file(path, e))?));
        }
    }
    Ok(files)
}
