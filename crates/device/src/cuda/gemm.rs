//! Matrix products through cuBLASLt.
//!
//! The library thinks in columns, we in rows. A row-major matrix read in columns is its transpose, so
//! c = a · b becomes cᵀ = bᵀ · aᵀ: the operands change places and nothing is copied.
//!
//! Which of the library's algorithms computes a product is chosen by timing where somebody asked for that
//! ([`MatrixProducts::time`], [`super::choice`]), else it is the first that the library's heuristic suggests.

use super::driver::{Context, DeviceMemory, check as check_driver};
use super::stream::Stream;
use crate::{Dtype, Error, Gemm, Matrix, Memory, ProductShape, Result};
use cudarc::cublaslt::sys::{self, cublasStatus_t};
use cudarc::driver::sys as driver;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};

/// Plans kept at most. A run has a few dozen shapes; whoever makes thousands pays for planning again.
const MAX_PLANS: usize = 1024;
/// Algorithms asked of the heuristic.
const CANDIDATES: usize = 32;
/// What every operand of a timed product is aligned to, and what a product needs to use the result.
const TIMED_ALIGNMENT: u32 = 16;
/// Candidates that are timed closely, after one run of each.
const FINALISTS: usize = 4;
/// Rounds of close timing, and how long each finalist runs in a round: long enough for a GPU at its limit of power to
/// slow down, since there what takes less energy takes less time.
const ROUNDS: usize = 3;
const ROUND_MS: f32 = 40.0;
/// The heuristic's own suggestion stays unless another one takes less than this share of its time.
const WORTH_CHANGING: f32 = 0.98;
/// Splits along k are summed in f32 and rounded once (CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE).
const REDUCE_IN_F32: u32 = 2;

fn check(call: &'static str, answer: cublasStatus_t) -> Result<()> {
    if answer == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(Error::Driver { call, what: format!("{answer:?}") })
}

/// How one operand lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Operand {
    dtype: Dtype,
    rows: usize,
    cols: usize,
    stride: usize,
    transposed: bool,
    /// The largest power of two up to 256 that divides the address: fast algorithms need 16 bytes.
    alignment: u32,
}

impl Operand {
    fn new(matrix: &Matrix<'_>) -> Self {
        let alignment = 1 << matrix.buffer.address().trailing_zeros().min(8);
        let Matrix { buffer, rows, cols, stride, transposed } = *matrix;
        Operand { dtype: buffer.dtype(), rows, cols, stride, transposed, alignment }
    }
}

/// Everything an algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    a: Operand,
    b: Operand,
    c: Operand,
    /// Whether c is added to. It does not change the algorithm, but may change which is fastest.
    accumulate: bool,
}

impl Key {
    fn new(args: &Gemm<'_>) -> Self {
        Key {
            a: Operand::new(&args.a),
            b: Operand::new(&args.b),
            c: Operand::new(&args.c),
            accumulate: args.beta != 0.0,
        }
    }

    fn is_aligned(&self) -> bool {
        [self.a, self.b, self.c].iter().all(|operand| operand.alignment >= TIMED_ALIGNMENT)
    }
}

/// The library's handle, its workspace, and the plans made so far.
pub(super) struct MatrixProducts {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    state: Mutex<State>,
}

struct State {
    plans: HashMap<Key, Plan>,
    choices: HashMap<String, Algorithm>,
    workspace: DeviceMemory,
    /// The stream that used the workspace last. Another one waits for it before using the workspace.
    last_user: Option<Stream>,
}

// SAFETY: the handle may be used from any thread; the rest is behind a mutex.
unsafe impl Send for MatrixProducts {}
// SAFETY: as above.
unsafe impl Sync for MatrixProducts {}

impl MatrixProducts {
    pub fn new(context: &Arc<Context>, workspace: DeviceMemory) -> Result<Self> {
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is to a local and the context is current.
        check("cublasLtCreate", unsafe { sys::cublasLtCreate(&mut handle) })?;
        let (plans, choices) = (HashMap::new(), HashMap::new());
        let state = State { plans, choices, workspace, last_user: None };
        Ok(MatrixProducts { context: context.clone(), handle, state: Mutex::new(state) })
    }

