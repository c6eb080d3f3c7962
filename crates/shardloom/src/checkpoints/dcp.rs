//! `checkpoint import --from dcp` and `checkpoint export --to dcp`: PyTorch's distributed checkpoints.

use super::command::folder_to_write;
use super::contents::{self, MAX_PART_BYTES};
use super::resume::find_in;
use crate::floats::is_float;
use crate::run::optimizer_at;
use crate::{Error, Result, show};
use checkpoint::dcp::{self, Naming, Object, Part, Step, TensorSpec};
use checkpoint::storage::Disk;
use checkpoint::{Dtype, Label, Plan, Reader, Spec, State, Writer, moment_names};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tensor::models::{Config, Family};
use tensor::optim::{AdamW, Decay};

/// Bytes copied at once: each copy is a piece of the manifest.
const BLOCK: usize = 16 << 20;

/// What `checkpoint import --from dcp` is to do.
#[derive(Clone, Debug)]
pub struct DcpImport {
    pub dir: PathBuf,
    /// A Hugging Face folder, or a config.json.
    pub model: PathBuf,
    pub out: PathBuf,
    pub weights_only: bool,
}

/// Makes a checkpoint of a distributed one, which a run then goes on from.
pub fn import_dcp(import: &DcpImport) -> Result<String> {
    let (config_text, mut plain) = describe(&import.model)?;
    let config = Config::parse(&config_text)?;
    plain.push(("config.json".into(), config_text.into_bytes()));
    let (weights, _) = contents::tensors(&tensor::models::build(&config, 1)?);
    let source = Source::open(&import.dir, config, &weights)?;
    let step = match (source.state.step(), import.weights_only) {
        (Some(step), false) => Some(step),
        (_, true) => None,
        (None, false) => {
            let what =
                "it has no state of AdamW. With --weights-only its weights become a folder to start from";
            return Err(Error::file(&import.dir, what));
        }
    };
    if let Some(step) = step {
        let versions = BTreeMap::from([("shardloom".into(), env!("CARGO_PKG_VERSION").into())]);
        let state = State { run: source.settings(&weights)?, versions, ..State::at(step) };
        plain.push((State::FILE.into(), state.to_json()?));
    }
    let copies = source.copies(&weights, step.is_some())?;
    let out = folder_to_write(&import.out)?;
    let written = source.write(&copies, &out, &plain, step.unwrap_or(0));
    let bytes = written.inspect_err(|_| {
        // Half a checkpoint is of no use.
        let _ = checkpoint::recover(&Disk, &out);
    })?;
    let what =
        step.map_or("weights alone".into(), |step| format!("weights and AdamW's state after step {step}"));
    Ok(format!("wrote {}: {what}, {}", import.out.display(), show::bytes(bytes as usize).trim()))
}

/// Files by name.
type Files = Vec<(String, Vec<u8>)>;

/// A model's configuration, and the files that go along with it.
fn describe(model: &Path) -> Result<(String, Files)> {
    let is_folder = model.is_dir();
    let path = if is_folder { model.join("config.json") } else { model.to_path_buf() };
    let text = std::fs::read_to_string(&path).map_err(|e| Error::file(&path, e))?;
    Ok((text, if is_folder { contents::companions(model)? } else { vec![] }))
}

/// The distributed checkpoint, with what its numbers mean.
struct Source {
    state: dcp::State,
    config: Config,
}

