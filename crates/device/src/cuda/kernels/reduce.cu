// Sums to one number, in two stages. The number of blocks depends on the length only, so the order of
// additions does too. Eight elements are summed in f32, everything above that in f64.

template <typename T, bool SQUARE> __device__ __forceinline__ float sum_of_eight(const Eight<T>& eight) {
    float v[8];
    eight.values(v);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = SQUARE ? v[j] * v[j] : v[j];
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

template <typename T, bool SQUARE>
__device__ void partial_sums(const T* x, float* partials, i64 n, i64 vector) {
    const i64 groups = vector ? n / 8 : 0;
    double total = 0.0;
    i64 at = global_thread();
    // Several loads are on their way at once.
    for (; at + 3 * global_threads() < groups; at += 4 * global_threads()) {
        Eight<T> eights[4];
#pragma unroll
        for (int k = 0; k < 4; k++) eights[k].load(x + (at + k * global_threads()) * 8);
#pragma unroll
        for (int k = 0; k < 4; k++) total += (double)sum_of_eight<T, SQUARE>(eights[k]);
    }
    for (; at < groups; at += global_threads()) {
        Eight<T> one;
        one.load(x + at * 8);
        total += (double)sum_of_eight<T, SQUARE>(one);
    }
    for (i64 i = groups * 8 + global_thread(); i < n; i += global_threads()) {
        const float v = to_f32(x[i]);
        total += (double)(SQUARE ? v * v : v);
    }
    total = block_sum(total);
    if (threadIdx.x == 0) partials[blockIdx.x] = (float)total;
}

extern "C" __global__ void sum_f32(const float* x, float* partials, i64 n, i64 vector) {
    partial_sums<float, false>(x, partials, n, vector);
}

#define SUM_SQUARES(T, t) \
    extern "C" __global__ void sum_squares_##t(const T* x, float* partials, i64 n, i64 vector) { \
        partial_sums<T, true>(x, partials, n, vector); \
    }
SUM_SQUARES(float, f32)
SUM_SQUARES(bf16, bf16)
SUM_SQUARES(f16, f16)

// One block.
extern "C" __global__ void sum_partials(const float* partials, i64 count, float* out, i64 accumulate) {
    double total = 0.0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) total += (double)partials[i];
    total = block_sum(total);
    if (threadIdx.x == 0) out[0] = (float)(accumulate ? (double)out[0] + total : total);
}
