use super::harness::{Bed, FLOATS, Random, Tolerance, beds, check_gradient, dot, round, twice};
use super::reference;
use device::{Dtype, Swiglu, SwigluGrad};

#[test]
fn the_activation_and_its_gradient() {
    for bed in &beds() {
        for dtype in FLOATS {
            for (rows, cols) in [(1, 8), (7, 65), (33, 513), (1, 1)] {
                case(bed, dtype, rows, cols);
            }
        }
    }
}

fn case(bed: &Bed, dtype: Dtype, rows: usize, cols: usize) {
    let case = format!("{}: swiglu {rows}×{cols} {dtype}", bed.device.name());
    let mut random = Random::new((rows * cols) as u64);
    let gate_up = bed.random(&mut random, dtype, 2 * rows * cols, 6.0);
    let dout = bed.random(&mut random, dtype, rows * cols, 1.0);
    for in_place in [false, true] {
        let [out, grad] = twice(&case, || {
            let input = bed.copy_of(&gate_up);
            let out = bed.poisoned(dtype, rows * cols);
            bed.device.swiglu(&bed.stream, &Swiglu { gate_up: &input, out: &out, rows, cols }).unwrap();
            let grad = if in_place { input.clone() } else { bed.poisoned(dtype, 2 * rows * cols) };
            let args = SwigluGrad { gate_up: &input, dout: &dout.buffer, dgate_up: &grad, rows, cols };
            bed.device.swiglu_grad(&bed.stream, &args).unwrap();
            [bed.read(&out), bed.read(&grad)]
        });
        Tolerance::new(dtype, 2).check(&case, &out, &reference::swiglu(&gate_up.values, cols));
        let want = reference::swiglu_grad(&gate_up.values, &dout.values, cols);
        Tolerance::new(dtype, 1).check(&format!("{case}: gradient"), &grad, &want);
        if dtype != Dtype::F32 {
            let rounded_twice = |i: usize| {
                let row = &gate_up.values[2 * (i / cols) * cols..];
                let silu = round(dtype, reference::silu(row[i % cols]) as f32);
                f64::from(round(dtype, silu * row[cols + i % cols] as f32))
            };
            // An exp that is off in its last place may turn a tie the other way, but seldom does.
            let same = (0..out.len()).filter(|&i| out[i] == rounded_twice(i)).count();
            assert!(same * 1000 >= out.len() * 995, "{case}: {same} of {} rounded as said", out.len());
        }
    }
}

#[test]
fn far_out_gates_give_their_limits() {
    for bed in &beds() {
        let gate_up = bed.input(Dtype::F32, &[-1000.0, 1000.0, -89.5, 0.0, 2.0, 2.0, 2.0, 2.0]);
        let out = bed.poisoned(Dtype::F32, 4);
        bed.device
            .swiglu(&bed.stream, &Swiglu { gate_up: &gate_up.buffer, out: &out, rows: 1, cols: 4 })
            .unwrap();
        let got = bed.read(&out);
        assert!(got[0] == 0.0 && got[1] == 2000.0 && got[2].abs() < 1e-36 && got[3] == 0.0, "{got:?}");
    }
}

#[test]
fn the_reference_gradient_is_the_slope() {
    let mut random = Random::new(4);
    let (gate_up, dout) = (random.values(20, 4.0), random.values(10, 1.0));
    let gradient = reference::swiglu_grad(&gate_up, &dout, 5);
    check_gradient("swiglu", |x| dot(&reference::swiglu(x, 5), &dout), &gate_up, &gradient);
}
