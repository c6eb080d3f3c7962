//! What kernels ask of their arguments before they touch memory.

use crate::{Buffer, Dtype, Error, Result, Stream, cpu};

pub fn stream<'a>(op: &'static str, stream: &'a Stream) -> Result<&'a cpu::Stream> {
    match stream {
        Stream::Cpu(stream) => Ok(stream),
        _ => Err(Error::argument(op, "the stream is another device's")),
    }
}

pub fn float(op: &'static str, buffer: &Buffer) -> Result<Dtype> {
    let dtype = buffer.dtype();
    if dtype.is_float() { Ok(dtype) } else { Err(Error::Unsupported { op, dtype }) }
}

/// At least `len` elements of `dtype`.
pub fn buffer(op: &'static str, name: &str, buffer: &Buffer, dtype: Dtype, len: usize) -> Result<()> {
    if buffer.dtype() != dtype {
        return Err(Error::WrongDtype { op, expected: dtype, found: buffer.dtype() });
    }
    buffer.expect_len(op, name, len)
}

/// At least `len` elements of `dtype` or f32.
pub fn dtype_or_f32(op: &'static str, name: &str, buffer: &Buffer, dtype: Dtype, len: usize) -> Result<()> {
    let expected = if buffer.dtype() == Dtype::F32 { Dtype::F32 } else { dtype };
    self::buffer(op, name, buffer, expected, len)
}

pub fn same_len(op: &'static str, a: &Buffer, b: &Buffer) -> Result<()> {
    if a.len() == b.len() {
        return Ok(());
    }
    Err(Error::argument(op, format!("lengths {} and {} differ", a.len(), b.len())))
}

/// Every index lies in `0..end`.
pub fn indices(op: &'static str, name: &str, indices: &[i32], end: usize) -> Result<()> {
    match indices.iter().find(|&&index| usize::try_from(index).map_or(true, |index| index >= end)) {
        None => Ok(()),
        Some(index) => Err(Error::argument(op, format!("{name}: {index} is not in 0..{end}"))),
    }
}
