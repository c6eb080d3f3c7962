// Functions of one number, and dropout. `vector` says that all pointers are 16-byte aligned.

struct Relu {
    static __device__ __forceinline__ float value(float x) {
        return x < 0.0f ? 0.0f : x;
    }
    static __device__ __forceinline__ float slope(float x) {
        return x > 0.0f ? 1.0f : 0.0f;
    }
};

struct Gelu {
    // erfcf keeps its relative exactness in the tail, where 1 + erff would cancel.
    static __device__ __forceinline__ float normal(float x) {
        return 0.5f * erfcf(-x * 0.70710678f);
    }
    static __device__ __forceinline__ float value(float x) {
        return x * normal(x);
    }
    static __device__ __forceinline__ float slope(float x) {
        return normal(x) + x * 0.39894228f * expf(-0.5f * x * x);
    }
};

struct GeluTanh {
    static __device__ __forceinline__ float normal(float x) {
        return 1.0f / (1.0f + expf(-2.0f * 0.7978846f * x * (1.0f + 0.044715f * x * x)));
    }
    static __device__ __forceinline__ float value(float x) {
        return x * normal(x);
    }
    static __device__ __forceinline__ float slope(float x) {
        const float n = normal(x), inner = 2.0f * 0.7978846f * (1.0f + 3.0f * 0.044715f * x * x);
        return n + x * n * (1.0f - n) * inner;
    }
};

template <typename F, typename T> __device__ void activation(const T* x, T* out, i64 n, i64 vector) {
    const i64 groups = vector ? n / 8 : 0;
    for (i64 i = global_thread(); i < groups; i += global_threads()) {
        float v[8];
        load8(x + i * 8, v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = F::value(v[j]);
        store8(out + i * 8, v);
    }
    for (i64 i = groups * 8 + global_thread(); i < n; i += global_threads()) {
        out[i] = from_f32<T>(F::value(to_f32(x[i])));
    }
}

template <typename F, typename T>
__device__ void activation_grad(const T* x, const T* dout, T* dx, i64 n, i64 vector) {
    const i64 groups = vector ? n / 8 : 0;
    for (i64 i = global_thread(); i < groups; i += global_threads()) {
        float v[8], d[8];
        load8(x + i * 8, v);
        load8(dout + i * 8, d);
#pragma unroll
        for (int j = 0; j < 8; j++) d[j] *= F::slope(v[j]);
        store8(dx + i * 8, d);
    }
    for (i64 i = groups * 8 + global_thread(); i < n; i += global_threads()) {
        dx[i] = from_f32<T>(to_f32(dout[i]) * F::slope(to_f32(x[i])));
    }
}

__device__ __forceinline__ float dropped(float x, u64 key, u64 element, u64 threshold, float scale) {
    return (u64)random_bits(key, element) < threshold ? 0.0f : x * scale;
}

template <typename T>
__device__ void dropout(const T* x, T* out, u64 key, u64 first, u64 threshold, float scale, i64 n, i64 vector) {
    const i64 groups = vector ? n / 8 : 0;
    for (i64 i = global_thread(); i < groups; i += global_threads()) {
        float v[8];
        load8(x + i * 8, v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = dropped(v[j], key, first + i * 8 + j, threshold, scale);
        store8(out + i * 8, v);
    }
    for (i64 i = groups * 8 + global_thread(); i < n; i += global_threads()) {
        out[i] = from_f32<T>(dropped(to_f32(x[i]), key, first + i, threshold, scale));
    }
}

#define FUNCTION(F, f, T, t) \
    extern "C" __global__ void f##_##t(const T* x, T* out, i64 n, i64 vector) { \
        activation<F>(x, out, n, vector); \
    } \
    extern "C" __global__ void f##_grad_##t(const T* x, const T* dout, T* dx, i64 n, i64 vector) { \
        activation_grad<F>(x, dout, dx, n, vector); \
    }
#define POINTWISE(T, t) \
    FUNCTION(Relu, relu, T, t) \
    FUNCTION(Gelu, gelu, T, t) \
    FUNCTION(GeluTanh, gelu_tanh, T, t) \
    extern "C" __global__ void dropout_##t( \
        const T* x, T* out, i64 key, i64 first, i64 threshold, float scale, i64 n, i64 vector \
    ) { \
        dropout(x, out, (u64)key, (u64)first, (u64)threshold, scale, n, vector); \
    }
POINTWISE(float, f32)
POINTWISE(bf16, bf16)
POINTWISE(f16, f16)
