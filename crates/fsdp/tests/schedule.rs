//! Schedules alone, with no device: the rules a step's order must keep, for many shapes.

use fsdp::{
    Accumulate, Action, AfterForward, Field, Layout, Offload, Part, Schedule, Settings, Strategy, UnitRule,
    Wrap,
};
use std::collections::BTreeSet;
use tensor::models::{Config, build};
use tensor::{Mode, Model};

fn model(layers: usize, tied: bool) -> Model {
    let text = format!(
        r#"{{"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": {layers}, "num_attention_heads": 4, "tie_word_embeddings": {tied}}}"#
    );
    build(&Config::parse(&text).unwrap(), 16).unwrap()
}

fn settings(ranks: usize, strategy: Strategy, wrap: Wrap, prefetch: usize) -> Settings {
    let fields = Field::tokens(2, 16);
    Settings { strategy, wrap, prefetch, micro_batches: 3, loss_chunk: 8, ..Settings::new(ranks, fields) }
}

/// What a walk through a schedule may never do, and what it must have done at its end.
fn check(layout: &Layout, settings: &Settings, schedule: &Schedule) {
    let sharded = settings.gathers();
    let fetches = settings.fetches() && (schedule.part.begins() || schedule.part == Part::Eval);
    let units = layout.units.len();
    let mut fetched = BTreeSet::new();
    let (mut gathered, mut narrowed) = (BTreeSet::new(), BTreeSet::new());
    let mut most_gathered = 0;
    let (mut forwards, mut backwards) = (vec![], vec![]);
    let (mut reduced, mut settled, mut updated) = (vec![], vec![], vec![]);
    let mut in_flight = BTreeSet::new();
    let trains = schedule.part.mode() == Mode::Train;
    let mut totals = 0;
    for action in &schedule.actions {
        let needs = |unit: &usize| layout.units[*unit].needs.clone();
        if let Action::Forward(unit) | Action::Turn(unit) | Action::Score(unit) | Action::Backward(unit) =
            action
        {
            assert!(!sharded || needs(unit).is_subset(&gathered), "{action:?} without its weights");
            assert!(!fetches || needs(unit).is_subset(&fetched), "{action:?} with old weights");
            assert!(needs(unit).iter().all(|need| !reduced.contains(need)), "{action:?} after its reduce");
        }
        match action {
            Action::Fetch(unit) => {
                assert!(settings.fetches() && !gathered.contains(unit), "unit {unit} is fetched too late");
                assert!(fetched.insert(*unit), "unit {unit} fetched twice");
            }
            Action::Gather(unit) => assert!(gathered.insert(*unit), "unit {unit} gathered twice"),
            Action::Free(unit) => assert!(gathered.remove(unit), "unit {unit} freed, but not gathered"),
            Action::Narrow(unit) => {
                assert!(gathered.remove(unit), "unit {unit} narrowed, but not gathered");
                assert!(narrowed.insert(*unit), "unit {unit} narrowed twice");
                let after = layout.units[*unit].after_forward;
                assert!(matches!(after, AfterForward::Group(_)), "{after:?} is no group");
            }
            Action::Widen(unit) => {
                assert!(narrowed.remove(unit), "unit {unit} widened, but not narrowed");
                assert!(gathered.insert(*unit), "unit {unit} gathered twice");
            }
            Action::Forward(unit) => forwards.push(*unit),
            Action::Turn(unit) => (forwards.push(*unit), backwards.push(*unit)).0,
            Action::Score(unit) => {
                assert!(!trains, "a score in training");
                forwards.push(*unit);
            }
            Action::Backward(unit) => backwards.push(*unit),
            Action::Reduce(unit) => {
                reduced.push(*unit);
                in_flight.insert(*unit);
                assert!(in_flight.len() <= 2, "more gradient slots than planned");
            }
            Action::Settle(unit) => {
                assert!(in_flight.remove(unit), "unit {unit} settled, but not in flight");
                settled.push(*unit);
            }
            Action::Total => {
                assert!(!trains && forwards.len() == units, "the total comes after all forwards");
                totals += 1;
            }
            Action::Norm => assert!(in_flight.is_empty(), "the norm before all gradients are there"),
            Action::Update(unit) => updated.push(*unit),
            Action::Count => assert!(forwards.is_empty(), "targets are counted before the forward"),
        }
        most_gathered = most_gathered.max(gathered.len());
    }
    let all: Vec<usize> = (0..units).collect();
    assert!(gathered.is_empty() && narrowed.is_empty(), "left: {gathered:?} {narrowed:?}");
    assert_eq!(forwards, all);
    let reversed: Vec<usize> = all.iter().rev().copied().collect();
    assert_eq!(backwards, if trains { reversed } else { vec![] });
    assert_eq!(totals, usize::from(!trains));
    let moves = settings.ranks > 1 || settings.grads_on_host();
    let reduces = trains && moves && (!settings.reduces_once() || schedule.part.ends());
    let sorted = |mut list: Vec<usize>| {
        list.sort();
        list
    };
    assert_eq!(sorted(reduced), if reduces { all.clone() } else { vec![] }, "each gradient once");
    assert_eq!(sorted(settled), if reduces { all.clone() } else { vec![] });
    assert_eq!(updated, if schedule.part.ends() { all } else { vec![] });
    assert_eq!(schedule.actions[0] == Action::Count, schedule.part.begins());
    if settings.strategy == Strategy::Full && settings.after_forward != AfterForward::Keep {
        // A position may need a tied unit beside its own.
        let tied = layout.units.iter().any(|unit| unit.needs.len() > 1) as usize;
        let bound = (1 + settings.prefetch + tied).min(units);
        assert!(most_gathered <= bound, "{most_gathered} gathered where {bound} suffice");
    }
}

