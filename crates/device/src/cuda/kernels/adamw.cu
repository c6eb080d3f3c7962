// One AdamW step over a flat range. Each of the five buffers has a dtype of its own, told by a number.

enum Dtype { F32 = 0, BF16 = 1, F16 = 2 };

__device__ __forceinline__ float load_one(const void* p, i64 dtype, i64 i) {
    if (dtype == F32) return ((const float*)p)[i];
    if (dtype == BF16) return to_f32(((const bf16*)p)[i]);
    return to_f32(((const f16*)p)[i]);
}

__device__ __forceinline__ void store_one(void* p, i64 dtype, i64 i, float x) {
    if (dtype == F32) ((float*)p)[i] = x;
    else if (dtype == BF16) ((bf16*)p)[i] = from_f32<bf16>(x);
    else ((f16*)p)[i] = from_f32<f16>(x);
}

__device__ __forceinline__ float round_to(i64 dtype, float x) {
    return dtype == F32 ? x : dtype == BF16 ? rounded<bf16>(x) : rounded<f16>(x);
}

enum Verdict { NORM, CLIP, APPLIES, BIAS2_SQRT, STEP_SIZE };
enum Scaler { SCALE, GOOD_STEPS, SKIPPED, ENDED };

// Whether the step is made, and by which factors: see `Judge`. One thread. A norm that is not a number stays
// visible, as in PyTorch.
extern "C" __global__ void judge(
    const float* sum_squares, float* scaler, float* verdict, float max_norm, i64 step, double beta1, double beta2,
    double lr, i64 scaling, float growth, float backoff, i64 interval
) {
    if (global_thread() != 0) return;
    const float squares = sum_squares[0], scale = scaler[SCALE];
    const float norm = sqrtf(squares) / scale, clip = max_norm / (norm + 1e-6f);
    // Infinity and NaN alike leave something else than 0.
    const bool applies = squares - squares == 0.0f && scaler[ENDED] == 0.0f;
    if (!applies) {
        scaler[SKIPPED] += 1.0f;
        scaler[GOOD_STEPS] = 0.0f;
        if (scaling) scaler[SCALE] = scale * backoff;
        else if (scaler[ENDED] == 0.0f) scaler[ENDED] = (float)step;
    } else if (scaling) {
        scaler[GOOD_STEPS] += 1.0f;
        if (scaler[GOOD_STEPS] >= (float)interval) {
            const float grown = scale * growth;
            if (grown - grown == 0.0f) scaler[SCALE] = grown;
            scaler[GOOD_STEPS] = 0.0f;
        }
    }
    const double t = (double)step - (double)scaler[SKIPPED], adam_step = t < 1.0 ? 1.0 : t;
    verdict[NORM] = norm;
    verdict[CLIP] = (max_norm == 0.0f || clip > 1.0f ? 1.0f : clip) / scale;
    verdict[APPLIES] = applies ? 1.0f : 0.0f;
    verdict[BIAS2_SQRT] = (float)sqrt(1.0 - pow(beta2, adam_step));
    verdict[STEP_SIZE] = (float)(-lr / (1.0 - pow(beta1, adam_step)));
}

struct Scalars {
    float clip, keep, one_minus_beta1, beta2, one_minus_beta2, bias2_sqrt, eps, step_size;
};

// Every operation rounds on its own, in the order of the documentation; nothing is contracted.
__device__ __forceinline__ void step(const Scalars& s, float grad, float& p, float& m, float& v) {
    const float g = __fmul_rn(grad, s.clip);
    p = __fmul_rn(p, s.keep);
    m = __fmaf_rn(s.one_minus_beta1, __fsub_rn(g, m), m);
    v = __fmul_rn(v, s.beta2);
    v = __fmaf_rn(__fmul_rn(s.one_minus_beta2, g), g, v);
    const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.bias2_sqrt), s.eps);
    p = __fadd_rn(p, __fdiv_rn(__fmul_rn(s.step_size, m), denominator));
}

// The same with the hardware's quick square root and reciprocal, a unit or two in f32's last place off: for
// weights that are rounded to 16 bits at once, where the exact ones would cost more than the memory traffic.
__device__ __forceinline__ void quick_step(const Scalars& s, float grad, float& p, float& m, float& v) {
    const float g = __fmul_rn(grad, s.clip);
    p = __fmul_rn(p, s.keep);
    m = __fmaf_rn(s.one_minus_beta1, __fsub_rn(g, m), m);
    v = __fmul_rn(v, s.beta2);
    v = __fmaf_rn(__fmul_rn(s.one_minus_beta2, g), g, v);
    float root, quotient;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(v));
    asm("div.approx.f32 %0, %1, %2;" : "=f"(root) : "f"(root), "f"(s.bias2_sqrt));
    asm("div.approx.f32 %0, %1, %2;" : "=f"(quotient) : "f"(__fmul_rn(s.step_size, m)), "f"(__fadd_rn(root, s.eps)));
    p = __fadd_rn(p, quotient);
}

// bf16 by chance: see `ByChance`. The upper neighbour is as likely as the value is near it.
struct Chance {
    u64 key, first;

    __device__ __forceinline__ float round(float x, i64 i) const {
        const u32 exponent = 0x7f800000u, bits = __float_as_uint(x);
        if ((bits & exponent) == exponent) return x;
        const u32 chance = random_bits(key, first + (u64)i) & 0xffffu;
        const u32 rounded = (bits + chance) & 0xffff0000u;
        return __uint_as_float((rounded & exponent) == exponent ? bits & 0xffff0000u : rounded);
    }
};

