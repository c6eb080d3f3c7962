use super::harness::{FLOATS, Random, Tolerance, beds, round, twice};
use device::{Device, Dtype, Role};

const LENS: [usize; 5] = [1, 7, 33, 2048, 5003];

/// Where roundings go wrong: ties, carries, subnormals, the ends of each range, and what is not a number.
fn awkward() -> Vec<f64> {
    let mut values = vec![0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1.0, -1.0, 65504.0, 65519.9];
    values.extend([65520.0, 65536.0, 1e30, -3.4e38, 6e-8, 2.9e-8, 3e-8, 6.1e-5, 6.09e-5, 1e-40, -1e-45]);
    for exponent in [-25, -20, -14, -1, 0, 5, 15, 16, 127] {
        for step in 0..9 {
            values.push(2f64.powi(exponent) * (1.0 + f64::from(step) * 2f64.powi(-12)));
            values.push(-2f64.powi(exponent) * (1.0 + f64::from(step) * 2f64.powi(-9)));
        }
    }
    values
}

fn same_bits(a: &[f64], b: &[f64]) -> bool {
    let same = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    a.len() == b.len() && a.iter().zip(b).all(same)
}

#[test]
fn casts_round_to_nearest_even() {
    for bed in &beds() {
        for from in FLOATS {
            for to in FLOATS {
                let mut values = awkward();
                values.extend(Random::new(1).values(5000, 3.0));
                let src = bed.input(from, &values);
                let dst = bed.poisoned(to, values.len());
                bed.device.cast(&bed.stream, &src.buffer, &dst).unwrap();
                let want: Vec<f64> = src.values.iter().map(|&v| f64::from(round(to, v as f32))).collect();
                let got = bed.read(&dst);
                let wrong = (0..got.len()).find(|&i| !same_bits(&got[i..=i], &want[i..=i]));
                let show = wrong.map(|i| (src.values[i], got[i], want[i]));
                assert!(wrong.is_none(), "{}: {from} → {to}: {show:?}", bed.device.name());
            }
        }
    }
}

#[test]
fn fills_and_copies_are_exact() {
    for bed in &beds() {
        for dtype in FLOATS {
            for len in LENS {
                let case = format!("{}: {len} × {dtype}", bed.device.name());
                let dst = bed.poisoned(dtype, len);
                bed.device.fill(&bed.stream, &dst, 0.1).unwrap();
                assert_eq!(bed.read(&dst), vec![f64::from(round(dtype, 0.1)); len], "{case}: fill");
                let src = bed.random(&mut Random::new(len as u64), dtype, len, 1.0);
                bed.device.copy(&bed.stream, &src.buffer, &dst).unwrap();
                assert_eq!(bed.read(&dst), src.values, "{case}: copy");
            }
        }
        let whole = bed.poisoned(Dtype::F32, 10);
        let (a, b) = (whole.slice(0, 6).unwrap(), whole.slice(4, 6).unwrap());
        assert!(bed.device.copy(&bed.stream, &a, &b).is_err(), "copies that overlap");
        assert!(bed.device.copy(&bed.stream, &a, &whole).is_err(), "copies of different lengths");
        assert!(bed.device.fill(&bed.stream, &bed.ints(&[1]), 0.0).is_err(), "filling integers");
    }
}

#[test]
fn sums_of_two_are_rounded_once() {
    for bed in &beds() {
        for from in FLOATS {
            for to in FLOATS {
                for len in LENS {
                    let mut random = Random::new(len as u64);
                    let src = bed.random(&mut random, from, len, 1.0);
                    let before = bed.random(&mut random, to, len, 1.0);
                    let dst = bed.copy_of(&before);
                    bed.device.add(&bed.stream, &src.buffer, &dst).unwrap();
                    let add = |(a, b): (&f64, &f64)| f64::from(round(to, *a as f32 + *b as f32));
                    let want: Vec<f64> = src.values.iter().zip(&before.values).map(add).collect();
                    assert!(bed.read(&dst) == want, "{}: add {len} × {from} to {to}", bed.device.name());
                }
            }
        }
    }
}

#[test]
fn reductions_to_one_number() {
    for bed in &beds() {
        let scratch = bed.poisoned(Dtype::F32, bed.device.profile().sum_scratch());
        for dtype in FLOATS {
            for len in [0, 1, 7, 33, 2048, 50_003] {
                let x = bed.random(&mut Random::new(len as u64), dtype, len, 3.0);
                for accumulate in [false, true] {
                    let case = format!("{}: {len} × {dtype}, accumulate {accumulate}", bed.device.name());
                    let before = if accumulate { 100.0 } else { f64::NAN };
                    let base = if accumulate { 100.0 } else { 0.0 };
                    let [squares] = twice(&case, || {
                        let out = bed.input(Dtype::F32, &[before]).buffer;
                        bed.device.sum_squares(&bed.stream, &x.buffer, &out, &scratch, accumulate).unwrap();
                        [bed.read(&out)]
                    });
                    let want = base + x.values.iter().map(|v| v * v).sum::<f64>();
                    Tolerance::new(Dtype::F32, 1).check(&format!("{case}: squares"), &squares, &[want]);
                    if dtype != Dtype::F32 {
                        continue;
                    }
                    let [sum] = twice(&case, || {
                        let out = bed.input(Dtype::F32, &[before]).buffer;
                        bed.device.sum(&bed.stream, &x.buffer, &out, &scratch, accumulate).unwrap();
                        [bed.read(&out)]
                    });
                    let want = base + x.values.iter().sum::<f64>();
                    // The sum of a random walk is small beside its terms: they set the scale.
                    let near = (sum[0] - want).abs() <= 1e-6 * (100.0 + 3.0 * (len as f64).sqrt());
                    assert!(near, "{case}: sum is {}, not {want}", sum[0]);
                }
            }
        }
    }
}

#[test]
fn reciprocals_and_products() {
    for bed in &beds() {
        let src = bed.input(Dtype::F32, &[4.0, 0.0, -0.5, 1e9]);
        let dst = bed.poisoned(Dtype::F32, 4);
        bed.device.reciprocal(&bed.stream, &src.buffer, &dst).unwrap();
        Tolerance::new(Dtype::F32, 1).check("reciprocal", &bed.read(&dst), &[0.25, 0.0, -2.0, 1e-9]);
        bed.device.multiply(&bed.stream, &src.buffer, &dst).unwrap();
        Tolerance::new(Dtype::F32, 1).check("multiply", &bed.read(&dst), &[1.0, 0.0, 1.0, 1.0]);
    }
}

#[test]
fn side_streams_do_the_same_work_in_order() {
    for bed in &beds() {
        let (a, b) =
            (bed.device.stream("a", Role::Side).unwrap(), bed.device.stream("b", Role::Side).unwrap());
        let device: &dyn Device = &*bed.device;
        let len = 300_000;
        let x = bed.poisoned(Dtype::F32, len);
        let (y, z) = (bed.poisoned(Dtype::F32, len), bed.poisoned(Dtype::Bf16, len));
        bed.stream.synchronize().unwrap();
        for round in 0..20 {
            device.fill(&a, &x, round as f32).unwrap();
            device.add(&a, &x, &x).unwrap();
            b.wait(&a.record().unwrap()).unwrap();
            device.copy(&b, &x, &y).unwrap();
            device.cast(&b, &y, &z).unwrap();
            a.wait(&b.record().unwrap()).unwrap();
        }
        let got = device.read_vec::<half::bf16>(&b, &z).unwrap();
        assert!(got.iter().all(|v| v.to_f32() == 38.0), "{}", device.name());
    }
}
