// RMSNorm of single heads inside packed rows, in place; one warp a head. `vector`: all pointers and rows are
// 16-byte aligned and heads are multiples of 8.
//
// A lane handles the same elements in every pass over a head, so passes need no barrier between them.

#define FOR_HEAD8(c) for (i64 c = (i64)(threadIdx.x % 32) * 8; c < dim; c += 32 * 8)
#define FOR_HEAD1(c) for (i64 c = threadIdx.x % 32; c < dim; c += 32)

// 1/sqrt(mean(x²) + eps) of a head, known to every lane.
template <typename T> __device__ __forceinline__ float head_rstd(const T* head, i64 dim, float eps, i64 vector) {
    float squares = 0.0f;
    if (vector) {
        FOR_HEAD8(c) {
            float v[8];
            load8(head + c, v);
#pragma unroll
            for (int j = 0; j < 8; j++) squares += v[j] * v[j];
        }
    } else {
        FOR_HEAD1(c) squares += to_f32(head[c]) * to_f32(head[c]);
    }
    return 1.0f / sqrtf(warp_sum(squares) / (float)dim + eps);
}

template <typename T>
__device__ void head_norm(
    T* x, const T* weight, T* before, i64 tokens, i64 first_heads, i64 heads, i64 dim, i64 stride, float eps,
    i64 vector
) {
    const i64 warps = global_threads() / 32;
    for (i64 item = global_thread() / 32; item < tokens * heads; item += warps) {
        const i64 token = item / heads, index = item % heads;
        T* head = x + token * stride + index * dim;
        T* copy = before ? before + item * dim : before;
        const T* w = weight + (index < first_heads ? 0 : dim);
        const float r = head_rstd(head, dim, eps, vector);
        if (vector) {
            FOR_HEAD8(c) {
                float v[8], factors[8];
                load8(head + c, v);
                load8(w + c, factors);
                if (copy) store8(copy + c, v);
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = rounded<T>(v[j] * r) * factors[j];
                store8(head + c, v);
            }
        } else {
            FOR_HEAD1(c) {
                const float v = to_f32(head[c]);
                if (copy) copy[c] = head[c];
                head[c] = from_f32<T>(rounded<T>(v * r) * to_f32(w[c]));
            }
        }
    }
}

// Block b handles tokens b, b + blocks, ...; its warps share a token's heads. Each warp sums the weights'
// gradients in shared memory of its own, and the block leaves the sum over its warps in row b of `partials`.
template <typename T>
__device__ void head_norm_grad(
    T* dx, const T* before, const T* weight, float* partials, i64 tokens, i64 first_heads, i64 heads, i64 dim,
    i64 stride, float eps, i64 vector
) {
    extern __shared__ float4 shared_sums[];
    float* all = (float*)shared_sums;
    const i64 warps = blockDim.x / 32, warp = threadIdx.x / 32;
    for (i64 i = threadIdx.x; i < warps * 2 * dim; i += blockDim.x) all[i] = 0.0f;
    __syncthreads();
    for (i64 token = blockIdx.x; token < tokens; token += gridDim.x) {
        for (i64 index = warp; index < heads; index += warps) {
            const i64 which = index < first_heads ? 0 : dim;
            T* grad = dx + token * stride + index * dim;
            const T* head = before + (token * heads + index) * dim;
            const T* w = weight + which;
            float* sums = all + warp * 2 * dim + which;
            const float r = head_rstd(head, dim, eps, vector);
            float dot = 0.0f;
            if (vector) {
                FOR_HEAD8(c) {
                    float g[8], v[8], factors[8];
                    load8(grad + c, g);
                    load8(head + c, v);
                    load8(w + c, factors);
#pragma unroll
                    for (int j = 0; j < 8; j++) dot += factors[j] * g[j] * (v[j] * r);
                }
            } else {
                FOR_HEAD1(c) dot += to_f32(w[c]) * to_f32(grad[c]) * (to_f32(head[c]) * r);
            }
            const float mean = warp_sum(dot) / (float)dim;
            if (vector) {
                FOR_HEAD8(c) {
                    float g[8], v[8], factors[8];
                    load8(grad + c, g);
                    load8(head + c, v);
                    load8(w + c, factors);
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const float normed = v[j] * r;
                        sums[c + j] += g[j] * normed;
                        g[j] = (factors[j] * g[j] - normed * mean) * r;
                    }
                    store8(grad + c, g);
                }
            } else {
                FOR_HEAD1(c) {
                    const float g = to_f32(grad[c]), normed = to_f32(head[c]) * r;
                    sums[c] += g * normed;
                    grad[c] = from_f32<T>((to_f32(w[c]) * g - normed * mean) * r);
                }
            }
        }
    }
    __syncthreads();
    for (i64 i = threadIdx.x; i < 2 * dim; i += blockDim.x) {
        float sum = 0.0f;
        for (i64 other = 0; other < warps; other++) sum += all[other * 2 * dim + i];
        partials[(i64)blockIdx.x * 2 * dim + i] = sum;
    }
}

#define HEAD_NORM(T, t) \
    extern "C" __global__ void head_norm_##t( \
        T* x, const T* weight, T* before, i64 tokens, i64 first_heads, i64 heads, i64 dim, i64 stride, \
        float eps, i64 vector \
    ) { \
        head_norm(x, weight, before, tokens, first_heads, heads, dim, stride, eps, vector); \
    } \
    extern "C" __global__ void head_norm_grad_##t( \
        T* dx, const T* before, const T* weight, float* partials, i64 tokens, i64 first_heads, i64 heads, \
        i64 dim, i64 stride, float eps, i64 vector \
    ) { \
        head_norm_grad(dx, before, weight, partials, tokens, first_heads, heads, dim, stride, eps, vector); \
    }
HEAD_NORM(float, f32)
HEAD_NORM(bf16, bf16)
HEAD_NORM(f16, f16)
