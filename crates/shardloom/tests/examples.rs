//! The numbered examples, run: what they print about themselves must be so.

#[path = "../examples/02-classifier.rs"]
mod classifier;
#[path = "../examples/01-own-model.rs"]
mod own_model;

fn assert_alike(what: &str, ours: &[f64], one: &[f64]) {
    for (step, (a, b)) in ours.iter().zip(one).enumerate() {
        assert!((a / b - 1.0).abs() < 1e-4, "{what}, step {}: {a} against {b}", step + 1);
    }
}

#[test]
fn a_model_of_ones_own_learns_the_same_on_any_number_of_ranks() {
    let one = own_model::train(1, 40).unwrap();
    assert!(one[39] < one[0] * 0.6, "{one:?}");
    for ranks in [2, 4] {
        assert_alike(&format!("{ranks} ranks"), &own_model::train(ranks, 40).unwrap(), &one);
    }
}

#[test]
fn a_classifier_learns_the_same_on_any_number_of_ranks() {
    let (one, unseen) = classifier::train(1, 200).unwrap();
    assert!(one[199] < one[0] / 2.0 && unseen < one[0] * 0.6, "{} to {}, {unseen} unseen", one[0], one[199]);
    for ranks in [2, 3] {
        // Rounding grows with steps, so the first ones are held to the bound.
        let (losses, _) = classifier::train(ranks, 20).unwrap();
        assert_alike(&format!("{ranks} ranks"), &losses, &one[..20]);
    }
}
