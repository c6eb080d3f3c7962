//! The readers, and inputs made along the structure of what they read.

use crate::Target;
use crate::made;
use crate::mutate::{Random, blindly, digits, number};
use checkpoint::dcp::{Checkpoint, Item, Metadata, Tensor};
use checkpoint::safetensors::File;
use checkpoint::{Manifest, Reader};
use std::path::{Path, PathBuf};

pub fn all() -> Vec<Box<dyn Target>> {
    vec![
        Box::new(Safetensors::new()),
        Box::new(Manifests::new()),
        Box::new(Pickles::new()),
        Box::new(Blobs::new()),
        Box::new(Folders::new()),
    ]
}

fn reference(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference").join(name)
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(reference(name)).unwrap()
}

/// Headers of safetensors files, with the data cut to what fits a small input.
struct Safetensors {
    dir: tempfile::TempDir,
    seeds: Vec<Vec<u8>>,
}

impl Safetensors {
    fn new() -> Self {
        let seeds = ["llama3/model.safetensors", "llama3/io.safetensors", "dcp/expected.safetensors"];
        Safetensors { dir: tempfile::tempdir().unwrap(), seeds: seeds.map(read).into() }
    }

    /// A small file from nothing: a header of a few entries, one of which may lie.
    fn made(random: &mut Random) -> Vec<u8> {
        let (mut header, mut at) = ("{".to_string(), 0);
        for entry in 0..random.below(5) {
            let dims: Vec<u64> = (0..random.below(4)).map(|_| random.below(5) as u64).collect();
            let bytes = dims.iter().product::<u64>() * 4;
            let comma = if entry > 0 { "," } else { "" };
            header += &format!(
                "{comma}\"t{entry}\":{{\"dtype\":\"F32\",\"shape\":{dims:?},\"data_offsets\":[{at},{}]}}",
                at + bytes
            );
            at += bytes;
        }
        let mut header = (header + "}").into_bytes();
        if random.one_in(2) {
            let from = random.below(header.len());
            digits(random, &mut header, from);
        }
        let length = if random.one_in(8) { number(random) } else { header.len() as u64 };
        [length.to_le_bytes().to_vec(), header, vec![0; at as usize]].concat()
    }
}

impl Target for Safetensors {
    fn name(&self) -> &'static str {
        "safetensors"
    }

    fn input(&mut self, random: &mut Random) -> Vec<u8> {
        if random.one_in(2) {
            return Self::made(random);
        }
        let seed = random.pick(&self.seeds);
        let header = 8 + u64::from_le_bytes(seed[..8].try_into().unwrap()) as usize;
        let mut head = seed[..header].to_vec();
        blindly(random, &mut head);
        if random.one_in(2) && head.len() > 8 {
            let length = head.len() as u64 - 8;
            head[..8].copy_from_slice(&length.to_le_bytes());
        }
        // Some keep their data, so that a changed header may still be taken.
        let rest = if random.one_in(16) { &seed[header..] } else { &[] };
        [&head, rest].concat()
    }

    fn read(&mut self, input: &[u8]) -> bool {
        let path = self.dir.path().join("f.safetensors");
        std::fs::write(&path, input).unwrap();
        let Ok(file) = File::open(&path) else { return false };
        for (name, info) in file.tensors() {
            let elements: usize = info.shape.iter().product();
            let bytes = file.read(name).unwrap();
            assert_eq!(bytes.len(), elements * info.dtype.bytes(), "{name}");
        }
        true
    }
}

/// Native checkpoints, by their manifest: alone, and with the files it describes.
struct Manifests {
    dir: tempfile::TempDir,
    seed: Vec<u8>,
}

impl Manifests {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        made::save(&made::disk(), &path, 3, 2).unwrap();
        let seed = std::fs::read(path.join("manifest.json")).unwrap();
        Manifests { dir, seed }
    }
}

/// Gives a changed manifest the checksum it should have, so that more than the checksum is tried.
fn mend(json: &mut Vec<u8>) {
    let key = b"\"crc32\":";
    let Some(at) = json.windows(key.len()).rposition(|window| window == key) else { return };
    json.truncate(at + key.len());
    json.extend(b"0}");
    let crc32 = crc32fast::hash(json);
    json.truncate(at + key.len());
    json.extend(format!("{crc32}}}").bytes());
}

