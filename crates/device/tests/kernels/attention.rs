use super::harness::{Bed, FLOATS, Random, Tolerance, attention_beds, beds, check_gradient, dot, twice};
use super::reference;
use device::{Attention, AttentionCached, AttentionGrad, AttentionShape, Buffer, Dtype, Profile};

fn shape(
    rows: usize,
    seq: usize,
    heads: (usize, usize),
    head_dim: usize,
    window: Option<usize>,
) -> AttentionShape {
    AttentionShape { rows, seq, heads: heads.0, kv_heads: heads.1, head_dim, window }
}

/// Shapes, and the mean length of documents where rows hold several.
fn cases() -> Vec<(AttentionShape, Option<usize>)> {
    vec![
        (shape(2, 1, (4, 2), 16, None), None),
        (shape(2, 5, (3, 1), 20, None), None),
        (shape(1, 48, (2, 2), 64, None), Some(20)),
        (shape(2, 130, (4, 2), 16, None), None),
        (shape(1, 130, (3, 1), 20, None), Some(20)),
        (shape(1, 130, (2, 2), 128, Some(17)), None),
        (shape(2, 48, (4, 2), 16, Some(1)), None),
        (shape(1, 130, (2, 1), 64, Some(70)), Some(20)),
        (shape(1, 48, (2, 2), 16, Some(1000)), None),
        (shape(1, 200, (2, 2), 16, Some(5)), Some(20)),
        // Long enough that a query meets several blocks of keys and its running maximum changes.
        (shape(1, 300, (2, 1), 16, None), None),
        // Several tiles of queries and keys of the kernels on tensor cores, in each of their head sizes; the last
        // is rounded up.
        (shape(1, 300, (4, 2), 64, None), Some(20)),
        (shape(1, 270, (2, 1), 80, Some(70)), None),
        (shape(2, 150, (3, 3), 96, None), Some(20)),
        (shape(1, 300, (4, 1), 128, Some(150)), Some(20)),
        (shape(2, 257, (2, 1), 128, None), None),
        (shape(1, 200, (2, 1), 104, None), Some(20)),
        // So few documents that cuDNN has room for most, for all, and for most again, with a window.
        (shape(2, 384, (2, 1), 64, None), Some(150)),
        (shape(1, 512, (2, 1), 128, None), Some(250)),
        (shape(2, 256, (2, 1), 128, Some(40)), Some(150)),
        // A last tile of keys with few tokens.
        (shape(1, 390, (2, 1), 64, Some(100)), None),
    ]
}

/// First tokens of documents of random lengths, per token.
fn documents(random: &mut Random, shape: &AttentionShape, mean: Option<usize>) -> Vec<i32> {
    let mut starts = Vec::new();
    for _ in 0..shape.rows {
        let mut start = 0;
        for token in 0..shape.seq {
            if mean.is_some_and(|mean| random.below(mean) == 0) {
                start = token;
            }
            starts.push(start as i32);
        }
    }
    starts
}

#[test]
fn attention_and_its_gradient() {
    for bed in &attention_beds() {
        for dtype in FLOATS {
            for (shape, mean) in cases() {
                case(bed, dtype, shape, mean);
            }
        }
    }
}

