// LayerNorm; one block a row. `vector`: all pointers are 16-byte aligned and `cols` is a multiple of 8.
//
// A thread handles the same columns in every pass over a row, so a pass may read what the one before it wrote
// without a barrier, and inputs may also be outputs where the documentation says so.

#define FOR_COLUMNS(c) for (i64 c = (i64)threadIdx.x * width; c < cols; c += (i64)blockDim.x * width)

// Eight elements or one, the rest zero.
template <typename T> __device__ __forceinline__ void load(const T* p, float* out, i64 vector) {
    if (vector) {
        load8(p, out);
        return;
    }
    out[0] = to_f32(p[0]);
#pragma unroll
    for (int j = 1; j < 8; j++) out[j] = 0.0f;
}

template <typename T> __device__ __forceinline__ void store(T* p, const float* in, i64 vector) {
    if (vector) {
        store8(p, in);
    } else {
        p[0] = from_f32<T>(in[0]);
    }
}

template <typename T>
__device__ void layer_norm(
    const T* x, const T* weight, const T* bias, T* out, float* statistics, i64 rows, i64 cols, float eps,
    i64 vector
) {
    const i64 width = vector ? 8 : 1;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* xs = x + row * cols;
        float sum = 0.0f, squares = 0.0f, v[8], w[8], b[8];
        FOR_COLUMNS(c) {
            load(xs + c, v, vector);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += v[j];
        }
        const float mean = block_sum(sum) / (float)cols;
        FOR_COLUMNS(c) {
            load(xs + c, v, vector);
#pragma unroll
            for (int j = 0; j < 8; j++) squares += j < width ? (v[j] - mean) * (v[j] - mean) : 0.0f;
        }
        const float r = 1.0f / sqrtf(block_sum(squares) / (float)cols + eps);
        if (threadIdx.x == 0) {
            statistics[2 * row] = mean;
            statistics[2 * row + 1] = r;
        }
        FOR_COLUMNS(c) {
            load(xs + c, v, vector);
            load(weight + c, w, vector);
            if (bias) load(bias + c, b, vector);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = (v[j] - mean) * r * w[j] + (bias ? b[j] : 0.0f);
            store(out + row * cols + c, v, vector);
        }
    }
}

// Block b handles rows b, b + blocks, ... and leaves its sums in row b of `dweights` and of `dbiases`, gathered in
// shared memory where they fit (`shared`), else in place.
template <typename T>
__device__ void layer_norm_grad(
    const T* dout, const T* x, const T* weight, const float* statistics, T* dx, float* dweights, float* dbiases,
    i64 rows, i64 cols, i64 vector, i64 shared
) {
    extern __shared__ float4 shared_sums[];
    const i64 width = vector ? 8 : 1;
    // In shared memory neighbouring threads use neighbouring banks: the eight columns of a thread lie apart.
    const i64 apart = shared ? (cols + width - 1) / width : 1, step = shared ? 1 : width;
    float* my_dweights = dweights + (i64)blockIdx.x * cols;
    float* my_dbiases = dbiases + (i64)blockIdx.x * cols;
    float* dw = shared ? (float*)shared_sums : my_dweights;
    float* db = shared ? (float*)shared_sums + cols : my_dbiases;
    FOR_COLUMNS(c) {
        for (i64 j = 0; j < width; j++) dw[c / width * step + j * apart] = db[c / width * step + j * apart] = 0.0f;
    }
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* dy = dout + row * cols;
        const T* xs = x + row * cols;
        const float mean = statistics[2 * row], r = statistics[2 * row + 1];
        float along = 0.0f, level = 0.0f, g[8], v[8], w[8];
        FOR_COLUMNS(c) {
            load(dy + c, g, vector);
            load(xs + c, v, vector);
            load(weight + c, w, vector);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                along += w[j] * g[j] * ((v[j] - mean) * r);
                level += w[j] * g[j];
            }
        }
        along = block_sum(along) / (float)cols;
        level = block_sum(level) / (float)cols;
        FOR_COLUMNS(c) {
            load(dy + c, g, vector);
            load(xs + c, v, vector);
            load(weight + c, w, vector);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (j >= width) break;
                const float normed = (v[j] - mean) * r;
                dw[c / width * step + j * apart] += g[j] * normed;
                db[c / width * step + j * apart] += g[j];
                v[j] = (w[j] * g[j] - level - normed * along) * r;
            }
            store(dx + row * cols + c, v, vector);
        }
    }
    if (!shared) return;
    FOR_COLUMNS(c) {
        for (i64 j = 0; j < width; j++) {
            my_dweights[c + j] = dw[c / width * step + j * apart];
            my_dbiases[c + j] = db[c / width * step + j * apart];
        }
    }
}

#define LAYER_NORM(T, t) \
    extern "C" __global__ void layer_norm_##t( \
        const T* x, const T* weight, const T* bias, T* out, float* statistics, i64 rows, i64 cols, float eps, \
        i64 vector \
    ) { \
        layer_norm(x, weight, bias, out, statistics, rows, cols, eps, vector); \
    } \
    extern "C" __global__ void layer_norm_grad_##t( \
        const T* dout, const T* x, const T* weight, const float* statistics, T* dx, float* dweights, \
        float* dbiases, i64 rows, i64 cols, i64 vector, i64 shared \
    ) { \
        layer_norm_grad( \
            dout, x, weight, statistics, dx, dweights, dbiases, rows, cols, vector, shared \
        ); \
    }
LAYER_NORM(float, f32)
LAYER_NORM(bf16, bf16)
LAYER_NORM(f16, f16)
