//! Rounding by chance: master weights of bf16 that follow f32's where rounding to the nearest stands still.

use crate::harness::{
    BF16, Weights, apart, assemble, batches, distance, hyper, model, on_ranks, part, settings, train,
};
use device::Dtype;
use fsdp::{Precision, Settings};

fn with(ranks: usize, master: Dtype, stochastic_rounding: bool) -> Settings {
    Settings { precision: Precision { master, stochastic_rounding, ..BF16 }, ..settings(ranks, 1) }
}

/// How weights move in so many steps, each alone less than half the distance between most neighbours of bf16.
fn moved(settings: &Settings, steps: u64) -> Vec<f64> {
    let model = model(true);
    let weights = |steps: u64| -> Weights {
        let parts = on_ranks(&model, settings, |rank, mut engine| {
            for step in 1..=steps {
                let mut hyper = hyper(step);
                (hyper.lr, hyper.adamw.weight_decay) = (1e-5, 0.0);
                engine.step(&batches(settings, rank, step), &hyper)?;
            }
            Ok(part(&engine))
        });
        assemble(&model, &parts.unwrap())
    };
    let (before, after) = (weights(0), weights(steps));
    let pairs = before.values().flatten().zip(after.values().flatten());
    pairs.map(|(before, after)| f64::from(*after) - f64::from(*before)).collect()
}

#[test]
fn small_updates_are_not_lost() {
    let exact = moved(&with(1, Dtype::F32, false), 30);
    // How far along f32's way: 1 is all of it.
    let along = |way: &[f64]| {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        dot(way, &exact) / dot(&exact, &exact)
    };
    let [nearest, by_chance] = [false, true].map(|chance| along(&moved(&with(1, Dtype::Bf16, chance), 30)));
    assert!(
        (by_chance - 1.0).abs() < 0.15 && nearest < 0.6,
        "{by_chance} by chance, {nearest} to the nearest"
    );
}

#[test]
fn any_number_of_ranks_rounds_alike() {
    let model = model(true);
    let [one, two, three] = [1, 2, 3].map(|ranks| train(&model, &with(ranks, Dtype::Bf16, true), 4));
    for other in [two, three] {
        let (loss, norm) = distance(&one.reports, &other.reports);
        assert!(loss < 1e-4 && norm < 1e-2, "loss {loss}, norm {norm}");
        // Other draws would leave weights a rounding of bf16 apart, about 1e-3.
        let weights = apart(&other.weights, &one.weights);
        assert!(weights < 2e-4, "weights {weights}");
    }
}