fn case(bed: &Bed, dtype: Dtype, shape: AttentionShape, mean: Option<usize>) {
    let case = format!("{}: {shape:?} {dtype}, documents {mean:?}", bed.device.name());
    let mut random = Random::new((shape.seq * shape.head_dim) as u64);
    let starts = documents(&mut random, &shape, mean);
    let start_buffer = bed.ints(&starts);
    let document_start = mean.map(|_| &start_buffer);
    let qkv = bed.random(&mut random, dtype, shape.tokens() * shape.qkv_cols(), 2.0);
    let dout = bed.random(&mut random, dtype, shape.tokens() * shape.out_cols(), 1.0);
    let profile = bed.device.profile();
    let run = || {
        let out = bed.poisoned(dtype, shape.tokens() * shape.out_cols());
        let lse = bed.poisoned(Dtype::F32, shape.tokens() * shape.heads);
        let dqkv = bed.poisoned(dtype, qkv.values.len());
        let scratch = bed.bytes(profile.attention_scratch(&shape, dtype));
        let (qkv, dout) = (&qkv.buffer, &dout.buffer);
        let args = Attention { shape, qkv, document_start, out: &out, lse: &lse, scratch: &scratch };
        bed.device.attention(&bed.stream, &args).unwrap();
        let scratch = bed.bytes(match mean {
            None => profile.attention_grad_scratch(&shape, dtype),
            Some(_) => profile.packed_attention_grad_scratch(&shape, dtype),
        });
        let (out, lse, dqkv) = (&out, &lse, &dqkv);
        let args = AttentionGrad { shape, qkv, document_start, out, lse, dout, dqkv, scratch: &scratch };
        bed.device.attention_grad(&bed.stream, &args).unwrap();
        [bed.read(out), bed.read(lse), bed.read(dqkv)]
    };
    let ordered = profile != Profile::Cuda { deterministic: false };
    let [got, lse, dqkv] = if ordered { twice(&case, run) } else { run() };
    let (want, want_lse) = reference::attention(&shape, &qkv.values, &starts);
    // Probabilities may be rounded before they meet the values, and the result is.
    Tolerance::new(dtype, 2).check(&format!("{case}: out"), &got, &want);
    Tolerance::new(Dtype::F32, 4).check(&format!("{case}: lse"), &lse, &want_lse);
    let want = reference::attention_grad(&shape, &qkv.values, &starts, &got, &dout.values);
    // Probabilities, the scores' gradient and the result. Tensor cores take the first two rounded; where a row's
    // first tokens average over few keys, those terms are larger than the others'.
    let fused = matches!(profile, Profile::Cuda { .. }) && !bed.device.name().contains("plain attention");
    let terms = if fused { 3.0 } else { 1.0 };
    Tolerance::new(dtype, 3).with_terms_of(terms).check(&format!("{case}: dqkv"), &dqkv, &want);
}

/// Whole sequences, and how they are cut into passes.
fn cached_cases() -> Vec<(AttentionShape, Vec<usize>)> {
    vec![
        (shape(2, 1, (4, 2), 16, None), vec![1]),
        (shape(2, 5, (3, 1), 20, None), vec![1, 1, 1, 1, 1]),
        (shape(1, 48, (2, 2), 64, None), vec![40, 1, 1, 6]),
        (shape(2, 150, (4, 2), 16, None), vec![3, 130, 1, 16]),
        (shape(1, 140, (3, 1), 20, None), vec![70, 70]),
        (shape(1, 139, (2, 2), 128, Some(17)), vec![100, 30, 1, 1, 7]),
        (shape(2, 48, (4, 2), 16, Some(1)), vec![47, 1]),
        (shape(1, 200, (8, 1), 80, Some(130)), vec![1, 140, 1, 58]),
        (shape(1, 20, (80, 1), 8, None), vec![18, 1, 1]),
        (shape(1, 400, (2, 1), 16, None), vec![399, 1]),
    ]
}

/// The tokens `start..start + seq` of every row.
fn part(values: &[f64], whole: &AttentionShape, cols: usize, start: usize, seq: usize) -> Vec<f64> {
    let row = |row: usize| &values[(row * whole.seq + start) * cols..][..seq * cols];
    (0..whole.rows).flat_map(row).copied().collect()
}

/// One pass over a cache.
fn cached_pass(bed: &Bed, shape: AttentionShape, qkv: &Buffer, cache: [&Buffer; 2], start: usize) -> Buffer {
    let dtype = qkv.dtype();
    let out = bed.poisoned(dtype, shape.tokens() * shape.out_cols());
    let lse = bed.poisoned(Dtype::F32, shape.tokens() * shape.heads);
    let scratch = bed.bytes(bed.device.profile().attention_scratch(&shape, dtype));
    let [keys, values] = cache;
    let max_len = keys.len() / (shape.rows * shape.kv_heads * shape.head_dim);
    let args =
        AttentionCached { shape, qkv, keys, values, start, max_len, out: &out, lse: &lse, scratch: &scratch };
    bed.device.attention_cached(&bed.stream, &args).unwrap();
    out
}

