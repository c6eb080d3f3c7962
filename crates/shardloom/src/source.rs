//! Where weights come from: a Hugging Face folder, or a seed.

use crate::checkpoints::SharedSource;
use crate::floats::{decode, is_float};
use crate::run::Load;
use checkpoint::folder::Weights;
use comm::Group;
use fsdp::{Error, Result, Source};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use tensor::{Init, Model};

/// Numbers read from a file at once.
const CHUNK: usize = 1 << 20;

/// Reads from a Hugging Face folder, each range on its own.
#[derive(Debug)]
pub struct Folder {
    weights: Weights,
}

impl Folder {
    /// Opens a folder and checks that it has every weight of the model in the model's shape.
    pub fn open(dir: &Path, model: &Model) -> crate::Result<Self> {
        let weights = Weights::open(dir)?;
        for spec in model.items.iter().flat_map(|item| &item.members) {
            let info = weights.info(&spec.name)?;
            if info.shape != spec.shape.dims() {
                let what =
                    format!("{} has shape {:?}; config.json asks for {}", spec.name, info.shape, spec.shape);
                return Err(crate::Error::file(dir, what));
            }
            if !is_float(info.dtype) {
                let what =
                    format!("{} is {}; weights are read from F32, BF16 and F16", spec.name, info.dtype);
                return Err(crate::Error::file(dir, what));
            }
        }
        Ok(Folder { weights })
    }
}

impl Source for Folder {
    fn read(&self, name: &str, start: usize, out: &mut [f32]) -> Result<()> {
        let fail = |e: checkpoint::Error| Error::Weight { name: name.into(), what: e.to_string() };
        let dtype = self.weights.info(name).map_err(fail)?.dtype;
        let size = dtype.bytes();
        let mut bytes = vec![0; CHUNK.min(out.len()) * size];
        for (number, values) in out.chunks_mut(CHUNK).enumerate() {
            let part = &mut bytes[..values.len() * size];
            let first = start + number * CHUNK;
            self.weights.read_range(name, (first * size) as u64, part).map_err(fail)?;
            decode(dtype, part, values);
        }
        Ok(())
    }
}

/// What a rank reads weights from, and how it gets them.
pub(crate) struct Supply {
    pub source: SharedSource,
    /// Whether rank 0 sends the others what they own.
    pub from_first: bool,
}

impl Supply {
    /// Each rank from its own folder, or all from rank 0's, as the ranks find out together.
    pub fn agree(load: Load, dir: &Path, model: &Model, ranks: &dyn Group) -> crate::Result<Supply> {
        let absent = ranks.rank() != 0 && (load == Load::First || load == Load::Auto && !dir.exists());
        let mine = if absent { Ok(None) } else { Folder::open(dir, model).map(Some) };
        let message = match &mine {
            Ok(Some(_)) => "+".to_string(),
            Ok(None) => String::new(),
            Err(error) => format!("!{error}"),
        };
        let all = ranks.exchange(message.as_bytes(), "who has the model's files")?;
        let mine = mine?;
        // Whose files are broken has said so; the others end as well.
        if let Some(rank) = all.iter().position(|said| said.first() == Some(&b'!')) {
            let what = String::from_utf8_lossy(&all[rank][1..]).into_owned();
            return Err(crate::Error::Rank { rank, what });
        }
        let from_first = all.iter().any(Vec::is_empty);
        let frozen = model.items.iter().any(|item| !item.trainable);
        if from_first && frozen {
            let what = "model.freeze: every rank saves its part of the frozen weights from the files, and some ranks have \
                        none; put the folder on every machine";
            return Err(crate::Error::Config(what.into()));
        }
        let source: SharedSource = match mine {
            Some(folder) => Arc::new(folder),
            None => Arc::new(Absent),
        };
        Ok(Supply { source, from_first })
    }
}

/// Stands for files that are on another rank's machine.
#[derive(Debug)]
struct Absent;

impl Source for Absent {
    fn read(&self, name: &str, _: usize, _: &mut [f32]) -> Result<()> {
        let what = "this rank does not have the model's files".to_string();
        Err(Error::Weight { name: name.into(), what })
    }
}

/// Makes weights up: each element is a function of the seed, the weight's name and the element's index alone,
/// so any rank and any thread makes the same numbers.
#[derive(Debug)]
pub struct Seeded {
    seed: u64,
    inits: HashMap<String, Init>,
    threads: usize,
}

impl Seeded {
    pub fn new(seed: u64, model: &Model) -> Self {
        let specs = model.items.iter().flat_map(|item| &item.members);
        let inits = specs.map(|spec| (spec.name.clone(), spec.init)).collect();
        let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
        Seeded { seed, inits, threads }
    }
}

/// A finaliser with good avalanche: neighbouring counters give unrelated numbers.
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Standard normal number `index` of a stream (Box–Muller; each index uses its own pair of uniforms).
fn normal(stream: u64, index: u64) -> f32 {
    let bits = mix(stream.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let u = ((bits >> 40) as f32 + 0.5) * (1.0 / (1u64 << 24) as f32);
    let v = (bits & 0xff_ffff) as f32 * (1.0 / (1u64 << 24) as f32);
    (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

impl Source for Seeded {
    fn read(&self, name: &str, start: usize, out: &mut [f32]) -> Result<()> {
        let unknown = || Error::Weight { name: name.into(), what: "the model has no such weight".into() };
        let std = match self.inits.get(name).ok_or_else(unknown)? {
            Init::Constant(value) => {
                out.fill(*value);
                return Ok(());
            }
            Init::Normal { std } => *std,
        };
        let stream = name.bytes().fold(mix(self.seed), |hash, byte| mix(hash ^ u64::from(byte)));
        let share = out.len().div_ceil(self.threads).max(1 << 16);
        std::thread::scope(|scope| {
            for (part, values) in out.chunks_mut(share).enumerate() {
                let first = (start + part * share) as u64;
                let fill = move || {
                    for (index, value) in values.iter_mut().enumerate() {
                        *value = std * normal(stream, first + index as u64);
                    }
                };
                scope.spawn(fill);
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_normal_numbers_whatever_the_range_asked_for() {
        let inits = HashMap::from([("w".to_string(), Init::Normal { std: 0.5 })]);
        let source = Seeded { seed: 7, inits, threads: 3 };
        let mut whole = vec![0.0; 200_000];
        source.read("w", 0, &mut whole).unwrap();
        let mut part = vec![0.0; 1000];
        source.read("w", 123_456, &mut part).unwrap();
        assert_eq!(part, whole[123_456..124_456]);
        let n = whole.len() as f64;
        let mean = whole.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        let var = whole.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
        let tail = whole.iter().filter(|x| x.abs() > 1.0).count() as f64 / n;
        assert!(mean.abs() < 0.005 && (var - 0.25).abs() < 0.005, "mean {mean} variance {var}");
        assert!((tail - 0.0455).abs() < 0.002, "beyond two sigma: {tail}");
    }
}