/// A tensor to be copied: from which part of a weight, to which name.
struct Copy {
    name: String,
    part: Part,
    to: String,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl Source {
    fn open(dir: &Path, config: Config, weights: &[(String, Vec<usize>)]) -> Result<Self> {
        let wanted: Vec<_> = weights.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
        Ok(Source { state: dcp::State::open(dir, &wanted, &namings(&config, weights))?, config })
    }

    /// All that is to be copied. Weights that were frozen have no moments.
    fn copies(&self, weights: &[(String, Vec<usize>)], moments: bool) -> Result<Vec<Copy>> {
        let mut copies = Vec::new();
        for (name, shape) in weights {
            let mut parts = vec![(Part::Weight, name.clone())];
            if moments && self.state.is_trained(name) {
                let [mean, square] = moment_names(name);
                parts.extend([(Part::ExpAvg, mean), (Part::ExpAvgSq, square)]);
            }
            for (part, to) in parts {
                let dtype = self.state.dtype(name, part)?;
                if !is_float(dtype) {
                    return Err(Error::Config(format!("{to} is {dtype}; F32, BF16 and F16 are read")));
                }
                copies.push(Copy { name: name.clone(), part, to, dtype, shape: shape.clone() });
            }
        }
        Ok(copies)
    }

    /// Writes the checkpoint; its bytes of tensors.
    fn write(&self, copies: &[Copy], out: &Path, plain: &[(String, Vec<u8>)], step: u64) -> Result<u64> {
        let specs = |weights: bool| {
            let chosen = copies.iter().filter(move |copy| (copy.part == Part::Weight) == weights);
            chosen.map(|copy| -> Spec<'_> { (&copy.to, copy.dtype, &copy.shape) })
        };
        let plan = Plan::new(out, specs(true), specs(false), MAX_PART_BYTES)?;
        let bytes = plan.data_bytes();
        let writer = Writer::create(Arc::new(Disk), out, plan)?;
        let mut block = Vec::new();
        for copy in copies {
            self.state.verify(&copy.name, copy.part)?;
            self.copy(copy, &writer, &mut block)?;
        }
        let (receipt, draft) = writer.finish()?;
        draft.commit([receipt], plain, Label::now(step, 1))?;
        Ok(bytes)
    }

    fn copy(&self, copy: &Copy, writer: &Writer, block: &mut Vec<u8>) -> Result<()> {
        let row_bytes = copy.shape[1..].iter().product::<usize>() * copy.dtype.bytes();
        let bytes = copy.shape[0] * row_bytes;
        let head = self.turned_head(&copy.name);
        // Whole rows where they are in another order.
        let most = if head.is_some() { (BLOCK / row_bytes).max(1) * row_bytes } else { BLOCK };
        for start in (0..bytes).step_by(most) {
            block.resize(most.min(bytes - start), 0);
            match head {
                None => self.state.read_range(&copy.name, copy.part, start as u64, block)?,
                Some(head) => {
                    for (number, row) in block.chunks_exact_mut(row_bytes).enumerate() {
                        let theirs = (turned(start / row_bytes + number, head) * row_bytes) as u64;
                        self.state.read_range(&copy.name, copy.part, theirs, row)?;
                    }
                }
            }
            writer.write(&copy.to, start as u64, block)?;
        }
        Ok(())
    }

    /// Rows of a head, where torchtitan has the rows of this weight in another order: its Llama pairs neighbours in
    /// RoPE, ours and Hugging Face's pair the halves of a head.
    fn turned_head(&self, name: &str) -> Option<usize> {
        let is_turned = self.state.naming() > 0 && self.config.family == Family::Llama;
        let turns = name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight");
        (is_turned && turns).then_some(self.config.head_dim)
    }

    /// The optimizer's settings as a RUN.toml has them, for those who export this again; null where they are unknown.
    fn settings(&self, weights: &[(String, Vec<usize>)]) -> Result<Value> {
        let of = |is_chosen: fn(&[usize]) -> bool| weights.iter().find(|(_, shape)| is_chosen(shape));
        let (Some((matrix, _)), Some((vector, _))) =
            (of(|shape| shape.len() > 1), of(|shape| shape.len() == 1))
        else {
            return Ok(Value::Null);
        };
        let number = |name: &str, key: &str| -> Result<Option<f64>> {
            Ok(match self.state.setting(name, key)? {
                Some(Object::Float(value)) => Some(value),
                Some(Object::Int(value)) => Some(value as f64),
                _ => None,
            })
        };
        let (Some(lr), Some(eps), Some(decay)) =
            (number(matrix, "lr")?, number(matrix, "eps")?, number(matrix, "weight_decay")?)
        else {
            return Ok(Value::Null);
        };
        let betas = match self.state.setting(matrix, "betas")? {
            Some(Object::Tuple(betas) | Object::List(betas)) => match betas[..] {
                [Object::Float(first), Object::Float(second)] => [first, second],
                _ => return Ok(Value::Null),
            },
            _ => return Ok(Value::Null),
        };
        let which = if number(vector, "weight_decay")? == Some(decay) { "all" } else { "matrices" };
        let optimizer = json!({"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay, "decay": which});
        Ok(json!({ "optimizer": optimizer }))
    }
}

/// Row of torchtitan's weight that is row `row` of ours.
fn turned(row: usize, head: usize) -> usize {
    let (start, within) = (row / head * head, row % head);
    let (half, pair) = (within / (head / 2), within % (head / 2));
    start + 2 * pair + half
}

/// What programs call the weights: Hugging Face's names first, then torchtitan's, which have changed over time.
fn namings(config: &Config, weights: &[(String, Vec<usize>)]) -> Vec<Naming> {
    let naming = |rename: &dyn Fn(&str) -> String| Naming {
        names: weights.iter().map(|(name, _)| rename(name)).collect(),
        also: if config.tied { vec![rename("lm_head.weight")] } else { vec![] },
    };
    let mut namings = vec![naming(&str::to_string)];
    if matches!(config.family, Family::Llama | Family::Qwen3) {
        for qkv in ["attention.qkv_linear.w", "attention.w"] {
            for head in ["lm_head", "output"] {
                namings.push(naming(&|name| torchtitan_name(name, qkv, head)));
            }
        }
    }
    namings
}

fn torchtitan_name(name: &str, qkv: &str, head: &str) -> String {
    let [q, k, v] = ["q", "k", "v"].map(|letter| format!("{qkv}{letter}."));
    let parts = [
        ("model.embed_tokens.", "tok_embeddings."),
        ("model.layers.", "layers."),
        ("model.norm.", "norm."),
        ("lm_head.", &format!("{head}.")),
        ("self_attn.q_proj.", &q),
        ("self_attn.k_proj.", &k),
        ("self_attn.v_proj.", &v),
        ("self_attn.o_proj.", "attention.wo."),
        ("self_attn.q_norm.", "attention.q_norm."),
        ("self_attn.k_norm.", "attention.k_norm."),
        ("mlp.gate_proj.", "feed_forward.w1."),
        ("mlp.up_proj.", "feed_forward.w3."),
        ("mlp.down_proj.", "feed_forward.w2."),
        ("input_layernorm.", "attention_norm."),
        ("post_attention_layernorm.", "ffn_norm."),
    ];
    parts.iter().fold(name.to_string(), |name, (ours, theirs)| name.replace(ours, theirs))
}

/// What `checkpoint export --to dcp` is to do.
#[derive(Clone, Debug)]
pub struct DcpExport {
    pub dir: PathBuf,
    pub out: PathBuf,
    /// Over how many files tensors are spread; None: as many as ranks wrote the checkpoint.
    pub files: Option<usize>,
}

/// Where the bytes of a tensor to be exported come from.
enum Origin {
    /// A tensor of the checkpoint.
    Tensor(String),
    /// The same once more, for a tied weight.
    Again(String),
    /// AdamW's number of steps, which torch keeps with each weight.
    Steps,
}

/// Writes a checkpoint so that `torch.distributed.checkpoint` loads it, as `{"model": …, "optimizer": …}` of
/// `get_state_dict`.
pub fn export_dcp(export: &DcpExport) -> Result<String> {
    let reader = Reader::open(find_in(&export.dir)?)?;
    let out = std::path::absolute(&export.out).map_err(|e| Error::file(&export.out, e))?;
    if out.read_dir().is_ok_and(|mut entries| entries.next().is_some()) {
        let what = "it is there already, with files in it; name a new folder";
        return Err(Error::Config(format!("--out {}: {what}", export.out.display())));
    }
    let state =
        if reader.plain_names().any(|name| name == State::FILE) { Some(reader.state()?) } else { None };
    let (tensors, origins) = tensors_of(&reader)?;
    let (objects, note) = match &state {
        Some(state) => param_groups(&reader, state)?,
        None => (vec![], ""),
    };
    let again = Reader::open(reader.dir())?;
    let steps = (state.map_or(0, |state| state.optimizer_step) as f32).to_le_bytes();
    let read = |number: usize, start: u64, bytes: &mut [u8]| match &origins[number] {
        Origin::Tensor(name) => reader.read(name, start, bytes),
        Origin::Again(name) => again.read(name, start, bytes),
        Origin::Steps => {
            bytes.copy_from_slice(&steps[start as usize..][..bytes.len()]);
            Ok(())
        }
    };
    let files = export.files.unwrap_or(reader.manifest().ranks).max(1);
    let written = dcp::write(&Disk, &out, files, &tensors, &objects, read)?;
    // Every byte was read once, and is what was written: only now it may be taken for a checkpoint.
    reader.prove([reader.receipt()])?;
    written.commit()?;
    Ok(format!("wrote {}: {} tensors in {files} files{note}", export.out.display(), tensors.len()))
}

fn tensors_of(reader: &Reader) -> Result<(Vec<TensorSpec>, Vec<Origin>)> {
    let (mut specs, mut origins) = (Vec::new(), Vec::new());
    let mut put = |path: &[&str], dtype: Dtype, shape: &[usize], origin: Origin| {
        let path = path.iter().map(|step| Step::from(*step)).collect();
        specs.push(TensorSpec { path, dtype, shape: shape.to_vec() });
        origins.push(origin);
    };
    for (name, info) in reader.weights() {
        put(&["model", name], info.dtype, &info.shape, Origin::Tensor(name.to_string()));
    }
    // torch has a tied weight under both its names.
    let (embedding, head) = ("model.embed_tokens.weight", "lm_head.weight");
    if let (Ok(info), Err(_)) = (reader.info(embedding), reader.info(head)) {
        put(&["model", head], info.dtype, &info.shape, Origin::Again(embedding.to_string()));
    }
    for (weight, _) in reader.weights() {
        for (moment, name) in moment_names(weight).into_iter().zip(["exp_avg", "exp_avg_sq"]) {
            let Ok(info) = reader.info(&moment) else { continue };
            put(
                &["optimizer", "state", weight, name],
                info.dtype,
                &info.shape,
                Origin::Tensor(moment.clone()),
            );
        }
        if is_trained(reader, weight) {
            put(&["optimizer", "state", weight, "step"], Dtype::F32, &[], Origin::Steps);
        }
    }
    Ok((specs, origins))
}

fn is_trained(reader: &Reader, weight: &str) -> bool {
    reader.info(&moment_names(weight)[0]).is_ok()
}

type Objects = Vec<(Vec<Step>, Object)>;

/// The optimizer's settings as torch has them: one group, or one of matrices and one of the rest, which do not decay.
/// And what there is to say of them.
fn param_groups(reader: &Reader, state: &State) -> Result<(Objects, &'static str)> {
    let known = optimizer_at(&state.run, state.step)?;
    let note = match known {
        Some(_) => "",
        None => ". Its optimizer's settings are not known: those of a run that names none were written",
    };
    let (adamw, [first_lr, lr]) = match known {
        Some(known) => known,
        None => optimizer_at(&json!({"optimizer": {}}), state.step)?.expect("it is there"),
    };
    let trained = reader.weights().filter(|(name, _)| is_trained(reader, name));
    let (matrices, others): (Vec<_>, Vec<_>) =
        trained.partition(|(_, info)| adamw.decay == Decay::All || info.shape.len() > 1);
    let mut objects = Vec::new();
    for (number, (group, decay)) in [(matrices, adamw.weight_decay), (others, 0.0)].into_iter().enumerate() {
        if group.is_empty() {
            continue;
        }
        let names = group.iter().map(|(name, _)| Object::Text(name.to_string())).collect();
        for (key, value) in settings_of(&adamw, [first_lr, lr], decay, names) {
            let path = vec!["optimizer".into(), "param_groups".into(), number.into(), key.into()];
            objects.push((path, value));
        }
    }
    Ok((objects, note))
}

/// Every key that torch's AdamW has in a group, and `initial_lr`, which schedulers look for.
fn settings_of(
    adamw: &AdamW,
    [first_lr, lr]: [f64; 2],
    weight_decay: f64,
    params: Vec<Object>,
) -> [(&'static str, Object); 13] {
    let betas = Object::Tuple(adamw.betas.map(Object::Float).into());
    [
        ("lr", Object::Float(lr)),
        ("initial_lr", Object::Float(first_lr)),
        ("betas", betas),
        ("eps", Object::Float(adamw.eps)),
        ("weight_decay", Object::Float(weight_decay)),
        ("amsgrad", Object::Bool(false)),
        ("maximize", Object::Bool(false)),
        ("foreach", Object::None),
        ("capturable", Object::Bool(false)),
        ("differentiable", Object::Bool(false)),
        ("fused", Object::None),
        ("decoupled_weight_decay", Object::Bool(true)),
        ("params", Object::List(params)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_head_are_pairs_there_and_halves_here() {
        let theirs: Vec<usize> = (0..16).map(|row| turned(row, 8)).collect();
        assert_eq!(theirs, [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]);
    }
}
