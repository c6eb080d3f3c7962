//! Times attention's kernels beside each other, and compares every element of their results with the plain one's.
//!
//! Usage: `attention_speed [number of a case]…`, on a machine with a GPU. A TFLOP is counted for what queries see, whatever a kernel
//! computes beside it; a backward has 2.5 times the forward's.

use device::cuda::{AttentionKernels, Cuda, Sums};
use device::{Attention, AttentionGrad, AttentionShape, Buffer, Device, Dtype, Role, Stream};
use half::bf16;
use std::error::Error;
use std::sync::Arc;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Timed runs of a kernel, after some that are not.
const RUNS: usize = 10;

fn main() -> Outcome<()> {
    let open = |sums, kernels| -> Outcome<Arc<dyn Device>> {
        Ok(Arc::new(Cuda::open(0, sums)?.with_attention(kernels)))
    };
    let devices = [
        ("plain", open(Sums::Ordered, AttentionKernels::Plain)?),
        ("own", open(Sums::Ordered, AttentionKernels::Own)?),
        ("any, ordered sums", open(Sums::Ordered, AttentionKernels::Any)?),
        ("any, fastest sums", open(Sums::Fastest, AttentionKernels::Any)?),
    ];
    println!("{}", devices[3].1.name());
    let mut far = false;
    let chosen = std::env::args().skip(1).map(|number| number.parse()).collect::<Result<Vec<usize>, _>>()?;
    let wanted = |(number, _): &(usize, _)| chosen.is_empty() || chosen.contains(number);
    for (_, (shape, mean)) in cases().into_iter().enumerate().filter(wanted) {
        let AttentionShape { rows, seq, heads, kv_heads, head_dim, window } = shape;
        println!(
            "\n{rows} × {seq}, heads {heads}/{kv_heads} of {head_dim}, bf16, window {window:?}, documents {mean:?}"
        );
        let case = Case::new(shape, mean);
        let mut oracle = None;
        for (name, device) in &devices {
            let found = case.run(name, device)?;
            let oracle = oracle.get_or_insert_with(|| found.clone());
            let errors: Vec<f64> = found.iter().zip(oracle.iter()).map(|(a, b)| distance(a, b)).collect();
            println!("    off the plain one by {:.1e} (out), {:.1e} (gradient)", errors[0], errors[1]);
            far |= errors.iter().any(|error| error.is_nan() || *error > 8e-3);
        }
    }
    println!("\n{}", if far { "FAIL" } else { "PASS" });
    std::process::exit(i32::from(far));
}

/// Shapes, and the mean length of documents where rows hold several.
fn cases() -> Vec<(AttentionShape, Option<usize>)> {
    let shape =
        |rows, seq, head_dim, window| AttentionShape { rows, seq, heads: 32, kv_heads: 8, head_dim, window };
    vec![
        (shape(2, 4096, 128, None), None),
        (shape(1, 8192, 128, None), None),
        (shape(2, 4096, 128, None), Some(600)),
        (shape(2, 4096, 128, Some(1024)), None),
        (shape(4, 4096, 64, None), None),
        (shape(2, 4096, 80, None), None),
        (shape(2, 4096, 96, None), Some(600)),
    ]
}

/// One shape with its inputs.
struct Case {
    shape: AttentionShape,
    qkv: Vec<bf16>,
    dout: Vec<bf16>,
    starts: Option<Vec<i32>>,
}

impl Case {
    fn new(shape: AttentionShape, mean: Option<usize>) -> Self {
        let mut random = Random(7);
        let qkv = random.normal(shape.tokens() * shape.qkv_cols());
        let dout = random.normal(shape.tokens() * shape.out_cols());
        let starts = mean.map(|mean| {
            let mut start = 0;
            let of_token = |token: usize| {
                if token.is_multiple_of(shape.seq) || random.below(mean) == 0 {
                    start = token % shape.seq;
                }
                start as i32
            };
            (0..shape.tokens()).map(of_token).collect()
        });
        Case { shape, qkv, dout, starts }
    }

