//! The same on a GPU, where there is one.

use super::harness::*;
use comm::Solo;
use device::cuda::{self, Cuda, Sums};
use device::{Device, Dtype, Profile};
use fsdp::{Engine, Groups, Offload, Plan, Precision, Report, Settings};
use std::sync::Arc;

/// Trains on one GPU; (reports, planned and taken bytes of the device, and of the host).
fn train_on_gpu(settings: &Settings, steps: u64) -> (Vec<Report>, [usize; 4]) {
    let model = model(true);
    let profile = Profile::Cuda { deterministic: true };
    let plan = Arc::new(Plan::new(&model, settings.clone(), profile).unwrap());
    let device: Arc<dyn Device> = Arc::new(Cuda::open(0, Sums::Ordered).unwrap());
    let planned = plan.peak_bytes(&model);
    let planned_host = plan.host_regions().iter().map(|region| region.bytes).sum();
    let groups = Groups::all(Arc::new(Solo::new("solo", device.clone())));
    let mut engine = Engine::new(device.clone(), plan, model, groups).unwrap();
    engine.fill(&Seeded).unwrap();
    let mut reports = Vec::new();
    for step in 1..=steps {
        engine.step(&batches(settings, 0, step), &hyper(step)).unwrap();
        reports.push(engine.report().unwrap());
    }
    (reports, [planned, device.memory_use().peak_bytes, planned_host, device.host_use().peak_bytes])
}

#[test]
fn offloading_and_f16_train_as_on_the_cpu() {
    if let Err(why) = cuda::present() {
        println!("skipped: {why}");
        return;
    }
    let bf16_all = Precision { grad: Dtype::Bf16, reduce: Dtype::Bf16, ..BF16 };
    for (precision, micro_batches) in [(BF16, 1), (F16, 1), (bf16_all, 3)] {
        let base = Settings { precision, ..settings(1, micro_batches) };
        let on_cpu = train(&model(true), &base, 6);
        let (plain, _) = train_on_gpu(&base, 6);
        let (loss, norm) = distance(&plain, &on_cpu.reports);
        assert!(loss < 2e-3 && norm < 3e-2, "{precision:?}: loss {loss:.1e}, norm {norm:.1e}");
        for offload in [
            Offload { optimizer: true, gradients: true, weights: false },
            Offload { gradients: true, ..Offload::default() },
            Offload { weights: true, ..Offload::default() },
            Offload::ALL,
        ] {
            let (reports, [planned, taken, planned_host, taken_host]) =
                train_on_gpu(&Settings { offload, ..base.clone() }, 6);
            let (loss, norm) = distance(&reports, &plain);
            assert!(loss < 1e-3 && norm < 2e-2, "{offload:?}: loss {loss:.1e}, norm {norm:.1e}");
            assert_eq!((taken, taken_host), (planned, planned_host), "{offload:?}");
        }
    }
}

#[test]
fn an_overflow_is_skipped_on_the_gpu() {
    if let Err(why) = cuda::present() {
        println!("skipped: {why}");
        return;
    }
    let loss_scale = fsdp::LossScale { init: 2.0f32.powi(24), ..Default::default() };
    for offload in [Offload::default(), Offload::ALL] {
        let settings = Settings { precision: F16, loss_scale, offload, ..settings(1, 1) };
        let (reports, _) = train_on_gpu(&settings, 12);
        let skipped = reports.iter().take_while(|report| !report.applied).count();
        assert!((1..11).contains(&skipped), "{reports:?}");
        assert_eq!(reports[skipped].loss_scale, f64::from(2.0f32.powi(24 - skipped as i32)));
    }
}
