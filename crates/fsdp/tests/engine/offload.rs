//! State in host memory: the same bits, less of the device's memory.

use super::harness::*;
use device::Profile;
use fsdp::{Accumulate, AfterForward, Keep, Offload, Plan, Settings, Strategy};

const SOME: [Offload; 5] = [
    Offload { optimizer: true, gradients: false, weights: false },
    Offload { optimizer: false, gradients: true, weights: false },
    Offload { optimizer: false, gradients: false, weights: true },
    Offload { optimizer: false, gradients: true, weights: true },
    Offload::ALL,
];

/// Holds every choice of what is offloaded against nothing offloaded.
fn hold(settings: &Settings, tied: bool) {
    let model = model(tied);
    let plain = train(&model, settings, 4);
    for offload in SOME {
        let outcome = train(&model, &Settings { offload, ..settings.clone() }, 4);
        assert_eq!(outcome.reports, plain.reports, "{offload:?}, {settings:?}");
        assert!(outcome.weights == plain.weights, "{offload:?}, {settings:?}");
    }
}

#[test]
fn one_rank() {
    hold(&settings(1, 1), false);
    hold(&Settings { precision: BF16, keep: Keep::Nothing, ..settings(1, 1) }, true);
}

#[test]
fn several_ranks() {
    hold(&settings(2, 1), true);
    hold(&Settings { precision: BF16, prefetch: 2, ..settings(3, 1) }, false);
    hold(&Settings { strategy: Strategy::Grad, ..settings(2, 1) }, true);
    hold(&Settings { strategy: Strategy::None, precision: BF16, ..settings(2, 1) }, false);
    hold(&Settings { replicate: 2, precision: F16, ..settings(4, 1) }, true);
    hold(&Settings { after_forward: AfterForward::Group(2), ..settings(4, 1) }, false);
}

#[test]
fn several_micro_batches() {
    hold(&settings(2, 3), true);
    let bf16_grads = fsdp::Precision { grad: device::Dtype::Bf16, ..BF16 };
    hold(&Settings { precision: bf16_grads, ..settings(2, 3) }, false);
    hold(&Settings { accumulate: Accumulate::Unsharded, ..settings(3, 2) }, true);
    hold(&Settings { accumulate: Accumulate::Unsharded, ..settings(1, 3) }, false);
}

#[test]
fn one_rank_adds_micro_batches_up_on_the_host() {
    let model = model(false);
    let plain = train(&model, &settings(1, 3), 4);
    for offload in SOME {
        let outcome = train(&model, &Settings { offload, ..settings(1, 3) }, 4);
        let (loss, norm) = distance(&outcome.reports, &plain.reports);
        assert!(loss < 1e-6 && norm < 1e-5, "{offload:?}: loss {loss:.1e}, norm {norm:.1e}");
    }
}

#[test]
fn a_skipped_step_is_skipped_on_the_host_too() {
    let model = model(false);
    let loss_scale = fsdp::LossScale { init: 2.0f32.powi(23), ..Default::default() };
    let base = Settings { precision: F16, loss_scale, ..settings(2, 1) };
    let [plain, offloaded] = [Offload::default(), Offload::ALL].map(|offload| {
        let outcome = train(&model, &Settings { offload, ..base.clone() }, 8);
        (format!("{:?}", outcome.reports), outcome.weights)
    });
    assert!(plain.0.contains("applied: false") && plain.0.contains("applied: true"), "{}", plain.0);
    assert!(plain == offloaded);
}

#[test]
fn evaluation_sees_the_hosts_last_update() {
    let model = model(true);
    let losses = |offload: Offload| {
        let settings = Settings { offload, ..settings(2, 1) };
        let results = on_ranks(&model, &settings, |rank, mut engine| {
            let mut losses = Vec::new();
            for step in 1..=3 {
                engine.step(&batches(&settings, rank, step), &hyper(step))?;
                losses.push(engine.evaluate(&batches(&settings, rank, 9))?.loss);
            }
            Ok(losses)
        });
        results.unwrap().remove(0)
    };
    let plain = losses(Offload::default());
    assert!(plain[0] != plain[1] && plain[1] != plain[2]);
    for offload in SOME {
        assert_eq!(losses(offload), plain, "{offload:?}");
    }
}

#[test]
fn transfers_are_what_the_schedule_asks_for() {
    let model = model(false);
    let settings = Settings { precision: BF16, offload: Offload::ALL, ..settings(2, 1) };
    let plan = Plan::new(&model, settings.clone(), Profile::Cpu).unwrap();
    let bytes = |name: &str| plan.traffic().into_iter().find(|(kind, ..)| *kind == name).unwrap().2;
    on_ranks(&model, &settings, |rank, mut engine| {
        let before = engine.device().copied();
        engine.step(&batches(&settings, rank, 1), &hyper(1))?;
        engine.report()?;
        let after = engine.device().copied();
        // The verdict goes along with the gradients.
        assert_eq!(after.to_host - before.to_host, bytes("to the host") + 20);
        assert_eq!(after.from_host - before.from_host, bytes("from the host"));
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_device_keeps_only_what_a_step_needs() {
    let model = model(false);
    let plan = |offload| {
        let settings = Settings { precision: BF16, offload, ..settings(1, 1) };
        Plan::new(&model, settings, Profile::Cpu).unwrap()
    };
    let (plain, all) = (plan(Offload::default()), plan(Offload::ALL));
    let names = |plan: &Plan| plan.regions().iter().map(|region| region.name).collect::<Vec<_>>();
    assert_eq!(names(&all), ["step", "batch"]);
    // Master and moments in f32, a copy in bf16: 14 bytes a weight less, and more of them than a step holds.
    let saved = plain.peak_bytes(&model) - all.peak_bytes(&model);
    assert!(saved > 12 * model.num_params(), "{saved} bytes saved");
    let host: usize = all.host_regions().iter().map(|region| region.bytes).sum();
    assert!(host >= 18 * model.num_params(), "{host} bytes on the host");
    assert!(all.host_bytes() > host && plain.host_regions().is_empty());
}
