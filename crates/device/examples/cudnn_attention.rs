//! Checks cuDNN's attention, element by element, against a plain one in double precision, and times it.
//!
//! Usage: `cudnn_attention`, on a machine with a GPU and libcudnn.

use cudarc::driver::{CudaContext, DriverError, result, sys};
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use device::cuda::cudnn::{Cudnn, QuerySum, backward_scratch};
use device::{Attention, AttentionGrad, AttentionShape, Buffer, Dtype, Memory, Profile};
use half::{bf16, f16};
use std::error::Error;
use std::ffi::{CString, c_void};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Bytes behind every allocation that nobody may write.
const GUARD: usize = 4096;

/// What memory holds before anything is written: NaN in every float type.
const POISON: u8 = 0xff;

/// From this many tokens a row on, speed is worth printing.
const LONG: usize = 1000;

fn main() -> Outcome<()> {
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let ordered = Cudnn::load()?;
    let atomic = Cudnn::load()?.with_query_sum(QuerySum::Atomic);
    println!("{} with cuDNN {}", context.name()?, ordered.version());
    let mut failed = 0;
    for (shape, dtype) in shapes() {
        let case = Case::new(shape, dtype, stream.cu_stream())?;
        failed += case.run(&ordered, &atomic)?;
    }
    println!("\n{}", if failed == 0 { "PASS" } else { "FAIL" });
    std::process::exit(i32::from(failed > 0));
}

fn shapes() -> Vec<(AttentionShape, Dtype)> {
    let shape = |rows, seq, heads, kv_heads, head_dim| AttentionShape {
        rows,
        seq,
        heads,
        kv_heads,
        head_dim,
        window: None,
    };
    let mut shapes = Vec::new();
    shapes.extend([1, 2, 7, 16, 65].map(|seq| (shape(2, seq, 4, 2, 64), Dtype::Bf16)));
    shapes.extend([16, 32, 48, 80, 96, 112].map(|head_dim| (shape(2, 300, 4, 2, head_dim), Dtype::Bf16)));
    shapes.extend([
        (shape(3, 129, 32, 8, 128), Dtype::Bf16),
        (shape(1, 777, 6, 1, 64), Dtype::Bf16),
        (shape(2, 512, 4, 4, 128), Dtype::Bf16),
        (shape(2, 1000, 4, 4, 64), Dtype::F16),
        (shape(2, 1000, 32, 8, 128), Dtype::Bf16),
        (shape(2, 4096, 32, 8, 128), Dtype::Bf16),
        (shape(1, 8192, 32, 8, 128), Dtype::Bf16),
        (shape(2, 4096, 32, 8, 128), Dtype::F16),
        (shape(4, 4096, 32, 8, 64), Dtype::Bf16),
    ]);
    shapes
}

/// One shape: its inputs, the plain kernels' results, and room for cuDNN's.
struct Case {
    shape: AttentionShape,
    dtype: Dtype,
    stream: sys::CUstream,
    qkv: Buffer,
    dout: Buffer,
    out: Buffer,
    lse: Buffer,
    dqkv: Buffer,
    memories: Vec<Arc<Gpu>>,
    plain: Plain,
}

impl Case {
    fn new(shape: AttentionShape, dtype: Dtype, stream: sys::CUstream) -> Outcome<Self> {
        let (tokens, heads) = (shape.tokens(), shape.heads);
        let mut memories = Vec::new();
        let mut alloc = |dtype: Dtype, len: usize| -> Outcome<Buffer> {
            let memory = Arc::new(Gpu::new(len * dtype.bytes())?);
            memories.push(memory.clone());
            Ok(Buffer::new(memory, 0, dtype, len)?)
        };
        let qkv = alloc(dtype, tokens * shape.qkv_cols())?;
        let dout = alloc(dtype, tokens * shape.out_cols())?;
        let out = alloc(dtype, tokens * shape.out_cols())?;
        let lse = alloc(Dtype::F32, tokens * heads)?;
        let dqkv = alloc(dtype, tokens * shape.qkv_cols())?;
        write(&qkv, &random(qkv.len(), dtype, 1))?;
        write(&dout, &random(dout.len(), dtype, 2))?;
        let plain = Plain::new(shape, dtype)?;
        Ok(Case { shape, dtype, stream, qkv, dout, out, lse, dqkv, memories, plain })
    }

