//! Element types in memory.

use half::{bf16, f16};
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    F32,
    Bf16,
    F16,
    I32,
    U8,
}

impl Dtype {
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::U8 => 1,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::I32 => "i32",
            Dtype::U8 => "u8",
        }
    }

    pub const fn is_float(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::Bf16 | Dtype::F16)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
    impl Sealed for i32 {}
    impl Sealed for u8 {}
}

/// A Rust type that stands for a [`Dtype`]: plain bits, any pattern valid.
pub trait Element: sealed::Sealed + Copy + Send + Sync + fmt::Debug + 'static {
    const DTYPE: Dtype;
    const ZERO: Self;
}

macro_rules! element {
    ($type:ty, $dtype:ident, $zero:expr) => {
        impl Element for $type {
            const DTYPE: Dtype = Dtype::$dtype;
            const ZERO: Self = $zero;
        }
    };
}
element!(f32, F32, 0.0);
element!(bf16, Bf16, bf16::ZERO);
element!(f16, F16, f16::ZERO);
element!(i32, I32, 0);
element!(u8, U8, 0);

/// The bytes behind a slice of elements.
pub fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: every `Element` is plain bits without padding, and `u8` has no alignment to satisfy.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes behind a mutable slice of elements.
pub fn bytes_of_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`; any bit pattern written is a valid `Element`.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
