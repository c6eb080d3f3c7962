//! A small checkpoint whose every byte follows from its step, for tests.

// Every test file that includes this uses a part of it.
#![allow(dead_code)]

use checkpoint::storage::{Disk, Storage};
use checkpoint::{Dtype, Label, Plan, Reader, Receipt, Result, State, Writer, moment_names};
use std::path::Path;
use std::sync::Arc;

/// Weights of odd sizes, one of them empty.
pub const WEIGHTS: [(&str, &[usize]); 4] =
    [("a.weight", &[7, 5]), ("b", &[3]), ("none", &[0, 4]), ("c", &[64, 33])];

pub fn disk() -> Arc<dyn Storage> {
    Arc::new(Disk)
}

/// Weights in bf16, moments in f32, in parts of at most 5000 bytes.
pub fn plan(dir: &Path) -> Plan {
    let weights = WEIGHTS.map(|(name, shape)| (name, Dtype::Bf16, shape));
    let moments: Vec<(String, &[usize])> =
        WEIGHTS.iter().flat_map(|(name, shape)| moment_names(name).map(|moment| (moment, *shape))).collect();
    let moments = moments.iter().map(|(name, shape)| (name.as_str(), Dtype::F32, *shape));
    Plan::new(dir, weights, moments, 5000).unwrap()
}

/// The bytes of a tensor at a step.
pub fn bytes_of(step: u64, name: &str, len: usize) -> Vec<u8> {
    let salt = name.bytes().fold(step.wrapping_mul(0x9e37_79b9_7f4a_7c15), |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    (0..len as u64)
        .map(|at| (salt.wrapping_add(at.wrapping_mul(0x2545_f491_4f6c_dd1d)) >> 32) as u8)
        .collect()
}

/// What writer `index` of `of` writes of `len` bytes.
pub fn share(index: usize, of: usize, len: usize) -> std::ops::Range<usize> {
    len * index / of..len * (index + 1) / of
}

/// Saves the checkpoint of a step as `writers` writers would.
pub fn save(storage: &Arc<dyn Storage>, dir: &Path, step: u64, writers: usize) -> Result<()> {
    let plan = plan(dir);
    let mut receipts: Vec<Receipt> = Vec::new();
    let mut drafts = Vec::new();
    let mut all = vec![Writer::create(storage.clone(), dir, plan.clone())?];
    for _ in 1..writers {
        all.push(Writer::join(storage.clone(), dir, plan.clone())?);
    }
    for (index, writer) in all.into_iter().enumerate() {
        for (_, layout) in plan.parts() {
            for (name, info) in layout.tensors() {
                let bytes = bytes_of(step, name, info.num_bytes() as usize);
                let mine = share(index, writers, bytes.len());
                writer.write(name, mine.start as u64, &bytes[mine])?;
            }
        }
        let (receipt, draft) = writer.finish()?;
        receipts.push(Receipt::from_bytes(&receipt.to_bytes()).unwrap());
        drafts.push(draft);
    }
    let plain = [
        ("config.json".to_string(), b"{}".to_vec()),
        (State::FILE.to_string(), State::at(step).to_json()?),
        ("additional_chat_templates/x.jinja".to_string(), b"hello".to_vec()),
    ];
    drafts.swap_remove(0).commit(receipts, &plain, Label::now(step, writers))
}

/// Reads it all as `readers` readers would, and proves it.
pub fn load(dir: &Path, readers: usize) -> Result<u64> {
    let reader = Reader::open(dir)?;
    let state = reader.state()?;
    let mut receipts = Vec::new();
    let names: Vec<(String, usize)> =
        reader.tensors().map(|(name, info, _)| (name.to_string(), info.num_bytes() as usize)).collect();
    for index in 0..readers {
        for (name, len) in &names {
            let mine = share(index, readers, *len);
            let mut out = vec![0; mine.len()];
            reader.read(name, mine.start as u64, &mut out)?;
            assert_eq!(out, bytes_of(state.step, name, *len)[mine], "{name} of step {}", state.step);
        }
        receipts.push(reader.receipt());
    }
    reader.prove(receipts)?;
    Ok(state.step)
}
