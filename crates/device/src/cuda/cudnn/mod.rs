//! cuDNN's fused attention, through its backend C API.
//!
//! Forward and backward are operation graphs that cuDNN recognises by their shape and runs as one fused kernel
//! each (with small ones around it). Plans are built once per shape and kept: a shape's first call takes some
//! hundred milliseconds, because cuDNN compiles for it.
//!
//! # The order of sums
//! The backward goes over keys in parallel, so several blocks add to one query's gradient. cuDNN either adds
//! atomically, and gives other bits on every run, or writes dS to memory and multiplies it with the keys
//! afterwards. The second is the default, since kernels here promise the same bits for the same inputs. It
//! needs `seq²` elements a head; where the scratch does not hold them for all heads, the backward runs part by
//! part: row by row, or on some of the heads at a time.
//!
//! # Packed documents
//! Documents are the batches of a graph then, with tensors that start where a table says ("ragged"). Graphs have
//! room for a number of documents, whatever a step brings; absent ones have no tokens. The table is written on the
//! device, so the host need not know how many there are; it also says which token the documents beyond that
//! number begin with, and whoever issues the graph sees to those. The order of sums is atomic or refused: `seq²`
//! elements a head would be too many for all documents.

mod backward;
mod descriptor;
mod forward;
mod graph;
mod library;
mod masks;
mod packed;
mod part;
mod sizes;
mod table;

pub use backward::QuerySum;
pub(super) use packed::PackedLayout;
pub use packed::packed_backward_scratch;
pub use part::backward_scratch;
pub(super) use table::DocumentTable;

use crate::{Attention, AttentionGrad, AttentionShape, Buffer, Dtype, Error, Result};
use backward::Backward;
use cudarc::driver::sys::CUstream;
use descriptor::Handle;
use forward::Forward;
use graph::{ALIGNMENT, Type};
use library::{Library, Opaque};
use part::{Part, ScratchLayout};
use sizes::{Packing, Sizes};
use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// cuDNN on one GPU.
pub struct Cudnn {
    library: &'static Library,
    query_sum: QuerySum,
    state: Mutex<State>,
}

struct State {
    library: &'static Library,
    handle: Opaque,
    forward: Plans<Sizes, Forward>,
    backward: Plans<(Sizes, QuerySum), Backward>,
    refused: Option<String>,
}

/// Plans by what they are for, or cuDNN's reason why it has none.
type Plans<K, P> = HashMap<K, std::result::Result<P, String>>;

// SAFETY: a handle and its plans may be used from any thread, by one at a time; the mutex sees to that.
unsafe impl Send for State {}

impl Cudnn {
    /// Opens the library, for the GPU whose context is current on this thread. It must be current, too, on every
    /// thread that calls the rest.
    pub fn load() -> Result<Cudnn> {
        let library = Library::load()?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is where the new handle goes.
        let status = unsafe { (library.create)(&mut handle) };
        library.check("cudnnCreate", status).map_err(|failure| Error::Unavailable {
            library: "cuDNN",
            what: Error::from(failure).to_string(),
        })?;
        let state =
            State { library, handle, forward: HashMap::new(), backward: HashMap::new(), refused: None };
        Ok(Cudnn { library, query_sum: QuerySum::Ordered, state: Mutex::new(state) })
    }

    /// Chooses how gradients of queries are summed; [`QuerySum::Ordered`] unless told otherwise.
    pub fn with_query_sum(self, query_sum: QuerySum) -> Self {
        Cudnn { query_sum, ..self }
    }

    /// major · 10000 + minor · 100 + patch
    pub fn version(&self) -> usize {
        self.library.version()
    }

    /// Why the latest call that returned false did.
    pub fn refused(&self) -> Option<String> {
        self.lock().refused.clone()
    }

    /// Issues the forward. False: cuDNN cannot do this one here, and nothing was issued.
    pub fn forward(&self, stream: CUstream, args: &Attention<'_>) -> Result<bool> {
        self.forward_of(stream, args, None)
    }

