//! The weights of a Hugging Face folder: `model.safetensors`, or parts and `model.safetensors.index.json`.

use crate::safetensors::{File, Layout, TensorInfo};
use crate::{Dtype, Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

#[derive(Serialize, Deserialize)]
struct Index {
    #[serde(default)]
    metadata: serde_json::Value,
    weight_map: BTreeMap<String, String>,
}

/// The weights of a folder, by name. Opening reads headers only.
#[derive(Debug)]
pub struct Weights {
    dir: PathBuf,
    files: Vec<File>,
    /// Name to the index of its file.
    names: BTreeMap<String, usize>,
}

impl Weights {
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        // In this order, as transformers does.
        if dir.join(SINGLE).exists() {
            let file = File::open(dir.join(SINGLE))?;
            let names = file.tensors().map(|(name, _)| (name.to_string(), 0)).collect();
            return Ok(Weights { dir: dir.to_path_buf(), files: vec![file], names });
        }
        if dir.join(INDEX).exists() {
            return Self::open_parts(dir);
        }
        let hint = if !dir.is_dir() {
            ": it is not a folder"
        } else if dir.join("pytorch_model.bin").exists() || dir.join("pytorch_model.bin.index.json").exists()
        {
            ": it has PyTorch pickles only; save the model with safe_serialization=True"
        } else {
            ": is this the folder of a Hugging Face model?"
        };
        let key = format!("{SINGLE} and no {INDEX}");
        Err(Error::Missing { path: dir.to_path_buf(), key, hint: hint.into() })
    }

    fn open_parts(dir: &Path) -> Result<Self> {
        let path = dir.join(INDEX);
        let json = std::fs::read(&path).map_err(Error::io(&path, "read"))?;
        let index = serde_json::from_slice::<Index>(&json)
            .map_err(|e| Error::format(&path, format!("not an index of weights: {e}")))?;
        let (mut files, mut names) = (Vec::<File>::new(), BTreeMap::new());
        let mut opened = BTreeMap::new();
        for (name, part) in index.weight_map {
            let number = match opened.get(&part) {
                Some(&number) => number,
                None => {
                    files.push(open_part(dir, &path, &name, &part)?);
                    opened.insert(part.clone(), files.len() - 1);
                    files.len() - 1
                }
            };
            if files[number].get(&name).is_none() {
                let what = format!("the index puts it into {part}, which does not have it; fetch both again");
                return Err(Error::entry(&path, &name, what));
            }
            names.insert(name, number);
        }
        Ok(Weights { dir: dir.to_path_buf(), files, names })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Names and entries, sorted by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &TensorInfo)> {
        self.names.iter().map(|(name, &number)| {
            let info = self.files[number].get(name).expect("checked when the folder was opened");
            (name.as_str(), info)
        })
    }

    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.files[*self.names.get(name)?].get(name)
    }

    /// As [`Weights::get`], and an error that names the folder when there is no such weight.
    pub fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.file(name)?.info(name)
    }

    /// The file that holds a weight.
    pub fn file(&self, name: &str) -> Result<&File> {
        if let Some(&number) = self.names.get(name) {
            return Ok(&self.files[number]);
        }
        let other = match name.strip_prefix("model.") {
            Some(stripped) => stripped.to_string(),
            None => format!("model.{name}"),
        };
        let hint = match self.names.contains_key(&other) {
            true => format!(", but there is {other}"),
            false => format!(" among its {} weights", self.names.len()),
        };
        Err(Error::Missing { path: self.dir.clone(), key: format!("weight {name}"), hint })
    }

    /// Fills `out` with a weight's bytes from `byte_start` on.
    pub fn read_range(&self, name: &str, byte_start: u64, out: &mut [u8]) -> Result<()> {
        self.file(name)?.read_range(name, byte_start, out)
    }

    /// All bytes of a weight.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        self.file(name)?.read(name)
    }
}

fn open_part(dir: &Path, index: &Path, name: &str, part: &str) -> Result<File> {
    if Path::new(part).file_name() != Some(part.as_ref()) {
        return Err(Error::entry(index, name, format!("{part:?} is not the name of a file in this folder")));
    }
    let path = dir.join(part);
    if !path.exists() {
        let what = format!("its part {part} is missing from the folder; fetch it");
        return Err(Error::entry(index, name, what));
    }
    File::open(path)
}

/// How tensors are to be written into a folder: which part each goes into, and where in it. It depends on
/// names, dtypes, shapes and the limit only, so that several writers agree without talking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    stem: &'static str,
    parts: Vec<(String, Layout)>,
}

impl Plan {
    /// Fills parts in the order given with at most `max_part_bytes` of data each; a larger tensor has a part
    /// of its own. Parts are named after `stem`: `model.safetensors`, or `model-00001-of-00002.safetensors` and so on.
    /// `dir` appears in errors.
    pub fn new<'a>(
        dir: &Path,
        stem: &'static str,
        tensors: impl IntoIterator<Item = (&'a str, Dtype, &'a [usize])>,
        max_part_bytes: u64,
    ) -> Result<Self> {
        let (mut groups, mut filled) = (vec![Vec::new()], 0u64);
        for (name, dtype, shape) in tensors {
            let bytes =
                shape.iter().fold(dtype.bytes() as u64, |bytes, &dim| bytes.saturating_mul(dim as u64));
            if filled.saturating_add(bytes) > max_part_bytes && filled > 0 {
                groups.push(Vec::new());
                filled = 0;
            }
            filled = filled.saturating_add(bytes);
            groups.last_mut().expect("there is always a last one").push((name, dtype, shape));
        }
        let count = groups.len();
        let mut parts = Vec::new();
        for (number, group) in groups.into_iter().enumerate() {
            let file = match count {
                1 => format!("{stem}.safetensors"),
                _ => format!("{stem}-{:05}-of-{count:05}.safetensors", number + 1),
            };
            let layout = Layout::new(&dir.join(&file), group)?;
            parts.push((file, layout));
        }
        Ok(Plan { stem, parts })
    }

    /// File names and layouts, part by part.
    pub fn parts(&self) -> impl ExactSizeIterator<Item = (&str, &Layout)> {
        self.parts.iter().map(|(file, layout)| (file.as_str(), layout))
    }

    /// Name and contents of the index, where there are several parts.
    pub fn index(&self) -> Option<(String, Vec<u8>)> {
        if self.parts.len() == 1 {
            return None;
        }
        let tensors = || self.parts.iter().flat_map(|(_, layout)| layout.tensors());
        let total_size: u64 = self.parts.iter().map(|(_, layout)| layout.data_bytes()).sum();
        let total_parameters: u64 = tensors().map(|(_, info)| info.num_elements()).sum();
        let map = self
            .parts
            .iter()
            .flat_map(|(file, layout)| layout.tensors().map(|(name, _)| (name.to_string(), file.clone())));
        let index = Index {
            metadata: serde_json::json!({ "total_parameters": total_parameters, "total_size": total_size }),
            weight_map: map.collect(),
        };
        let json = serde_json::to_vec_pretty(&index).expect("names and numbers are always JSON");
        Some((format!("{}.safetensors.index.json", self.stem), json))
    }

    pub(crate) fn into_parts(self) -> Vec<(String, Layout)> {
        self.parts
    }
}
