//! Zip archives as `torch.save` writes them: entries stored as they are, found through the directory at the end.

use super::region::Region;
use std::io;

type Read<T> = std::result::Result<T, String>;

const LOCAL: u32 = 0x0403_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END64: u32 = 0x0606_4b50;
const LOCATOR64: u32 = 0x0706_4b50;

const LOCAL_BYTES: usize = 30;
const CENTRAL_BYTES: usize = 46;
const END_BYTES: usize = 22;
const END64_BYTES: usize = 56;
const LOCATOR64_BYTES: usize = 20;

/// A tensor's archive has some seven entries.
const MAX_DIRECTORY_BYTES: u64 = 1 << 20;

/// What the directory says of one entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub name: String,
    pub crc32: u32,
    pub bytes: u64,
    /// Where its local header starts.
    header: u64,
}

/// Numbers at fixed places of a header, which the caller has made long enough.
struct Header<'a>(&'a [u8]);

impl Header<'_> {
    fn number(&self, at: usize, len: usize) -> u64 {
        self.0[at..at + len].iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
    }

    fn u16(&self, at: usize) -> u16 {
        self.number(at, 2) as u16
    }

    fn u32(&self, at: usize) -> u32 {
        self.number(at, 4) as u32
    }

    fn u64(&self, at: usize) -> u64 {
        self.number(at, 8)
    }
}

fn failed(e: io::Error) -> String {
    format!("it cannot be read: {e}")
}

/// The archive's entries.
pub(crate) fn directory(archive: &Region<'_>) -> Read<Vec<Entry>> {
    let (start, size) = place_of_directory(archive)?;
    if size > MAX_DIRECTORY_BYTES {
        return Err(format!("its zip directory would have {size} bytes"));
    }
    if start.checked_add(size).is_none_or(|end| end > archive.len()) {
        return Err("its zip directory leaves the archive".into());
    }
    let mut bytes = vec![0; size as usize];
    archive.read(start, &mut bytes).map_err(failed)?;
    let (mut rest, mut entries) = (&bytes[..], Vec::new());
    while !rest.is_empty() {
        let (entry, taken) = parse_entry(rest)?;
        entries.push(entry);
        rest = &rest[taken..];
    }
    Ok(entries)
}

/// Where the directory starts, and its bytes.
fn place_of_directory(archive: &Region<'_>) -> Read<(u64, u64)> {
    let no_zip = || "not a zip archive, or a truncated one".to_string();
    let end_at = archive.len().checked_sub(END_BYTES as u64).ok_or_else(no_zip)?;
    let mut end = [0; END_BYTES];
    archive.read(end_at, &mut end).map_err(failed)?;
    let end = Header(&end);
    if end.u32(0) != END || end.u16(20) != 0 {
        return Err(no_zip());
    }
    let small = (u64::from(end.u32(16)), u64::from(end.u32(12)));
    // torch always adds the records for large archives too; they hold where these are full.
    if small.0 != u64::from(u32::MAX) && small.1 != u64::from(u32::MAX) {
        return Ok(small);
    }
    let locator_at = end_at.checked_sub(LOCATOR64_BYTES as u64).ok_or_else(no_zip)?;
    let mut locator = [0; LOCATOR64_BYTES];
    archive.read(locator_at, &mut locator).map_err(failed)?;
    let locator = Header(&locator);
    let end64_at = locator.u64(8);
    let fits = end64_at.checked_add(END64_BYTES as u64).is_some_and(|end| end <= locator_at);
    if locator.u32(0) != LOCATOR64 || !fits {
        return Err(no_zip());
    }
    let mut end64 = [0; END64_BYTES];
    archive.read(end64_at, &mut end64).map_err(failed)?;
    let end64 = Header(&end64);
    if end64.u32(0) != END64 {
        return Err(no_zip());
    }
    Ok((end64.u64(48), end64.u64(40)))
}

