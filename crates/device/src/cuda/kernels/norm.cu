// RMSNorm. Rows of up to 16384 elements that can be read 16 bytes at a time have kernels that keep a row in
// registers, GROUPS times eight columns a thread; others go column by column.
//
// A thread handles the same columns in every pass over a row. That is why a pass may read what the one before
// it wrote without a barrier, and why inputs may also be outputs where the documentation says so.

// The columns of this thread, one at a time.
#define FOR_COLUMNS1(c) for (i64 c = threadIdx.x; c < cols; c += blockDim.x)

template <typename T>
__device__ void rms_norm(
    const T* x, const T* delta, const T* weight, T* sum, T* out, float* rstd, i64 rows, i64 cols, float eps
) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 start = row * cols;
        float squares = 0.0f;
        FOR_COLUMNS1(c) {
            float v = to_f32(x[start + c]);
            if (delta) {
                v = rounded<T>(v + to_f32(delta[start + c]));
                sum[start + c] = from_f32<T>(v);
            }
            squares += v * v;
        }
        const float r = 1.0f / sqrtf(block_sum(squares) / (float)cols + eps);
        if (threadIdx.x == 0) rstd[row] = r;
        const T* source = (delta ? sum : x) + start;
        FOR_COLUMNS1(c) {
            out[start + c] = from_f32<T>(rounded<T>(to_f32(source[c]) * r) * to_f32(weight[c]));
        }
    }
}

// The same with the row in registers: each thread keeps its GROUPS times eight columns, and reads nothing twice.
template <typename T, int GROUPS>
__device__ void rms_norm_in_registers(
    const T* x, const T* delta, const T* weight, T* sum, T* out, float* rstd, i64 rows, i64 cols, float eps
) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 start = row * cols;
        Eight<T> w[GROUPS];
        float v[GROUPS][8], squares = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const i64 c = ((i64)g * blockDim.x + threadIdx.x) * 8;
            if (c < cols) load8(x + start + c, v[g]);
        }
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const i64 c = ((i64)g * blockDim.x + threadIdx.x) * 8;
            if (c >= cols) continue;
            w[g].load(weight + c);
            if (delta) {
                float d[8];
                load8(delta + start + c, d);
#pragma unroll
                for (int j = 0; j < 8; j++) v[g][j] = rounded<T>(v[g][j] + d[j]);
                store8(sum + start + c, v[g]);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) squares += v[g][j] * v[g][j];
        }
        const float r = 1.0f / sqrtf(block_sum(squares) / (float)cols + eps);
        if (threadIdx.x == 0) rstd[row] = r;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const i64 c = ((i64)g * blockDim.x + threadIdx.x) * 8;
            if (c >= cols) continue;
            float scale[8];
            w[g].values(scale);
#pragma unroll
            for (int j = 0; j < 8; j++) v[g][j] = rounded<T>(v[g][j] * r) * scale[j];
            store8(out + start + c, v[g]);
        }
    }
}

// What a thread has of one row of a norm's gradient.
template <typename T, int GROUPS> struct GradRow {
    Eight<T> dout[GROUPS], x[GROUPS], dresidual[GROUPS];
    float rstd;

    __device__ __forceinline__ void load(
        const T* douts, const T* xs, const T* dresiduals, const float* rstds, i64 row, i64 cols
    ) {
        rstd = rstds[row];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const i64 c = ((i64)g * blockDim.x + threadIdx.x) * 8;
            if (c >= cols) continue;
            dout[g].load(douts + row * cols + c);
            x[g].load(xs + row * cols + c);
            if (dresiduals) dresidual[g].load(dresiduals + row * cols + c);
        }
    }
};

// Block b handles rows b, b + blocks, ... and leaves its part of the weight's gradient in row b of `partials`. The
// row, the weight and that part stay in registers; where these suffice, the next row is on its way while this one is
// summed.
template <typename T, int GROUPS>
__device__ void rms_norm_grad_in_registers(
    const T* dout, const T* x, const T* weight, const float* rstd, const T* dresidual, T* dx, float* partials,
    i64 rows, i64 cols
) {
    float sums[GROUPS][8];
    Eight<T> w[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const i64 c = ((i64)g * blockDim.x + threadIdx.x) * 8;
        if (c < cols) w[g].load(weight + c);
#pragma unroll
        for (int j = 0; j < 8; j++) sums[g][j] = 0.0f;
    }
    const bool AHEAD = sizeof(T) * GROUPS <= 4;
    GradRow<T, GROUPS> now, next;
    if (AHEAD && blockIdx.x < rows) now.load(dout, x, dresidual, rstd, blockIdx.x, cols);
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        if (!AHEAD) now.load(dout, x, dresidual, rstd, row, cols);
        else if (row + gridDim.x < rows) next.load(dout, x, dresidual, rstd, row + gridDim.x, cols);
        const float r = now.rstd;
        float dot = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            if (((i64)g * blockDim.x + threadIdx.x) * 8 >= cols) continue;
            float dy[8], v[8], scale[8];
            now.dout[g].values(dy);
            now.x[g].values(v);
            w[g].values(scale);
#pragma unroll
            for (int j = 0; j < 8; j++) dot += scale[j] * dy[j] * (v[j] * r);
        }
        const float mean = block_sum(dot) / (float)cols;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const i64 c = ((i64)g * blockDim.x + threadIdx.x) * 8;
            if (c >= cols) continue;
            float dy[8], v[8], scale[8], d[8];
            now.dout[g].values(dy);
            now.x[g].values(v);
            w[g].values(scale);
            if (dresidual) {
                now.dresidual[g].values(d);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++) d[j] = 0.0f;
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float normed = v[j] * r;
                sums[g][j] += dy[j] * normed;
                d[j] += (scale[j] * dy[j] - normed * mean) * r;
            }
            store8(dx + row * cols + c, d);
        }
        if (AHEAD) now = next;
    }
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const i64 c = ((i64)g * blockDim.x + threadIdx.x) * 8;
        if (c < cols) store8(partials + (i64)blockIdx.x * cols + c, sums[g]);
    }
}

