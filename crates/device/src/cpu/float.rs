//! Stored floats as f32 and back, and the choice of instruction set for the loops that do it.

use crate::Element;
use half::{bf16, f16};

/// A float as it is stored. Both directions are free of branches, so that loops over them vectorise.
pub trait Float: Element {
    fn load(self) -> f32;
    /// Rounds to nearest even.
    fn store(value: f32) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }

    #[inline(always)]
    fn store(value: f32) -> Self {
        value
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn store(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // A NaN must stay one: rounding could carry its payload away.
        let nan = (bits >> 16) | 0x40;
        bf16::from_bits(if value.is_nan() { nan } else { rounded } as u16)
    }
}

impl Float for f16 {
    #[inline(always)]
    fn load(self) -> f32 {
        let bits = u32::from(self.to_bits());
        // The exponent's bias is moved by a product, which also normalises subnormals.
        let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
        let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
        f32::from_bits(magnitude.to_bits() | special | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn store(value: f32) -> Self {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let special = if value.is_nan() { 0x7e00 } else { 0x7c00 };
        // Adding a half aligns a subnormal's last bit with the sum's, and the addition rounds.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
        let small = if magnitude < 113 << 23 { subnormal } else { normal };
        let rounded = if magnitude >= 143 << 23 { special } else { small };
        f16::from_bits((rounded | (bits >> 16) & 0x8000) as u16)
    }
}

/// What a value becomes by being stored.
#[inline(always)]
pub fn round<T: Float>(value: f32) -> f32 {
    T::store(value).load()
}

/// Runs `$body` with `$T` standing for a float dtype.
macro_rules! by_dtype {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::Dtype::F32 => {
                type $T = f32;
                $body
            }
            $crate::Dtype::Bf16 => {
                type $T = half::bf16;
                $body
            }
            $crate::Dtype::F16 => {
                type $T = half::f16;
                $body
            }
            dtype => Err($crate::Error::Unsupported { op: $op, dtype }),
        }
    };
}
pub(crate) use by_dtype;

/// Instruction sets that loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

/// The widest one this host has.
#[inline]
pub fn level() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        let fma = is_x86_feature_detected!("fma");
        if fma
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            return Level::Avx512;
        }
        if fma && is_x86_feature_detected!("avx2") {
            return Level::Avx2;
        }
    }
    Level::Portable
}

/// Compiles a function once per [`Level`] and calls the widest one the host has. The arithmetic is the same in
/// all of them: sums run over fixed lanes, and a fused product is fused everywhere.
macro_rules! simd {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$T:ident>)? ($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name $(<$T: $crate::cpu::float::Float>)? ($($arg: $type),*) $(-> $ret)? {
            #[inline(always)]
            fn portable $(<$T: $crate::cpu::float::Float>)? ($($arg: $type),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
                fn avx512 $(<$T: $crate::cpu::float::Float>)? ($($arg: $type),*) $(-> $ret)? {
                    portable $(::<$T>)? ($($arg),*)
                }

                #[target_feature(enable = "avx2,fma")]
                fn avx2 $(<$T: $crate::cpu::float::Float>)? ($($arg: $type),*) $(-> $ret)? {
                    portable $(::<$T>)? ($($arg),*)
                }

                match $crate::cpu::float::level() {
                    $crate::cpu::float::Level::Portable => {}
                    $crate::cpu::float::Level::Avx512 => {
                        // SAFETY: `level` has found these features on this host.
                        return unsafe { avx512 $(::<$T>)? ($($arg),*) };
                    }
                    $crate::cpu::float::Level::Avx2 => {
                        // SAFETY: `level` has found these features on this host.
                        return unsafe { avx2 $(::<$T>)? ($($arg),*) };
                    }
                }
            }
            portable $(::<$T>)? ($($arg),*)
        }
    };
}
pub(crate) use simd;

simd! {
    /// Stored floats to f32.
    pub fn load<T>(src: &[T], dst: &mut [f32]) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = src.load();
        }
    }
}

simd! {
    /// f32 to stored floats, rounding.
    pub fn store<T>(src: &[f32], dst: &mut [T]) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = T::store(*src);
        }
    }
}

/// Independent partial sums of a reduction: as many as keep the widest vectors busy.
pub const LANES: usize = 32;

/// Adds up lanes pairwise.
#[inline(always)]
fn add_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Σ f(i) for i in 0..len, in an order that depends on `len` only.
#[inline(always)]
pub fn sum_over(len: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = len - len % LANES;
    let mut start = 0;
    while start < whole {
        for lane in 0..LANES {
            lanes[lane] += f(start + lane);
        }
        start += LANES;
    }
    for lane in 0..len - whole {
        lanes[lane] += f(whole + lane);
    }
    add_lanes(lanes)
}

/// The largest value; −∞ when there is none, NaN ignored.
#[inline(always)]
pub fn max_of(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
        }
    }
    let rest = chunks.remainder().iter().copied();
    lanes.into_iter().chain(rest).fold(f32::NEG_INFINITY, |max, value| if value > max { value } else { max })
}

/// e^x within two units in the last place, subnormal results included.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    /// Added to a small float, leaves its nearest integer in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    // Beyond these the result is 0 or ∞ anyway; a NaN passes both comparisons.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    // Cephes' minimax polynomial for (eʳ − 1 − r) / r².
    let p = r.mul_add(1.987_569_1e-4, 1.398_199_9e-3).mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2).mul_add(r, 1.666_666_5e-1).mul_add(r, 0.5);
    let p = p.mul_add(r * r, r) + 1.0;
    // 2ⁿ in two factors, because n may lie outside a float's exponents.
    let n = (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    p * power(half) * power(n.wrapping_sub(half))
}