    /// The number of checks that failed.
    fn run(&self, ordered: &Cudnn, atomic: &Cudnn) -> Outcome<usize> {
        let AttentionShape { rows, seq, heads, kv_heads, head_dim, .. } = self.shape;
        println!("\n{rows} rows of {seq}, heads {heads}/{kv_heads} of {head_dim}, {}", self.dtype);
        let mut failed = self.forward(ordered)?;
        let expected = self.plain.backward(&self.qkv, &self.out, &self.lse, &self.dout)?;
        let bytes = Profile::Cuda { deterministic: false }.attention_grad_scratch(&self.shape, self.dtype);
        failed += self.backward(atomic, QuerySum::Atomic, bytes, &expected, &mut None)?;
        let limits = if seq >= 4096 { &[usize::MAX, 2 << 30, 1 << 30, 0][..] } else { &[usize::MAX, 0] };
        let mut first = None;
        for &limit in limits {
            let bytes = backward_scratch(&self.shape, self.dtype, QuerySum::Ordered, limit);
            failed += self.backward(ordered, QuerySum::Ordered, bytes, &expected, &mut first)?;
        }
        Ok(failed)
    }

    fn forward(&self, cudnn: &Cudnn) -> Outcome<usize> {
        let (memory, scratch) =
            Gpu::buffer(Profile::Cuda { deterministic: false }.attention_scratch(&self.shape, self.dtype))?;
        let (shape, qkv, out, lse) = (self.shape, &self.qkv, &self.out, &self.lse);
        let args = Attention { shape, qkv, document_start: None, out, lse, scratch: &scratch };
        let issue = || cudnn.forward(self.stream, &args);
        let start = Instant::now();
        if !issue()? {
            println!("  forward refused: {} FAIL", cudnn.refused().unwrap_or_default());
            return Ok(1);
        }
        self.synchronize()?;
        let first_ms = start.elapsed().as_millis();
        let (expected_out, expected_lse) = self.plain.forward(qkv)?;
        let rows = shape.tokens() * shape.heads;
        let mut failed = self.compare("out", &read(out)?, &expected_out, 0..rows, rows);
        let errors = read(lse)?.into_iter().zip(&expected_lse).map(|(found, expected)| found - expected);
        let worst = errors.fold(
            0.0,
            |worst: f64, error| {
                if error.is_finite() { worst.max(error.abs()) } else { f64::INFINITY }
            },
        );
        failed += self.verdict(worst < 1e-5, &format!("lse: worst error {worst:.1e}"));
        failed += self.guards(&memory)?;
        println!("  forward {}, first call {first_ms} ms", self.speed(1.0, issue)?);
        Ok(failed)
    }

    /// `bits`: what an earlier run gave, where this one is to give the same.
    fn backward(
        &self,
        cudnn: &Cudnn,
        sum: QuerySum,
        bytes: usize,
        expected: &[f64],
        bits: &mut Option<Vec<u8>>,
    ) -> Outcome<usize> {
        let (memory, scratch) = Gpu::buffer(bytes)?;
        let args = AttentionGrad {
            shape: self.shape,
            qkv: &self.qkv,
            document_start: None,
            out: &self.out,
            lse: &self.lse,
            dout: &self.dout,
            dqkv: &self.dqkv,
            scratch: &scratch,
        };
        let issue = || cudnn.backward(self.stream, &args);
        let run = || -> Outcome<Option<Vec<u8>>> {
            poison(&self.dqkv)?;
            poison(&scratch)?;
            if !issue()? {
                return Ok(None);
            }
            self.synchronize()?;
            Ok(Some(read_bytes(&self.dqkv)?))
        };
        let start = Instant::now();
        let Some(found) = run()? else {
            println!("  backward refused: {} FAIL", cudnn.refused().unwrap_or_default());
            return Ok(1);
        };
        let first_ms = start.elapsed().as_millis();
        let (heads, kv_heads) = (self.shape.heads, self.shape.kv_heads);
        let values = floats(&found, self.dtype);
        let per_token = heads + 2 * kv_heads;
        let mut failed = 0;
        for (name, part) in
            [("dq", 0..heads), ("dk", heads..heads + kv_heads), ("dv", heads + kv_heads..per_token)]
        {
            failed += self.compare(name, &values, expected, part, per_token);
        }
        failed += self.guards(&memory)?;
        let mut same = true;
        for _ in 0..3 {
            same &= run()?.is_some_and(|again| again == found);
        }
        if sum == QuerySum::Ordered {
            failed += self.verdict(same, &format!("same bits again: {same}"));
            let same = bits.get_or_insert_with(|| found.clone()) == &found;
            failed += self.verdict(same, &format!("same bits with another scratch: {same}"));
        } else {
            println!("    same bits again: {same}");
        }
        let speed = self.speed(2.5, issue)?;
        println!(
            "  backward {sum:?} in {:.1} MiB: {speed}, first call {first_ms} ms",
            bytes as f64 / 1048576.0
        );
        Ok(failed)
    }

