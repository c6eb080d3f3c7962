//! Readers of files from elsewhere, given files that nobody would write: they may refuse them in any words, but never
//! panic, hang, or take memory that the size of the file does not justify.
//!
//! Each target changes real files, at random and along their structure, until the time is up:
//! `SHARDLOOM_FUZZ_S=60 SHARDLOOM_FUZZ_SEED=1 cargo test -p checkpoint --test fuzz -- --nocapture`.
//! The same seed gives the same inputs in the same order. An input that fails is kept, and its path printed.

#[path = "../made/mod.rs"]
mod made;
mod memory;
mod mutate;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// What one input may take beyond its own size many times over: buffers of a fixed size.
const BASE_BYTES: usize = 8 << 20;
/// How often its own size: an instruction of one byte makes an object of some tens.
const FACTOR: usize = 192;

/// A reader under test.
trait Target: Send {
    fn name(&self) -> &'static str;

    /// Makes the next input.
    fn input(&mut self, random: &mut mutate::Random) -> Vec<u8>;

    /// Reads it. Whether it was taken is returned; what is taken must be sound.
    fn read(&mut self, input: &[u8]) -> bool;
}

fn env(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => u64::from_str_radix(&text, 16)
            .unwrap_or_else(|_| panic!("{name}={text} is not a hexadecimal number")),
        Err(_) => default,
    }
}

fn seconds() -> u64 {
    match std::env::var("SHARDLOOM_FUZZ_S") {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("SHARDLOOM_FUZZ_S={text} is not a number")),
        Err(_) => 2,
    }
}

/// Runs a target until the time is up; an `Err` says which input failed and how.
fn run(target: &mut dyn Target, seed: u64, until: Instant) -> Result<String, String> {
    let (name, mut random) = (target.name(), mutate::Random::new(seed));
    let (mut inputs, mut taken) = (0u64, 0u64);
    while Instant::now() < until {
        let input = target.input(&mut random);
        let (outcome, peak) = memory::peak_of(|| catch_unwind(AssertUnwindSafe(|| target.read(&input))));
        let bound = BASE_BYTES + FACTOR * input.len();
        let failure = match &outcome {
            Err(_) => "it panicked (see above)".to_string(),
            Ok(_) if peak > bound => format!("it took {peak} bytes of memory for {} of input", input.len()),
            Ok(accepted) => {
                taken += u64::from(*accepted);
                inputs += 1;
                continue;
            }
        };
        let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{name}-{seed:x}-{inputs}"));
        std::fs::write(&kept, &input).unwrap();
        return Err(format!(
            "{name}, seed {seed:x}, input {inputs}: {failure}; the input is in {}",
            kept.display()
        ));
    }
    assert!(inputs > 0, "{name}: no time for a single input");
    Ok(format!("{name}: {inputs} inputs, {taken} of them taken"))
}

#[test]
fn readers_survive_whatever_files_say() {
    let seed = env("SHARDLOOM_FUZZ_SEED", 1);
    let until = Instant::now() + Duration::from_secs(seconds());
    println!("seed {seed:x}, {} s each, all at once", seconds());
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = targets::all()
            .into_iter()
            .map(|mut target| scope.spawn(move || run(&mut *target, seed, until)))
            .collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let failures: Vec<&String> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    outcomes.iter().flatten().for_each(|line| println!("{line}"));
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn a_reader_that_believes_a_lie_is_caught() {
    struct Believer;
    impl Target for Believer {
        fn name(&self) -> &'static str {
            "believer"
        }
        fn input(&mut self, _: &mut mutate::Random) -> Vec<u8> {
            (64u64 << 20).to_le_bytes().to_vec()
        }
        fn read(&mut self, input: &[u8]) -> bool {
            let bytes: Vec<u8> = vec![1; u64::from_le_bytes(input.try_into().unwrap()) as usize];
            bytes.len() == 3
        }
    }
    let until = Instant::now() + Duration::from_secs(60);
    let caught = run(&mut Believer, 1, until).unwrap_err();
    assert!(caught.contains("bytes of memory for 8 of input"), "{caught}");
}