impl Target for Manifests {
    fn name(&self) -> &'static str {
        "manifest"
    }

    fn input(&mut self, random: &mut Random) -> Vec<u8> {
        let mut json = self.seed.clone();
        match random.below(3) {
            0 => blindly(random, &mut json),
            1 if random.one_in(4) => {
                let (key, name) = (b"\"files\":{\"", *random.pick(&["../", "/", "a/../../", "./", "x/"]));
                let at = json.windows(key.len()).position(|window| window == key).unwrap() + key.len();
                json.splice(at..at, name.bytes());
            }
            _ => {
                for _ in 0..=random.below(2) {
                    let from = random.below(json.len());
                    digits(random, &mut json, from);
                }
            }
        }
        if random.below(8) > 0 {
            mend(&mut json);
        }
        json
    }

    fn read(&mut self, input: &[u8]) -> bool {
        let dir = self.dir.path().join("c");
        let path = dir.join("manifest.json");
        let Ok(manifest) = Manifest::parse(&path, input) else { return false };
        // By the letters of the name, not as the reader judges it. Two dots within a part are a name like any other.
        let leads_outside = |name: &String| name.split('/').any(|part| ["", ".", ".."].contains(&part));
        assert!(!manifest.files.keys().any(leads_outside), "{:?}", manifest.files.keys());
        std::fs::write(&path, input).unwrap();
        let Ok(reader) = Reader::open(&dir) else { return false };
        let _ = (reader.verify(), reader.state());
        for (name, info, _) in reader.tensors() {
            let mut bytes = vec![0; info.num_bytes() as usize];
            let _ = reader.read(name, 0, &mut bytes);
        }
        let _ = reader.prove([reader.receipt()]);
        true
    }
}

/// `.metadata`, instruction by instruction.
struct Pickles {
    seeds: Vec<Vec<u8>>,
    parts: Vec<Vec<Vec<u8>>>,
}

/// How the argument of a pickle's instruction is laid out.
fn argument_bytes(code: u8, rest: &[u8]) -> Option<usize> {
    let number = |len: usize| {
        let bytes = rest.get(..len)?;
        Some(bytes.iter().rev().fold(0usize, |number, byte| number << 8 | usize::from(*byte)))
    };
    Some(match code {
        b'K' | b'h' | b'q' | 0x80 => 1,
        b'M' => 2,
        b'J' | b'j' | b'r' => 4,
        b'G' | 0x95 => 8,
        b'U' | b'C' | 0x8c | 0x8a => 1 + number(1)?,
        b'T' | b'X' | b'B' | 0x8b => 4 + number(4)?,
        0x8d | 0x8e | 0x96 => 8 + number(8)?,
        b'c' => {
            let mut lines = rest.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1);
            lines.nth(1)?
        }
        _ => 0,
    })
}

fn instructions(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut parts = Vec::new();
    while let Some((&code, rest)) = bytes.split_first() {
        let len = 1 + argument_bytes(code, rest).unwrap_or(rest.len()).min(rest.len());
        parts.push(bytes[..len].to_vec());
        bytes = &bytes[len..];
    }
    parts
}

/// Instructions that real files do not have, or not in such numbers.
fn instruction(random: &mut Random) -> Vec<u8> {
    const BARE: &[u8] = b"(.012NQRabde}l]st)u\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98io";
    const NAMES: [&str; 6] = [
        "cos\nsystem\n",
        "cbuiltins\neval\n",
        "ctorch\nSize\n",
        "ctorch.distributed.checkpoint.metadata\nMetadata\n",
        "ccollections\nOrderedDict\n",
        "ctorch\nfloat32\n",
    ];
    match random.below(6) {
        0 => random.pick(&NAMES).as_bytes().to_vec(),
        1 => [&[*random.pick(b"hqK")][..], &[random.next() as u8]].concat(),
        2 => [&[*random.pick(b"jrJXTB\x8b")][..], &(number(random) as u32).to_le_bytes()].concat(),
        3 => [&[*random.pick(b"\x8d\x8e\x95\x96G")][..], &number(random).to_le_bytes()].concat(),
        _ => vec![*random.pick(BARE)],
    }
}

/// Another number for a small one wherever it stands, so that what says it twice still agrees with itself.
fn everywhere(random: &mut Random, parts: &mut [Vec<u8>]) {
    let numbers: Vec<Vec<u8>> = parts.iter().filter(|part| matches!(part[0], b'K' | b'M')).cloned().collect();
    if numbers.is_empty() {
        return;
    }
    let (old, new) = (random.pick(&numbers), number(random) >> random.below(64));
    let new = [&[0x8a, 8][..], &new.to_le_bytes()].concat();
    parts.iter_mut().filter(|part| *part == old).for_each(|part| *part = new.clone());
}

