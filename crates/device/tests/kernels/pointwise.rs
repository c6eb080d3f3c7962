use super::harness::{Bed, FLOATS, Random, Tolerance, beds, check_gradient, dot, round, twice};
use super::reference;
use device::{Activation, ActivationGrad, Dropout, Dtype, Function};

const FUNCTIONS: [Function; 3] = [Function::Relu, Function::Gelu, Function::GeluTanh];
const LENS: [usize; 4] = [1, 8, 97, 5003];

#[test]
fn functions_and_their_gradients() {
    for bed in &beds() {
        for dtype in FLOATS {
            for function in FUNCTIONS {
                LENS.into_iter().for_each(|len| case(bed, dtype, function, len));
            }
        }
    }
}

fn case(bed: &Bed, dtype: Dtype, function: Function, len: usize) {
    let case = format!("{}: {function:?} of {len} × {dtype}", bed.device.name());
    let mut random = Random::new(len as u64);
    let x = bed.random(&mut random, dtype, len, 6.0);
    let dout = bed.random(&mut random, dtype, len, 1.0);
    for in_place in [false, true] {
        let [out, grad] = twice(&case, || {
            let input = bed.copy_of(&x);
            let out = if in_place { input.clone() } else { bed.poisoned(dtype, len) };
            let args = Activation { function, x: &input, out: &out };
            bed.device.activation(&bed.stream, &args).unwrap();
            let arriving = bed.copy_of(&dout);
            let dx = if in_place { arriving.clone() } else { bed.poisoned(dtype, len) };
            let args = ActivationGrad { function, x: &x.buffer, dout: &arriving, dx: &dx };
            bed.device.activation_grad(&bed.stream, &args).unwrap();
            [bed.read(&out), bed.read(&dx)]
        });
        let want: Vec<f64> = x.values.iter().map(|&x| reference::function(function, x)).collect();
        Tolerance::new(dtype, 1).check(&case, &out, &want);
        let slopes = x.values.iter().map(|&x| reference::slope(function, x));
        let want: Vec<f64> = slopes.zip(&dout.values).map(|(slope, dout)| slope * dout).collect();
        Tolerance::new(dtype, 1).check(&format!("{case}: gradient"), &grad, &want);
    }
}

#[test]
fn far_out_values_give_their_limits() {
    for bed in &beds() {
        let x = bed.input(Dtype::F32, &[-1000.0, 1000.0, -12.0, 0.0, 12.0]);
        for function in FUNCTIONS {
            let (out, dx) = (bed.poisoned(Dtype::F32, 5), bed.poisoned(Dtype::F32, 5));
            bed.device.activation(&bed.stream, &Activation { function, x: &x.buffer, out: &out }).unwrap();
            let ones = bed.input(Dtype::F32, &[1.0; 5]);
            let args = ActivationGrad { function, x: &x.buffer, dout: &ones.buffer, dx: &dx };
            bed.device.activation_grad(&bed.stream, &args).unwrap();
            let (out, dx) = (bed.read(&out), bed.read(&dx));
            assert!(out[0] == 0.0 && out[1] == 1000.0 && out[2].abs() < 1e-29, "{function:?}: {out:?}");
            assert!(out[3] == 0.0 && out[4] == 12.0, "{function:?}: {out:?}");
            assert!(
                dx[0] == 0.0 && dx[1] == 1.0 && dx[2].abs() < 1e-29 && dx[4] == 1.0,
                "{function:?}: {dx:?}"
            );
        }
    }
}

#[test]
fn the_reference_gradient_is_the_slope() {
    let mut random = Random::new(4);
    let (x, dout) = (random.values(20, 4.0), random.values(20, 1.0));
    for function in FUNCTIONS {
        let all = |x: &[f64]| -> Vec<f64> { x.iter().map(|&x| reference::function(function, x)).collect() };
        let gradient: Vec<f64> =
            x.iter().zip(&dout).map(|(&x, dout)| reference::slope(function, x) * dout).collect();
        check_gradient(&format!("{function:?}"), |x| dot(&all(x), &dout), &x, &gradient);
    }
}

#[test]
fn dropout_goes_by_the_elements_number() {
    for bed in &beds() {
        for dtype in FLOATS {
            for (len, p) in [(1, 0.5), (97, 0.1), (20_003, 0.25), (64, 0.0)] {
                let case = format!("{}: dropout {p} of {len} × {dtype}", bed.device.name());
                let x = bed.random(&mut Random::new(len as u64), dtype, len, 2.0);
                let run = |first: u64, start: usize, count: usize| {
                    let part = x.buffer.slice(start, count).unwrap();
                    let out = bed.poisoned(dtype, count);
                    let args = Dropout { x: &part, out: &out, p, key: 77, first };
                    bed.device.dropout(&bed.stream, &args).unwrap();
                    bed.read(&out)
                };
                let [whole] = twice(&case, || [run(1000, 0, len)]);
                let scale = 1.0 / (1.0 - p);
                let kept =
                    |i: usize| f64::from(Dropout::bits(77, 1000 + i as u64)) >= f64::from(p) * 2f64.powi(32);
                let want = |i: usize| {
                    if kept(i) { f64::from(round(dtype, x.values[i] as f32 * scale)) } else { 0.0 }
                };
                assert!((0..len).all(|i| whole[i] == want(i)), "{case}");
                // In two parts, as on two ranks.
                let cut = len / 3;
                let parts = [run(1000, 0, cut), run(1000 + cut as u64, cut, len - cut)].concat();
                assert_eq!(parts, whole, "{case}: in parts");
                let dropped = (0..len).filter(|&i| !kept(i)).count() as f64;
                let spread = 5.0 * (len as f64 * f64::from(p) * (1.0 - f64::from(p))).sqrt();
                assert!((dropped - len as f64 * f64::from(p)).abs() <= spread, "{case}: {dropped} dropped");
            }
        }
        let x = bed.poisoned(Dtype::F32, 4);
        let args = Dropout { x: &x, out: &x, p: 1.0, key: 0, first: 0 };
        assert!(bed.device.dropout(&bed.stream, &args).is_err(), "nothing would be left");
    }
}
