//! What every group must do, as one body that each backend's tests run on each rank.

// Every test file that includes this uses a part of it.
#![allow(dead_code)]

use comm::{Group, Mesh, Reduction};
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

/// Numbers of ranks to try: these, or with `SHARDLOOM_MATRIX=all` every one that a backend must do.
pub fn ranks(few: &[usize]) -> Vec<usize> {
    let all = std::env::var("SHARDLOOM_MATRIX").is_ok_and(|matrix| matrix == "all");
    if all { vec![1, 2, 3, 4, 5, 8] } else { few.to_vec() }
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
    messages(rank);
    sub_groups(rank);
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

        let (src, dst) = (rank.buffer_of(&held::<T>(me, len * size)), rank.zeros(T::DTYPE, len * size));
        rank.group.all_to_all(stream, &src, &dst, "exchange of parts").unwrap();
        stream.synchronize().unwrap();
        let part_of = |peer: usize| (me * len..(me + 1) * len).map(move |i| element::<T>(peer, i));
        assert_bits(&rank.values::<T>(&dst), &(0..size).flat_map(part_of).collect::<Vec<_>>(), "all_to_all");

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

/// Round the ring, from rank 0 on, and back in the other direction.
fn messages(rank: &Rank) {
    let (me, size) = (rank.group.rank(), rank.group.size());
    if size == 1 {
        let buffer = rank.zeros(Dtype::F32, 1);
        assert!(rank.group.send(&rank.compute, &buffer, 0, "to itself").is_err());
        return;
    }
    // The last is longer than what a group is likely to hold for the receiver.
    for (len, stream) in [(0, &rank.compute), (1, &rank.side), (1001, &rank.compute), (1 << 18, &rank.side)] {
        for (next, before) in
            [((me + 1) % size, (me + size - 1) % size), ((me + size - 1) % size, (me + 1) % size)]
        {
            let (mine, theirs) = (rank.buffer_of(&held::<f32>(me, len)), rank.zeros(Dtype::F32, len));
            let send = || rank.group.send(stream, &mine, next, "to the next").unwrap();
            let receive = || rank.group.receive(stream, &theirs, before, "from the one before").unwrap();
            if me == 0 {
                send();
                receive();
            } else {
                receive();
                send();
            }
            stream.synchronize().unwrap();
            assert_bits(&rank.values::<f32>(&theirs), &held::<f32>(before, len), "send and receive");
        }
    }
    rank.group.barrier("all sent").unwrap();
}

fn sub_groups(rank: &Rank) {
    let (me, size) = (rank.group.rank(), rank.group.size());
    // Even and odd ranks, counted from the last.
    let same: Vec<usize> = (0..size).rev().filter(|other| other % 2 == me % 2).collect();
    let group = rank.group.split(&same, "half").unwrap().unwrap();
    assert_eq!((group.size(), same[group.rank()], group.name()), (same.len(), me, "half"));
    let all = group.exchange(&[me as u8], "who").unwrap();
    assert_eq!(all, same.iter().map(|&rank| vec![rank as u8]).collect::<Vec<_>>());
    // All but rank 0, which is in none.
    let others: Vec<usize> = (1..size).collect();
    let part = rank.group.split(if me == 0 { &[] } else { &others }, "others").unwrap();
    assert_eq!(part.is_some(), me > 0);
    if let Some(part) = part {
        let buffer = rank.buffer_of(&held::<f32>(me, 17));
        part.all_reduce(&rank.side, &buffer, Reduction::Max, "max").unwrap();
        rank.side.synchronize().unwrap();
        let want: Vec<f32> =
            (0..17).map(|i| others.iter().map(|&r| element::<f32>(r, i)).fold(f32::MIN, f32::max)).collect();
        assert_bits(&rank.values::<f32>(&buffer), &want, "all_reduce among some");
    }
    // Lists that disagree are an error, for those they concern, and harm nobody.
    if size > 1 && me < 2 {
        assert!(rank.group.split(if me == 0 { &[0, 1] } else { &[1] }, "wrong").is_err());
    } else {
        assert!(rank.group.split(&[], "wrong").unwrap().is_none() || size == 1);
    }
    rank.group.barrier("split").unwrap();
}

/// 64 MiB in all, of numbers that are quickly made and whose sums are exact.
pub fn large(rank: &Rank) {
    let (me, size) = (rank.group.rank(), rank.group.size());
    let total = (16 << 20) / size * size;
    let part = total / size;
    let value = |rank: usize, i: usize| ((i % 8191) + rank) as f32;
    let whole: Vec<f32> = (0..total).map(|i| value(me, i)).collect();
    let src = rank.buffer_of(&whole);
    let dst = rank.zeros(Dtype::F32, part);
    rank.group.reduce_scatter(&rank.side, &src, &dst, "large").unwrap();
    rank.side.synchronize().unwrap();
    let sum = |i: usize| (0..size).map(|rank| value(rank, i)).sum::<f32>();
    assert!(rank.values::<f32>(&dst).iter().enumerate().all(|(i, &got)| got == sum(me * part + i)));
    rank.group.all_gather(&rank.side, &dst, &src, "large").unwrap();
    rank.side.synchronize().unwrap();
    assert!(rank.values::<f32>(&src).iter().enumerate().all(|(i, &got)| got == sum(i)));
    rank.set(&src, &whole);
    rank.group.all_reduce(&rank.compute, &src, Reduction::Sum, "large").unwrap();
    assert!(rank.values::<f32>(&src).iter().enumerate().all(|(i, &got)| got == sum(i)));
    rank.set(&src, &whole);
    rank.group.broadcast(&rank.compute, &src, size - 1, "large").unwrap();
    assert!(rank.values::<f32>(&src).iter().enumerate().all(|(i, &got)| got == value(size - 1, i)));
}

/// Random numbers that are the same on every rank.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        // Knuth's MMIX generator; the high bits are the good ones.
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % below
    }
}