    /// As [`Cudnn::forward`], for the documents of a table, if any.
    pub(super) fn forward_of(
        &self,
        stream: CUstream,
        args: &Attention<'_>,
        documents: Option<&DocumentTable>,
    ) -> Result<bool> {
        let mut state = self.lock();
        let sizes = match sizes(&args.shape, args.qkv.dtype(), args.document_start, documents) {
            Ok(sizes) => sizes,
            Err(reason) => return Ok(state.refuse(reason)),
        };
        check("attention", &args.shape, args.lse, &[("qkv", args.qkv)], &[("out", args.out)])?;
        if !aligned(&[args.qkv, args.out, args.lse, args.scratch]) {
            return Ok(state.refuse("an address is not aligned"));
        }
        let handle = self.on_stream(&state, stream)?;
        let build = || Forward::new(self.library, handle, &sizes);
        let plan = match plan(&mut state.forward, sizes, build)? {
            Ok(plan) => plan,
            Err(reason) => return Ok(state.refuse(reason)),
        };
        if let Err(reason) = fits(plan.workspace_bytes(), args.scratch.num_bytes()) {
            return Ok(state.refuse(reason));
        }
        let [q, k, v] = split(args.qkv, &args.shape);
        let (out, lse, workspace) = (args.out.address(), args.lse.address(), args.scratch.address());
        let at = forward::Addresses { q, k, v, out, lse, workspace, documents };
        // SAFETY: the buffers were found long enough for the shape, and whoever issues the work keeps them until
        // it has run, as for every kernel.
        unsafe { plan.run(handle, args.shape.scale(), &at) }?;
        Ok(true)
    }

    /// Issues the backward. False: cuDNN cannot do this one here, and nothing was issued.
    pub fn backward(&self, stream: CUstream, args: &AttentionGrad<'_>) -> Result<bool> {
        let mut state = self.lock();
        let (shape, dtype) = (&args.shape, args.qkv.dtype());
        let whole = match sizes(shape, dtype, args.document_start, None) {
            Ok(sizes) => sizes,
            Err(reason) => return Ok(state.refuse(reason)),
        };
        let packed = [("qkv", args.qkv), ("dqkv", args.dqkv)];
        check("attention_grad", shape, args.lse, &packed, &[("out", args.out), ("dout", args.dout)])?;
        if !aligned(&[args.qkv, args.out, args.lse, args.dout, args.dqkv, args.scratch]) {
            return Ok(state.refuse("an address is not aligned"));
        }
        // All of dS would be made for a few keys a query.
        if whole.window.is_some() && self.query_sum == QuerySum::Ordered {
            return Ok(state.refuse("a window only with atomic sums"));
        }
        let room = args.scratch.num_bytes();
        let Some(part) = Part::largest(shape, dtype, self.query_sum, room) else {
            return Ok(state.refuse(format!("{room} bytes of scratch are too few")));
        };
        let layout = ScratchLayout::new(shape, &part, self.query_sum);
        let sizes = part.sizes(&whole);

        let handle = self.on_stream(&state, stream)?;
        let build = || Backward::new(self.library, handle, &sizes, self.query_sum);
        let plan = match plan(&mut state.backward, (sizes, self.query_sum), build)? {
            Ok(plan) => plan,
            Err(reason) => return Ok(state.refuse(reason)),
        };
        if let Err(reason) = fits(layout.workspace + plan.workspace_bytes(), room) {
            return Ok(state.refuse(reason));
        }
        let scratch = args.scratch.address();
        let ([q, k, v], [dq, dk, dv]) = (split(args.qkv, shape), split(args.dqkv, shape));
        for offsets in part.offsets(shape, dtype) {
            let at = backward::Addresses {
                q: q + offsets.queries,
                k: k + offsets.keys,
                v: v + offsets.keys,
                out: args.out.address() + offsets.outputs,
                dout: args.dout.address() + offsets.outputs,
                lse: args.lse.address() + offsets.lse,
                dq: dq + offsets.queries,
                dk: dk + offsets.keys,
                dv: dv + offsets.keys,
                row_sums: scratch,
                accumulator: scratch + layout.accumulator,
                workspace: scratch + layout.workspace,
                documents: None,
                dk_each: 0,
                dv_each: 0,
            };
            // SAFETY: as in `forward`; a part's offsets stay inside the shape. Parts share the scratch because
            // they run one after the other.
            unsafe { plan.run(handle, shape.scale(), &at) }?;
        }
        Ok(true)
    }