// The same for rows of any length and alignment: columns one by one, the part gathered in place.
template <typename T>
__device__ void rms_norm_grad(
    const T* dout, const T* x, const T* weight, const float* rstd, const T* dresidual, T* dx, float* partials,
    i64 rows, i64 cols
) {
    float* sums = partials + (i64)blockIdx.x * cols;
    FOR_COLUMNS1(c) sums[c] = 0.0f;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* dy = dout + row * cols;
        const T* xs = x + row * cols;
        const float r = rstd[row];
        float dot = 0.0f;
        FOR_COLUMNS1(c) dot += to_f32(weight[c]) * to_f32(dy[c]) * (to_f32(xs[c]) * r);
        const float mean = block_sum(dot) / (float)cols;
        FOR_COLUMNS1(c) {
            const float g = to_f32(dy[c]), normed = to_f32(xs[c]) * r;
            float d = dresidual ? to_f32(dresidual[row * cols + c]) : 0.0f;
            sums[c] += g * normed;
            d += (to_f32(weight[c]) * g - normed * mean) * r;
            dx[row * cols + c] = from_f32<T>(d);
        }
    }
}

// Sums of partials, 32 columns a block: each warp adds every sixteenth row of them, then the warps' sums are added
// in order. Blocks are of 512 threads.
template <typename W>
__device__ void weight_grad(const float* partials, i64 count, W* dweight, i64 cols, i64 accumulate) {
    __shared__ float sums[16][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (i64 first = (i64)blockIdx.x * 32; first < cols; first += (i64)gridDim.x * 32) {
        const i64 c = first + lane;
        float sum = 0.0f;
        if (c < cols) {
#pragma unroll 8
            for (i64 p = warp; p < count; p += 16) sum += partials[p * cols + c];
        }
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && c < cols) {
#pragma unroll
            for (int w = 1; w < 16; w++) sum += sums[w][lane];
            if (accumulate) sum += to_f32(dweight[c]);
            dweight[c] = from_f32<W>(sum);
        }
        __syncthreads();
    }
}

#define NORM_ROWS(T, t, GROUPS) \
    extern "C" __global__ void __launch_bounds__(512) rms_norm_##GROUPS##_##t( \
        const T* x, const T* delta, const T* weight, T* sum, T* out, float* rstd, i64 rows, i64 cols, float eps \
    ) { \
        rms_norm_in_registers<T, GROUPS>(x, delta, weight, sum, out, rstd, rows, cols, eps); \
    } \
    extern "C" __global__ void __launch_bounds__(512) rms_norm_grad_##GROUPS##_##t( \
        const T* dout, const T* x, const T* weight, const float* rstd, const T* dresidual, T* dx, \
        float* partials, i64 rows, i64 cols \
    ) { \
        rms_norm_grad_in_registers<T, GROUPS>(dout, x, weight, rstd, dresidual, dx, partials, rows, cols); \
    }

#define NORM(T, t) \
    extern "C" __global__ void rms_norm_0_##t( \
        const T* x, const T* delta, const T* weight, T* sum, T* out, float* rstd, i64 rows, i64 cols, float eps \
    ) { \
        rms_norm(x, delta, weight, sum, out, rstd, rows, cols, eps); \
    } \
    extern "C" __global__ void rms_norm_grad_0_##t( \
        const T* dout, const T* x, const T* weight, const float* rstd, const T* dresidual, T* dx, \
        float* partials, i64 rows, i64 cols \
    ) { \
        rms_norm_grad(dout, x, weight, rstd, dresidual, dx, partials, rows, cols); \
    } \
    NORM_ROWS(T, t, 1) \
    NORM_ROWS(T, t, 2) \
    NORM_ROWS(T, t, 4) \
    extern "C" __global__ void weight_grad_##t( \
        const float* partials, i64 count, T* dweight, i64 cols, i64 accumulate \
    ) { \
        weight_grad(partials, count, dweight, cols, accumulate); \
    }
NORM(float, f32)
NORM(bf16, bf16)
NORM(f16, f16)
