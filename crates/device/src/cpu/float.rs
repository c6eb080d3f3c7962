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
    #[cfg(test)]
    if let Some(level) = tests::FORCED.get() {
        return level;
    }
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

/// Σ f(element of each slice), in an order that depends on the first one's length only.
#[inline(always)]
pub fn sum_over<const N: usize>(slices: [&[f32]; N], f: impl Fn([f32; N]) -> f32) -> f32 {
    let len = slices[0].len();
    let slices = slices.map(|slice| &slice[..len]);
    let mut lanes = [0.0f32; LANES];
    let whole = len - len % LANES;
    for start in (0..whole).step_by(LANES) {
        // Slices cut to the lanes: no bounds to check inside.
        let chunks = slices.map(|slice| &slice[start..start + LANES]);
        for lane in 0..LANES {
            lanes[lane] += f(chunks.map(|chunk| chunk[lane]));
        }
    }
    for lane in 0..len - whole {
        lanes[lane] += f(slices.map(|slice| slice[whole + lane]));
    }
    add_lanes(lanes)
}

simd! {
    pub fn dot(a: &[f32], b: &[f32]) -> f32 {
        sum_over([a, b], |[a, b]| a * b)
    }
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
    for (lane, &value) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = if value > *lane { value } else { *lane };
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = if lanes[i + width] > lanes[i] { lanes[i + width] } else { lanes[i] };
        }
        width /= 2;
    }
    lanes[0]
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

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::cell::Cell;

    thread_local! {
        /// The level to run at instead of the host's best.
        pub static FORCED: Cell<Option<Level>> = const { Cell::new(None) };
    }

    /// Runs `body` at every level this host has.
    pub fn at_every_level<R>(body: impl Fn() -> R) -> Vec<R> {
        let best = level();
        #[cfg(target_arch = "x86_64")]
        let levels = match best {
            Level::Avx512 => vec![Level::Portable, Level::Avx2, Level::Avx512],
            Level::Avx2 => vec![Level::Portable, Level::Avx2],
            Level::Portable => vec![Level::Portable],
        };
        #[cfg(not(target_arch = "x86_64"))]
        let levels = vec![best];
        let run = |level| {
            FORCED.set(Some(level));
            let result = body();
            FORCED.set(None);
            result
        };
        levels.into_iter().map(run).collect()
    }

    simd! {
        fn exps(values: &mut [f32]) {
            for value in values {
                *value = exp(*value);
            }
        }
    }

    /// Distance in units of the last place of a correctly rounded result.
    fn ulps(got: f32, want: f64) -> f64 {
        let rounded = want as f32;
        let unit = f64::from(rounded.next_up()) - f64::from(rounded);
        (f64::from(got) - want).abs() / unit
    }

    #[test]
    fn exp_is_within_two_units_everywhere() {
        // Every 97th float from the first that gives 0 to the last that is finite.
        let range = |from: f32, to: f32| (from.to_bits()..to.to_bits()).step_by(97).map(f32::from_bits);
        let mut x: Vec<f32> = range(-1e-10, -104.0).chain(range(1e-10, 88.722)).collect();
        x.extend([0.0, -0.0, 1e-40, -87.336_55, -103.972]);
        let mut got = x.clone();
        exps(&mut got);
        let (worst, at) = x
            .iter()
            .zip(&got)
            .map(|(&x, &y)| (ulps(y, f64::from(x).exp()), x))
            .fold((0.0, 0.0), |worst, this| if this.0 > worst.0 { this } else { worst });
        assert!(worst < 1.5, "{worst} units at {at}");
    }

    #[test]
    fn exp_ends_well() {
        let ends = [f32::NEG_INFINITY, -200.0, -104.0, 88.73, 1e9, f32::INFINITY];
        assert_eq!(ends.map(exp), [0.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY, f32::INFINITY]);
        assert!(exp(f32::NAN).is_nan() && exp(0.0) == 1.0);
    }

    #[test]
    fn sixteen_bit_floats_convert_as_the_half_crate_does() {
        for bits in 0..=u16::MAX {
            let (a, b) = (bf16::from_bits(bits), f16::from_bits(bits));
            assert!(a.load().to_bits() == a.to_f32().to_bits() || a.is_nan() && a.load().is_nan());
            assert!(b.load().to_bits() == b.to_f32().to_bits() || b.is_nan() && b.load().is_nan());
        }
        for bits in (0..=u32::MAX).step_by(4099) {
            let x = f32::from_bits(bits);
            let (a, b) = (<bf16 as Float>::store(x), <f16 as Float>::store(x));
            assert!(a.to_bits() == bf16::from_f32(x).to_bits() || x.is_nan() && a.is_nan(), "{x}");
            assert!(b.to_bits() == f16::from_f32(x).to_bits() || x.is_nan() && b.is_nan(), "{x}");
        }
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        let x: Vec<f32> = (0..1003).map(|i| ((i * 7919) % 1009) as f32 * 0.013 - 6.0).collect();
        let results = at_every_level(|| {
            let mut y = x.clone();
            exps(&mut y);
            let mut halves = vec![f16::ZERO; x.len()];
            store(&y, &mut halves);
            (y.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), halves)
        });
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    }
}