/// The entry at the start of `bytes`, and how many of them it takes.
fn parse_entry(bytes: &[u8]) -> Read<(Entry, usize)> {
    let broken = || "its zip directory is broken".to_string();
    if bytes.len() < CENTRAL_BYTES {
        return Err(broken());
    }
    let header = Header(bytes);
    if header.u32(0) != CENTRAL {
        return Err(broken());
    }
    let [name, extra, comment] = [28, 30, 32].map(|at| usize::from(header.u16(at)));
    let taken = CENTRAL_BYTES + name + extra + comment;
    let (name_end, extra_end) = (CENTRAL_BYTES + name, CENTRAL_BYTES + name + extra);
    if bytes.len() < taken {
        return Err(broken());
    }
    let name = std::str::from_utf8(&bytes[CENTRAL_BYTES..name_end]).map_err(|_| broken())?;
    if header.u16(10) != 0 {
        return Err(format!("its entry {name:?} is compressed; torch.save stores entries as they are"));
    }
    if header.u16(8) & 1 != 0 {
        return Err(format!("its entry {name:?} is encrypted"));
    }
    let [packed, unpacked, at] = [20, 24, 42].map(|at| header.u32(at));
    let mut large = large_numbers(&bytes[name_end..extra_end]);
    let mut number = |small: u32| match small {
        u32::MAX => large.next().ok_or_else(broken),
        _ => Ok(u64::from(small)),
    };
    // In this order, each only where the small field is full.
    let (unpacked, packed, at) = (number(unpacked)?, number(packed)?, number(at)?);
    if packed != unpacked {
        return Err(broken());
    }
    let entry = Entry { name: name.to_string(), crc32: header.u32(16), bytes: unpacked, header: at };
    Ok((entry, taken))
}

/// The 64-bit numbers of an extra field.
fn large_numbers(mut extra: &[u8]) -> impl Iterator<Item = u64> {
    let mut found: &[u8] = &[];
    while extra.len() >= 4 {
        let header = Header(extra);
        let (id, len) = (header.u16(0), usize::from(header.u16(2)));
        let Some(field) = extra.get(4..4 + len) else { break };
        if id == 1 {
            found = field;
        }
        extra = &extra[4 + len..];
    }
    found.chunks_exact(8).map(|bytes| Header(bytes).u64(0))
}

impl Entry {
    /// Where its bytes start. All of them lie within the archive.
    pub fn start(&self, archive: &Region<'_>) -> Read<u64> {
        let leaves = || format!("its entry {:?} leaves the archive", self.name);
        let fits = self.header.checked_add(LOCAL_BYTES as u64).is_some_and(|end| end <= archive.len());
        if !fits {
            return Err(leaves());
        }
        let mut header = [0; LOCAL_BYTES];
        archive.read(self.header, &mut header).map_err(failed)?;
        let header = Header(&header);
        if header.u32(0) != LOCAL {
            return Err(format!("its entry {:?} is not where the zip directory says", self.name));
        }
        let names = u64::from(header.u16(26)) + u64::from(header.u16(28));
        let start = self.header + LOCAL_BYTES as u64 + names;
        match start.checked_add(self.bytes) {
            Some(end) if end <= archive.len() => Ok(start),
            _ => Err(leaves()),
        }
    }
}

/// An archive to be written, whose entries' sizes are known and whose contents may come later.
///
/// Small entries are given whole. One large entry, at a place aligned for memory maps, is left open: its bytes are
/// written by whoever has them, and its checksum goes into [`Archive::head`] and [`Archive::tail`] afterwards.
#[derive(Debug)]
pub(crate) struct Archive {
    small: Vec<(String, Vec<u8>)>,
    large: Option<(String, u64)>,
}

/// Entries start at multiples of this, as torch's do.
const ALIGN: u64 = 64;

impl Archive {
    pub fn new(small: Vec<(String, Vec<u8>)>, large: Option<(String, u64)>) -> Self {
        Archive { small, large }
    }