struct Buffers {
    void *master, *moment1, *moment2;
    const void* grad;
    void* compute;
    Chance chance;
};

// Eight elements from i on, for dtypes known when compiling. P: master, M: moments, G: gradient, C: compute.
template <typename P, typename M, typename G, typename C, bool BY_CHANCE>
__device__ __forceinline__ void eight(const Scalars& s, const Buffers& b, i64 i) {
    float g[8], p[8], m[8], v[8];
    load8((const G*)b.grad + i, g);
    load8((const P*)b.master + i, p);
    load8((const M*)b.moment1 + i, m);
    load8((const M*)b.moment2 + i, v);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (sizeof(P) == 2) quick_step(s, g[j], p[j], m[j], v[j]);
        else step(s, g[j], p[j], m[j], v[j]);
        if (BY_CHANCE) p[j] = b.chance.round(p[j], i + j);
    }
    store8((P*)b.master + i, p);
    store8((M*)b.moment1 + i, m);
    store8((M*)b.moment2 + i, v);
    if (b.compute) {
#pragma unroll
        for (int j = 0; j < 8; j++) p[j] = rounded<P>(p[j]);
        store8((C*)b.compute + i, p);
    }
}

// Four elements from i on, of f32 master weights: 16 bytes of each buffer that is f32.
template <typename M, typename G, typename C>
__device__ __forceinline__ void four(const Scalars& s, const Buffers& b, i64 i) {
    float g[4], p[4], m[4], v[4];
    load4((const G*)b.grad + i, g);
    load4((const float*)b.master + i, p);
    load4((const M*)b.moment1 + i, m);
    load4((const M*)b.moment2 + i, v);
#pragma unroll
    for (int j = 0; j < 4; j++) step(s, g[j], p[j], m[j], v[j]);
    store4((float*)b.master + i, p);
    store4((M*)b.moment1 + i, m);
    store4((M*)b.moment2 + i, v);
    if (b.compute) store4((C*)b.compute + i, p);
}

template <typename P, typename M, typename G, typename C, bool BY_CHANCE = false>
__device__ __forceinline__ void groups_of_eight(const Scalars& s, const Buffers& b, i64 groups) {
    if (sizeof(P) == 4) {
        for (i64 i = global_thread(); i < 2 * groups; i += global_threads()) four<M, G, C>(s, b, i * 4);
        return;
    }
    for (i64 group = global_thread(); group < groups; group += global_threads()) 
        eight<P, M, G, C, BY_CHANCE>(s, b, group * 8);
}

// `compute` is null when the master weights are the compute weights. The combinations people train with have
// loops of their own; the others go element by element.
extern "C" __global__ void adamw(
    void* master, i64 master_dtype, void* moment1, i64 moment1_dtype, void* moment2, i64 moment2_dtype,
    const void* grad, i64 grad_dtype, const float* verdict, void* compute, i64 compute_dtype,
    float keep, float one_minus_beta1, float beta2, float one_minus_beta2, float eps, i64 by_chance, i64 key,
    i64 first, i64 n, i64 vector
) {
    if (verdict[APPLIES] == 0.0f) return;
    const Scalars s = {verdict[CLIP], keep, one_minus_beta1, beta2, one_minus_beta2, verdict[BIAS2_SQRT], eps,
                       verdict[STEP_SIZE]};
    const Buffers b = {master, moment1, moment2, grad, compute, {(u64)key, (u64)first}};
    const bool one_moment_dtype = moment1_dtype == moment2_dtype;
    const i64 kinds = master_dtype * 1000 + moment1_dtype * 100 + grad_dtype * 10 + (compute ? compute_dtype : master_dtype);
    i64 groups = vector && one_moment_dtype ? n / 8 : 0;
    switch (kinds + (by_chance ? 10000 : 0)) {
    case 0: groups_of_eight<float, float, float, float>(s, b, groups); break;
    case 1: groups_of_eight<float, float, float, bf16>(s, b, groups); break;
    case 2: groups_of_eight<float, float, float, f16>(s, b, groups); break;
    case 11: groups_of_eight<float, float, bf16, bf16>(s, b, groups); break;
    case 101: groups_of_eight<float, bf16, float, bf16>(s, b, groups); break;
    case 111: groups_of_eight<float, bf16, bf16, bf16>(s, b, groups); break;
    case 1101: groups_of_eight<bf16, bf16, float, bf16>(s, b, groups); break;
    case 1111: groups_of_eight<bf16, bf16, bf16, bf16>(s, b, groups); break;
    case 11101: groups_of_eight<bf16, bf16, float, bf16, true>(s, b, groups); break;
    case 11111: groups_of_eight<bf16, bf16, bf16, bf16, true>(s, b, groups); break;
    default: groups = 0;
    }
    for (i64 i = groups * 8 + global_thread(); i < n; i += global_threads()) {
        float p = load_one(master, master_dtype, i), m = load_one(moment1, moment1_dtype, i),
              v = load_one(moment2, moment2_dtype, i);
        const float g = load_one(grad, grad_dtype, i);
        if (master_dtype == F32) step(s, g, p, m, v);
        else quick_step(s, g, p, m, v);
        if (by_chance) p = b.chance.round(p, i);
        store_one(master, master_dtype, i, p);
        store_one(moment1, moment1_dtype, i, m);
        store_one(moment2, moment2_dtype, i, v);
        if (compute) store_one(compute, compute_dtype, i, round_to(master_dtype, p));
    }
}
