//! What the host computes beside a device: the optimizer's step on state that does not fit on the device.
//!
//! Work is issued on a [`Device::host_stream`] and runs on its worker, on buffers of [`Device::alloc_host`]. The worker
//! waits for a device's events by sleeping; a device does not wait for the worker's, whoever issues work for it does.

use crate::cpu::optim::Step;
use crate::cpu::{check, elementwise};
use crate::{AdamW, Buffer, Device, Event, Result, Stream};

/// Parts of a step are not smaller than this: a thread takes longer to start.
const MIN_PART: usize = 1 << 16;

/// The host beside one device.
#[derive(Debug)]
pub struct Host {
    stream: Stream,
    threads: usize,
}

impl Host {
    pub fn new(device: &dyn Device, name: &str) -> Result<Host> {
        Ok(Host { stream: device.host_stream(name)?, threads: device.host_threads().max(1) })
    }

    /// What is issued from now on starts after `event`, which may be the device's.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.stream.wait(event)
    }

    pub fn record(&self) -> Result<Event> {
        self.stream.record()
    }

    /// As [`crate::Kernels::adamw`], each thread taking a part. Elements are independent, so the parts change no bit.
    pub fn adamw(&self, args: &AdamW<'_>) -> Result<()> {
        if matches!(self.stream, Stream::Null) {
            return Ok(());
        }
        let len = args.master.len();
        let part = len.div_ceil(self.threads).max(MIN_PART);
        let steps = (0..len).step_by(part).map(|start| {
            let cut = |buffer: &Buffer| buffer.slice(start, part.min(len - start));
            let compute = args.compute.map(cut).transpose()?;
            let (master, grad) = (cut(args.master)?, cut(args.grad)?);
            let (moment1, moment2) = (cut(args.moment1)?, cut(args.moment2)?);
            Step::new(&AdamW {
                master: &master,
                moment1: &moment1,
                moment2: &moment2,
                grad: &grad,
                compute: compute.as_ref(),
                rounding: args.rounding.map(|chance| chance.after(start)),
                ..*args
            })
        });
        let steps = steps.collect::<Result<Vec<Step>>>()?;
        check::stream("adamw", &self.stream)?.submit(move || {
            let Some((first, others)) = steps.split_first() else { return Ok(()) };
            std::thread::scope(|scope| {
                let threads: Vec<_> = others.iter().map(|step| scope.spawn(|| step.run())).collect();
                let mine = first.run();
                let all = threads.into_iter().map(|thread| {
                    thread.join().unwrap_or_else(|_| Err(crate::Error::argument("adamw", "a part panicked")))
                });
                all.fold(mine, |result, part| result.and(part))
            })
        })
    }

    /// As [`crate::Kernels::fill`].
    pub fn fill(&self, dst: &Buffer, value: f32) -> Result<()> {
        if matches!(self.stream, Stream::Null) { Ok(()) } else { elementwise::fill(&self.stream, dst, value) }
    }

    /// As [`crate::Kernels::cast`].
    pub fn cast(&self, src: &Buffer, dst: &Buffer) -> Result<()> {
        if matches!(self.stream, Stream::Null) { Ok(()) } else { elementwise::cast(&self.stream, src, dst) }
    }

    /// Waits for all that was issued, and hears of what failed.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AdamWScalars, Dtype, Role, VERDICT, cpu::Cpu};

    #[test]
    fn a_step_in_parts_is_the_step_to_the_bit_and_kernels_do_not_see_the_hosts_memory() {
        let device: &dyn Device = &Cpu::new();
        let compute = device.stream("compute", Role::Compute).unwrap();
        let len = 3 * MIN_PART + 777;
        let scalars =
            AdamWScalars { keep: 0.99, one_minus_beta1: 0.1, beta2: 0.95, one_minus_beta2: 0.05, eps: 1e-8 };
        let values = |factor: usize| -> Vec<f32> {
            (0..len).map(|i| ((i * factor) % 1013) as f32 * 0.002 + 0.001).collect()
        };
        let run = |on_host: bool| {
            let alloc = |dtype, len| match on_host {
                true => device.alloc_host_buffer(dtype, len, "test").unwrap(),
                false => device.alloc_buffer(dtype, len, "test").unwrap(),
            };
            let filled = |factor| {
                let buffer = alloc(Dtype::F32, len);
                device.write_slice(&compute, &values(factor), &buffer).unwrap();
                buffer
            };
            let (p, m, v, g) = (filled(3), filled(5), filled(7), filled(11));
            let (copy, verdict) = (alloc(Dtype::Bf16, len), alloc(Dtype::F32, VERDICT));
            device.write_slice(&compute, &[1.0f32, 0.5, 1.0, 0.3, -0.01], &verdict).unwrap();
            let args = AdamW {
                master: &p,
                moment1: &m,
                moment2: &v,
                grad: &g,
                verdict: &verdict,
                compute: Some(&copy),
                scalars,
                rounding: None,
            };
            if on_host {
                assert!(device.adamw(&compute, &args).is_err());
                let host = Host { stream: device.host_stream("host").unwrap(), threads: 3 };
                host.adamw(&args).unwrap();
                host.synchronize().unwrap();
            } else {
                device.adamw(&compute, &args).unwrap();
            }
            let copy: Vec<half::bf16> = device.read_vec(&compute, &copy).unwrap();
            let state = [&p, &m, &v].map(|buffer| device.read_vec::<f32>(&compute, buffer).unwrap());
            (state, copy)
        };
        assert!(run(true) == run(false));
        assert!(device.host_use().peak_bytes > 0 && device.host_use().current_bytes == 0);
    }
}
