//! Devices, inputs, and what counts as equal.

use device::cuda::{AttentionKernels, Cuda, Sums};
use device::{Buffer, Device, Dtype, Role, Stream};
use half::{bf16, f16};
use std::sync::Arc;

pub const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// The devices of this host: the CPU first, and a GPU where there is one.
pub fn devices() -> Vec<Arc<dyn Device>> {
    let mut devices: Vec<Arc<dyn Device>> = vec![Arc::new(device::cpu::Cpu::new())];
    match device::cuda::present() {
        Ok(()) => {
            let open = || Cuda::open(0, Sums::Ordered).expect("a GPU that is present opens");
            let own = open().with_attention(AttentionKernels::Own);
            devices.extend([Arc::new(open()) as Arc<dyn Device>, Arc::new(own)]);
        }
        Err(why) => println!("skipped on CUDA: {why}"),
    }
    devices
}

/// A device with a stream to compute on.
pub struct Bed {
    pub device: Arc<dyn Device>,
    pub stream: Stream,
}

/// What a kernel is given: on the device, and as the reference sees it (already rounded to the dtype).
pub struct Input {
    pub buffer: Buffer,
    pub values: Vec<f64>,
}

/// One per device.
pub fn beds() -> Vec<Bed> {
    devices().into_iter().map(Bed::new).collect()
}

/// Two more where there is a GPU: with the plain attention alone, and with sums in whatever order is fastest.
pub fn attention_beds() -> Vec<Bed> {
    let mut beds = beds();
    if device::cuda::present().is_ok() {
        let open = |sums| Cuda::open(0, sums).expect("a GPU that is present opens");
        beds.push(Bed::new(Arc::new(open(Sums::Ordered).with_attention(AttentionKernels::Plain))));
        beds.push(Bed::new(Arc::new(open(Sums::Fastest))));
    }
    beds
}

impl Bed {
    fn new(device: Arc<dyn Device>) -> Self {
        let stream = device.stream("test", Role::Compute).unwrap();
        Bed { device, stream }
    }

    pub fn input(&self, dtype: Dtype, values: &[f64]) -> Input {
        let buffer = self.device.alloc_buffer(dtype, values.len(), "input").unwrap();
        let (device, stream) = (&*self.device, &self.stream);
        match dtype {
            Dtype::F32 => {
                let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
                device.write_slice(stream, &values, &buffer).unwrap();
            }
            Dtype::Bf16 => {
                let values: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v as f32)).collect();
                device.write_slice(stream, &values, &buffer).unwrap();
            }
            Dtype::F16 => {
                let values: Vec<f16> = values.iter().map(|&v| f16::from_f32(v as f32)).collect();
                device.write_slice(stream, &values, &buffer).unwrap();
            }
            Dtype::I32 | Dtype::U8 => panic!("{dtype} is not a float"),
        }
        let values = self.read(&buffer);
        Input { buffer, values }
    }

    /// Uniform in ±`scale`.
    pub fn random(&self, random: &mut Random, dtype: Dtype, len: usize, scale: f64) -> Input {
        self.input(dtype, &random.values(len, scale))
    }

    pub fn ints(&self, values: &[i32]) -> Buffer {
        let buffer = self.device.alloc_buffer(Dtype::I32, values.len(), "ints").unwrap();
        self.device.write_slice(&self.stream, values, &buffer).unwrap();
        buffer
    }

    /// An output that no kernel has written yet.
    pub fn poisoned(&self, dtype: Dtype, len: usize) -> Buffer {
        self.input(dtype, &vec![f64::NAN; len]).buffer
    }

    /// A copy to write over.
    pub fn copy_of(&self, input: &Input) -> Buffer {
        self.input(input.buffer.dtype(), &input.values).buffer
    }

    pub fn bytes(&self, len: usize) -> Buffer {
        self.device.alloc_buffer(Dtype::U8, len, "scratch").unwrap()
    }

    pub fn read(&self, buffer: &Buffer) -> Vec<f64> {
        let (device, stream) = (&*self.device, &self.stream);
        match buffer.dtype() {
            Dtype::F32 => {
                device.read_vec::<f32>(stream, buffer).unwrap().into_iter().map(f64::from).collect()
            }
            Dtype::Bf16 => {
                device.read_vec::<bf16>(stream, buffer).unwrap().into_iter().map(f64::from).collect()
            }
            Dtype::F16 => {
                device.read_vec::<f16>(stream, buffer).unwrap().into_iter().map(f64::from).collect()
            }
            dtype => panic!("{dtype} is not a float"),
        }
    }
}

