//! What every group must do, as one body that each backend's tests run on each rank.

// Every test file that includes this uses a part of it.
#![allow(dead_code)]

use comm::{Group, Reduction};
use device::{Buffer, Device, Dtype, Element, Role, Stream};
use half::{bf16, f16};
use std::sync::Arc;

/// In which order a group sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// Over the ranks from 0 on, in f32, rounded once: the bits are known.
    InRankOrder,
    /// As the library likes, rounding on the way.
    AnyOrder,
}

/// One rank with its device and two streams.
pub struct Rank {
    pub sums: Sums,
    pub group: Arc<dyn Group>,
    pub device: Arc<dyn Device>,
    pub compute: Stream,
    pub side: Stream,
}

impl Rank {
    pub fn new(group: Arc<dyn Group>, device: Arc<dyn Device>) -> Self {
        let stream = |name: &str, role| device.stream(name, role).unwrap();
        let (compute, side) = (stream("compute", Role::Compute), stream("side", Role::Side));
        Rank { sums: Sums::InRankOrder, group, device, compute, side }
    }

    pub fn zeros(&self, dtype: Dtype, len: usize) -> Buffer {
        let buffer = self.device.alloc_buffer(dtype, len, "test").unwrap();
        self.device.write(&self.compute, &vec![0; buffer.num_bytes()], &buffer).unwrap();
        self.compute.synchronize().unwrap();
        buffer
    }

    pub fn buffer_of<T: Element>(&self, values: &[T]) -> Buffer {
        let buffer = self.device.alloc_buffer(T::DTYPE, values.len(), "test").unwrap();
        self.set(&buffer, values);
        buffer
    }

    pub fn set<T: Element>(&self, buffer: &Buffer, values: &[T]) {
        self.device.write_slice(&self.compute, values, buffer).unwrap();
        self.compute.synchronize().unwrap();
    }

    /// To be called when nothing is in flight on the buffer.
    pub fn values<T: Element>(&self, buffer: &Buffer) -> Vec<T> {
        self.device.read_vec(&self.compute, buffer).unwrap()
    }
}

/// An element type as the tests need it: made from a number, summed plainly, compared by bits.
pub trait Sample: Element {
    fn sample(seed: u64) -> Self;
    fn fold(values: &[Self], reduction: Reduction) -> Self;
    fn bits(self) -> u32;
    fn number(self) -> f64;
    /// By how much a sum of two numbers near 1 may be off.
    const EPSILON: f64;
}

/// Floats of very different magnitudes, so that any other order or rounding of the sum shows.
fn float(seed: u64) -> f32 {
    let mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.rotate_left(29);
    let mixed = mixed.wrapping_mul(0xd1b5_4a32_d192_ed03);
    let fraction = (mixed >> 40) as f32 / (1u32 << 24) as f32 - 0.5;
    fraction * (1 << (mixed % 13)) as f32 / 64.0
}

fn fold_f32(values: impl Iterator<Item = f32>, reduction: Reduction) -> f32 {
    let fold = |a: f32, b: f32| match reduction {
        Reduction::Sum => a + b,
        Reduction::Max => a.max(b),
    };
    values.reduce(fold).unwrap()
}

impl Sample for f32 {
    fn sample(seed: u64) -> Self {
        float(seed)
    }
    fn fold(values: &[Self], reduction: Reduction) -> Self {
        fold_f32(values.iter().copied(), reduction)
    }
    fn bits(self) -> u32 {
        self.to_bits()
    }
    fn number(self) -> f64 {
        self.into()
    }
    const EPSILON: f64 = f32::EPSILON as f64;
}

impl Sample for bf16 {
    fn sample(seed: u64) -> Self {
        bf16::from_f32(float(seed))
    }
    fn fold(values: &[Self], reduction: Reduction) -> Self {
        bf16::from_f32(fold_f32(values.iter().map(|v| v.to_f32()), reduction))
    }
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
    fn number(self) -> f64 {
        self.to_f64()
    }
    const EPSILON: f64 = 0.0078125;
}

impl Sample for f16 {
    fn sample(seed: u64) -> Self {
        f16::from_f32(float(seed))
    }
    fn fold(values: &[Self], reduction: Reduction) -> Self {
        f16::from_f32(fold_f32(values.iter().map(|v| v.to_f32()), reduction))
    }
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
    fn number(self) -> f64 {
        self.to_f64()
    }
    const EPSILON: f64 = 0.0009765625;
}

impl Sample for i32 {
    fn sample(seed: u64) -> Self {
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) as i32
    }
    fn fold(values: &[Self], reduction: Reduction) -> Self {
        let fold = |a: i32, b: i32| match reduction {
            Reduction::Sum => a.wrapping_add(b),
            Reduction::Max => a.max(b),
        };
        values.iter().copied().reduce(fold).unwrap()
    }
    fn bits(self) -> u32 {
        self as u32
    }
    fn number(self) -> f64 {
        self.into()
    }
    const EPSILON: f64 = 0.0;
}

