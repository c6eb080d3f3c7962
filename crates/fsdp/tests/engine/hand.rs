//! What a user of the library can do beside stepping.

use super::harness::*;
use fsdp::{AfterForward, Keep, Offload, Settings, Slot, Strategy, Wrap};

#[test]
fn a_unit_made_whole_by_hand_is_the_weights() {
    let model = model(true);
    for (ranks, strategy, offload) in [
        (1, Strategy::Full, Offload::default()),
        (3, Strategy::Full, Offload::default()),
        (2, Strategy::None, Offload::default()),
        (2, Strategy::Full, Offload::ALL),
    ] {
        let settings = Settings { strategy, offload, precision: BF16, ..settings(ranks, 1) };
        let name = "model.layers.1.self_attn.k_proj.weight";
        let results = on_ranks(&model, &settings, |rank, mut engine| {
            engine.step(&batches(&settings, rank, 1), &hyper(1))?;
            let before = engine.device().memory_use().current_bytes;
            let unit = engine.unit_of(name)?;
            let (exact, rounded) =
                (engine.gather_by_hand(unit, Slot::Master)?, engine.gather_by_hand(unit, Slot::Compute)?);
            assert!(engine.device().memory_use().current_bytes > before);
            let (whole, coarse) = (exact.read(name)?, rounded.read(name)?);
            assert!(exact.read("lm_head.weight").is_err() && engine.unit_of("nothing").is_err());
            drop((exact, rounded));
            // It disturbs nothing, and once the streams have gone on it is freed.
            engine.step(&batches(&settings, rank, 2), &hyper(2))?;
            engine.report()?;
            assert_eq!(engine.device().memory_use().current_bytes, before, "freed");
            Ok((whole, coarse, part(&engine)))
        })
        .unwrap();
        let expected = train(&model, &Settings { offload: Offload::default(), ..settings.clone() }, 1);
        let after = train(&model, &Settings { offload: Offload::default(), ..settings }, 2);
        for (whole, coarse, _) in &results {
            assert_eq!(*whole, expected.weights[name]);
            let rounded: Vec<f32> = whole.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect();
            assert_eq!(*coarse, rounded);
        }
        let parts: Vec<_> = results.into_iter().map(|(.., part)| part).collect();
        assert!(assemble(&model, &parts) == after.weights);
    }
}

#[test]
fn a_closure_may_say_what_a_unit_is() {
    let model = model(false);
    // Embedding and first layer; second layer; third layer and head.
    let wrap = Wrap::by(|block, at| block.kind() == "Qwen2DecoderLayer" && at < 3);
    assert_eq!(wrap.units(&model).unwrap(), [0..2, 2..3, 3..5]);
    let one = train(&model, &settings(1, 1), 3);
    let two = train(&model, &Settings { wrap, ..settings(2, 1) }, 3);
    let (loss, norm) = distance(&two.reports, &one.reports);
    assert!(loss < 1e-5 && norm < 1e-4, "loss {loss:.1e}, norm {norm:.1e}");
}

#[test]
fn the_number_of_micro_batches_may_change_from_step_to_step() {
    let model = model(false);
    for strategy in [Strategy::Full, Strategy::None] {
        let settings = Settings { strategy, ..settings(2, 3) };
        let results = on_ranks(&model, &settings, |rank, mut engine| {
            let mut losses = Vec::new();
            for (step, count) in [(1, 3), (2, 2), (3, 5)] {
                let all = batches(&settings, rank, step);
                let some: Vec<_> = (0..count).map(|at| all[at % 3].clone()).collect();
                engine.step(&some, &hyper(step))?;
                losses.push(engine.report()?);
            }
            assert!(engine.step(&[], &hyper(4)).is_err());
            assert!(engine.step(&batches(&settings, rank, 1)[..1], &hyper(4)).is_err());
            Ok(losses)
        });
        let targets: Vec<usize> = results.unwrap()[0].iter().map(|report| report.num_targets).collect();
        assert_eq!(targets, [156, 104, 260]);
    }
}

#[test]
fn a_step_copies_nothing_between_what_is_gathered_and_what_is_used() {
    for tied in [false, true] {
        let model = model(tied);
        for (ranks, micro_batches) in [(1, 1), (2, 1), (3, 2)] {
            for keep in [Keep::All, Keep::Expensive, Keep::Nothing] {
                for (strategy, precision) in
                    [(Strategy::Full, BF16), (Strategy::Grad, F16), (Strategy::None, BF16)]
                {
                    let settings = Settings { keep, strategy, precision, ..settings(ranks, micro_batches) };
                    on_ranks(&model, &settings, |rank, mut engine| {
                        engine.step(&batches(&settings, rank, 1), &hyper(1))?;
                        engine.report()?;
                        assert_eq!(engine.device().copied(), Default::default(), "{settings:?}");
                        Ok(())
                    })
                    .unwrap();
                }
            }
        }
    }
    // The counter does count: narrowing copies the part that is kept.
    let settings = Settings { after_forward: AfterForward::Group(2), ..settings(4, 1) };
    on_ranks(&model(false), &settings, |rank, mut engine| {
        engine.step(&batches(&settings, rank, 1), &hyper(1))?;
        engine.report()?;
        assert!(engine.device().copied().on_device > 0);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_cap_on_whole_units_changes_no_bit() {
    let model = model(true);
    for strategy in [Strategy::Full, Strategy::Grad] {
        let base = Settings { strategy, prefetch: 3, precision: BF16, ..settings(2, 1) };
        let free = train(&model, &base, 3);
        for cap in [1, 2, 3] {
            let capped = train(&model, &Settings { max_gathered: Some(cap), ..base.clone() }, 3);
            assert_eq!(capped.reports, free.reports);
            assert!(capped.weights == free.weights);
        }
    }
}
