//! Floating-point numbers as files hold them.

use checkpoint::Dtype;
use half::{bf16, f16};

/// What files call a device's dtype.
pub fn file_dtype(dtype: device::Dtype) -> Dtype {
    match dtype {
        device::Dtype::Bf16 => Dtype::Bf16,
        device::Dtype::F16 => Dtype::F16,
        device::Dtype::I32 => Dtype::I32,
        _ => Dtype::F32,
    }
}

/// Whether weights can be read from it.
pub fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16)
}

/// The numbers of a file's bytes. The dtype is one of those [`is_float`] knows.
pub fn decode(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    let numbers = out.iter_mut().zip(bytes.chunks_exact(dtype.bytes()));
    match dtype {
        Dtype::Bf16 => numbers.for_each(|(value, b)| *value = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
        Dtype::F16 => numbers.for_each(|(value, b)| *value = f16::from_le_bytes([b[0], b[1]]).to_f32()),
        _ => numbers.for_each(|(value, b)| *value = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
    }
}

/// The bytes of numbers in a file, rounded to the nearest.
pub fn encode(values: &[f32], dtype: Dtype, out: &mut [u8]) {
    let numbers = values.iter().zip(out.chunks_exact_mut(dtype.bytes()));
    match dtype {
        Dtype::Bf16 => {
            numbers.for_each(|(value, b)| b.copy_from_slice(&bf16::from_f32(*value).to_le_bytes()))
        }
        Dtype::F16 => numbers.for_each(|(value, b)| b.copy_from_slice(&f16::from_f32(*value).to_le_bytes())),
        _ => numbers.for_each(|(value, b)| b.copy_from_slice(&value.to_le_bytes())),
    }
}