    /// Prints the speed of both directions; returns the output and the gradient.
    fn run(&self, name: &str, device: &Arc<dyn Device>) -> Outcome<Vec<Vec<bf16>>> {
        let stream = device.stream("compute", Role::Compute)?;
        let shape = self.shape;
        let upload = |values: &[bf16]| -> Outcome<Buffer> {
            let buffer = device.alloc_buffer(Dtype::Bf16, values.len(), "values")?;
            device.write_slice(&stream, values, &buffer)?;
            Ok(buffer)
        };
        let (qkv, dout) = (upload(&self.qkv)?, upload(&self.dout)?);
        let starts = self.starts.as_ref().map(|starts| -> Outcome<Buffer> {
            let buffer = device.alloc_buffer(Dtype::I32, starts.len(), "starts")?;
            device.write_slice(&stream, starts, &buffer)?;
            Ok(buffer)
        });
        let starts = starts.transpose()?;
        // NaN until a kernel writes it.
        let poison = |len| upload(&vec![bf16::NAN; len]);
        let (out, dqkv) = (poison(self.dout.len())?, poison(self.qkv.len())?);
        let lse = device.alloc_buffer(Dtype::F32, shape.tokens() * shape.heads, "lse")?;
        let profile = device.profile();
        let bytes = profile.attention_scratch(&shape, Dtype::Bf16);
        let grad_bytes = match starts {
            None => profile.attention_grad_scratch(&shape, Dtype::Bf16),
            Some(_) => profile.packed_attention_grad_scratch(&shape, Dtype::Bf16),
        };
        let scratch = device.alloc_buffer(Dtype::U8, bytes, "scratch")?;
        let grad_scratch = device.alloc_buffer(Dtype::U8, grad_bytes, "scratch")?;
        let (out, lse, scratch, document_start) = (&out, &lse, &scratch, starts.as_ref());
        let forward = Attention { shape, qkv: &qkv, document_start, out, lse, scratch };
        let (dout, dqkv, scratch) = (&dout, &dqkv, &grad_scratch);
        let backward = AttentionGrad { shape, qkv: &qkv, document_start, out, lse, dout, dqkv, scratch };
        let forward_ms = time(&stream, || device.attention(&stream, &forward))?;
        let backward_ms = time(&stream, || device.attention_grad(&stream, &backward))?;
        let tflop = self.seen_pairs() * (4 * shape.heads * shape.head_dim) as f64 / 1e12;
        println!(
            "  {name:<18} forward {forward_ms:7.3} ms {:4.0} TFLOP/s   backward {backward_ms:7.3} ms {:4.0} TFLOP/s",
            tflop / forward_ms * 1e3,
            2.5 * tflop / backward_ms * 1e3
        );
        Ok(vec![device.read_vec(&stream, out)?, device.read_vec(&stream, dqkv)?])
    }

    /// Pairs of a query and a key that it sees.
    fn seen_pairs(&self) -> f64 {
        let seen = |token: usize| {
            let query = token % self.shape.seq;
            let start = self.starts.as_ref().map_or(0, |starts| starts[token] as usize);
            (query + 1 - start).min(self.shape.window.unwrap_or(usize::MAX))
        };
        (0..self.shape.tokens()).map(seen).sum::<usize>() as f64
    }
}

/// The median in milliseconds.
fn time(stream: &Stream, issue: impl Fn() -> device::Result<()>) -> Outcome<f64> {
    let Stream::Cuda(on) = stream else { return Err("the stream is no GPU's".into()) };
    let mut times = Vec::new();
    for turn in 0..RUNS + 3 {
        let start = on.record_timed()?;
        issue()?;
        let end = on.record_timed()?;
        stream.synchronize()?;
        if turn >= 3 {
            times.push(f64::from(start.elapsed_ms(&end)?));
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// ‖a − b‖ / ‖b‖
fn distance(a: &[bf16], b: &[bf16]) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        let (a, b) = (a.to_f64(), b.to_f64());
        error += (a - b) * (a - b);
        norm += b * b;
    }
    (error / norm).sqrt()
}

/// splitmix64
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// About normally distributed.
    fn normal(&mut self, len: usize) -> Vec<bf16> {
        let mut next = || {
            let bits = self.bits();
            let sum: i64 = (0..4).map(|part| ((bits >> (16 * part)) & 0xffff) as i64 - 0x8000).sum();
            bf16::from_f32(sum as f32 / 37837.0)
        };
        (0..len).map(|_| next()).collect()
    }
}
