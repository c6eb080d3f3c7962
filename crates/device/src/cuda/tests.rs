//! What the conformance suite does not see: streams, staging, and products of awkward shapes.

use super::{Cuda, Sums, present};
use crate::{Buffer, Device, Dtype, Gemm, Matrix, Role, Stream};
use std::sync::Arc;

struct Bed {
    device: Arc<dyn Device>,
    stream: Stream,
}

/// None, and a line saying so, where there is no GPU.
fn bed() -> Option<Bed> {
    if let Err(what) = present() {
        println!("skipped: no CUDA device ({what})");
        return None;
    }
    let device: Arc<dyn Device> = Arc::new(Cuda::open(0, Sums::Ordered).unwrap());
    let stream = device.stream("test", Role::Compute).unwrap();
    Some(Bed { device, stream })
}

impl Bed {
    fn upload(&self, values: &[f32]) -> Buffer {
        let buffer = self.device.alloc_buffer(Dtype::F32, values.len(), "test").unwrap();
        self.device.write_slice(&self.stream, values, &buffer).unwrap();
        buffer
    }

    fn download(&self, buffer: &Buffer) -> Vec<f32> {
        self.device.read_vec(&self.stream, buffer).unwrap()
    }
}

#[test]
fn a_source_may_be_reused_as_soon_as_it_is_written() {
    let Some(bed) = bed() else { return };
    // More than all staging slots together.
    let mut values: Vec<f32> = (0..6 << 20).map(|i| i as f32).collect();
    let buffer = bed.device.alloc_buffer(Dtype::F32, values.len(), "test").unwrap();
    bed.device.write_slice(&bed.stream, &values, &buffer).unwrap();
    values.fill(-1.0);
    let back = bed.download(&buffer);
    assert!(back.iter().enumerate().all(|(i, &x)| x == i as f32));
}

#[test]
fn an_event_orders_two_streams() {
    let Some(bed) = bed() else { return };
    let side = bed.device.stream("side", Role::Side).unwrap();
    let (from, to) = (bed.upload(&vec![0.0; 8 << 20]), bed.upload(&vec![0.0; 8 << 20]));
    for round in 1..20 {
        bed.device.fill(&bed.stream, &from, round as f32).unwrap();
        side.wait(&bed.stream.record().unwrap()).unwrap();
        bed.device.copy(&side, &from, &to).unwrap();
        bed.stream.wait(&side.record().unwrap()).unwrap();
        let last = to.slice(to.len() - 1, 1).unwrap();
        assert_eq!(bed.download(&last), [round as f32]);
    }
}

#[test]
fn time_passes_between_two_points() {
    let Some(bed) = bed() else { return };
    let Stream::Cuda(stream) = &bed.stream else { panic!("not a CUDA stream") };
    let buffer = bed.upload(&vec![0.0; 1 << 20]);
    let start = stream.record_timed().unwrap();
    bed.device.fill(&bed.stream, &buffer, 1.0).unwrap();
    let ms = start.elapsed_ms(&stream.record_timed().unwrap()).unwrap();
    assert!(ms > 0.0 && ms < 10_000.0, "{ms}");
}

#[test]
fn products_on_two_streams_share_the_workspace_in_turn() {
    let Some(bed) = bed() else { return };
    let side = bed.device.stream("side", Role::Side).unwrap();
    let n = 256;
    let ones = bed.upload(&vec![1.0; n * n]);
    let (c, d) = (bed.upload(&vec![0.0; n * n]), bed.upload(&vec![0.0; n * n]));
    bed.stream.synchronize().unwrap();
    for _ in 0..10 {
        for (stream, out) in [(&bed.stream, &c), (&side, &d)] {
            let (a, b) = (Matrix::new(&ones, n, n), Matrix::new(&ones, n, n).t());
            bed.device.gemm(stream, &Gemm { a, b, c: Matrix::new(out, n, n), beta: 0.0 }).unwrap();
        }
    }
    side.synchronize().unwrap();
    assert!(bed.download(&c).iter().chain(&bed.download(&d)).all(|&x| x == n as f32));
}

#[test]
fn a_product_takes_operands_at_any_address() {
    let Some(bed) = bed() else { return };
    let (m, n, k) = (5, 7, 3);
    let values: Vec<f32> = (0..64).map(|i| (i % 11) as f32 - 5.0).collect();
    let whole = bed.upload(&values);
    let out = bed.upload(&[0.0; 64]);
    for shift in 0..4 {
        let (a, b) = (whole.slice(shift, m * k).unwrap(), whole.slice(20 + shift, k * n).unwrap());
        let c = out.slice(shift, m * n).unwrap();
        let (a, b) = (Matrix::new(&a, k, m).t(), Matrix::new(&b, k, n));
        bed.device.gemm(&bed.stream, &Gemm { a, b, c: Matrix::new(&c, m, n), beta: 0.0 }).unwrap();
        let got = bed.download(&c);
        for (i, row) in got.chunks(n).enumerate() {
            for (j, &x) in row.iter().enumerate() {
                let want: f32 =
                    (0..k).map(|p| values[shift + p * m + i] * values[20 + shift + p * n + j]).sum();
                assert_eq!(x, want, "shift {shift}, row {i}, column {j}");
            }
        }
    }
}

#[test]
fn a_gpu_that_is_not_there_is_an_error() {
    let error = Cuda::open(10_000, Sums::Fastest).unwrap_err().to_string();
    assert!(error.contains("not available"), "{error}");
}