    pub fn multiply(&self, stream: &Stream, args: &Gemm<'_>) -> Result<()> {
        let (m, n, k) = args.check()?;
        check_dtypes(args)?;
        if args.beta != 0.0 && args.beta != 1.0 {
            return Err(Error::argument("gemm", format!("beta is {}; 0 or 1 is expected", args.beta)));
        }
        if m == 0 || n == 0 {
            return Ok(());
        }
        self.context.enter()?;
        if k == 0 {
            return if args.beta == 0.0 { zero_rows(stream, &args.c) } else { Ok(()) };
        }
        let key = Key::new(args);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.take_workspace(stream)?;
        if !state.plans.contains_key(&key) {
            if state.plans.len() >= MAX_PLANS {
                state.plans.clear();
            }
            let mut plan = Plan::new(self.handle, &key, state.workspace.bytes())
                .map_err(|error| Error::argument("gemm", format!("{m}×{k} · {k}×{n}, {key:?}: {error}")))?;
            if key.is_aligned()
                && let Some(chosen) = state.choices.get(&ProductShape::new(args).to_string())
            {
                plan.prefer(self.handle, chosen, state.workspace.bytes());
            }
            state.plans.insert(key, plan);
        }
        let plan = &state.plans[&key];
        plan.run(self.handle, stream, args, &plan.algorithm, &state.workspace)
    }

    /// From now on products of these shapes are computed by these algorithms, where they can be.
    pub fn adopt(&self, choices: HashMap<String, Algorithm>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.plans.clear();
        state.choices.extend(choices);
    }

    /// The algorithm that takes the least time for this product, whose result is computed many times over.
    pub fn time(&self, stream: &Stream, args: &Gemm<'_>) -> Result<Algorithm> {
        args.check()?;
        check_dtypes(args)?;
        self.context.enter()?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.take_workspace(stream)?;
        let mut key = Key::new(args);
        for operand in [&mut key.a, &mut key.b, &mut key.c] {
            operand.alignment = operand.alignment.min(TIMED_ALIGNMENT);
        }
        let plan = Plan::new(self.handle, &key, state.workspace.bytes())?;
        let time = |algorithm: &Algorithm, runs: usize| -> Option<f32> {
            let start = stream.record_timed().ok()?;
            for _ in 0..runs {
                plan.run(self.handle, stream, args, algorithm, &state.workspace).ok()?;
            }
            start.elapsed_ms(&stream.record_timed().ok()?).ok()
        };
        // The first run of each loads its code.
        let mut timed: Vec<(&Algorithm, Vec<f32>)> = plan
            .candidates
            .iter()
            .filter_map(|candidate| {
                time(candidate, 1).and(time(candidate, 1)).map(|ms| (candidate, vec![ms]))
            })
            .collect();
        let Some((suggested, first_ms)) = timed.first().cloned() else { return Ok(plan.algorithm) };
        timed.sort_by(|a, b| a.1[0].total_cmp(&b.1[0]));
        timed.truncate(FINALISTS);
        if !timed.iter().any(|(candidate, _)| candidate.data == suggested.data) {
            timed.push((suggested, first_ms));
        }
        let runs = (ROUND_MS / timed[0].1[0].max(1e-3)).clamp(2.0, 1000.0) as usize;
        // In turn, so that a GPU that slows down as it warms slows all of them alike.
        timed.iter_mut().for_each(|(_, times)| times.clear());
        for _ in 0..ROUNDS {
            for (candidate, times) in &mut timed {
                times.extend(time(candidate, runs).map(|ms| ms / runs as f32));
            }
        }
        let median = |times: &Vec<f32>| {
            let mut sorted = times.clone();
            sorted.sort_by(f32::total_cmp);
            sorted.get(sorted.len() / 2).copied().unwrap_or(f32::INFINITY)
        };
        let of_suggested = timed.iter().find(|(candidate, _)| candidate.data == suggested.data);
        let limit = of_suggested.map_or(f32::INFINITY, |(_, times)| median(times) * WORTH_CHANGING);
        let best = timed.iter().min_by(|a, b| median(&a.1).total_cmp(&median(&b.1)));
        Ok(*best.filter(|(_, times)| median(times) < limit).map_or(suggested, |(candidate, _)| candidate))
    }
}

/// An algorithm of the library with its settings: bytes that mean the same to every process with the same version.
pub(super) type Algorithm = sys::cublasLtMatmulAlgo_t;

/// The library's version, as in 130100.
pub(super) fn library_version() -> usize {
    // SAFETY: takes nothing.
    unsafe { sys::cublasLtGetVersion() }
}

impl Drop for MatrixProducts {
    fn drop(&mut self) {
        // The workspace goes with the state; products in flight end first.
        if self.context.synchronize().is_ok() {
            // SAFETY: created by `cublasLtCreate`, destroyed once. Plans do not refer to it.
            let _ = unsafe { sys::cublasLtDestroy(self.handle) };
        }
    }
}