impl Pickles {
    fn new() -> Self {
        let seeds = ["dcp/boxes/.metadata", "dcp/app-tied/.metadata", "dcp/accelerate/optimizer_0/.metadata"];
        let seeds: Vec<Vec<u8>> = seeds.map(read).into();
        let parts = seeds.iter().map(|seed| instructions(seed)).collect();
        Pickles { seeds, parts }
    }

    /// A real pickle with some instructions changed.
    fn changed(&self, random: &mut Random) -> Vec<u8> {
        let mut parts = random.pick(&self.parts).clone();
        for _ in 0..=random.below(3) {
            let (at, other) = (random.below(parts.len()), random.below(parts.len()));
            match random.below(7) {
                0 => everywhere(random, &mut parts),
                1 => drop(parts.remove(at)),
                2 => parts.insert(at, instruction(random)),
                3 => parts[at] = instruction(random),
                4 => parts.swap(at, other),
                5 => parts[at] = parts[other].clone(),
                _ => {
                    let argument = parts[at].len() - 1;
                    let value = number(random).to_le_bytes();
                    let width = argument.min(8);
                    parts[at][1..1 + width].copy_from_slice(&value[..width]);
                }
            }
            if parts.is_empty() {
                break;
            }
        }
        parts.concat()
    }

    /// A program from nothing.
    fn made(random: &mut Random) -> Vec<u8> {
        let count = random.below(64);
        let body: Vec<u8> = (0..count).flat_map(|_| instruction(random)).collect();
        [&[0x80, 2 + random.below(4) as u8][..], &body, b"."].concat()
    }
}

impl Target for Pickles {
    fn name(&self) -> &'static str {
        "dcp-metadata"
    }

    fn input(&mut self, random: &mut Random) -> Vec<u8> {
        match random.below(4) {
            0 => Self::made(random),
            1 => {
                let mut bytes = random.pick(&self.seeds).clone();
                blindly(random, &mut bytes);
                bytes
            }
            _ => self.changed(random),
        }
    }

    fn read(&mut self, input: &[u8]) -> bool {
        match Metadata::parse(Path::new(".metadata"), input) {
            Ok(metadata) => {
                check_metadata(&metadata);
                true
            }
            Err(_) => false,
        }
    }
}

/// What has been taken is sound: names of files lead nowhere else, pieces lie within their tensors.
fn check_metadata(metadata: &Metadata) {
    assert!(metadata.files.iter().all(|name| !name.contains('/') && name != ".." && name != "."));
    for (key, item) in &metadata.items {
        let Item::Tensor(tensor) = item else { continue };
        for piece in &tensor.pieces {
            for (dim, &size) in tensor.shape.iter().enumerate() {
                assert!(piece.offsets[dim] + piece.sizes[dim] <= size, "{key}");
            }
            assert!(piece.location.file < metadata.files.len(), "{key}");
        }
    }
}

/// What `torch.save` makes of a tensor.
struct Blobs {
    seeds: Vec<Vec<u8>>,
}

impl Blobs {
    fn new() -> Self {
        let checkpoint = Checkpoint::open(reference("dcp/boxes")).unwrap();
        let files: Vec<Vec<u8>> =
            checkpoint.metadata().files.iter().map(|name| read(&format!("dcp/boxes/{name}"))).collect();
        let mut seeds = Vec::new();
        for item in checkpoint.metadata().items.values() {
            let Item::Tensor(tensor) = item else { continue };
            for location in tensor.pieces.iter().map(|piece| piece.location) {
                let range = location.start as usize..(location.start + location.bytes) as usize;
                seeds.push(files[location.file][range].to_vec());
            }
        }
        Blobs { seeds }
    }