#[test]
fn every_schedule_keeps_the_rules() {
    let mut count = 0;
    let [some, optimizer] =
        [false, true].map(|optimizer| Offload { optimizer, gradients: true, weights: false });
    let weights = Offload { weights: true, ..Offload::default() };
    let offloads =
        [Offload::default(), optimizer, weights, Offload::ALL, Offload::default(), some, optimizer];
    for layers in [1, 2, 3, 7] {
        for tied in [false, true] {
            let model = model(layers, tied);
            for wrap in [Wrap::Layer, Wrap::None, Wrap::MinParams(9000), Wrap::Kinds(vec!["Head".into()])] {
                for strategy in [Strategy::Full, Strategy::Grad, Strategy::None] {
                    for (ranks, prefetch) in [(1, 1), (2, 0), (2, 1), (3, 2), (8, 5)] {
                        let mut settings = settings(ranks, strategy, wrap.clone(), prefetch);
                        let afters = [AfterForward::Auto, AfterForward::Keep, AfterForward::Group(2)];
                        let fits = |after: &AfterForward| *after != AfterForward::Group(2) || ranks % 4 == 0;
                        for (accumulate, after) in
                            [Accumulate::Sharded, Accumulate::Unsharded].into_iter().flat_map(|accumulate| {
                                afters.into_iter().filter(fits).map(move |after| (accumulate, after))
                            })
                        {
                            (settings.accumulate, settings.after_forward) = (accumulate, after);
                            let layout = Layout::new(&model, &settings).unwrap();
                            settings.offload = offloads[count % offloads.len()];
                            for part in [Part::Only, Part::First, Part::Middle, Part::Last, Part::Eval] {
                                check(&layout, &settings, &Schedule::new(&layout, &settings, part));
                                count += 1;
                            }
                        }
                    }
                }
            }
        }
    }
    // Of five numbers of ranks, one has neighbours.
    assert_eq!(count, 4 * 2 * 4 * 3 * (5 * 2 + 1) * 2 * 5);
}

#[test]
fn a_small_schedule_reads_as_it_should() {
    use Action::*;
    let model = model(1, true);
    let settings = settings(2, Strategy::Full, Wrap::Layer, 1);
    let layout = Layout::new(&model, &settings).unwrap();
    // Units: 0 embedding, 1 layer, 2 norm and tied head (which needs 0 too).
    let expected = [
        Count,
        Gather(0),
        Gather(1),
        Forward(0),
        // The head is next but one, and needs the embedding: it stays.
        Gather(2),
        Forward(1),
        Turn(2),
        Free(2),
        Reduce(2),
        Backward(1),
        Free(1),
        Reduce(1),
        Settle(2),
        Backward(0),
        Free(0),
        Reduce(0),
        Settle(1),
        Settle(0),
        Norm,
        Update(0),
        Update(1),
        Update(2),
    ];
    assert_eq!(Schedule::new(&layout, &settings, Part::Only).actions, expected);
    let expected =
        [Gather(0), Gather(1), Forward(0), Gather(2), Forward(1), Free(1), Score(2), Free(0), Free(2), Total];
    assert_eq!(Schedule::new(&layout, &settings, Part::Eval).actions, expected);
}

/// The actions on gathered weights of one unit.
fn fate(schedule: &Schedule, unit: usize) -> Vec<Action> {
    let about = |action: &&Action| match action {
        Action::Gather(of) | Action::Free(of) | Action::Narrow(of) | Action::Widen(of) => *of == unit,
        _ => false,
    };
    schedule.actions.iter().filter(about).copied().collect()
}

