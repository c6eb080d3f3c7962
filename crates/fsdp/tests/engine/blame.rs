//! Gradients that are not numbers, and ranks that do not agree.

use super::harness::*;
use device::{Device, Profile};
use fsdp::{Engine, Error, Plan, Settings, Source, Strategy, on_threads};
use std::sync::Arc;

/// As [`Seeded`], but one weight is broken where one rank alone reads it.
struct Broken {
    rank: usize,
}

impl Source for Broken {
    fn read(&self, name: &str, start: usize, out: &mut [f32]) -> fsdp::Result<()> {
        Seeded.read(name, start, out)?;
        if self.rank == 1 && name == "model.layers.1.mlp.down_proj.weight" {
            out[0] = f32::NAN;
        }
        Ok(())
    }
}

#[test]
fn a_bad_gradient_is_named_and_not_applied() {
    // A token whose embedding is huge on one rank's rows only would be data's fault; here a rank's own weights are.
    let model = model(false);
    for check_gradients in [true, false] {
        let settings = Settings { strategy: Strategy::None, check_gradients, ..settings(3, 1) };
        let plan = Arc::new(Plan::new(&model, settings.clone(), Profile::Cpu).unwrap());
        let results = on_threads(3, |rank, device: Arc<dyn Device>, groups| {
            let mut engine = Engine::new(device, plan.clone(), model.clone(), groups)?;
            engine.fill(&Seeded)?;
            engine.step(&batches(&settings, rank, 1), &hyper(1))?;
            assert_eq!(engine.report()?.ended_at, None);
            engine.fill(&Broken { rank })?;
            let before = part(&engine);
            for step in 2..=4 {
                engine.step(&batches(&settings, rank, step), &hyper(step))?;
            }
            let report = engine.report()?;
            assert_eq!((report.ended_at, report.applied, report.skipped_steps), (Some(2), false, 3));
            assert_eq!(format!("{:?}", part(&engine)), format!("{before:?}"), "nothing was applied");
            Ok(engine.blame(2)?.to_string())
        })
        .unwrap();
        assert!(results.iter().all(|other| *other == results[0]), "{results:?}");
        let message = &results[0];
        // The layer's own gradient is bad first in everything above its output: the head.
        let place = if check_gradients { "of Head on rank 1 is" } else { "of Head (train.check_gradients" };
        assert!(message.contains("step 2") && message.contains(place), "{message}");
    }
}

#[test]
fn one_rank_names_its_unit_without_looking_twice() {
    let model = model(false);
    let settings = settings(1, 1);
    let message = on_ranks(&model, &settings, |rank, mut engine| {
        engine.fill(&Broken { rank: 1 })?;
        engine.step(&batches(&settings, rank, 1), &hyper(1))?;
        Ok(engine.blame(1)?.to_string())
    });
    let message = message.unwrap().remove(0);
    assert!(message.contains("of Head on rank 0 is not finite"), "{message}");
}

#[test]
fn ranks_with_other_settings_hear_which() {
    let model = model(false);
    let results = on_threads(2, |rank, device: Arc<dyn Device>, groups| {
        let settings = Settings { prefetch: 1 + rank, ..settings(2, 1) };
        let plan = Arc::new(Plan::new(&model, settings, Profile::Cpu)?);
        Engine::new(device, plan, model.clone(), groups).map(drop)
    });
    let error = results.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::PlansDiffer { .. }), "{text}");
    assert!(text.contains("shard.prefetch is 1 here and 2 there"), "{text}");
    assert!(text.contains("rank 0 and rank 1"), "{text}");
}
