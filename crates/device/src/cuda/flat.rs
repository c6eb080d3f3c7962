//! Kernels over flat ranges: copies, casts, functions of one number, sums and the optimizer.

use super::device::{Cuda, aligned, expect, float};
use super::driver::check;
use super::module::{Launch, args};
use super::nvrtc::{ADAMW, ELEMENTWISE, POINTWISE, REDUCE};
use super::stream::Stream;
use crate::{
    Activation, ActivationGrad, AdamW, Buffer, Dropout, Dtype, Error, Function, Judge, Result, SCALER,
    Scaling, VERDICT,
};
use cudarc::driver::sys;
use std::sync::atomic::Ordering;

const BLOCK: usize = 256;
/// Elements a thread takes at a time, where alignment allows.
const GROUP: usize = 8;
/// Blocks of a sum's first stage at most; each leaves one f32.
const MAX_PARTIALS: usize = 1024;

fn expect_equal_len(op: &'static str, a: &Buffer, b: &Buffer) -> Result<()> {
    if a.len() == b.len() {
        return Ok(());
    }
    Err(Error::argument(op, format!("lengths differ: {} and {}", a.len(), b.len())))
}

/// The number by which `adamw.cu` knows a dtype.
fn code(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        _ => 2,
    }
}

/// What `pointwise.cu` calls a function.
fn name_of(function: Function) -> &'static str {
    match function {
        Function::Relu => "relu",
        Function::Gelu => "gelu",
        Function::GeluTanh => "gelu_tanh",
    }
}

impl Cuda {
    /// Enough blocks to keep the GPU busy; kernels walk over what is left.
    fn flat(&self, len: usize, vector: bool) -> Launch {
        let items = if vector { len.div_ceil(GROUP) } else { len };
        Launch::new(items.div_ceil(BLOCK).clamp(1, self.context.multiprocessors as usize * 16), BLOCK)
    }

    pub(super) fn fill(&self, stream: &Stream, dst: &Buffer, value: f32) -> Result<()> {
        let (dtype, n, vector) = (float("fill", dst)?, dst.len(), aligned(&[dst]));
        if n == 0 {
            return Ok(());
        }
        let name = format!("fill_{dtype}");
        self.launch(stream, &ELEMENTWISE, &name, self.flat(n, vector), args![dst, value, n, vector])
    }