    /// As [`Cudnn::backward`], for the documents of a table, whose keys and values lie in the scratch as
    /// [`PackedLayout`] says; their gradients are left there.
    pub(super) fn backward_of(
        &self,
        stream: CUstream,
        args: &AttentionGrad<'_>,
        documents: &DocumentTable,
    ) -> Result<bool> {
        let mut state = self.lock();
        let (shape, dtype) = (&args.shape, args.qkv.dtype());
        let sizes = match sizes(shape, dtype, args.document_start, Some(documents)) {
            Ok(sizes) => sizes,
            Err(reason) => return Ok(state.refuse(reason)),
        };
        if self.query_sum == QuerySum::Ordered {
            return Ok(state.refuse("documents only with atomic sums"));
        }
        let packed = [("qkv", args.qkv), ("dqkv", args.dqkv)];
        check("attention_grad", shape, args.lse, &packed, &[("out", args.out), ("dout", args.dout)])?;
        if !aligned(&[args.qkv, args.out, args.lse, args.dout, args.dqkv, args.scratch]) {
            return Ok(state.refuse("an address is not aligned"));
        }
        let layout = PackedLayout::new(shape, dtype);
        let handle = self.on_stream(&state, stream)?;
        let build = || Backward::new(self.library, handle, &sizes, self.query_sum);
        let plan = match plan(&mut state.backward, (sizes, self.query_sum), build)? {
            Ok(plan) => plan,
            Err(reason) => return Ok(state.refuse(reason)),
        };
        if let Err(reason) = fits(layout.workspace + plan.workspace_bytes(), args.scratch.num_bytes()) {
            return Ok(state.refuse(reason));
        }
        let scratch = args.scratch.address();
        let at = backward::Addresses {
            q: args.qkv.address(),
            k: scratch + layout.k,
            v: scratch + layout.v,
            out: args.out.address(),
            dout: args.dout.address(),
            lse: args.lse.address(),
            dq: args.dqkv.address(),
            dk: scratch + layout.dk,
            dv: scratch + layout.dv,
            row_sums: scratch,
            accumulator: scratch + layout.accumulator,
            workspace: scratch + layout.workspace,
            documents: Some(documents),
            dk_each: scratch + layout.dk_each,
            dv_each: scratch + layout.dv_each,
        };
        // SAFETY: as in `forward`; the layout fits the scratch, as just seen.
        unsafe { plan.run(handle, shape.scale(), &at) }?;
        Ok(true)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn on_stream(&self, state: &State, stream: CUstream) -> Result<Handle> {
        // SAFETY: the handle is alive, and the stream is its context's.
        let status = unsafe { (self.library.set_stream)(state.handle, stream) };
        self.library.check("cudnnSetStream", status)?;
        Ok(Handle(state.handle))
    }
}

impl State {
    fn refuse(&mut self, reason: impl Into<String>) -> bool {
        self.refused = Some(reason.into());
        false
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.forward.clear();
        self.backward.clear();
        // SAFETY: alive, and its plans are gone.
        unsafe { (self.library.destroy)(self.handle) };
    }
}

impl fmt::Debug for Cudnn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cudnn({})", self.version())
    }
}