#[test]
fn a_unit_goes_its_own_way_after_its_forward() {
    use Action::*;
    let model = model(4, false);
    let rule = |kind: &str, blocks, after_forward| {
        let kinds = if kind.is_empty() { vec![] } else { vec![kind.to_string()] };
        UnitRule { kinds, blocks, after_forward }
    };
    let units = vec![
        rule("LlamaDecoderLayer", None, AfterForward::Group(2)),
        rule("", Some(2..3), AfterForward::Keep),
        rule("LlamaDecoderLayer", Some(0..2), AfterForward::Free),
    ];
    let settings = Settings { units, ..settings(4, Strategy::Full, Wrap::Layer, 0) };
    let layout = Layout::new(&model, &settings).unwrap();
    let schedule = Schedule::new(&layout, &settings, Part::Only);
    // Blocks: 0 embedding, 1 to 4 layers, 5 head.
    assert_eq!(fate(&schedule, 0), [Gather(0), Free(0), Gather(0), Free(0)]);
    assert_eq!(fate(&schedule, 1), [Gather(1), Free(1), Gather(1), Free(1)]);
    assert_eq!(fate(&schedule, 2), [Gather(2), Free(2)]);
    assert_eq!(fate(&schedule, 3), [Gather(3), Narrow(3), Widen(3), Free(3)]);
    // Evaluation does not come back.
    let schedule = Schedule::new(&layout, &settings, Part::Eval);
    assert_eq!(fate(&schedule, 3), [Gather(3), Free(3)]);
    // A group of one keeps, a group of all frees.
    for (size, fates) in [(1, &[Gather(3), Free(3)][..]), (4, &[Gather(3), Free(3), Gather(3), Free(3)])] {
        let settings =
            Settings { after_forward: AfterForward::Group(size), units: vec![], ..settings.clone() };
        let layout = Layout::new(&model, &settings).unwrap();
        assert_eq!(fate(&Schedule::new(&layout, &settings, Part::Only), 3), fates, "group of {size}");
    }
    let units = vec![rule("LlamaLayer", None, AfterForward::Keep)];
    let error = Layout::new(&model, &Settings { units, ..settings }).unwrap_err().to_string();
    assert!(error.contains("LlamaLayer") && error.contains("LlamaDecoderLayer"), "{error}");
}

#[test]
fn a_cap_holds_whatever_is_kept_or_gathered_ahead() {
    for tied in [false, true] {
        let model = model(7, tied);
        for strategy in [Strategy::Full, Strategy::Grad] {
            for cap in 1..6 {
                let base = settings(4, strategy, Wrap::Layer, 4);
                let settings = Settings { max_gathered: Some(cap), ..base };
                let layout = Layout::new(&model, &settings).unwrap();
                for part in [Part::Only, Part::Middle, Part::Eval] {
                    let schedule = Schedule::new(&layout, &settings, part);
                    check(&layout, &settings, &schedule);
                    let (mut whole, mut most) = (0, 0);
                    for action in &schedule.actions {
                        match action {
                            Action::Gather(_) | Action::Widen(_) => whole += 1,
                            Action::Free(_) | Action::Narrow(_) => whole -= 1,
                            _ => {}
                        }
                        most = most.max(whole);
                    }
                    // The tied head needs two.
                    assert_eq!(most, cap.max(if tied { 2 } else { 1 }), "{strategy:?}, {part:?}");
                }
            }
        }
    }
}

#[test]
fn every_element_of_every_weight_is_owned_once() {
    for (ranks, tied) in [(1, false), (2, true), (3, false), (5, true), (64, false)] {
        let model = model(2, tied);
        let settings = settings(ranks, Strategy::Full, Wrap::Layer, 1);
        let layout = Layout::new(&model, &settings).unwrap();
        for spec in model.items.iter().flat_map(|item| &item.members) {
            let mut owners = vec![0; spec.shape.numel()];
            for (unit, rank) in (0..layout.units.len()).flat_map(|u| (0..ranks).map(move |r| (u, r))) {
                let pieces = layout.pieces(&model, unit, rank);
                for piece in pieces.iter().filter(|piece| piece.name == spec.name) {
                    owners[piece.start..piece.start + piece.len].iter_mut().for_each(|count| *count += 1);
                }
            }
            assert!(owners.iter().all(|count| *count == 1), "{} with {ranks} ranks", spec.name);
        }
        for unit in 0..layout.units.len() {
            let spanned: usize =
                (0..ranks).flat_map(|rank| layout.spans(unit, rank)).map(|span| span.len).sum();
            assert_eq!(spanned, layout.units[unit].places.iter().map(|place| place.len).sum::<usize>());
        }
    }
}

#[test]
fn a_wrap_policy_that_matches_nothing_says_which_kinds_there_are() {
    let wrap = Wrap::Kinds(vec!["LlamaDecoderLayr".into()]);
    let error = wrap.units(&model(1, false)).unwrap_err().to_string();
    assert!(error.contains("LlamaDecoderLayr") && error.contains("LlamaDecoderLayer"), "{error}");
}