impl fmt::Debug for MatrixProducts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MatrixProducts")
    }
}

impl State {
    /// Two products at a time must not share the workspace: a new stream starts after what the last one has
    /// been given so far.
    fn take_workspace(&mut self, stream: &Stream) -> Result<()> {
        match &self.last_user {
            Some(last) if last.is(stream) => return Ok(()),
            Some(last) => stream.wait(&last.record()?)?,
            None => {}
        }
        self.last_user = Some(stream.clone());
        Ok(())
    }
}

fn check_dtypes(args: &Gemm<'_>) -> Result<()> {
    let (input, output) = (args.a.buffer.dtype(), args.c.buffer.dtype());
    if !input.is_float() {
        return Err(Error::Unsupported { op: "gemm", dtype: input });
    }
    if output != input && output != Dtype::F32 {
        return Err(Error::WrongDtype { op: "gemm", expected: input, found: output });
    }
    Ok(())
}

/// An empty sum: every row of c becomes zero, what lies between rows stays.
fn zero_rows(stream: &Stream, c: &Matrix<'_>) -> Result<()> {
    let (address, bytes) = (c.buffer.address() as driver::CUdeviceptr, c.buffer.dtype().bytes());
    let (pitch, width) = (c.stride * bytes, c.cols * bytes);
    // SAFETY: `Gemm::check` found the buffer long enough for its rows; context and stream live.
    let answer = unsafe { driver::cuMemsetD2D8Async(address, pitch, 0, width, c.rows, stream.handle()) };
    check_driver("cuMemsetD2D8Async", answer)
}

fn data_type(dtype: Dtype) -> sys::cudaDataType {
    match dtype {
        Dtype::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        Dtype::F16 => sys::cudaDataType::CUDA_R_16F,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

/// A layout of the library, destroyed when dropped.
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// The transpose of how we see the matrix in memory.
    fn new(operand: &Operand) -> Result<Self> {
        let (rows, cols, stride) = (operand.cols as u64, operand.rows as u64, operand.stride as i64);
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a local.
        let answer = unsafe {
            sys::cublasLtMatrixLayoutCreate(&mut raw, data_type(operand.dtype), rows, cols, stride)
        };
        check("cublasLtMatrixLayoutCreate", answer)?;
        Ok(Layout(raw))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created above, destroyed once.
        let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// A product's description, destroyed when dropped.
struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    /// `first` and `second` are the operands as the library sees them.
    fn new(first: &Operand, second: &Operand) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // Plain f32 sums; for f32 inputs this is never TF32.
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        // SAFETY: the pointer is to a local.
        let answer =
            unsafe { sys::cublasLtMatmulDescCreate(&mut raw, compute, sys::cudaDataType::CUDA_R_32F) };
        check("cublasLtMatmulDescCreate", answer)?;
        let description = Description(raw);
        use sys::cublasLtMatmulDescAttributes_t::{CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB};
        description.set_operation(CUBLASLT_MATMUL_DESC_TRANSA, first.transposed)?;
        description.set_operation(CUBLASLT_MATMUL_DESC_TRANSB, second.transposed)?;
        Ok(description)
    }

    fn set_operation(&self, attribute: sys::cublasLtMatmulDescAttributes_t, transposed: bool) -> Result<()> {
        // CUBLAS_OP_N and CUBLAS_OP_T.
        let operation: i32 = if transposed { 1 } else { 0 };
        // SAFETY: the description lives, and reads four bytes of a local.
        let answer = unsafe {
            sys::cublasLtMatmulDescSetAttribute(self.0, attribute, std::ptr::from_ref(&operation).cast(), 4)
        };
        check("cublasLtMatmulDescSetAttribute", answer)
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created above, destroyed once.
        let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.0) };
    }
}