    /// Compares each row of `head_dim` elements whose number modulo `per_token` is in `part`.
    fn compare(
        &self,
        name: &str,
        found: &[f64],
        expected: &[f64],
        part: Range<usize>,
        per_token: usize,
    ) -> usize {
        let width = self.shape.head_dim;
        let rows = found.chunks(width).zip(expected.chunks(width)).enumerate();
        let rows = rows.filter(|(row, _)| part.contains(&(row % per_token)));
        let (mut error, mut norm, mut max_abs, mut each) = (0.0f64, 0.0f64, 0.0f64, Vec::new());
        for (row, (found, expected)) in rows {
            let (mut row_error, mut row_norm) = (0.0f64, 0.0f64);
            for (found, expected) in found.iter().zip(expected) {
                let difference = if found.is_finite() { (found - expected).abs() } else { f64::INFINITY };
                row_error += difference * difference;
                row_norm += expected * expected;
                max_abs = max_abs.max(difference);
            }
            error += row_error;
            norm += row_norm;
            each.push((row, row_error.sqrt(), row_norm.sqrt()));
        }
        // A row of zeros, as the gradient of the first query is, is measured against the usual row.
        let usual = (norm / each.len() as f64).sqrt().max(1e-3);
        let worst = |worst: (f64, usize), &(row, error, norm): &(usize, f64, f64)| {
            let ratio = error / (norm + 0.05 * usual);
            if ratio <= worst.0 { worst } else { (ratio, row) }
        };
        let (worst, row) = each.iter().fold((0.0, 0), worst);
        let relative = (error / norm.max(1e-6)).sqrt();
        let limit = if self.dtype == Dtype::F16 { 1e-3 } else { 8e-3 };
        let text =
            format!("{name}: error {relative:.1e}, of row {row} {worst:.1e}, of one element {max_abs:.1e}");
        self.verdict(relative < limit && worst < 3.0 * limit, &text)
    }

    fn verdict(&self, ok: bool, text: &str) -> usize {
        println!("    {text}{}", if ok { "" } else { " FAIL" });
        usize::from(!ok)
    }

    /// Counts the allocations behind which something was written.
    fn guards(&self, scratch: &Gpu) -> Outcome<usize> {
        let mut failed = 0;
        for memory in self.memories.iter().map(Arc::as_ref).chain([scratch]) {
            if !memory.guarded()? {
                failed += self.verdict(false, &format!("written behind a buffer of {} bytes", memory.bytes));
            }
        }
        Ok(failed)
    }

    /// `factor`: how many times the forward's operations it takes.
    fn speed(&self, factor: f64, issue: impl Fn() -> device::Result<bool>) -> Outcome<String> {
        if self.shape.seq < LONG {
            return Ok("not timed".to_owned());
        }
        let ms = self.time(&issue)?;
        let again = self.time(&issue)?;
        let AttentionShape { rows, seq, heads, head_dim, .. } = self.shape;
        let flops = factor * 2.0 * (rows * heads * seq * seq * head_dim) as f64;
        Ok(format!("{ms:.3} ms (again {again:.3}), {:.0} TFLOP/s", flops / ms / 1e9))
    }

