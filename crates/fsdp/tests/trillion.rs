//! A model of a trillion parameters as shapes: what the host holds for it is counted by the allocator.

use device::Profile;
use fsdp::{Field, Plan, Precision, Settings};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tensor::models::{Config, build};

struct Counting;

static CURRENT: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is the system allocator's; only sizes are counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = CURRENT.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        CURRENT.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MOST: usize = 100 << 20;

#[test]
fn a_trillion_parameters_are_planned_in_little_memory() {
    let text = r#"{"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 25600,
        "intermediate_size": 102400, "num_hidden_layers": 110, "num_attention_heads": 200,
        "num_key_value_heads": 8, "tie_word_embeddings": false, "rope_theta": 1000000.0}"#;
    let before = CURRENT.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let model = Arc::new(build(&Config::parse(text).unwrap(), 131_072).unwrap());
    let params = model.num_params();
    assert!((1_000_000_000_000..1_100_000_000_000).contains(&params), "{params} parameters");
    let built = PEAK.load(Ordering::Relaxed) - before;
    let settings = Settings {
        precision: Precision { compute: device::Dtype::Bf16, ..Precision::F32 },
        loss_chunk: 2048,
        ..Settings::new(1024, Field::tokens(1, 4096))
    };
    let plan = Plan::new(&model, settings, Profile::Cuda { deterministic: false }).unwrap();
    let planned = PEAK.load(Ordering::Relaxed) - before;
    println!("{params} parameters: {built} bytes to build, {planned} to plan as well");
    assert!(built < MOST && planned < MOST, "{built} bytes to build, {planned} to plan as well");
    assert!(plan.peak_bytes(&model) > params / 1024 * 12, "the plan counts what a rank would hold");
}
