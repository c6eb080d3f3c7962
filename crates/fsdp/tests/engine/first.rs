//! Weights that only rank 0 can read.

use super::harness::*;
use device::{Device, Profile};
use fsdp::{Engine, Offload, Plan, Settings, Source, Strategy, on_threads};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the elements that were read, and the most at once.
#[derive(Default)]
struct Counting {
    all: AtomicUsize,
    most: AtomicUsize,
}

impl Source for Counting {
    fn read(&self, name: &str, start: usize, out: &mut [f32]) -> fsdp::Result<()> {
        self.all.fetch_add(out.len(), Ordering::Relaxed);
        self.most.fetch_max(out.len(), Ordering::Relaxed);
        Seeded.read(name, start, out)
    }
}

#[test]
fn every_rank_gets_its_own_from_rank_0() {
    let mut model = model(true);
    Arc::get_mut(&mut model).unwrap().freeze(|name| name.contains("layers.0.mlp")).unwrap();
    for (ranks, strategy, offload) in [
        (1, Strategy::Full, Offload::default()),
        (2, Strategy::Full, Offload::default()),
        (3, Strategy::Grad, Offload::ALL),
        (2, Strategy::None, Offload::default()),
    ] {
        let settings = Settings { strategy, offload, precision: BF16, ..settings(ranks, 1) };
        let plan = Arc::new(Plan::new(&model, settings.clone(), Profile::Cpu).unwrap());
        let (whole, source) = (model.num_params(), Counting::default());
        let train = |from_first: bool| {
            let results = on_threads(ranks, |rank, device: Arc<dyn Device>, groups| {
                let mut engine = Engine::new(device, plan.clone(), model.clone(), groups)?;
                match from_first {
                    true => engine.fill_from_first((rank == 0).then_some(&source as &dyn Source))?,
                    false => engine.fill(&Seeded)?,
                }
                let mut losses = Vec::new();
                for step in 1..=2 {
                    engine.step(&batches(&settings, rank, step), &hyper(step))?;
                    losses.push(engine.report()?);
                }
                assert_eq!(engine.device().memory_use().peak_bytes, plan.peak_bytes(&model));
                Ok((losses, part(&engine)))
            });
            results.unwrap()
        };
        assert!(train(true) == train(false), "{ranks} ranks, {strategy:?}");
        let copies = if strategy == Strategy::None { ranks } else { 1 };
        assert_eq!(
            source.all.into_inner(),
            copies * whole,
            "each element is read once for each that holds it"
        );
    }
}

#[test]
fn without_a_source_rank_0_says_so() {
    let model = model(false);
    let plan = Arc::new(Plan::new(&model, settings(2, 1), Profile::Cpu).unwrap());
    let error = on_threads(2, |_, device: Arc<dyn Device>, groups| {
        Engine::new(device, plan.clone(), model.clone(), groups)?.fill_from_first(None)
    });
    assert!(error.unwrap_err().to_string().contains("rank 0"));
}