impl Sample for u8 {
    fn sample(seed: u64) -> Self {
        (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8
    }
    fn fold(_: &[Self], _: Reduction) -> Self {
        unreachable!("bytes are not reduced")
    }
    fn bits(self) -> u32 {
        self.into()
    }
    fn number(self) -> f64 {
        self.into()
    }
    const EPSILON: f64 = 0.0;
}

/// Element `i` of what rank `rank` holds: every rank can tell what its peers hold.
fn element<T: Sample>(rank: usize, i: usize) -> T {
    T::sample((rank * 1_000_003 + i) as u64 + 1)
}

fn held<T: Sample>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| element(rank, i)).collect()
}

fn assert_bits<T: Sample>(got: &[T], want: &[T], what: &str) {
    let differing = got.iter().zip(want).position(|(a, b)| a.bits() != b.bits());
    assert_eq!((got.len(), differing), (want.len(), None), "{what}");
}

/// Sums as the group promises them.
fn assert_sums<T: Sample>(rank: &Rank, got: &[T], want: &[T], what: &str) {
    if rank.sums == Sums::InRankOrder {
        return assert_bits(got, want, what);
    }
    // Samples are within ±32.
    let bound = 32.0 * (rank.group.size() * rank.group.size()) as f64 * T::EPSILON;
    let differing = got.iter().zip(want).position(|(a, b)| (a.number() - b.number()).abs() > bound);
    assert_eq!((got.len(), differing), (want.len(), None), "{what}");
}

pub fn all(rank: &Rank) {
    for len in [0, 1, 2, 63, 257, 4099] {
        collectives::<f32>(rank, len);
        collectives::<bf16>(rank, len);
        collectives::<f16>(rank, len);
        collectives::<i32>(rank, len);
        moves::<u8>(rank, len);
    }
    // A MiB in all.
    collectives::<bf16>(rank, (1 << 19) / rank.group.size() + 1);
    exchange(rank);
}

fn collectives<T: Sample>(rank: &Rank, len: usize) {
    moves::<T>(rank, len);
    sums::<T>(rank, len);
}

fn moves<T: Sample>(rank: &Rank, len: usize) {
    let (me, size) = (rank.group.rank(), rank.group.size());
    let everyone: Vec<T> = (0..size).flat_map(|peer| held(peer, len)).collect();
    for stream in [&rank.compute, &rank.side] {
        let (src, dst) = (rank.buffer_of(&held::<T>(me, len)), rank.zeros(T::DTYPE, len * size));
        rank.group.all_gather(stream, &src, &dst, "gather").unwrap();
        stream.synchronize().unwrap();
        assert_bits(&rank.values::<T>(&dst), &everyone, "all_gather");

        let dst = rank.zeros(T::DTYPE, len * size);
        let own = dst.slice(me * len, len).unwrap();
        rank.set(&own, &held::<T>(me, len));
        rank.group.all_gather(stream, &own, &dst, "gather in place").unwrap();
        stream.synchronize().unwrap();
        assert_bits(&rank.values::<T>(&dst), &everyone, "all_gather in place");

        for root in [0, size - 1] {
            let buffer = rank.buffer_of(&held::<T>(me, len));
            rank.group.broadcast(stream, &buffer, root, "broadcast").unwrap();
            stream.synchronize().unwrap();
            assert_bits(&rank.values::<T>(&buffer), &held::<T>(root, len), "broadcast");
        }
    }
}

/// The reduction, over all ranks, of the elements `start..start + len` of what they hold.
fn folded<T: Sample>(size: usize, start: usize, len: usize, reduction: Reduction) -> Vec<T> {
    let column = |i: usize| (0..size).map(|peer| element(peer, i)).collect::<Vec<T>>();
    (start..start + len).map(|i| T::fold(&column(i), reduction)).collect()
}

fn sums<T: Sample>(rank: &Rank, len: usize) {
    let (me, size) = (rank.group.rank(), rank.group.size());
    let total = len * size;
    let want = folded::<T>(size, me * len, len, Reduction::Sum);
    let stream = &rank.side;

    let (src, dst) = (rank.buffer_of(&held::<T>(me, total)), rank.zeros(T::DTYPE, len));
    rank.group.reduce_scatter(stream, &src, &dst, "scatter").unwrap();
    stream.synchronize().unwrap();
    assert_sums(rank, &rank.values::<T>(&dst), &want, "reduce_scatter");
    assert_bits(&rank.values::<T>(&src), &held::<T>(me, total), "reduce_scatter leaves its source alone");

    let own = src.slice(me * len, len).unwrap();
    rank.group.reduce_scatter(stream, &src, &own, "scatter in place").unwrap();
    stream.synchronize().unwrap();
    assert_sums(rank, &rank.values::<T>(&own), &want, "reduce_scatter in place");

    for reduction in [Reduction::Sum, Reduction::Max] {
        let buffer = rank.buffer_of(&held::<T>(me, len));
        rank.group.all_reduce(stream, &buffer, reduction, "reduce").unwrap();
        stream.synchronize().unwrap();
        assert_sums(rank, &rank.values::<T>(&buffer), &folded(size, 0, len, reduction), "all_reduce");
    }
}

fn exchange(rank: &Rank) {
    let bytes_of = |rank: usize| vec![rank as u8 + 1; rank * 3];
    for _ in 0..3 {
        let all = rank.group.exchange(&bytes_of(rank.group.rank()), "plan hash").unwrap();
        assert_eq!(all, (0..rank.group.size()).map(bytes_of).collect::<Vec<_>>());
    }
}
