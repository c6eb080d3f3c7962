//! The bytes of PyTorch's TCPStore: little-endian numbers; a string is a u64 length and its bytes.

use std::io::{self, Read, Write};

pub const MAGIC: u32 = 0x3C85_F7CE;
/// As much as PyTorch allows for one string.
const MAX_STRING: u64 = 8 << 20;
const MAX_KEYS: u64 = 128 << 10;

pub const VALIDATE: u8 = 0;
pub const SET: u8 = 1;
pub const COMPARE_SET: u8 = 2;
pub const GET: u8 = 3;
pub const ADD: u8 = 4;
pub const CHECK: u8 = 5;
pub const WAIT: u8 = 6;
pub const NUM_KEYS: u8 = 7;
pub const DELETE: u8 = 8;
pub const APPEND: u8 = 9;
pub const MULTI_GET: u8 = 10;
pub const MULTI_SET: u8 = 11;
pub const CANCEL_WAIT: u8 = 12;
pub const PING: u8 = 13;
/// Ours alone, and only where the job has a secret: a nonce; nonce; proof; proof.
pub const SECRET: u8 = 0x53;
/// Ours alone: a key and a value that the server sets should this connection end; an empty key takes it back.
pub const WILL: u8 = 0x57;

/// Answers to CHECK.
pub const READY: u8 = 0;
pub const NOT_READY: u8 = 1;
/// Answers to WAIT and CANCEL_WAIT.
pub const STOP_WAITING: u8 = 0;
pub const WAIT_CANCELED: u8 = 1;

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

pub fn read_array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

pub fn read_u8(from: &mut impl Read) -> io::Result<u8> {
    Ok(read_array::<1>(from)?[0])
}

pub fn read_u32(from: &mut impl Read) -> io::Result<u32> {
    Ok(u32::from_le_bytes(read_array(from)?))
}

pub fn read_i64(from: &mut impl Read) -> io::Result<i64> {
    Ok(i64::from_le_bytes(read_array(from)?))
}

pub fn read_bytes(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let len = u64::from_le_bytes(read_array(from)?);
    if len > MAX_STRING {
        return Err(invalid(format!("a string of {len} bytes")));
    }
    // Grows with what really comes, not with what is promised.
    let mut bytes = Vec::new();
    from.take(len).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes)
}

pub fn read_count(from: &mut impl Read) -> io::Result<u64> {
    let count = u64::from_le_bytes(read_array(from)?);
    if count > MAX_KEYS {
        return Err(invalid(format!("{count} keys at once")));
    }
    Ok(count)
}

pub fn read_keys(from: &mut impl Read) -> io::Result<Vec<Vec<u8>>> {
    (0..read_count(from)?).map(|_| read_bytes(from)).collect()
}

/// A message, gathered so that it leaves in one piece.
#[derive(Default)]
pub struct Message(Vec<u8>);

impl Message {
    pub fn new(op: u8) -> Self {
        Message(vec![op])
    }

    pub fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub fn i64(mut self, value: i64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub fn bytes(mut self, value: &[u8]) -> Self {
        self.0.extend((value.len() as u64).to_le_bytes());
        self.0.extend(value);
        self
    }

    pub fn keys(mut self, keys: &[String]) -> Self {
        self.0.extend((keys.len() as u64).to_le_bytes());
        keys.iter().fold(self, |message, key| message.bytes(key.as_bytes()))
    }

    pub fn send(&self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(&self.0)
    }
}
