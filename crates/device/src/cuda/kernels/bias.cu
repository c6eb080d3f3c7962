// One vector for every row, and the column sums that are its gradient. `vector`: all pointers are 16-byte
// aligned and `cols` is a multiple of 8.

template <typename T>
__device__ void bias(T* x, const T* bias, i64 rows, i64 cols, i64 accumulate, i64 vector) {
    const i64 width = vector ? 8 : 1;
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        T* xs = x + row * cols;
        for (i64 c = global_thread() * width; c < cols; c += global_threads() * width) {
            if (vector) {
                float b[8];
                load8(bias + c, b);
                if (accumulate) {
                    float v[8];
                    load8(xs + c, v);
#pragma unroll
                    for (int j = 0; j < 8; j++) b[j] = v[j] + b[j];
                }
                store8(xs + c, b);
            } else {
                const float b = to_f32(bias[c]);
                xs[c] = from_f32<T>(accumulate ? to_f32(xs[c]) + b : b);
            }
        }
    }
}

// Blocks (b, ·) handle rows b, b + blocks, ... and leave their sums in row b of `partials`; a thread has the same
// columns in all of them.
template <typename T>
__device__ void bias_grad(const T* dout, float* partials, i64 rows, i64 cols, i64 vector) {
    const i64 width = vector ? 8 : 1;
    const i64 thread = (i64)blockIdx.y * blockDim.x + threadIdx.x, threads = (i64)gridDim.y * blockDim.x;
    float* mine = partials + (i64)blockIdx.x * cols;
    for (i64 c = thread * width; c < cols; c += threads * width) {
        float sums[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
            if (vector) {
                float v[8];
                load8(dout + row * cols + c, v);
#pragma unroll
                for (int j = 0; j < 8; j++) sums[j] += v[j];
            } else {
                sums[0] += to_f32(dout[row * cols + c]);
            }
        }
        if (vector) {
            store8(mine + c, sums);
        } else {
            mine[c] = sums[0];
        }
    }
}

#define BIAS(T, t) \
    extern "C" __global__ void bias_##t(T* x, const T* values, i64 rows, i64 cols, i64 accumulate, i64 vector) { \
        bias(x, values, rows, cols, accumulate, vector); \
    } \
    extern "C" __global__ void bias_grad_##t(const T* dout, float* partials, i64 rows, i64 cols, i64 vector) { \
        bias_grad(dout, partials, rows, cols, vector); \
    }
BIAS(float, f32)
BIAS(bf16, bf16)
BIAS(f16, f16)