#[test]
fn cached_attention_is_that_of_the_whole_sequence() {
    for bed in &beds() {
        for dtype in FLOATS {
            for (whole, passes) in cached_cases() {
                let case = format!("{}: {whole:?} {dtype}, passes {passes:?}", bed.device.name());
                let mut random = Random::new((whole.seq * whole.head_dim) as u64);
                let qkv = bed.random(&mut random, dtype, whole.tokens() * whole.qkv_cols(), 2.0);
                // Room for more than there is: what lies behind the last token must not be read.
                let len = whole.rows * whole.kv_heads * (whole.seq + 3) * whole.head_dim;
                let (want, _) = reference::attention(&whole, &qkv.values, &vec![0; whole.tokens()]);
                twice(&case, || {
                    let cache = [bed.poisoned(dtype, len), bed.poisoned(dtype, len)];
                    let (mut start, mut all) = (0, vec![]);
                    for &seq in &passes {
                        let shape = AttentionShape { seq, ..whole };
                        let new = bed.input(dtype, &part(&qkv.values, &whole, whole.qkv_cols(), start, seq));
                        let out = cached_pass(bed, shape, &new.buffer, cache.each_ref(), start);
                        let want = part(&want, &whole, whole.out_cols(), start, seq);
                        let got = bed.read(&out);
                        Tolerance::new(dtype, 2).check(&format!("{case}: from {start}"), &got, &want);
                        start += seq;
                        all.extend(got);
                    }
                    assert_eq!(start, whole.seq);
                    [all]
                });
            }
        }
    }
}

#[test]
fn a_cache_that_is_full_takes_no_more() {
    for bed in &beds() {
        let shape = shape(1, 3, (2, 1), 8, None);
        let qkv = bed.poisoned(Dtype::F32, shape.tokens() * shape.qkv_cols());
        let (out, lse) = (bed.poisoned(Dtype::F32, 3 * 16), bed.poisoned(Dtype::F32, 6));
        let (cache, scratch) = (bed.poisoned(Dtype::F32, 10 * 8), bed.bytes(0));
        let args = AttentionCached {
            shape,
            qkv: &qkv,
            keys: &cache,
            values: &cache,
            start: 8,
            max_len: 10,
            out: &out,
            lse: &lse,
            scratch: &scratch,
        };
        let error = bed.device.attention_cached(&bed.stream, &args).unwrap_err().to_string();
        assert!(error.contains("3 tokens after 8"), "{error}");
    }
}

#[test]
fn large_scores_do_not_overflow() {
    for bed in &beds() {
        let shape = shape(1, 300, (1, 1), 16, None);
        let mut random = Random::new(8);
        let qkv = bed.random(&mut random, Dtype::F32, shape.tokens() * shape.qkv_cols(), 20.0);
        let (out, lse) = (bed.poisoned(Dtype::F32, 300 * 16), bed.poisoned(Dtype::F32, 300));
        let scratch = bed.bytes(bed.device.profile().attention_scratch(&shape, Dtype::F32));
        let args = Attention {
            shape,
            qkv: &qkv.buffer,
            document_start: None,
            out: &out,
            lse: &lse,
            scratch: &scratch,
        };
        bed.device.attention(&bed.stream, &args).unwrap();
        let (want, want_lse) = reference::attention(&shape, &qkv.values, &[0; 300]);
        assert!(want_lse.iter().any(|lse| *lse > 100.0), "the case must be one that overflows f32's exp");
        // A score of some hundreds has that many units in the last place of error in its exponent.
        Tolerance::new(Dtype::F32, 2000).check("large scores", &bed.read(&out), &want);
        Tolerance::new(Dtype::F32, 8).check("large scores: lse", &bed.read(&lse), &want_lse);
    }
}

#[test]
fn the_reference_gradient_is_the_slope() {
    let shape = shape(2, 5, (4, 2), 3, Some(4));
    let mut random = Random::new(11);
    let starts = [0, 0, 0, 3, 3, 0, 1, 1, 1, 1];
    let qkv = random.values(shape.tokens() * shape.qkv_cols(), 1.5);
    let dout = random.values(shape.tokens() * shape.out_cols(), 1.0);
    let (out, _) = reference::attention(&shape, &qkv, &starts);
    let gradient = reference::attention_grad(&shape, &qkv, &starts, &out, &dout);
    let loss = |qkv: &[f64]| dot(&reference::attention(&shape, qkv, &starts).0, &dout);
    check_gradient("attention", loss, &qkv, &gradient);
}