    /// Changes the pickle within the archive and mends its checksum, so that the change is seen.
    fn repickled(seed: &[u8], random: &mut Random) -> Vec<u8> {
        let mut bytes = seed.to_vec();
        let find = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).position(|window| window == what);
        // The first entry, whose bytes start with the protocol.
        let (Some(start), Some(central)) = (find(&bytes, b"\x80\x02c"), find(&bytes, b"PK\x01\x02")) else {
            return bytes;
        };
        let len = u32::from_le_bytes(bytes[central + 24..][..4].try_into().unwrap()) as usize;
        for _ in 0..=random.below(3) {
            let at = start + random.below(len);
            bytes[at] = match random.below(3) {
                0 => number(random) as u8,
                1 => bytes[start + random.below(len)],
                _ => bytes[at] ^ 1 << random.below(8),
            };
        }
        let crc32 = crc32fast::hash(&bytes[start..start + len]).to_le_bytes();
        bytes[central + 16..central + 20].copy_from_slice(&crc32);
        bytes
    }

    /// Changes numbers of the zip's own records.
    fn rezipped(seed: &[u8], random: &mut Random) -> Vec<u8> {
        let mut bytes = seed.to_vec();
        let records: Vec<usize> =
            bytes.windows(2).enumerate().filter(|(_, two)| *two == b"PK").map(|(at, _)| at).collect();
        for _ in 0..=random.below(3) {
            let record = *random.pick(&records);
            if random.one_in(3) && bytes.len() > record + 28 {
                // Both sizes of an entry alike.
                let size = (number(random) as u32).to_le_bytes();
                bytes[record + 20..record + 28].copy_from_slice(&[size, size].concat());
                continue;
            }
            let at = record + 2 + random.below(54);
            let width = *random.pick(&[1usize, 2, 4, 8]);
            let end = (at + width).min(bytes.len());
            if at < end {
                bytes[at..end].copy_from_slice(&number(random).to_le_bytes()[..end - at]);
            }
        }
        bytes
    }
}

impl Target for Blobs {
    fn name(&self) -> &'static str {
        "dcp-blob"
    }

    fn input(&mut self, random: &mut Random) -> Vec<u8> {
        let seed = random.pick(&self.seeds);
        match random.below(3) {
            0 => {
                let mut bytes = seed.clone();
                blindly(random, &mut bytes);
                bytes
            }
            1 => Self::repickled(seed, random),
            _ => Self::rezipped(seed, random),
        }
    }

    fn read(&mut self, input: &[u8]) -> bool {
        let Ok(tensor) = Tensor::parse(Path::new("blob"), "key", input) else { return false };
        let elements: usize = tensor.shape.iter().product();
        assert!(tensor.start as usize + elements * tensor.dtype.bytes() <= input.len(), "{tensor:?}");
        true
    }
}

/// Whole folders: `.metadata` and the file it points into, each changed by itself.
struct Folders {
    dir: tempfile::TempDir,
    pickles: Pickles,
    data: Vec<u8>,
}

const FOLDER: &str = "dcp/boxes";

impl Folders {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(reference(FOLDER).join("__0_0.distcp"), dir.path().join("__0_0.distcp")).unwrap();
        let seeds = vec![read("dcp/boxes/.metadata")];
        let parts = seeds.iter().map(|seed| instructions(seed)).collect();
        Folders { dir, pickles: Pickles { seeds, parts }, data: read("dcp/boxes/__1_0.distcp") }
    }
}

impl Target for Folders {
    fn name(&self) -> &'static str {
        "dcp-folder"
    }

    /// Metadata, then data, with the length of the first before it.
    fn input(&mut self, random: &mut Random) -> Vec<u8> {
        let mut data = self.data.clone();
        let metadata = match random.one_in(2) {
            true => {
                blindly(random, &mut data);
                self.pickles.seeds[0].clone()
            }
            false => self.pickles.changed(random),
        };
        [(metadata.len() as u64).to_le_bytes().to_vec(), metadata, data].concat()
    }

    fn read(&mut self, input: &[u8]) -> bool {
        let (length, rest) = input.split_at(8);
        let (metadata, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
        std::fs::write(self.dir.path().join(".metadata"), metadata).unwrap();
        std::fs::write(self.dir.path().join("__1_0.distcp"), data).unwrap();
        let Ok(checkpoint) = Checkpoint::open(self.dir.path()) else { return false };
        for (key, item) in &checkpoint.metadata().items {
            let Item::Tensor(tensor) = item else {
                let _ = checkpoint.number(key);
                continue;
            };
            let _ = checkpoint.verify(key);
            if let Ok(bytes) = checkpoint.read(key) {
                let elements: usize = tensor.shape.iter().product();
                assert_eq!(bytes.len(), elements * checkpoint.dtype(key).unwrap().bytes(), "{key}");
            }
        }
        true
    }
}
