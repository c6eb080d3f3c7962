// Kernels that treat a buffer as a flat row of elements. `vector` says that all pointers are 16-byte aligned.

template <typename T> __device__ void fill(T* dst, float value, i64 n, i64 vector) {
    const i64 groups = vector ? n / 8 : 0;
    float values[8];
#pragma unroll
    for (int j = 0; j < 8; j++) values[j] = value;
    for (i64 i = global_thread(); i < groups; i += global_threads()) store8(dst + i * 8, values);
    for (i64 i = groups * 8 + global_thread(); i < n; i += global_threads()) dst[i] = from_f32<T>(value);
}

template <typename S, typename D> __device__ void cast(const S* src, D* dst, i64 n, i64 vector) {
    const i64 groups = vector ? n / 8 : 0;
    for (i64 i = global_thread(); i < groups; i += global_threads()) {
        float values[8];
        load8(src + i * 8, values);
        store8(dst + i * 8, values);
    }
    for (i64 i = groups * 8 + global_thread(); i < n; i += global_threads()) {
        dst[i] = from_f32<D>(to_f32(src[i]));
    }
}

template <typename S, typename D> __device__ void add(const S* src, D* dst, i64 n, i64 vector) {
    const i64 groups = vector ? n / 8 : 0;
    for (i64 i = global_thread(); i < groups; i += global_threads()) {
        float values[8], sums[8];
        load8(src + i * 8, values);
        load8(dst + i * 8, sums);
#pragma unroll
        for (int j = 0; j < 8; j++) sums[j] += values[j];
        store8(dst + i * 8, sums);
    }
    for (i64 i = groups * 8 + global_thread(); i < n; i += global_threads()) {
        dst[i] = from_f32<D>(to_f32(dst[i]) + to_f32(src[i]));
    }
}

#define FILL(T, t) \
    extern "C" __global__ void fill_##t(T* dst, float value, i64 n, i64 vector) { \
        fill(dst, value, n, vector); \
    }
FILL(float, f32)
FILL(bf16, bf16)
FILL(f16, f16)

// Numbers around zero that no multiplier finds easy: four uniform ones added up, spread about 1.
template <typename T> __device__ void noise(T* dst, i64 n, i64 seed) {
    for (i64 i = global_thread(); i < n; i += global_threads()) {
        const u64 z = random_word((u64)seed, (u64)i + 1);
        const u32 sum = (u32)(z & 0xffff) + (u32)(z >> 16 & 0xffff) + (u32)(z >> 32 & 0xffff) + (u32)(z >> 48);
        dst[i] = from_f32<T>(((float)sum * (1.0f / 65536.0f) - 2.0f) * 1.7f);
    }
}

#define NOISE(T, t) \
    extern "C" __global__ void noise_##t(T* dst, i64 n, i64 seed) { \
        noise(dst, n, seed); \
    }
NOISE(float, f32)
NOISE(bf16, bf16)
NOISE(f16, f16)

#define PAIR(S, s, D, d) \
    extern "C" __global__ void cast_##s##_##d(const S* src, D* dst, i64 n, i64 vector) { \
        cast(src, dst, n, vector); \
    } \
    extern "C" __global__ void add_##s##_##d(const S* src, D* dst, i64 n, i64 vector) { \
        add(src, dst, n, vector); \
    }
PAIR(float, f32, float, f32)
PAIR(float, f32, bf16, bf16)
PAIR(float, f32, f16, f16)
PAIR(bf16, bf16, float, f32)
PAIR(bf16, bf16, bf16, bf16)
PAIR(bf16, bf16, f16, f16)
PAIR(f16, f16, float, f32)
PAIR(f16, f16, bf16, bf16)
PAIR(f16, f16, f16, f16)

extern "C" __global__ void reciprocal(const float* src, float* dst, i64 n) {
    for (i64 i = global_thread(); i < n; i += global_threads()) {
        const float x = src[i];
        dst[i] = x == 0.0f ? 0.0f : 1.0f / x;
    }
}

extern "C" __global__ void multiply(const float* src, float* dst, i64 n) {
    for (i64 i = global_thread(); i < n; i += global_threads()) dst[i] *= src[i];
}