    /// The median of 20 runs, in milliseconds.
    fn time(&self, issue: impl Fn() -> device::Result<bool>) -> Outcome<f64> {
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let (start, end) = (result::event::create(flags)?, result::event::create(flags)?);
        let mut times = Vec::new();
        for turn in 0..23 {
            // SAFETY: events and stream are alive.
            unsafe { result::event::record(start, self.stream) }?;
            issue()?;
            // SAFETY: as above.
            unsafe { result::event::record(end, self.stream) }?;
            self.synchronize()?;
            if turn >= 3 {
                // SAFETY: both have been recorded and reached.
                times.push(unsafe { result::event::elapsed(start, end) }?);
            }
        }
        times.sort_by(f32::total_cmp);
        Ok(f64::from(times[times.len() / 2]))
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.stream) }
    }
}

/// The plain kernels.
struct Plain {
    shape: AttentionShape,
    module: sys::CUmodule,
}

impl Plain {
    fn new(shape: AttentionShape, dtype: Dtype) -> Outcome<Self> {
        let mut options = CompileOptions { arch: Some("compute_90"), ..Default::default() };
        if dtype == Dtype::F16 {
            options.options.push("-DHALF".into());
        }
        let ptx = compile_ptx_with_opts(include_str!("cudnn_attention.cu"), options)?;
        let source = CString::new(ptx.to_src())?;
        // SAFETY: PTX, zero-terminated.
        let module = unsafe { result::module::load_data(source.as_ptr().cast()) }?;
        Ok(Plain { shape, module })
    }

    /// out and lse
    fn forward(&self, qkv: &Buffer) -> Outcome<(Vec<f64>, Vec<f64>)> {
        let out = Gpu::doubles(self.shape.tokens() * self.shape.out_cols())?;
        let lse = Gpu::doubles(self.shape.tokens() * self.shape.heads)?;
        let addresses = [qkv.address(), out.address, lse.address];
        self.launch("forward", self.shape.heads, self.shape.seq * 8, &addresses)?;
        Ok((out.read()?, lse.read()?))
    }

    /// dq, dk and dv, laid out as qkv
    fn backward(&self, qkv: &Buffer, out: &Buffer, lse: &Buffer, dout: &Buffer) -> Outcome<Vec<f64>> {
        let shape = &self.shape;
        let (tokens, q_cols, kv_cols) = (shape.tokens(), shape.out_cols(), shape.kv_heads * shape.head_dim);
        let row_sums = Gpu::doubles(tokens * shape.heads)?;
        let (dq, dk, dv) = (
            Gpu::doubles(tokens * q_cols)?,
            Gpu::doubles(tokens * kv_cols)?,
            Gpu::doubles(tokens * kv_cols)?,
        );
        let (qkv, lse, dout) = (qkv.address(), lse.address(), dout.address());
        let query = [qkv, out.address(), lse, dout, row_sums.address, dq.address];
        self.launch("query", shape.heads, shape.seq * 8, &query)?;
        let key = [qkv, lse, dout, row_sums.address, dk.address, dv.address];
        self.launch("key", shape.kv_heads, shape.seq * 16, &key)?;

        let (dq, dk, dv) = (dq.read()?, dk.read()?, dv.read()?);
        let mut dqkv = Vec::with_capacity(tokens * shape.qkv_cols());
        for token in 0..tokens {
            dqkv.extend_from_slice(&dq[token * q_cols..][..q_cols]);
            dqkv.extend_from_slice(&dk[token * kv_cols..][..kv_cols]);
            dqkv.extend_from_slice(&dv[token * kv_cols..][..kv_cols]);
        }
        Ok(dqkv)
    }

    fn launch(&self, name: &str, heads: usize, shared: usize, addresses: &[usize]) -> Outcome<()> {
        let shape = &self.shape;
        let sizes = [shape.seq, shape.heads, shape.kv_heads, shape.head_dim].map(|size| size as i32);
        let scale = 1.0 / (shape.head_dim as f64).sqrt();
        let mut params: Vec<*mut c_void> =
            addresses.iter().map(|a| (&raw const *a).cast_mut().cast()).collect();
        params.extend(sizes.iter().map(|size| (&raw const *size).cast_mut().cast::<c_void>()));
        params.push((&raw const scale).cast_mut().cast());
        let grid = (shape.seq as u32, heads as u32, shape.rows as u32);
        // SAFETY: the parameters are the kernel's, in order, and the buffers are as long as it expects.
        unsafe {
            let function = result::module::get_function(self.module, CString::new(name)?)?;
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            result::function::set_function_attribute(function, attribute, shared as i32)?;
            let default = std::ptr::null_mut();
            result::launch_kernel(function, grid, (128, 1, 1), shared as u32, default, &mut params)?;
            result::stream::synchronize(default)?;
        }
        Ok(())
    }
}

