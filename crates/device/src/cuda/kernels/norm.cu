// RMSNorm. `vector`: all pointers are 16-byte aligned and `cols` is a multiple of 8.
//
// A thread handles the same columns in every pass over a row. That is why a pass may read what the one before
// it wrote without a barrier, and why inputs may also be outputs where the documentation says so.

// The columns of this thread, eight or one at a time.
#define FOR_COLUMNS8(c) for (i64 c = (i64)threadIdx.x * 8; c < cols; c += (i64)blockDim.x * 8)
#define FOR_COLUMNS1(c) for (i64 c = threadIdx.x; c < cols; c += blockDim.x)

// This thread's part of a row's sum of squares; adds the delta first where there is one.
template <typename T>
__device__ __forceinline__ float squares_of_row(const T* x, const T* delta, T* sum, i64 cols, i64 vector) {
    float squares = 0.0f;
    if (vector) {
        FOR_COLUMNS8(c) {
            float v[8];
            load8(x + c, v);
            if (delta) {
                float d[8];
                load8(delta + c, d);
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = rounded<T>(v[j] + d[j]);
                store8(sum + c, v);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) squares += v[j] * v[j];
        }
        return squares;
    }
    FOR_COLUMNS1(c) {
        float v = to_f32(x[c]);
        if (delta) {
            v = rounded<T>(v + to_f32(delta[c]));
            sum[c] = from_f32<T>(v);
        }
        squares += v * v;
    }
    return squares;
}

template <typename T>
__device__ void rms_norm(
    const T* x, const T* delta, const T* weight, T* sum, T* out, float* rstd, i64 rows, i64 cols, float eps,
    i64 vector
) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 start = row * cols;
        const float squares =
            squares_of_row(x + start, delta ? delta + start : delta, sum ? sum + start : sum, cols, vector);
        const float r = 1.0f / sqrtf(block_sum(squares) / (float)cols + eps);
        if (threadIdx.x == 0) rstd[row] = r;
        const T* source = (delta ? sum : x) + start;
        if (vector) {
            FOR_COLUMNS8(c) {
                float v[8], w[8];
                load8(source + c, v);
                load8(weight + c, w);
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = rounded<T>(v[j] * r) * w[j];
                store8(out + start + c, v);
            }
        } else {
            FOR_COLUMNS1(c) {
                out[start + c] = from_f32<T>(rounded<T>(to_f32(source[c]) * r) * to_f32(weight[c]));
            }
        }
    }
}

// Block b handles rows b, b + blocks, ... and leaves its part of the weight's gradient in row b of `partials`.
// The part is gathered in shared memory where it fits (`shared`), else in place.
template <typename T>
__device__ void rms_norm_grad(
    const T* dout, const T* x, const T* weight, const float* rstd, const T* dresidual, T* dx, float* partials,
    i64 rows, i64 cols, i64 vector, i64 shared
) {
    extern __shared__ float4 shared_sums[];
    float* mine = partials + (i64)blockIdx.x * cols;
    float* sums = shared ? (float*)shared_sums : mine;
    // In shared memory neighbouring threads use neighbouring banks: the eight columns of a thread lie apart.
    const i64 apart = shared ? cols / 8 : 1, step = shared ? 1 : 8;
    if (vector) {
        FOR_COLUMNS8(c) {
#pragma unroll
            for (int j = 0; j < 8; j++) sums[c / 8 * step + j * apart] = 0.0f;
        }
    } else {
        FOR_COLUMNS1(c) sums[c] = 0.0f;
    }
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* dy = dout + row * cols;
        const T* xs = x + row * cols;
        const float r = rstd[row];
        float dot = 0.0f;
        if (vector) {
            FOR_COLUMNS8(c) {
                float g[8], v[8], w[8];
                load8(dy + c, g);
                load8(xs + c, v);
                load8(weight + c, w);
#pragma unroll
                for (int j = 0; j < 8; j++) dot += w[j] * g[j] * (v[j] * r);
            }
        } else {
            FOR_COLUMNS1(c) dot += to_f32(weight[c]) * to_f32(dy[c]) * (to_f32(xs[c]) * r);
        }
        const float mean = block_sum(dot) / (float)cols;
        if (vector) {
            FOR_COLUMNS8(c) {
                float g[8], v[8], w[8], d[8];
                load8(dy + c, g);
                load8(xs + c, v);
                load8(weight + c, w);
                if (dresidual) {
                    load8(dresidual + row * cols + c, d);
                } else {
#pragma unroll
                    for (int j = 0; j < 8; j++) d[j] = 0.0f;
                }
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float normed = v[j] * r;
                    sums[c / 8 * step + j * apart] += g[j] * normed;
                    d[j] += (w[j] * g[j] - normed * mean) * r;
                }
                store8(dx + row * cols + c, d);
            }
        } else {
            FOR_COLUMNS1(c) {
                const float g = to_f32(dy[c]), normed = to_f32(xs[c]) * r;
                float d = dresidual ? to_f32(dresidual[row * cols + c]) : 0.0f;
                sums[c] += g * normed;
                d += (to_f32(weight[c]) * g - normed * mean) * r;
                dx[row * cols + c] = from_f32<T>(d);
            }
        }
    }
    if (!shared) return;
    if (vector) {
        FOR_COLUMNS8(c) {
#pragma unroll
            for (int j = 0; j < 8; j++) mine[c + j] = sums[c / 8 * step + j * apart];
        }
    } else {
        FOR_COLUMNS1(c) mine[c] = sums[c];
    }
}

// One thread a column, partials in order.
template <typename W>
__device__ void weight_grad(const float* partials, i64 count, W* dweight, i64 cols, i64 accumulate) {
    for (i64 c = global_thread(); c < cols; c += global_threads()) {
        float sum = 0.0f;
#pragma unroll 8
        for (i64 p = 0; p < count; p++) sum += partials[p * cols + c];
        if (accumulate) sum += to_f32(dweight[c]);
        dweight[c] = from_f32<W>(sum);
    }
}

#define NORM(T, t) \
    extern "C" __global__ void rms_norm_##t( \
        const T* x, const T* delta, const T* weight, T* sum, T* out, float* rstd, i64 rows, i64 cols, \
        float eps, i64 vector \
    ) { \
        rms_norm(x, delta, weight, sum, out, rstd, rows, cols, eps, vector); \
    } \
    extern "C" __global__ void rms_norm_grad_##t( \
        const T* dout, const T* x, const T* weight, const float* rstd, const T* dresidual, T* dx, \
        float* partials, i64 rows, i64 cols, i64 vector, i64 shared \
    ) { \
        rms_norm_grad(dout, x, weight, rstd, dresidual, dx, partials, rows, cols, vector, shared); \
    } \
    extern "C" __global__ void weight_grad_##t( \
        const float* partials, i64 count, T* dweight, i64 cols, i64 accumulate \
    ) { \
        weight_grad(partials, count, dweight, cols, accumulate); \
    }
NORM(float, f32)
NORM(bf16, bf16)
NORM(f16, f16)