/// A random sequence of calls on random sub-groups, several of them in flight at once on two streams.
pub fn random(rank: &Rank, seed: u64, steps: usize) {
    let (me, size) = (rank.group.rank(), rank.group.size());
    let mut dice = Dice(seed);
    let everyone: Vec<usize> = (0..size).collect();
    // Members in this group's order, and the handle where this rank is one of them.
    let mut groups = vec![(everyone.clone(), Some(rank.group.clone()))];
    for _ in 0..3 {
        // A shuffled deck, cut in up to three; the last cut is left out now and then.
        let mut deck = everyone.clone();
        (0..size).for_each(|i| deck.swap(i, i + dice.roll(size - i)));
        let mut cuts = [dice.roll(size + 1), dice.roll(size + 1)];
        cuts.sort();
        let leave_out = dice.roll(2) == 0;
        let lists =
            [&deck[..cuts[0]], &deck[cuts[0]..cuts[1]], if leave_out { &[] } else { &deck[cuts[1]..] }];
        let mine = lists.into_iter().find(|list| list.contains(&me)).unwrap_or(&[]);
        let handle = rank.group.split(mine, "random").unwrap();
        assert_eq!(handle.is_some(), !mine.is_empty());
        for list in lists.into_iter().filter(|list| !list.is_empty()) {
            groups.push((list.to_vec(), handle.clone().filter(|_| list.contains(&me))));
        }
    }
    let mut checks: Vec<Box<dyn FnOnce()>> = Vec::new();
    for step in 0..steps {
        let (members, handle) = &groups[dice.roll(groups.len())];
        let (op, on_side) = (dice.roll(7), dice.roll(2) == 0);
        let len = [0, 1, dice.roll(50), dice.roll(5000), dice.roll(200_000)][dice.roll(5)];
        let (root, max) = (dice.roll(members.len()), dice.roll(2) == 0);
        let Some(group) = handle else { continue };
        let (n, r) = (members.len(), group.rank());
        // Collectives of several groups are in flight at once, but every rank issues them in one order.
        let stream = if on_side { &rank.side } else { &rank.compute };
        let value = move |rank: usize, i: usize| element::<bf16>(rank * 31 + step, i);
        let values = move |rank: usize, len: usize| (0..len).map(|i| value(rank, i)).collect::<Vec<_>>();
        let (members, what) = (members.clone(), format!("step {step}"));
        let folded = {
            let members = members.clone();
            move |i: usize, reduction| {
                bf16::fold(&members.iter().map(|&m| value(m, i)).collect::<Vec<_>>(), reduction)
            }
        };
        let (buffer, want): (Buffer, Vec<bf16>) = match op {
            0 => {
                let (src, dst) = (rank.buffer_of(&values(me, len)), rank.zeros(Dtype::Bf16, len * n));
                group.all_gather(stream, &src, &dst, &what).unwrap();
                (dst, members.iter().flat_map(|&m| values(m, len)).collect())
            }
            1 => {
                let (src, dst) = (rank.buffer_of(&values(me, len * n)), rank.zeros(Dtype::Bf16, len));
                group.reduce_scatter(stream, &src, &dst, &what).unwrap();
                (dst, (r * len..(r + 1) * len).map(|i| folded(i, Reduction::Sum)).collect())
            }
            2 => {
                let reduction = if max { Reduction::Max } else { Reduction::Sum };
                let buffer = rank.buffer_of(&values(me, len));
                group.all_reduce(stream, &buffer, reduction, &what).unwrap();
                (buffer, (0..len).map(|i| folded(i, reduction)).collect())
            }
            3 => {
                let buffer = rank.buffer_of(&values(me, len));
                group.broadcast(stream, &buffer, root, &what).unwrap();
                (buffer, values(members[root], len))
            }
            4 => {
                let (src, dst) = (rank.buffer_of(&values(me, len * n)), rank.zeros(Dtype::Bf16, len * n));
                group.all_to_all(stream, &src, &dst, &what).unwrap();
                let part = |m: usize| (r * len..(r + 1) * len).map(move |i| value(m, i));
                (dst, members.iter().flat_map(|&m| part(m)).collect())
            }
            5 => {
                // From the root to the one after it, if that is another.
                let to = (root + 1) % n;
                let buffer = rank.buffer_of(&values(me, len));
                if to != root && r == root {
                    group.send(stream, &buffer, to, &what).unwrap();
                }
                if to != root && r == to {
                    group.receive(stream, &buffer, root, &what).unwrap();
                }
                (buffer, values(if r == to { members[root] } else { me }, len))
            }
            _ => {
                let all = group.exchange(&vec![me as u8; me * 1000], &what).unwrap();
                assert_eq!(all, members.iter().map(|&m| vec![m as u8; m * 1000]).collect::<Vec<_>>());
                continue;
            }
        };
        let device = rank.device.clone();
        let compute = rank.compute.clone();
        checks.push(Box::new(move || {
            assert_bits(
                &device.read_vec::<bf16>(&compute, &buffer).unwrap(),
                &want,
                &format!("{what}, op {op}"),
            );
        }));
    }
    rank.side.synchronize().unwrap();
    checks.into_iter().for_each(|check| check());
    rank.group.barrier("end").unwrap();
}

