//! What every group must do, as one body that each backend's tests run on each rank.

use comm::{Group, Reduction};
use device::{Buffer, Dtype, Element, Memory, Role, Stream, cpu};
use half::{bf16, f16};
use std::cell::UnsafeCell;
use std::sync::Arc;

/// One rank with its two streams.
pub struct Rank {
    pub group: Arc<dyn Group>,
    pub compute: Stream,
    pub side: Stream,
}

impl Rank {
    pub fn new(group: Arc<dyn Group>) -> Self {
        let stream = |name: &str, role| Stream::Cpu(cpu::Stream::new(name, role).unwrap());
        Rank { group, compute: stream("compute", Role::Compute), side: stream("side", Role::Side) }
    }
}

/// Runs `body` once per handle, each in a thread of its own that holds the only handle of its rank.
pub fn in_threads(handles: Vec<Arc<dyn Group>>, body: impl Fn(Rank) + Send + Sync) {
    std::thread::scope(|scope| {
        for handle in handles {
            let body = &body;
            scope.spawn(move || body(Rank::new(handle)));
        }
    });
}

#[derive(Debug)]
struct Host(Box<[UnsafeCell<u64>]>);

// SAFETY: shared as device memory is: who may write is decided by stream order and collectives.
unsafe impl Sync for Host {}

impl Memory for Host {
    fn address(&self) -> usize {
        self.0.as_ptr() as usize
    }

    fn bytes(&self) -> usize {
        self.0.len() * 8
    }
}

pub fn zeros(dtype: Dtype, len: usize) -> Buffer {
    let words = (len * dtype.bytes()).div_ceil(8);
    let memory = Arc::new(Host((0..words).map(|_| UnsafeCell::new(0)).collect()));
    Buffer::new(memory, 0, dtype, len).unwrap()
}

pub fn buffer_of<T: Element>(values: &[T]) -> Buffer {
    let buffer = zeros(T::DTYPE, values.len());
    set(&buffer, values);
    buffer
}

pub fn set<T: Element>(buffer: &Buffer, values: &[T]) {
    // SAFETY: host memory of this thread, with nothing in flight on it.
    unsafe { buffer.host_slice_mut::<T>() }.copy_from_slice(values);
}

/// Waits are the caller's.
pub fn values<T: Element>(buffer: &Buffer) -> Vec<T> {
    // SAFETY: as in `set`.
    unsafe { buffer.host_slice::<T>() }.to_vec()
}

/// An element type as the tests need it: made from a number, summed plainly, compared by bits.
pub trait Sample: Element {
    fn sample(seed: u64) -> Self;
    fn fold(values: &[Self], reduction: Reduction) -> Self;
    fn bits(self) -> u32;
}

/// Floats of very different magnitudes, so that any other order or rounding of the sum shows.
fn float(seed: u64) -> f32 {
    let mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.rotate_left(29);
    let mixed = mixed.wrapping_mul(0xd1b5_4a32_d192_ed03);
    let fraction = (mixed >> 40) as f32 / (1u32 << 24) as f32 - 0.5;
    fraction * 2f32.powi((mixed % 13) as i32 - 6)
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

pub fn all(rank: Rank) {
    for len in [0, 1, 2, 63, 257, 8195] {
        collectives::<f32>(&rank, len);
        collectives::<bf16>(&rank, len);
        collectives::<f16>(&rank, len);
        collectives::<i32>(&rank, len);
        moves::<u8>(&rank, len);
    }
    // A few MiB in all.
    collectives::<bf16>(&rank, (2 << 20) / rank.group.size() + 1);
    exchange(&rank);
}

fn collectives<T: Sample>(rank: &Rank, len: usize) {
    moves::<T>(rank, len);
    sums::<T>(rank, len);
}

fn moves<T: Sample>(rank: &Rank, len: usize) {
    let (me, size) = (rank.group.rank(), rank.group.size());
    let everyone: Vec<T> = (0..size).flat_map(|peer| held(peer, len)).collect();
    for stream in [&rank.compute, &rank.side] {
        let (src, dst) = (buffer_of(&held::<T>(me, len)), zeros(T::DTYPE, len * size));
        rank.group.all_gather(stream, &src, &dst, "gather").unwrap();
        stream.synchronize().unwrap();
        assert_bits(&values::<T>(&dst), &everyone, "all_gather");

        let dst = zeros(T::DTYPE, len * size);
        let own = dst.slice(me * len, len).unwrap();
        set(&own, &held::<T>(me, len));
        rank.group.all_gather(stream, &own, &dst, "gather in place").unwrap();
        stream.synchronize().unwrap();
        assert_bits(&values::<T>(&dst), &everyone, "all_gather in place");

        for root in [0, size - 1] {
            let buffer = buffer_of(&held::<T>(me, len));
            rank.group.broadcast(stream, &buffer, root, "broadcast").unwrap();
            stream.synchronize().unwrap();
            assert_bits(&values::<T>(&buffer), &held::<T>(root, len), "broadcast");
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

    let (src, dst) = (buffer_of(&held::<T>(me, total)), zeros(T::DTYPE, len));
    rank.group.reduce_scatter(stream, &src, &dst, "scatter").unwrap();
    stream.synchronize().unwrap();
    assert_bits(&values::<T>(&dst), &want, "reduce_scatter");
    assert_bits(&values::<T>(&src), &held::<T>(me, total), "reduce_scatter leaves its source alone");

    let own = src.slice(me * len, len).unwrap();
    rank.group.reduce_scatter(stream, &src, &own, "scatter in place").unwrap();
    stream.synchronize().unwrap();
    assert_bits(&values::<T>(&own), &want, "reduce_scatter in place");

    for reduction in [Reduction::Sum, Reduction::Max] {
        let buffer = buffer_of(&held::<T>(me, len));
        rank.group.all_reduce(stream, &buffer, reduction, "reduce").unwrap();
        stream.synchronize().unwrap();
        assert_bits(&values::<T>(&buffer), &folded(size, 0, len, reduction), "all_reduce");
    }
}

fn exchange(rank: &Rank) {
    let bytes_of = |rank: usize| vec![rank as u8 + 1; rank * 3];
    for _ in 0..3 {
        let all = rank.group.exchange(&bytes_of(rank.group.rank()), "plan hash").unwrap();
        assert_eq!(all, (0..rank.group.size()).map(bytes_of).collect::<Vec<_>>());
    }
}
