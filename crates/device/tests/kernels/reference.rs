//! The kernels' mathematics in f64, written from their definitions.

use device::{AttentionShape, Function};

/// (out, rstd)
pub fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let cols = weight.len();
    let (mut out, mut rstd) = (Vec::new(), Vec::new());
    for row in x.chunks(cols) {
        let scale = 1.0 / (row.iter().map(|v| v * v).sum::<f64>() / cols as f64 + eps).sqrt();
        rstd.push(scale);
        out.extend(row.iter().zip(weight).map(|(x, w)| x * scale * w));
    }
    (out, rstd)
}

/// (dx, dweight)
pub fn rms_norm_grad(dout: &[f64], x: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let cols = weight.len();
    let (mut dx, mut dweight) = (Vec::new(), vec![0.0; cols]);
    for (row, dout) in x.chunks(cols).zip(dout.chunks(cols)) {
        let scale = 1.0 / (row.iter().map(|v| v * v).sum::<f64>() / cols as f64 + eps).sqrt();
        let along: f64 = (0..cols).map(|i| weight[i] * dout[i] * row[i] * scale).sum::<f64>() / cols as f64;
        for i in 0..cols {
            dweight[i] += dout[i] * row[i] * scale;
            dx.push((weight[i] * dout[i] - row[i] * scale * along) * scale);
        }
    }
    (dx, dweight)
}

/// How tokens and heads lie in the rows that are rotated.
#[derive(Clone, Copy)]
pub struct RopeShape {
    pub heads: usize,
    pub head_dim: usize,
    pub stride: usize,
}

/// Rotates by `sign` times each angle. Tables are `[positions, head_dim / 2]`.
pub fn rope(shape: RopeShape, x: &[f64], positions: &[i32], cos: &[f64], sin: &[f64], sign: f64) -> Vec<f64> {
    let half = shape.head_dim / 2;
    let mut out = x.to_vec();
    for (token, &position) in positions.iter().enumerate() {
        for head in 0..shape.heads {
            for i in 0..half {
                let first = token * shape.stride + head * shape.head_dim + i;
                let (c, s) = (cos[position as usize * half + i], sign * sin[position as usize * half + i]);
                out[first] = x[first] * c - x[first + half] * s;
                out[first + half] = x[first + half] * c + x[first] * s;
            }
        }
    }
    out
}

/// Probabilities of one query over all keys of its row.
fn probabilities(
    shape: &AttentionShape,
    qkv: &[f64],
    start: usize,
    at: (usize, usize, usize),
) -> (Vec<f64>, f64) {
    let (row, head, query) = at;
    let scale = 1.0 / (shape.head_dim as f64).sqrt();
    let first = shape.window.map_or(0, |window| (query + 1).saturating_sub(window)).max(start);
    let q = head_of(shape, qkv, row, query, head);
    let kv = shape.heads + head / (shape.heads / shape.kv_heads);
    let mut exps = vec![0.0; shape.seq];
    for (key, exp) in exps.iter_mut().enumerate().take(query + 1).skip(first) {
        *exp = (super::harness::dot(q, head_of(shape, qkv, row, key, kv)) * scale).exp();
    }
    let sum: f64 = exps.iter().sum();
    (exps.iter().map(|e| e / sum).collect(), sum.ln())
}

/// One head's slice of a token; heads count through queries, keys and values.
fn head_of<'a>(shape: &AttentionShape, qkv: &'a [f64], row: usize, token: usize, head: usize) -> &'a [f64] {
    &qkv[head_at(shape, row, token, head)..][..shape.head_dim]
}

fn head_at(shape: &AttentionShape, row: usize, token: usize, head: usize) -> usize {
    (row * shape.seq + token) * shape.qkv_cols() + head * shape.head_dim
}

/// Every (row, head, query).
fn queries(shape: &AttentionShape) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
    let AttentionShape { rows, heads, seq, .. } = *shape;
    (0..rows).flat_map(move |r| (0..heads).flat_map(move |h| (0..seq).map(move |q| (r, h, q))))
}

/// (out, lse)
pub fn attention(shape: &AttentionShape, qkv: &[f64], document_start: &[i32]) -> (Vec<f64>, Vec<f64>) {
    let mut out = vec![0.0; shape.tokens() * shape.out_cols()];
    let mut lse = Vec::new();
    for (row, head, query) in queries(shape) {
        let start = document_start[row * shape.seq + query] as usize;
        let (p, log_sum) = probabilities(shape, qkv, start, (row, head, query));
        let value = shape.heads + shape.kv_heads + head / (shape.heads / shape.kv_heads);
        let at = (row * shape.seq + query) * shape.out_cols() + head * shape.head_dim;
        for (key, p) in p.iter().enumerate() {
            let v = head_of(shape, qkv, row, key, value);
            out[at..at + shape.head_dim].iter_mut().zip(v).for_each(|(out, v)| *out += p * v);
        }
        lse.push(log_sum);
    }
    (out, lse)
}