/// Eight ranks as 2 × 2 × 2, and as what they cannot be.
pub fn mesh(world: Arc<dyn Group>) {
    let me = world.rank();
    let mesh = Mesh::new(world.clone(), &[("replicate", 2), ("shard", 2), ("tensor", 2)]).unwrap();
    for (axis, stride) in [("replicate", 4), ("shard", 2), ("tensor", 1)] {
        let group = mesh.axis(axis).unwrap();
        assert_eq!((group.name(), group.size(), group.rank()), (axis, 2, me / stride % 2));
        let all = group.exchange(&[me as u8], "who").unwrap();
        let first = me - me / stride % 2 * stride;
        assert_eq!(all, [vec![first as u8], vec![(first + stride) as u8]]);
    }
    assert_eq!(mesh.axes().collect::<Vec<_>>(), [("replicate", 2), ("shard", 2), ("tensor", 2)]);
    assert_eq!(mesh.world().size(), 8);
    assert!(mesh.axis("pipeline").unwrap_err().to_string().contains("replicate, shard, tensor"));
    let text = Mesh::new(world.clone(), &[("replicate", 3), ("shard", 2)]).unwrap_err().to_string();
    assert!(text.contains("replicate 3 × shard 2: they make 6 ranks, there are 8"), "{text}");
    assert!(Mesh::new(world.clone(), &[("shard", 2), ("shard", 4)]).is_err());
    assert!(Mesh::new(world, &[("shard", 0), ("tensor", usize::MAX)]).is_err());
}