/// Device memory, poisoned, with a guard behind it.
#[derive(Debug)]
struct Gpu {
    address: usize,
    bytes: usize,
}

impl Gpu {
    fn new(bytes: usize) -> Result<Self, DriverError> {
        // SAFETY: plain memory, filled before anyone reads it.
        unsafe {
            let address = result::malloc_sync(bytes + GUARD)?;
            result::memset_d8_sync(address, POISON, bytes + GUARD)?;
            result::ctx::synchronize()?;
            Ok(Gpu { address: address as usize, bytes })
        }
    }

    fn buffer(bytes: usize) -> Outcome<(Arc<Self>, Buffer)> {
        let memory = Arc::new(Gpu::new(bytes)?);
        let buffer = Buffer::new(memory.clone(), 0, Dtype::U8, bytes)?;
        Ok((memory, buffer))
    }

    fn doubles(len: usize) -> Result<Self, DriverError> {
        Gpu::new(len * 8)
    }

    /// The elements of [`Gpu::doubles`].
    fn read(&self) -> Result<Vec<f64>, DriverError> {
        let mut out = vec![0f64; self.bytes / 8];
        // SAFETY: as many elements as there are, all written by now.
        unsafe { result::memcpy_dtoh_sync(&mut out, self.address as u64) }?;
        Ok(out)
    }

    fn guarded(&self) -> Result<bool, DriverError> {
        let mut guard = [0u8; GUARD];
        // SAFETY: the allocation goes on for that long.
        unsafe { result::memcpy_dtoh_sync(&mut guard, (self.address + self.bytes) as u64) }?;
        Ok(guard.iter().all(|&byte| byte == POISON))
    }
}

impl Memory for Gpu {
    fn address(&self) -> usize {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: ours, and everything that used it has been waited for.
        let _ = unsafe { result::free_sync(self.address as u64) };
    }
}

/// About normally distributed, as bytes of the dtype.
fn random(len: usize, dtype: Dtype, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut out = Vec::with_capacity(len * 2);
    for _ in 0..len {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let mixed = (state ^ (state >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = mixed ^ (mixed >> 32);
        let sum: i64 = (0..4).map(|part| ((mixed >> (16 * part)) & 0xffff) as i64 - 0x8000).sum();
        let value = sum as f32 / 37837.0;
        match dtype {
            Dtype::F16 => out.extend(f16::from_f32(value).to_ne_bytes()),
            _ => out.extend(bf16::from_f32(value).to_ne_bytes()),
        }
    }
    out
}

fn floats(bytes: &[u8], dtype: Dtype) -> Vec<f64> {
    match dtype {
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_ne_bytes(b).into()).collect(),
        Dtype::F16 => bytes.as_chunks::<2>().0.iter().map(|&b| f16::from_ne_bytes(b).into()).collect(),
        _ => bytes.as_chunks::<2>().0.iter().map(|&b| bf16::from_ne_bytes(b).into()).collect(),
    }
}

fn read_bytes(buffer: &Buffer) -> Result<Vec<u8>, DriverError> {
    let mut bytes = vec![0u8; buffer.num_bytes()];
    // SAFETY: as many bytes as the buffer has; whatever was to write them has been waited for.
    unsafe { result::memcpy_dtoh_sync(&mut bytes, buffer.address() as u64) }?;
    Ok(bytes)
}

fn read(buffer: &Buffer) -> Result<Vec<f64>, DriverError> {
    Ok(floats(&read_bytes(buffer)?, buffer.dtype()))
}

fn write(buffer: &Buffer, bytes: &[u8]) -> Result<(), DriverError> {
    // SAFETY: the buffer holds at least as many bytes.
    unsafe { result::memcpy_htod_sync(buffer.address() as u64, &bytes[..buffer.num_bytes()]) }?;
    result::ctx::synchronize()
}

fn poison(buffer: &Buffer) -> Result<(), DriverError> {
    // SAFETY: the buffer's own bytes.
    unsafe { result::memset_d8_sync(buffer.address() as u64, POISON, buffer.num_bytes()) }?;
    result::ctx::synchronize()
}