/// What the heuristic has to respect, destroyed when dropped.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(key: &Key, workspace_bytes: usize) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a local.
        check("cublasLtMatmulPreferenceCreate", unsafe { sys::cublasLtMatmulPreferenceCreate(&mut raw) })?;
        let preference = Preference(raw);
        use sys::cublasLtMatmulPreferenceAttributes_t as attribute;
        preference.set(attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(workspace_bytes as u64))?;
        preference.set(attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &REDUCE_IN_F32)?;
        preference.set(attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &key.b.alignment)?;
        preference.set(attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &key.a.alignment)?;
        preference.set(attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &key.c.alignment)?;
        preference.set(attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &key.c.alignment)?;
        Ok(preference)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulPreferenceAttributes_t, value: &T) -> Result<()> {
        // SAFETY: the preference lives, and reads as many bytes as the value has.
        let answer = unsafe {
            let value = std::ptr::from_ref(value).cast::<c_void>();
            sys::cublasLtMatmulPreferenceSetAttribute(self.0, attribute, value, size_of::<T>())
        };
        check("cublasLtMatmulPreferenceSetAttribute", answer)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created above, destroyed once.
        let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

/// A product of one shape, ready to run. Names are ours: the library's A is our b.
struct Plan {
    description: Description,
    a: Layout,
    b: Layout,
    c: Layout,
    algorithm: Algorithm,
    /// The heuristic's suggestions that fit, best first.
    candidates: Vec<Algorithm>,
}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, key: &Key, workspace_bytes: usize) -> Result<Self> {
        let description = Description::new(&key.b, &key.a)?;
        let (a, b, c) = (Layout::new(&key.a)?, Layout::new(&key.b)?, Layout::new(&key.c)?);
        let preference = Preference::new(key, workspace_bytes)?;
        let works = |candidate: &sys::cublasLtMatmulHeuristicResult_t| {
            candidate.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && candidate.workspaceSize <= workspace_bytes
        };
        let found = candidates(handle, &description, [&b, &a, &c], &preference)?;
        let candidates: Vec<Algorithm> =
            found.into_iter().filter(works).map(|candidate| candidate.algo).collect();
        let algorithm = *candidates.first().ok_or_else(|| Error::Driver {
            call: "cublasLtMatmulAlgoGetHeuristic",
            what: "the library knows no algorithm for this product".into(),
        })?;
        Ok(Plan { description, a, b, c, algorithm, candidates })
    }

    /// Takes `chosen` instead of the heuristic's suggestion, if the library agrees that it can do this product.
    fn prefer(&mut self, handle: sys::cublasLtHandle_t, chosen: &Algorithm, workspace_bytes: usize) {
        let mut result = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: handle, description and layouts live; the library fills the result, which zero bytes are a value of.
        let (answer, result) = unsafe {
            let answer = sys::cublasLtMatmulAlgoCheck(
                handle,
                self.description.0,
                self.b.0,
                self.a.0,
                self.c.0,
                self.c.0,
                chosen,
                result.as_mut_ptr(),
            );
            (answer, result.assume_init())
        };
        if answer == cublasStatus_t::CUBLAS_STATUS_SUCCESS && result.workspaceSize <= workspace_bytes {
            self.algorithm = *chosen;
        }
    }

    fn run(
        &self,
        handle: sys::cublasLtHandle_t,
        stream: &Stream,
        args: &Gemm<'_>,
        algorithm: &Algorithm,
        workspace: &DeviceMemory,
    ) -> Result<()> {
        let (alpha, beta) = (1.0f32, args.beta);
        let address = |matrix: &Matrix<'_>| matrix.buffer.address() as *mut c_void;
        // SAFETY: `Gemm::check` found all buffers long enough for the layouts; the scalars are read before the
        // call returns; handle, description, layouts and stream live; c and d are the same matrix.
        let answer = unsafe {
            sys::cublasLtMatmul(
                handle,
                self.description.0,
                std::ptr::from_ref(&alpha).cast(),
                address(&args.b),
                self.b.0,
                address(&args.a),
                self.a.0,
                std::ptr::from_ref(&beta).cast(),
                address(&args.c),
                self.c.0,
                address(&args.c),
                self.c.0,
                algorithm,
                workspace.address() as *mut c_void,
                workspace.bytes(),
                stream.handle() as sys::cudaStream_t,
            )
        };
        check("cublasLtMatmul", answer)
    }
}

/// The heuristic's suggestions, best first. Layouts are those of the library's A, B and C.
fn candidates(
    handle: sys::cublasLtHandle_t,
    description: &Description,
    [first, second, out]: [&Layout; 3],
    preference: &Preference,
) -> Result<Vec<sys::cublasLtMatmulHeuristicResult_t>> {
    let mut found = Vec::with_capacity(CANDIDATES);
    let mut count: c_int = 0;
    // SAFETY: all handles live; there is room for as many results as are asked for.
    let answer = unsafe {
        sys::cublasLtMatmulAlgoGetHeuristic(
            handle,
            description.0,
            first.0,
            second.0,
            out.0,
            out.0,
            preference.0,
            CANDIDATES as c_int,
            found.as_mut_ptr(),
            &mut count,
        )
    };
    check("cublasLtMatmulAlgoGetHeuristic", answer)?;
    // SAFETY: the library filled the first `count` results.
    unsafe { found.set_len((count.max(0) as usize).min(CANDIDATES)) };
    Ok(found)
}