    pub(super) fn copy(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        expect("copy", "dst", dst, src.dtype(), src.len())?;
        expect_equal_len("copy", src, dst)?;
        if src.is_empty() {
            return Ok(());
        }
        if src.overlaps(dst) {
            return Err(Error::argument("copy", "source and destination overlap"));
        }
        self.copies.on_device.fetch_add(src.num_bytes(), Ordering::Relaxed);
        self.context.enter()?;
        let (to, from) = (dst.address() as sys::CUdeviceptr, src.address() as sys::CUdeviceptr);
        // SAFETY: both are `src.num_bytes()` long and apart; the stream lives.
        let answer = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, src.num_bytes(), stream.handle()) };
        check("cuMemcpyDtoDAsync", answer)
    }

    pub(super) fn cast(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.pairwise("cast", stream, src, dst)
    }

    pub(super) fn add(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        self.pairwise("add", stream, src, dst)
    }

    fn pairwise(&self, op: &'static str, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        let (from, to) = (float(op, src)?, float(op, dst)?);
        expect_equal_len(op, src, dst)?;
        let (n, vector) = (src.len(), aligned(&[src, dst]));
        if n == 0 {
            return Ok(());
        }
        let name = format!("{op}_{from}_{to}");
        self.launch(stream, &ELEMENTWISE, &name, self.flat(n, vector), args![src, dst, n, vector])
    }

    pub(super) fn sum(
        &self,
        stream: &Stream,
        x: &Buffer,
        out: &Buffer,
        scratch: &Buffer,
        accumulate: bool,
    ) -> Result<()> {
        expect("sum", "x", x, Dtype::F32, 0)?;
        self.reduce("sum", stream, x, out, scratch, accumulate)
    }

    pub(super) fn sum_squares(
        &self,
        stream: &Stream,
        x: &Buffer,
        out: &Buffer,
        scratch: &Buffer,
        accumulate: bool,
    ) -> Result<()> {
        self.reduce("sum_squares", stream, x, out, scratch, accumulate)
    }

    /// In two stages whose shape depends on the length only.
    fn reduce(
        &self,
        op: &'static str,
        stream: &Stream,
        x: &Buffer,
        out: &Buffer,
        scratch: &Buffer,
        accumulate: bool,
    ) -> Result<()> {
        let (dtype, n, vector) = (float(op, x)?, x.len(), aligned(&[x]));
        let blocks = n.div_ceil(BLOCK * GROUP * 4).clamp(1, MAX_PARTIALS);
        expect(op, "out", out, Dtype::F32, 1)?;
        expect(op, "scratch", scratch, Dtype::F32, blocks)?;
        let first = Launch::new(blocks, BLOCK);
        self.launch(stream, &REDUCE, &format!("{op}_{dtype}"), first, args![x, scratch, n, vector])?;
        self.launch(
            stream,
            &REDUCE,
            "sum_partials",
            Launch::new(1, BLOCK),
            args![scratch, blocks, out, accumulate],
        )
    }

    pub(super) fn reciprocal(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        expect("reciprocal", "src", src, Dtype::F32, 0)?;
        expect("reciprocal", "dst", dst, Dtype::F32, 0)?;
        expect_equal_len("reciprocal", src, dst)?;
        let n = src.len();
        if n == 0 {
            return Ok(());
        }
        self.launch(stream, &ELEMENTWISE, "reciprocal", self.flat(n, false), args![src, dst, n])
    }

    pub(super) fn multiply(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        expect("multiply", "src", src, Dtype::F32, 0)?;
        expect("multiply", "dst", dst, Dtype::F32, 0)?;
        expect_equal_len("multiply", src, dst)?;
        let n = src.len();
        if n == 0 {
            return Ok(());
        }
        self.launch(stream, &ELEMENTWISE, "multiply", self.flat(n, false), args![src, dst, n])
    }

    pub(super) fn judge(&self, stream: &Stream, a: &Judge<'_>) -> Result<()> {
        expect("judge", "sum_squares", a.sum_squares, Dtype::F32, 1)?;
        expect("judge", "scaler", a.scaler, Dtype::F32, SCALER)?;
        expect("judge", "verdict", a.verdict, Dtype::F32, VERDICT)?;
        let Scaling { growth, backoff, interval } =
            a.scaling.unwrap_or(Scaling { growth: 1.0, backoff: 1.0, interval: 0 });
        let values = args![
            a.sum_squares,
            a.scaler,
            a.verdict,
            a.max_norm,
            a.step as usize,
            a.betas[0],
            a.betas[1],
            a.lr,
            a.scaling.is_some(),
            growth,
            backoff,
            interval as usize,
        ];
        self.launch(stream, &ADAMW, "judge", Launch::new(1, 32), values)
    }

    pub(super) fn adamw(&self, stream: &Stream, a: &AdamW<'_>) -> Result<()> {
        let n = a.master.len();
        let mut buffers = vec![a.master, a.moment1, a.moment2, a.grad];
        buffers.extend(a.compute);
        for buffer in &buffers {
            float("adamw", buffer)?;
            expect_equal_len("adamw", a.master, buffer)?;
        }
        expect("adamw", "verdict", a.verdict, Dtype::F32, VERDICT)?;
        a.check_rounding()?;
        if n == 0 {
            return Ok(());
        }
        let (vector, s) = (aligned(&buffers), a.scalars);
        let compute_code = a.compute.map_or(0, |buffer| code(buffer.dtype()));
        let values = args![
            a.master,
            code(a.master.dtype()),
            a.moment1,
            code(a.moment1.dtype()),
            a.moment2,
            code(a.moment2.dtype()),
            a.grad,
            code(a.grad.dtype()),
            a.verdict,
            a.compute,
            compute_code,
            s.keep,
            s.one_minus_beta1,
            s.beta2,
            s.one_minus_beta2,
            s.eps,
            a.rounding.is_some(),
            a.rounding.map_or(0, |rounding| rounding.key) as usize,
            a.rounding.map_or(0, |rounding| rounding.first) as usize,
            n,
            vector,
        ];
        self.launch(stream, &ADAMW, "adamw", self.flat(n, vector), values)
    }

    pub(super) fn activation(&self, stream: &Stream, a: &Activation<'_>) -> Result<()> {
        let op = "activation";
        let dtype = float(op, a.x)?;
        expect(op, "out", a.out, dtype, 0)?;
        expect_equal_len(op, a.x, a.out)?;
        let (n, vector) = (a.x.len(), aligned(&[a.x, a.out]));
        if n == 0 {
            return Ok(());
        }
        let name = format!("{}_{dtype}", name_of(a.function));
        self.launch(stream, &POINTWISE, &name, self.flat(n, vector), args![a.x, a.out, n, vector])
    }

    pub(super) fn activation_grad(&self, stream: &Stream, a: &ActivationGrad<'_>) -> Result<()> {
        let op = "activation_grad";
        let dtype = float(op, a.x)?;
        for buffer in [a.dout, a.dx] {
            expect(op, "dout or dx", buffer, dtype, 0)?;
            expect_equal_len(op, a.x, buffer)?;
        }
        let (n, vector) = (a.x.len(), aligned(&[a.x, a.dout, a.dx]));
        if n == 0 {
            return Ok(());
        }
        let name = format!("{}_grad_{dtype}", name_of(a.function));
        self.launch(stream, &POINTWISE, &name, self.flat(n, vector), args![a.x, a.dout, a.dx, n, vector])
    }

    pub(super) fn dropout(&self, stream: &Stream, a: &Dropout<'_>) -> Result<()> {
        let op = "dropout";
        let (dtype, threshold, scale) = (float(op, a.x)?, a.threshold()? as usize, 1.0 / (1.0 - a.p));
        expect(op, "out", a.out, dtype, 0)?;
        expect_equal_len(op, a.x, a.out)?;
        let (n, vector) = (a.x.len(), aligned(&[a.x, a.out]));
        if n == 0 {
            return Ok(());
        }
        let values = args![a.x, a.out, a.key as usize, a.first as usize, threshold, scale, n, vector];
        self.launch(stream, &POINTWISE, &format!("dropout_{dtype}"), self.flat(n, vector), values)
    }
}