/// What a plan for this shape is for, unless these graphs do not cover it.
fn sizes(
    shape: &AttentionShape,
    dtype: Dtype,
    document_start: Option<&Buffer>,
    documents: Option<&DocumentTable>,
) -> std::result::Result<Sizes, &'static str> {
    let dtype = match dtype {
        Dtype::Bf16 => Type::CUDNN_DATA_BFLOAT16,
        Dtype::F16 => Type::CUDNN_DATA_HALF,
        _ => return Err("only bf16 and f16"),
    };
    if document_start.is_some() != documents.is_some() {
        return Err("documents need a table");
    }
    if shape.head_dim == 0 || shape.head_dim > 128 || !shape.head_dim.is_multiple_of(16) {
        return Err("only heads of 16, 32, … 128");
    }
    if shape.tokens() == 0 || shape.kv_heads == 0 || !shape.heads.is_multiple_of(shape.kv_heads) {
        return Err("no tokens, or heads that do not come in groups");
    }
    // Offsets of documents are 32-bit.
    if documents.is_some() && shape.tokens() * shape.qkv_cols() > i32::MAX as usize {
        return Err("too many tokens for documents");
    }
    Ok(Sizes {
        dtype,
        rows: documents.map_or(shape.rows, |table| table.cap) as i64,
        packing: if documents.is_some() { Packing::Documents } else { Packing::Rows },
        seq: shape.seq as i64,
        heads: shape.heads as i64,
        kv_heads: shape.kv_heads as i64,
        head_dim: shape.head_dim as i64,
        qkv_cols: shape.qkv_cols() as i64,
        out_cols: shape.out_cols() as i64,
        window: shape.window.filter(|&window| window < shape.seq).map(|window| window as i64),
    })
}

/// Fails where a buffer has another dtype or is too short.
fn check(
    op: &'static str,
    shape: &AttentionShape,
    lse: &Buffer,
    packed: &[(&str, &Buffer)],
    outputs: &[(&str, &Buffer)],
) -> Result<()> {
    lse.expect_dtype::<f32>(op)?;
    lse.expect_len(op, "lse", shape.tokens() * shape.heads)?;
    let packed = packed.iter().map(|(name, buffer)| (name, buffer, shape.qkv_cols()));
    let outputs = outputs.iter().map(|(name, buffer)| (name, buffer, shape.out_cols()));
    let mut expected = None;
    for (name, buffer, cols) in packed.chain(outputs) {
        buffer.expect_len(op, name, shape.tokens() * cols)?;
        let expected = *expected.get_or_insert(buffer.dtype());
        if buffer.dtype() != expected {
            return Err(Error::WrongDtype { op, expected, found: buffer.dtype() });
        }
    }
    Ok(())
}

fn aligned(buffers: &[&Buffer]) -> bool {
    buffers.iter().all(|buffer| buffer.address().is_multiple_of(ALIGNMENT))
}

fn fits(needed: usize, room: usize) -> std::result::Result<(), String> {
    if needed <= room {
        return Ok(());
    }
    Err(format!("{needed} bytes of scratch needed, {room} there"))
}

/// Addresses of the first query, key and value in a packed buffer.
fn split(qkv: &Buffer, shape: &AttentionShape) -> [usize; 3] {
    let bytes = shape.head_dim * qkv.dtype().bytes();
    let q = qkv.address();
    [q, q + shape.heads * bytes, q + (shape.heads + shape.kv_heads) * bytes]
}

/// The plan kept under `key`, built where there is none yet; or why there can be none.
fn plan<K: Eq + Hash, P>(
    plans: &mut Plans<K, P>,
    key: K,
    build: impl FnOnce() -> descriptor::Result<P>,
) -> Result<std::result::Result<&P, String>> {
    let plan = match plans.entry(key) {
        std::collections::hash_map::Entry::Occupied(found) => found.into_mut(),
        std::collections::hash_map::Entry::Vacant(room) => room.insert(match build() {
            Ok(plan) => Ok(plan),
            Err(failure) if failure.is_unsupported() => Err(failure.what().to_owned()),
            Err(failure) => return Err(failure.into()),
        }),
    };
    Ok(plan.as_ref().map_err(String::clone))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_there_is_no_cudnn_it_is_unavailable() {
        match Cudnn::load() {
            Ok(_) | Err(Error::Unavailable { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}
