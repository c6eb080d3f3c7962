//! What the reference folders do not have (biases everywhere, scaled RoPE, windows in some layers only), held
//! against finite differences.

mod walk;

use device::Dtype;
use tensor::models::{Config, build};
use walk::Walk;

const SEQ: usize = 9;

fn open(model_type: &str, more: &str) -> Walk {
    let text = format!(
        r#"{{"model_type": "{model_type}", "vocab_size": 11, "hidden_size": 12, "intermediate_size": 10,
        "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4,
        "max_position_embeddings": 64, {more}}}"#
    );
    let model = build(&Config::parse(&text).unwrap(), SEQ).unwrap();
    let lens: Vec<(String, usize)> = model
        .items
        .iter()
        .flat_map(|item| item.members.iter().map(|member| (member.name.clone(), member.shape.numel())))
        .collect();
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let mut walk = Walk::new(model, Dtype::F32, |name| {
        let len = lens.iter().find(|(other, _)| other == name).unwrap().1;
        let centre = if name.contains("norm") { 1.0 } else { 0.0 };
        (0..len).map(|_| centre + 0.4 * random()).collect()
    });
    let ids: Vec<i32> = (0..2 * SEQ as i32).map(|i| (i * 7 + 3) % 11).collect();
    let labels: Vec<i32> =
        (0..2 * SEQ as i32).map(|i| if i == 4 { -100 } else { (i * 5 + 1) % 11 }).collect();
    walk.tokens(SEQ, &ids, &labels);
    walk
}

fn mean_loss(walk: &Walk) -> f64 {
    walk.train().iter().map(|loss| f64::from(*loss)).sum::<f64>() / (2 * SEQ - 1) as f64
}

fn check(walk: &Walk) {
    let names: Vec<String> =
        walk.model.items.iter().flat_map(|item| item.members.iter().map(|m| m.name.clone())).collect();
    for name in &names {
        mean_loss(walk);
        let (grad, values) = (walk.grad(name), walk.value(name));
        for at in (0..values.len()).step_by(values.len().div_ceil(5)) {
            let difference = |step: f32| {
                let loss_at = |value: f32| {
                    walk.set(name, at, value);
                    mean_loss(walk)
                };
                (loss_at(values[at] + step) - loss_at(values[at] - step)) / f64::from(2.0 * step)
            };
            // Two steps, so that what is left is of the fourth order.
            let slope = (4.0 * difference(5e-3) - difference(1e-2)) / 3.0;
            walk.set(name, at, values[at]);
            let near = (f64::from(grad[at]) - slope).abs() <= 1e-4 + 2e-3 * slope.abs();
            assert!(near, "{name}[{at}] is {}, not {slope}", grad[at]);
        }
    }
}

#[test]
fn llama_with_biases_and_yarn() {
    let yarn = r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}"#;
    let walk = open("llama", &format!(r#""attention_bias": true, "mlp_bias": true, "rope_scaling": {yarn}"#));
    let named = |name: &str| walk.model.items.iter().any(|item| item.members.iter().any(|m| m.name == name));
    for name in ["self_attn.o_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj"] {
        assert!(named(&format!("model.layers.1.{name}.bias")), "{name}");
    }
    check(&walk);
}

#[test]
fn qwen_with_a_window_in_one_layer_and_linear_rope() {
    let more = r#""use_sliding_window": true, "sliding_window": 3, "max_window_layers": 1,
        "tie_word_embeddings": true, "rope_scaling": {"type": "linear", "factor": 2.0}"#;
    for model_type in ["qwen2", "qwen3"] {
        check(&open(model_type, more));
    }
    let full = r#""tie_word_embeddings": true, "rope_scaling": {"type": "linear", "factor": 2.0}"#;
    assert_ne!(open("qwen2", more).train(), open("qwen2", full).train(), "the window is felt");
}
