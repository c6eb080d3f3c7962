//! f16 with its loss scale.

use super::harness::*;
use fsdp::{Accumulate, LossScale, Scaling, Settings, Strategy};

#[test]
fn f16_trains_as_f32_does() {
    for tied in [false, true] {
        let model = model(tied);
        let exact = train(&model, &settings(1, 1), 6);
        for (ranks, micro_batches) in [(1, 1), (2, 1), (3, 2), (4, 3)] {
            let halves = Settings { precision: F16, ..settings(ranks, micro_batches) };
            let outcome = train(&model, &halves, 6);
            let (loss, norm) = distance(&outcome.reports, &exact.reports);
            println!("{ranks} ranks, {micro_batches} micro-batches: loss {loss:.1e}, norm {norm:.1e}");
            assert!(loss < 3e-4 && norm < 6e-3, "{ranks} ranks: loss {loss:.1e}, norm {norm:.1e}");
            assert!(outcome.reports.iter().all(|report| report.applied && report.loss_scale == 65536.0));
            assert!(apart(&outcome.weights, &exact.weights) < 5e-3);
        }
        // Three bits more than bf16.
        let [halves, coarse] = [F16, BF16].map(|precision| {
            distance(&train(&model, &Settings { precision, ..settings(2, 1) }, 6).reports, &exact.reports)
        });
        assert!(halves.0 < coarse.0 && halves.1 < coarse.1, "{halves:?} {coarse:?}");
    }
}

/// A scale that overflows at first.
fn overflowing(ranks: usize, micro_batches: usize) -> Settings {
    let scaling = Scaling { interval: 3, ..LossScale::default().scaling };
    let loss_scale = LossScale { init: 2.0f32.powi(28), scaling };
    Settings { precision: F16, loss_scale, ..settings(ranks, micro_batches) }
}

#[test]
fn an_overflow_skips_the_step_on_all_ranks_and_halves_the_scale() {
    let model = model(true);
    for (ranks, micro_batches, strategy, accumulate) in [
        (1, 1, Strategy::Full, Accumulate::Sharded),
        (2, 1, Strategy::Full, Accumulate::Sharded),
        (2, 3, Strategy::Full, Accumulate::Unsharded),
        (3, 2, Strategy::Grad, Accumulate::Sharded),
        (2, 1, Strategy::None, Accumulate::Sharded),
    ] {
        let settings = Settings { strategy, accumulate, ..overflowing(ranks, micro_batches) };
        let results = on_ranks(&model, &settings, |rank, mut engine| {
            let mut seen = Vec::new();
            let before = part(&engine);
            // One batch again and again, until it has been applied a few times.
            for step in 1..=20 {
                engine.step(&batches(&settings, rank, 1), &hyper(step))?;
                let report = engine.report()?;
                if seen.iter().all(|(_, applied)| !applied) && !report.applied {
                    assert_eq!(part(&engine), before, "a skipped step leaves the weights");
                    assert!(!report.grad_norm.is_finite());
                }
                seen.push((report.loss_scale, report.applied));
            }
            Ok((seen, engine.scaler()?, part(&engine)))
        })
        .unwrap();
        let (seen, scaler, _) = &results[0];
        assert!(results.iter().all(|(other, other_scaler, _)| other == seen && other_scaler == scaler));
        let skipped = seen.iter().take_while(|(_, applied)| !applied).count();
        assert!((2..12).contains(&skipped), "{seen:?}");
        assert_eq!(seen[skipped - 1].0, f64::from(2.0f32.powi(28 - skipped as i32)));
        // Three good steps double it again.
        assert_eq!(seen[skipped + 2].0, 2.0 * seen[skipped + 1].0, "{seen:?}");
        let all_skipped = seen.iter().filter(|(_, applied)| !applied).count();
        assert_eq!(scaler.skipped_steps as usize, all_skipped);
    }
}

#[test]
fn adams_step_does_not_advance_on_skipped_steps() {
    let model = model(false);
    let settings = overflowing(2, 1);
    let run = |init: f32, steps: u64| {
        let loss_scale = LossScale { init, ..settings.loss_scale };
        let settings = Settings { loss_scale, ..settings.clone() };
        let parts = on_ranks(&model, &settings, |rank, mut engine| {
            let mut first = 0;
            let mut step = 0;
            while step < first + steps {
                step += 1;
                engine.step(&batches(&settings, rank, 1), &hyper(step))?;
                if !engine.report()?.applied {
                    first += 1;
                }
            }
            Ok((first, engine.scaler()?, part(&engine)))
        });
        let (firsts, scalers, parts) = {
            let results = parts.unwrap();
            let first = results[0].0;
            (first, results[0].1, results.into_iter().map(|result| result.2).collect::<Vec<_>>())
        };
        (firsts, scalers, assemble(&model, &parts))
    };
    let (skipped, scaler, weights) = run(2.0f32.powi(28), 2);
    assert!(skipped > 0);
    // From the scale that worked, nothing is skipped, and the weights are the same to the bit.
    let (none, other, straight) = run(scaler.scale, 2);
    assert_eq!((none, other.scale, other.good_steps), (0, scaler.scale, scaler.good_steps));
    assert!(weights == straight, "the same two steps of Adam");
}

#[test]
fn a_scalers_state_can_be_taken_along() {
    let model = model(false);
    let settings = overflowing(1, 1);
    on_ranks(&model, &settings, |rank, mut engine| {
        let state = fsdp::Scaler { scale: 1024.0, good_steps: 2, skipped_steps: 7 };
        engine.set_scaler(&state)?;
        assert_eq!(engine.scaler()?, state);
        engine.step(&batches(&settings, rank, 1), &hyper(8))?;
        let after = engine.scaler()?;
        assert_eq!((after.scale, after.good_steps, after.skipped_steps), (2048.0, 0, 7));
        Ok(())
    })
    .unwrap();
}
