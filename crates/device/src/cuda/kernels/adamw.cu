// One AdamW step over a flat range. Each of the five buffers has a dtype of its own; a switch that is the same
// for every thread costs nothing beside the memory traffic, and spares a kernel per combination.

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

__device__ __forceinline__ void load_eight(const void* p, i64 dtype, i64 i, float* out) {
    if (dtype == F32) load8((const float*)p + i, out);
    else if (dtype == BF16) load8((const bf16*)p + i, out);
    else load8((const f16*)p + i, out);
}

__device__ __forceinline__ void store_eight(void* p, i64 dtype, i64 i, const float* in) {
    if (dtype == F32) store8((float*)p + i, in);
    else if (dtype == BF16) store8((bf16*)p + i, in);
    else store8((f16*)p + i, in);
}

__device__ __forceinline__ float round_to(i64 dtype, float x) {
    return dtype == F32 ? x : dtype == BF16 ? rounded<bf16>(x) : rounded<f16>(x);
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

// `compute` is null when the master weights are the compute weights.
extern "C" __global__ void adamw(
    void* master, i64 master_dtype, void* moment1, i64 moment1_dtype, void* moment2, i64 moment2_dtype,
    const void* grad, i64 grad_dtype, const float* clip, void* compute, i64 compute_dtype,
    float keep, float one_minus_beta1, float beta2, float one_minus_beta2, float bias2_sqrt, float eps,
    float step_size, i64 n, i64 vector
) {
    const Scalars s = {clip[0], keep, one_minus_beta1, beta2, one_minus_beta2, bias2_sqrt, eps, step_size};
    const i64 groups = vector ? n / 8 : 0;
    for (i64 group = global_thread(); group < groups; group += global_threads()) {
        const i64 i = group * 8;
        float g[8], p[8], m[8], v[8];
        load_eight(grad, grad_dtype, i, g);
        load_eight(master, master_dtype, i, p);
        load_eight(moment1, moment1_dtype, i, m);
        load_eight(moment2, moment2_dtype, i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) step(s, g[j], p[j], m[j], v[j]);
        store_eight(master, master_dtype, i, p);
        store_eight(moment1, moment1_dtype, i, m);
        store_eight(moment2, moment2_dtype, i, v);
        if (compute) {
#pragma unroll
            for (int j = 0; j < 8; j++) p[j] = round_to(master_dtype, p[j]);
            store_eight(compute, compute_dtype, i, p);
        }
    }
    for (i64 i = groups * 8 + global_thread(); i < n; i += global_threads()) {
        float p = load_one(master, master_dtype, i), m = load_one(moment1, moment1_dtype, i),
              v = load_one(moment2, moment2_dtype, i);
        step(s, load_one(grad, grad_dtype, i), p, m, v);
        store_one(master, master_dtype, i, p);
        store_one(moment1, moment1_dtype, i, m);
        store_one(moment2, moment2_dtype, i, v);
        if (compute) store_one(compute, compute_dtype, i, round_to(master_dtype, p));
    }
}
