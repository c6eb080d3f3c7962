//! The list of what a checkpoint holds, with sizes and checksums. It is written last: a folder without one is not a
//! checkpoint.
//!
//! Checksums are CRC-32: the sum of a range follows from the sums of its parts, so that ranks which each read a part of
//! what was written as one piece can prove it together.

use crate::safetensors::TensorInfo;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Component, Path};

/// The manifest's name within its folder.
pub const MANIFEST: &str = "manifest.json";

const FORMAT: &str = "shardloom checkpoint";
const VERSION: u32 = 1;

/// Far above any real one: a piece takes some twenty bytes.
const MAX_BYTES: u64 = 1 << 30;

/// A stretch of a tensor that was written at once: its length, and the checksum of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u64, u32)", into = "(u64, u32)")]
pub struct Piece {
    pub bytes: u64,
    pub crc32: u32,
}

impl From<(u64, u32)> for Piece {
    fn from((bytes, crc32): (u64, u32)) -> Self {
        Piece { bytes, crc32 }
    }
}

impl From<Piece> for (u64, u32) {
    fn from(piece: Piece) -> Self {
        (piece.bytes, piece.crc32)
    }
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    pub bytes: u64,
    /// Of the bytes that belong to no tensor: all of a plain file, length and header of a safetensors file.
    pub crc32: u32,
    /// Of a safetensors file: the pieces of each tensor, one after another without holes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tensors: BTreeMap<String, Vec<Piece>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u32,
    /// Who wrote it, as in "shardloom 0.1.0".
    pub writer: String,
    /// Steps trained.
    pub step: u64,
    /// When it was written, in milliseconds since 1970.
    pub saved_unix_ms: u64,
    /// How many ranks wrote it.
    pub ranks: usize,
    /// By name, relative to the folder.
    pub files: BTreeMap<String, Entry>,
    /// Of this manifest with a zero here.
    crc32: u32,
}

/// What a manifest says beside its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    pub writer: String,
    pub step: u64,
    pub saved_unix_ms: u64,
    pub ranks: usize,
}

impl Label {
    /// Written now, by this version.
    pub fn now(step: u64, ranks: usize) -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Label {
            writer: format!("shardloom {}", env!("CARGO_PKG_VERSION")),
            step,
            saved_unix_ms: since.map_or(0, |since| since.as_millis() as u64),
            ranks,
        }
    }
}

impl Manifest {
    pub(crate) fn new(label: Label, files: BTreeMap<String, Entry>) -> Self {
        let Label { writer, step, saved_unix_ms, ranks } = label;
        let (format, version) = (FORMAT.to_string(), VERSION);
        Manifest { format, version, writer, step, saved_unix_ms, ranks, files, crc32: 0 }
    }

    /// As the file has it, with its own checksum.
    pub fn to_json(&self, path: &Path) -> Result<Vec<u8>> {
        Manifest { crc32: self.sum(path)?, ..self.clone() }.as_it_is(path)
    }

    /// The checksum it should have.
    fn sum(&self, path: &Path) -> Result<u32> {
        Ok(crc32fast::hash(&Manifest { crc32: 0, ..self.clone() }.as_it_is(path)?))
    }

    fn as_it_is(&self, path: &Path) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|e| Error::format(path, format!("it cannot be written: {e}")))
    }

    /// Reads the manifest of a folder.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(MANIFEST);
        let size = match std::fs::metadata(&path) {
            Ok(found) => found.len(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let hint = match dir.is_dir() {
                    true => ": this is not a checkpoint, or one whose writing was interrupted",
                    false => ": there is no such folder",
                };
                return Err(Error::Missing { path: dir.into(), key: MANIFEST.into(), hint: hint.into() });
            }
            Err(e) => return Err(Error::io(&path, "look at")(e)),
        };
        if size > MAX_BYTES {
            return Err(Error::format(&path, format!("{size} bytes are too many for a manifest")));
        }
        let json = std::fs::read(&path).map_err(Error::io(&path, "read"))?;
        Self::parse(&path, &json)
    }

    /// Parses and checks what can be checked without looking at the files. `path` appears in errors.
    pub fn parse(path: &Path, json: &[u8]) -> Result<Self> {
        let manifest = serde_json::from_slice::<Manifest>(json)
            .map_err(|e| Error::format(path, format!("not the manifest of a checkpoint: {e}")))?;
        if manifest.format != FORMAT {
            return Err(Error::format(path, format!("its format is {:?}, not {FORMAT:?}", manifest.format)));
        }
        if manifest.version != VERSION {
            let what = format!("its version is {}; this program reads {VERSION}", manifest.version);
            return Err(Error::format(path, what));
        }
        if manifest.sum(path)? != manifest.crc32 {
            return Err(Error::format(path, "damaged: it does not have the checksum it claims"));
        }
        for name in manifest.files.keys() {
            check_name(path, name)?;
        }
        Ok(manifest)
    }

    /// Bytes of all files.
    pub fn total_bytes(&self) -> u64 {
        self.files.values().fold(0, |sum, entry| sum.saturating_add(entry.bytes))
    }
}

/// Names lead to files in the folder, or in one within it, and nowhere else.
fn check_name(path: &Path, name: &str) -> Result<()> {
    let normal = |part: Component<'_>| matches!(part, Component::Normal(_));
    let plain = Path::new(name).components().all(normal) && !name.ends_with('/') && !name.contains("//");
    if plain && !name.is_empty() && name != MANIFEST {
        return Ok(());
    }
    Err(Error::entry(path, name, "not the name of a file in this folder"))
}

/// Whether pieces are exactly a tensor's bytes.
pub(crate) fn check_pieces(path: &Path, name: &str, info: &TensorInfo, pieces: &[Piece]) -> Result<()> {
    let sum = pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.bytes));
    if sum == Some(info.num_bytes()) {
        return Ok(());
    }
    let sum = sum.map_or("too many".to_string(), |sum| sum.to_string());
    let what = format!("the manifest's pieces have {sum} bytes, the tensor {}", info.num_bytes());
    Err(Error::entry(path, name, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let pieces = vec![Piece { bytes: 8, crc32: 7 }, Piece { bytes: 4, crc32: 9 }];
        let tensors = BTreeMap::from([("w".to_string(), pieces)]);
        let entry = |tensors| Entry { bytes: 99, crc32: 5, tensors };
        let files = [("a.json", entry(BTreeMap::new())), ("m.safetensors", entry(tensors))];
        Manifest::new(Label::now(3, 2), files.map(|(name, entry)| (name.to_string(), entry)).into())
    }

    #[test]
    fn it_reads_as_it_was_written_and_a_changed_byte_is_found() {
        let path = Path::new("manifest.json");
        let json = manifest().to_json(path).unwrap();
        let back = Manifest::parse(path, &json).unwrap();
        assert_eq!((back.step, back.ranks, &back.files), (3, 2, &manifest().files));
        for at in 0..json.len() {
            let mut bytes = json.clone();
            bytes[at] ^= 1;
            assert!(Manifest::parse(path, &bytes).is_err(), "byte {at}");
        }
        assert!(Manifest::parse(path, &json[..json.len() - 1]).is_err());
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for name in ["../x", "/etc/passwd", "..", ".", "", "a/../../b", "manifest.json", "a/", "./a"] {
            let mut lying = manifest();
            let entry = lying.files.remove("a.json").unwrap();
            lying.files.insert(name.into(), entry);
            let json = lying.to_json(Path::new("m")).unwrap();
            let text = Manifest::parse(Path::new("m"), &json).unwrap_err().to_string();
            assert!(text.contains("not the name of a file"), "{name}: {text}");
        }
    }
}