/// Runs a kernel twice on fresh outputs: the same bits must come out. Returns them.
pub fn twice<const N: usize>(case: &str, run: impl Fn() -> [Vec<f64>; N]) -> [Vec<f64>; N] {
    let (first, second) = (run(), run());
    let bits =
        |outputs: &[Vec<f64>; N]| -> Vec<u64> { outputs.iter().flatten().map(|v| v.to_bits()).collect() };
    assert!(bits(&first) == bits(&second), "{case}: two runs differ");
    first
}

/// A fixed sequence of numbers (splitmix64).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn values(&mut self, len: usize, scale: f64) -> Vec<f64> {
        (0..len).map(|_| (2.0 * self.uniform() - 1.0) * scale).collect()
    }
}

/// The relative error of one rounding: half a unit in the last place.
fn unit(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 2f64.powi(-24),
        Dtype::F16 => 2f64.powi(-11),
        Dtype::Bf16 => 2f64.powi(-8),
        Dtype::I32 | Dtype::U8 => 0.0,
    }
}

/// What computing in f32 may cost beside rounding to storage: sums of some hundred terms in any order, a
/// vendor's exp and rsqrt of a few units in the last place. A TF32 product (1e-3) or a bf16 sum does not pass.
const F32_NORM: f64 = 2e-6;
const F32_ELEMENT: f64 = 2e-5;
/// Half the spacing of f16's subnormals, which no relative bound covers.
const F16_SUBNORMAL: f64 = 3e-8;

/// How far from the reference a result may be: roundings to `dtype` on the way to it, plus f32 arithmetic.
#[derive(Clone, Copy)]
pub struct Tolerance {
    dtype: Dtype,
    roundings: f64,
    /// How much larger than the array's root mean square the terms of one element may be.
    term: f64,
}

impl Tolerance {
    pub fn new(dtype: Dtype, roundings: usize) -> Self {
        Tolerance { dtype, roundings: roundings as f64, term: 1.0 }
    }

    /// For arrays some of whose elements sum terms `term` times as large as the array's root mean square.
    pub fn with_terms_of(self, term: f64) -> Self {
        Tolerance { term, ..self }
    }

    /// ‖got − want‖ / ‖want‖. A rounding's error is spread evenly, so over many elements its root mean square
    /// is 0.6 of its bound; where a few large ones make up the norm, it can be the bound itself.
    fn norm(self, elements: f64) -> f64 {
        let spread = if elements < 64.0 { 1.0 } else { 0.6 };
        F32_NORM + spread * self.roundings * unit(self.dtype)
    }

    /// |got − want| for one element, as a fraction of its own size plus the array's root mean square: where
    /// terms cancel, their size, not the result's, says how exact it can be.
    fn element(self) -> f64 {
        F32_ELEMENT + self.roundings * unit(self.dtype)
    }

    pub fn check(self, case: &str, got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len(), "{case}: lengths");
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
        let size = squares(&mut want.iter().copied());
        let rms = (size / want.len().max(1) as f64).sqrt();
        let absolute = if self.dtype == Dtype::F16 { F16_SUBNORMAL } else { 1e-30 };
        for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
            let allowed = self.element() * (want.abs() + self.term * rms) + absolute;
            let near = (got - want).abs() <= allowed;
            assert!(near, "{case}: element {i} is {got}, not {want} (±{allowed:e})");
        }
        let error = squares(&mut got.iter().zip(want).map(|(got, want)| got - want)).sqrt();
        // As many equal elements would have this norm.
        let elements = size * size / want.iter().map(|v| v.powi(4)).sum::<f64>().max(1e-300);
        let allowed = self.norm(elements) * size.sqrt() + absolute * (want.len() as f64).sqrt();
        assert!(error <= allowed, "{case}: off by {error:e} in norm, {allowed:e} allowed");
    }
}

/// Rounds as storing in `dtype` does.
pub fn round(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::Bf16 => bf16::from_f32(value).to_f32(),
        Dtype::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Proves a reference gradient by central differences of the reference itself.
pub fn check_gradient(case: &str, f: impl Fn(&[f64]) -> f64, x: &[f64], gradient: &[f64]) {
    const STEP: f64 = 1e-5;
    assert_eq!(x.len(), gradient.len());
    let mut x = x.to_vec();
    for i in 0..x.len() {
        let at = x[i];
        x[i] = at + STEP;
        let above = f(&x);
        x[i] = at - STEP;
        let below = f(&x);
        x[i] = at;
        let slope = (above - below) / (2.0 * STEP);
        let near = (slope - gradient[i]).abs() <= 1e-7 * (1.0 + slope.abs());
        assert!(near, "{case}: d/dx[{i}] is {slope}, the reference says {}", gradient[i]);
    }
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
