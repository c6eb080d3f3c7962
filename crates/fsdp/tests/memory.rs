//! What a plan says of memory: shards get smaller with every rank, and few units are whole at a time.

use device::{Dtype, Profile};
use fsdp::{Accumulate, Field, Keep, Plan, Precision, Settings, Strategy};
use std::sync::Arc;
use tensor::models::{Config, build};
use tensor::{Kind, Model};

fn model(tied: bool) -> Arc<Model> {
    let text = format!(
        r#"{{"model_type": "llama", "vocab_size": 515, "hidden_size": 64, "intermediate_size": 176,
            "num_hidden_layers": 5, "num_attention_heads": 4, "tie_word_embeddings": {tied}}}"#
    );
    Arc::new(build(&Config::parse(&text).unwrap(), 16).unwrap())
}

fn plan(model: &Arc<Model>, change: impl Fn(&mut Settings)) -> Plan {
    let mut settings = Settings::new(1, Field::tokens(2, 16));
    change(&mut settings);
    Plan::new(model, settings, Profile::Cpu).unwrap()
}

/// Bytes a rank holds between steps.
fn persistent_bytes(plan: &Plan) -> usize {
    let kept = ["master weights", "compute weights", "moments", "held gradients"];
    plan.regions().iter().filter(|region| kept.contains(&region.name)).map(|region| region.bytes).sum()
}

#[test]
fn what_a_rank_keeps_falls_as_one_over_the_ranks() {
    for (compute, micro_batches) in [(Dtype::F32, 1), (Dtype::Bf16, 3)] {
        let model = model(true);
        let precision = Precision { compute, ..Precision::F32 };
        let of = |ranks: usize| {
            plan(&model, |settings| {
                (settings.ranks, settings.precision, settings.micro_batches) =
                    (ranks, precision, micro_batches);
            })
        };
        let one = of(1);
        // Master, moments, a bf16 copy and held gradients, of every parameter.
        let each = 12 + if compute == Dtype::Bf16 { 2 } else { 0 } + if micro_batches > 1 { 4 } else { 0 };
        for ranks in [2, 3, 4, 8, 64] {
            let plan = of(ranks);
            let padding = plan.layout.units.len() * 128 * each;
            let (kept, share) = (persistent_bytes(&plan), persistent_bytes(&one) / ranks);
            assert!(kept <= share + padding, "{ranks} ranks: {kept} bytes, a share is {share}");
            assert!(kept * ranks >= model.num_params() * each, "{ranks} ranks: {kept} bytes are not all");
        }
    }
}

/// (most tensors, most bytes) of gathered weights alive at once, over all schedules.
fn most_gathered(plan: &Plan) -> (usize, usize) {
    let mut most = (0, 0);
    for placement in &plan.placements {
        let gathered: Vec<_> =
            placement.trace.lives.iter().filter(|life| life.kind == Kind::Gathered).collect();
        for life in &gathered {
            let alive = gathered.iter().filter(|other| other.start <= life.start && life.start < other.end);
            let (count, bytes) = alive.fold((0, 0), |(count, bytes), life| (count + 1, bytes + life.bytes));
            most = (most.0.max(count), most.1.max(bytes));
        }
    }
    most
}

#[test]
fn few_units_are_whole_at_once() {
    for tied in [false, true] {
        let model = model(tied);
        for prefetch in [0, 1, 2] {
            for keep in [Keep::All, Keep::Expensive, Keep::Nothing] {
                for (replicate, accumulate) in [(1, Accumulate::Sharded), (2, Accumulate::Unsharded)] {
                    let plan = plan(&model, |settings| {
                        *settings = Settings {
                            ranks: 4,
                            prefetch,
                            keep,
                            replicate,
                            accumulate,
                            micro_batches: 3,
                            ..settings.clone()
                        };
                    });
                    let (count, bytes) = most_gathered(&plan);
                    let units = plan.layout.units.len();
                    let mut sizes: Vec<usize> =
                        (0..units).map(|unit| plan.layout.unit_len(unit) * 4).collect();
                    let tied_bytes = if tied { sizes[0] } else { 0 };
                    sizes.sort_unstable_by_key(|size| std::cmp::Reverse(*size));
                    let allowed = sizes[..=prefetch].iter().sum::<usize>() + tied_bytes;
                    assert!(
                        count <= 1 + prefetch + usize::from(tied),
                        "{count} units with prefetch {prefetch}"
                    );
                    assert!(bytes <= allowed, "{bytes} bytes of gathered weights, {allowed} allowed");
                    assert!(count >= 1, "something is gathered");
                }
            }
        }
        let kept = plan(&model, |settings| (settings.ranks, settings.strategy) = (4, Strategy::Grad));
        assert_eq!(
            most_gathered(&kept).0,
            kept.layout.units.iter().filter(|unit| unit.shard_len > 0).count()
        );
        let whole = plan(&model, |settings| (settings.ranks, settings.strategy) = (4, Strategy::None));
        assert_eq!(most_gathered(&whole), (0, 0));
    }
}