    /// Everything before the large entry's bytes.
    pub fn head(&self, crc32: u32) -> Vec<u8> {
        let mut out = Vec::new();
        for (name, bytes) in &self.small {
            local(&mut out, name, crc32fast::hash(bytes), bytes.len() as u64, 0);
            out.extend(bytes);
        }
        if let Some((name, bytes)) = &self.large {
            let unpadded = out.len() as u64 + (LOCAL_BYTES + name.len() + 4) as u64;
            let padding = unpadded.next_multiple_of(ALIGN) - unpadded;
            local(&mut out, name, crc32, *bytes, padding as usize + 4);
        }
        out
    }

    /// Everything after the large entry's bytes.
    pub fn tail(&self, crc32: u32) -> Vec<u8> {
        let mut out = Vec::new();
        let mut at = 0;
        for (name, bytes) in &self.small {
            central(&mut out, name, crc32fast::hash(bytes), bytes.len() as u64, at);
            at += (LOCAL_BYTES + name.len() + bytes.len()) as u64;
        }
        let mut start = at;
        if let Some((name, bytes)) = &self.large {
            central(&mut out, name, crc32, *bytes, at);
            start = self.head(0).len() as u64 + bytes;
        }
        let (count, size) = (self.small.len() + usize::from(self.large.is_some()), out.len());
        out.extend(END.to_le_bytes());
        out.extend([0; 4]);
        out.extend([(count as u16).to_le_bytes(); 2].concat());
        out.extend((size as u32).to_le_bytes());
        out.extend((start as u32).to_le_bytes());
        out.extend([0; 2]);
        out
    }
}

/// Version needed, flags (names are UTF-8), method: stored.
const COMMON: [u16; 3] = [20, 0x0800, 0];

fn shared_fields(out: &mut Vec<u8>, name: &str, crc32: u32, bytes: u64, extra: usize) {
    out.extend(COMMON.map(u16::to_le_bytes).concat());
    // The first moment zip can say: midnight, 1 January 1980.
    out.extend([0, 0, 0x21, 0]);
    out.extend(crc32.to_le_bytes());
    out.extend([(bytes as u32).to_le_bytes(); 2].concat());
    out.extend([name.len() as u16, extra as u16].map(u16::to_le_bytes).concat());
}

fn local(out: &mut Vec<u8>, name: &str, crc32: u32, bytes: u64, extra: usize) {
    out.extend(LOCAL.to_le_bytes());
    shared_fields(out, name, crc32, bytes, extra);
    out.extend(name.as_bytes());
    if extra > 0 {
        out.extend(b"FB");
        out.extend((extra as u16 - 4).to_le_bytes());
        out.resize(out.len() + extra - 4, b'Z');
    }
}

fn central(out: &mut Vec<u8>, name: &str, crc32: u32, bytes: u64, at: u64) {
    out.extend(CENTRAL.to_le_bytes());
    out.extend([20, 0]);
    shared_fields(out, name, crc32, bytes, 0);
    out.extend([0; 10]);
    out.extend((at as u32).to_le_bytes());
    out.extend(name.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_read_as_it_was_written() {
        let small =
            vec![("a/data.pkl".to_string(), b"pickle".to_vec()), ("a/version".into(), b"3\n".to_vec())];
        let data = b"0123456789";
        let draft = Archive::new(small, Some(("a/data/0".into(), data.len() as u64)));
        let crc32 = crc32fast::hash(data);
        let bytes = [draft.head(crc32), data.to_vec(), draft.tail(crc32)].concat();
        let whole = &bytes[..];
        let archive = Region::new(&whole, 0, bytes.len() as u64);
        let entries = directory(&archive).unwrap();
        let named: Vec<_> = entries.iter().map(|entry| (entry.name.as_str(), entry.bytes)).collect();
        assert_eq!(named, [("a/data.pkl", 6), ("a/version", 2), ("a/data/0", 10)]);
        let start = entries[2].start(&archive).unwrap();
        assert_eq!((start % 64, entries[2].crc32), (0, crc32));
        assert_eq!(&bytes[start as usize..][..10], data);
        for len in 0..bytes.len() {
            let cut = &bytes[..len];
            assert!(directory(&Region::new(&cut, 0, len as u64)).is_err(), "{len} bytes");
        }
    }
}