/// `out` is the forward's, as it was stored: Σ p·dp is taken from it, as Σ out·dout.
pub fn attention_grad(
    shape: &AttentionShape,
    qkv: &[f64],
    document_start: &[i32],
    out: &[f64],
    dout: &[f64],
) -> Vec<f64> {
    let mut dqkv = vec![0.0; qkv.len()];
    let (dim, scale) = (shape.head_dim, 1.0 / (shape.head_dim as f64).sqrt());
    for (row, head, query) in queries(shape) {
        let start = document_start[row * shape.seq + query] as usize;
        let (p, _) = probabilities(shape, qkv, start, (row, head, query));
        let group = head / (shape.heads / shape.kv_heads);
        let (key_head, value_head) = (shape.heads + group, shape.heads + shape.kv_heads + group);
        let at = (row * shape.seq + query) * shape.out_cols() + head * dim;
        let (out, dout) = (&out[at..at + dim], &dout[at..at + dim]);
        let mean = super::harness::dot(out, dout);
        let q_at = head_at(shape, row, query, head);
        for (key, p) in p.iter().enumerate() {
            let dp = super::harness::dot(dout, head_of(shape, qkv, row, key, value_head));
            let ds = p * (dp - mean) * scale;
            let (k_at, v_at) = (head_at(shape, row, key, key_head), head_at(shape, row, key, value_head));
            for i in 0..dim {
                dqkv[q_at + i] += ds * qkv[k_at + i];
                dqkv[k_at + i] += ds * qkv[q_at + i];
                dqkv[v_at + i] += p * dout[i];
            }
        }
    }
    dqkv
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

pub fn swiglu(gate_up: &[f64], cols: usize) -> Vec<f64> {
    gate_up.chunks(2 * cols).flat_map(|row| (0..cols).map(|i| silu(row[i]) * row[cols + i])).collect()
}

pub fn swiglu_grad(gate_up: &[f64], dout: &[f64], cols: usize) -> Vec<f64> {
    let mut grad = vec![0.0; gate_up.len()];
    for (r, row) in gate_up.chunks(2 * cols).enumerate() {
        for i in 0..cols {
            let (g, up, d) = (row[i], row[cols + i], dout[r * cols + i]);
            grad[2 * r * cols + i] = d * up * (sigmoid(g) + g * sigmoid(g) * (1.0 - sigmoid(g)));
            grad[2 * r * cols + cols + i] = d * silu(g);
        }
    }
    grad
}

/// One row: the loss and the logits' gradient. A negative label is ignored.
pub fn cross_entropy(logits: &[f64], label: i32) -> (f64, Vec<f64>) {
    if label < 0 {
        return (0.0, vec![0.0; logits.len()]);
    }
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let log_sum = max + logits.iter().map(|v| (v - max).exp()).sum::<f64>().ln();
    let mut gradient: Vec<f64> = logits.iter().map(|v| (v - log_sum).exp()).collect();
    gradient[label as usize] -= 1.0;
    (log_sum - logits[label as usize], gradient)
}

/// a · b over logical (m, n, k); `at` say where element (i, j) of each operand lies.
pub fn gemm(
    (m, n, k): (usize, usize, usize),
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for depth in 0..k {
            let a = a(i, depth);
            for j in 0..n {
                c[i * n + j] += a * b(depth, j);
            }
        }
    }
    c
}

/// (out, mean and rstd of each row)
pub fn layer_norm(x: &[f64], weight: &[f64], bias: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let cols = weight.len();
    let (mut out, mut statistics) = (Vec::new(), Vec::new());
    for row in x.chunks(cols) {
        let mean = row.iter().sum::<f64>() / cols as f64;
        let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / cols as f64;
        let rstd = 1.0 / (variance + eps).sqrt();
        statistics.extend([mean, rstd]);
        out.extend((0..cols).map(|i| (row[i] - mean) * rstd * weight[i] + bias[i]));
    }
    (out, statistics)
}

/// (dx, dweight, dbias)
pub fn layer_norm_grad(dout: &[f64], x: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let cols = weight.len();
    let (_, statistics) = layer_norm(x, weight, weight, eps);
    let (mut dx, mut dweight, mut dbias) = (Vec::new(), vec![0.0; cols], vec![0.0; cols]);
    for (r, (row, dout)) in x.chunks(cols).zip(dout.chunks(cols)).enumerate() {
        let (mean, rstd) = (statistics[2 * r], statistics[2 * r + 1]);
        let normed: Vec<f64> = row.iter().map(|v| (v - mean) * rstd).collect();
        let inner: Vec<f64> = weight.iter().zip(dout).map(|(w, d)| w * d).collect();
        let level = inner.iter().sum::<f64>() / cols as f64;
        let along = super::harness::dot(&inner, &normed) / cols as f64;
        for i in 0..cols {
            dweight[i] += dout[i] * normed[i];
            dbias[i] += dout[i];
            dx.push((inner[i] - level - normed[i] * along) * rstd);
        }
    }
    (dx, dweight, dbias)
}

/// The normal distribution's Φ: a series near 0, a continued fraction in the tails.
fn normal(x: f64) -> f64 {
    let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    if x.abs() < 3.0 {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= x * x / (2 * n + 1) as f64;
            sum += term;
        }
        return 0.5 + density * sum;
    }
    let z = x.abs();
    let fraction = (1..100).rev().fold(z, |fraction, n| z + f64::from(n) / fraction);
    let tail = density / fraction;
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// The tanh form of Φ and its slope.
fn normal_tanh(x: f64) -> (f64, f64) {
    let scale = (2.0 / std::f64::consts::PI).sqrt();
    let tanh = (scale * (x + 0.044715 * x.powi(3))).tanh();
    (0.5 * (1.0 + tanh), 0.5 * (1.0 - tanh * tanh) * scale * (1.0 + 3.0 * 0.044715 * x * x))
}

pub fn function(function: Function, x: f64) -> f64 {
    match function {
        Function::Relu => x.max(0.0),
        Function::Gelu => x * normal(x),
        Function::GeluTanh => x * normal_tanh(x).0,
    }
}

pub fn slope(function: Function, x: f64) -> f64 {
    match function {
        Function::Relu => f64::from(u8::from(x > 0.0)),
        Function::Gelu => normal(x) + x * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt(),
        Function::GeluTanh => {
            let (normal, slope) = normal_tanh(x);
            normal + x * slope
        }
    }
}
