//! What becomes of gathered weights after the forward changes memory and traffic, and no number.

use super::harness::*;
use device::Profile;
use fsdp::{AfterForward, Keep, Plan, Settings, Strategy, UnitRule};

fn with(settings: Settings, after_forward: AfterForward) -> Settings {
    Settings { after_forward, ..settings }
}

#[test]
fn no_choice_changes_a_bit() {
    for tied in [false, true] {
        let model = model(tied);
        for (ranks, replicate, micro_batches, groups) in
            [(4, 1, 1, &[2][..]), (6, 1, 2, &[2, 3]), (12, 3, 1, &[2])]
        {
            for keep in [Keep::All, Keep::Nothing] {
                let base = Settings { replicate, keep, precision: BF16, ..settings(ranks, micro_batches) };
                let free = train(&model, &with(base.clone(), AfterForward::Free), 3);
                let others = groups.iter().map(|size| AfterForward::Group(*size)).chain([AfterForward::Keep]);
                for after in others {
                    let other = train(&model, &with(base.clone(), after), 3);
                    assert_eq!(other.reports, free.reports, "{ranks} ranks, {after:?}");
                    assert!(other.weights == free.weights, "{ranks} ranks, {after:?}");
                }
            }
        }
    }
}

#[test]
fn units_with_their_own_rules_train_as_one_rank_does() {
    let model = model(true);
    let one = train(&model, &settings(1, 1), 4);
    let rule = |kind: &str, after_forward| UnitRule { kinds: vec![kind.into()], blocks: None, after_forward };
    let units =
        vec![rule("Qwen2DecoderLayer", AfterForward::Group(2)), rule("Embedding", AfterForward::Keep)];
    let four = train(&model, &Settings { units, prefetch: 2, ..settings(4, 1) }, 4);
    let (loss, norm) = distance(&four.reports, &one.reports);
    assert!(loss < 1e-5 && norm < 1e-4, "loss {loss:.1e}, norm {norm:.1e}");
}

#[test]
fn memory_and_traffic_lie_between_freeing_and_keeping() {
    let model = model(false);
    let plan = |after_forward| {
        let settings = Settings { precision: F16, ..with(settings(4, 1), after_forward) };
        Plan::new(&model, settings, Profile::Cpu).unwrap()
    };
    let [free, near, keep] = [AfterForward::Free, AfterForward::Group(2), AfterForward::Keep].map(plan);
    let count = |plan: &Plan, name: &str| {
        plan.traffic().into_iter().find(|(kind, ..)| *kind == name).map_or(0, |(_, count, _)| count)
    };
    // The head turns without letting go, and what comes right after it is still there.
    let units = free.layout.units.len();
    assert_eq!([&free, &near, &keep].map(|plan| count(plan, "gathers")), [2 * units - 2, units, units]);
    assert_eq!([&free, &near, &keep].map(|plan| count(plan, "gathers nearby")), [0, units - 2, 0]);
    let [low, between, high] = [&free, &near, &keep].map(|plan| plan.peak_bytes(&model));
    assert!(low < between && between < high, "{low} {between} {high}");
}

#[test]
fn a_group_that_does_not_divide_the_ranks_is_refused() {
    for (settings, word) in [
        (with(settings(4, 1), AfterForward::Group(3)), "after_forward = 3"),
        (with(Settings { strategy: Strategy::Grad, ..settings(6, 1) }, AfterForward::Group(4)), "6 shards"),
    ] {
        let error = Plan::new(&model(false), settings, Profile::Cpu).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}
