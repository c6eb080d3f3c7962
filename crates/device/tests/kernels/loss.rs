use super::harness::{Bed, FLOATS, Random, Tolerance, beds, check_gradient, twice};
use super::reference;
use device::{CrossEntropy, Dtype, SumLoss};

#[test]
fn losses_and_the_logits_gradient() {
    for bed in &beds() {
        for dtype in FLOATS {
            for (rows, vocab, gap) in [(1, 8, 0), (7, 65, 7), (33, 513, 0), (3, 5003, 5)] {
                case(bed, dtype, rows, vocab, vocab + gap);
            }
        }
    }
}

const SEED: f64 = 0.75;

fn case(bed: &Bed, dtype: Dtype, rows: usize, vocab: usize, stride: usize) {
    let mut random = Random::new((rows * vocab) as u64);
    let logits = bed.random(&mut random, dtype, rows * stride, 10.0);
    let label =
        |row: usize, random: &mut Random| if row % 5 == 2 { -100 } else { random.below(vocab) as i32 };
    let labels: Vec<i32> = (0..rows).map(|row| label(row, &mut random)).collect();
    let (label_buffer, seed) = (bed.ints(&labels), bed.input(Dtype::F32, &[SEED]));
    let rows_of =
        |values: &[f64]| -> Vec<Vec<f64>> { values.chunks(stride).map(|row| row.to_vec()).collect() };
    for with_gradient in [false, true] {
        let case = format!("{}: loss {rows}×{vocab} {dtype}, gradient {with_gradient}", bed.device.name());
        let [got, losses] = twice(&case, || {
            let (logits, losses) = (bed.copy_of(&logits), bed.poisoned(Dtype::F32, rows));
            let args = CrossEntropy {
                logits: &logits,
                labels: &label_buffer,
                losses: &losses,
                seed: with_gradient.then_some(&seed.buffer),
                rows,
                vocab,
                stride,
            };
            bed.device.cross_entropy(&bed.stream, &args).unwrap();
            [bed.read(&logits), bed.read(&losses)]
        });
        let rows_with_labels = rows_of(&logits.values).into_iter().zip(&labels);
        let (want_losses, gradients): (Vec<f64>, Vec<Vec<f64>>) =
            rows_with_labels.map(|(row, &label)| reference::cross_entropy(&row[..vocab], label)).unzip();
        Tolerance::new(Dtype::F32, 4).check(&case, &losses, &want_losses);
        if !with_gradient {
            assert_eq!(got, logits.values, "{case}: logits changed");
            continue;
        }
        for (row, (got, want)) in rows_of(&got).iter().zip(&gradients).enumerate() {
            let want: Vec<f64> = want.iter().map(|v| v * SEED).collect();
            Tolerance::new(dtype, 1).check(&format!("{case}: row {row}"), &got[..vocab], &want);
            assert_eq!(got[vocab..], logits.values[row * stride + vocab..(row + 1) * stride], "{case}: gap");
        }
    }
}

#[test]
fn a_label_outside_the_vocabulary_is_an_error_where_the_host_can_see_it() {
    let bed = &beds()[0];
    let (logits, losses) = (bed.poisoned(Dtype::F32, 8), bed.poisoned(Dtype::F32, 1));
    let labels = bed.ints(&[8]);
    let (logits, labels, losses) = (&logits, &labels, &losses);
    let args = CrossEntropy { logits, labels, losses, seed: None, rows: 1, vocab: 8, stride: 8 };
    assert!(bed.device.cross_entropy(&bed.stream, &args).is_err());
}

#[test]
fn the_reference_gradient_is_the_slope() {
    let logits = Random::new(9).values(9, 5.0);
    let gradient = reference::cross_entropy(&logits, 4).1;
    check_gradient("loss", |x| reference::cross_entropy(x, 4).0, &logits, &gradient);
}

/// One row's loss and the gradient of its input.
fn sum_loss(x: &[f64], target: Option<&[f64]>, scale: f64) -> (f64, Vec<f64>) {
    match target {
        None => (scale * x.iter().sum::<f64>(), vec![scale; x.len()]),
        Some(target) => {
            let errors: Vec<f64> = x.iter().zip(target).map(|(x, target)| x - target).collect();
            let sum = errors.iter().map(|error| error * error).sum::<f64>();
            (scale * sum, errors.iter().map(|error| 2.0 * scale * error).collect())
        }
    }
}

#[test]
fn losses_that_are_sums() {
    for bed in &beds() {
        for dtype in FLOATS {
            for (rows, cols) in [(1, 1), (7, 65), (33, 513)] {
                sums(bed, dtype, rows, cols, false);
                sums(bed, dtype, rows, cols, true);
            }
        }
    }
}

fn sums(bed: &Bed, dtype: Dtype, rows: usize, cols: usize, with_target: bool) {
    const SCALE: f32 = 0.5;
    let mut random = Random::new((rows * cols) as u64);
    // Away from 0, so that a sum's size is that of its terms.
    let positive: Vec<f64> = random.values(rows * cols, 1.0).iter().map(|v| v + 2.0).collect();
    let (x, target) = (bed.input(dtype, &positive), bed.random(&mut random, dtype, rows * cols, 1.0));
    let seed = bed.input(Dtype::F32, &[SEED]);
    for with_gradient in [false, true] {
        let case = format!("{}: sum_loss {rows}×{cols} {dtype}, target {with_target}", bed.device.name());
        let [got, losses] = twice(&case, || {
            let (input, losses) = (bed.copy_of(&x), bed.poisoned(Dtype::F32, rows));
            let args = SumLoss {
                x: &input,
                target: with_target.then_some(&target.buffer),
                losses: &losses,
                seed: with_gradient.then_some(&seed.buffer),
                scale: SCALE,
                rows,
                cols,
            };
            bed.device.sum_loss(&bed.stream, &args).unwrap();
            [bed.read(&input), bed.read(&losses)]
        });
        let targets = target.values.chunks(cols).map(|row| with_target.then_some(row));
        let (want, gradients): (Vec<f64>, Vec<Vec<f64>>) = x
            .values
            .chunks(cols)
            .zip(targets)
            .map(|(row, target)| sum_loss(row, target, f64::from(SCALE)))
            .unzip();
        Tolerance::new(Dtype::F32, 2).check(&case, &losses, &want);
        if with_gradient {
            let want: Vec<f64> = gradients.iter().flatten().map(|gradient| gradient * SEED).collect();
            Tolerance::new(dtype, 1).check(&format!("{case}: gradient"), &got, &want);
        } else {
            assert_eq!(got, x.values, "{case}: the input changed");
        }
    }
}

#[test]
fn the_reference_gradient_of_sums_is_the_slope() {
    let mut random = Random::new(10);
    let (x, target) = (random.values(9, 2.0), random.values(9, 2.0));
    for target in [None, Some(&target[..])] {
        check_gradient("sum", |x| sum_loss(x, target, 0.3).0, &x, &sum_loss(&x, target, 0.3).1);
    }
}
