// Rotary positions and SwiGLU.

// Split-half rotation in place; one block a token. `sign` is 1 forward and -1 for the inverse. Tables, products
// and sums are each rounded to the storage type. `vector`: rows, halves of heads and tables are 16-byte aligned.
//
// A thread rotates the same columns of one head after another, so that it reads the tables once.
template <typename T>
__device__ void rope(
    T* x, const int* positions, const float* cos, const float* sin, i64 tokens, i64 heads, i64 head_dim,
    i64 stride, float sign, i64 vector
) {
    const int half = (int)(head_dim / 2), width = vector ? 8 : 1, groups = half / width;
    for (i64 token = blockIdx.x; token < tokens; token += gridDim.x) {
        const i64 table = (i64)positions[token] * half;
        for (int group = threadIdx.x % groups; group < groups; group += blockDim.x) {
            const int i = group * width;
            // Fewer threads than groups: all of them share one head at a time.
            const int first_head = (int)blockDim.x < groups ? 0 : threadIdx.x / groups;
            const int heads_at_once = (int)blockDim.x < groups ? 1 : blockDim.x / groups;
            if (first_head >= heads_at_once) break;
            float c[8], s[8];
            if (vector) {
                load8(cos + table + i, c);
                load8(sin + table + i, s);
            } else {
                c[0] = cos[table + i];
                s[0] = sin[table + i];
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (j >= width) break;
                c[j] = rounded<T>(c[j]);
                s[j] = sign * rounded<T>(s[j]);
            }
            for (int head = first_head; head < (int)heads; head += heads_at_once) {
                T* first = x + token * stride + head * head_dim + i;
                T* second = first + half;
                float a[8], b[8];
                if (vector) {
                    load8(first, a);
                    load8(second, b);
                } else {
                    a[0] = to_f32(*first);
                    b[0] = to_f32(*second);
                }
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (j >= width) break;
                    const float low = rounded<T>(a[j] * c[j]) - rounded<T>(b[j] * s[j]);
                    const float high = rounded<T>(b[j] * c[j]) + rounded<T>(a[j] * s[j]);
                    a[j] = low;
                    b[j] = high;
                }
                if (vector) {
                    store8(first, a);
                    store8(second, b);
                } else {
                    *first = from_f32<T>(a[0]);
                    *second = from_f32<T>(b[0]);
                }
            }
        }
    }
}

template <typename T> __device__ __forceinline__ float sigmoid(float x) {
    return reciprocal_for<T>(1.0f + exp_for<T>(-x));
}

template <typename T> __device__ __forceinline__ float swiglu_one(float gate, float up) {
    return rounded<T>(gate * sigmoid<T>(gate)) * up;
}

// Grids are (columns, rows): blockIdx.x walks along a row and blockIdx.y over rows.
template <typename T>
__device__ void swiglu(const T* gate_up, T* out, i64 rows, i64 cols, i64 vector) {
    const i64 width = vector ? 8 : 1;
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        const T* gates = gate_up + row * 2 * cols;
        for (i64 c = global_thread() * width; c < cols; c += global_threads() * width) {
            if (vector) {
                float gate[8], up[8];
                load8(gates + c, gate);
                load8(gates + cols + c, up);
#pragma unroll
                for (int j = 0; j < 8; j++) gate[j] = swiglu_one<T>(gate[j], up[j]);
                store8(out + row * cols + c, gate);
            } else {
                out[row * cols + c] = from_f32<T>(swiglu_one<T>(to_f32(gates[c]), to_f32(gates[cols + c])));
            }
        }
    }
}

// Turns (gate, up) into their gradients.
template <typename T> __device__ __forceinline__ void swiglu_grad_one(float dout, float& gate, float& up) {
    const float s = sigmoid<T>(gate), dgate = dout * up * s * (1.0f + gate * (1.0f - s));
    up = dout * gate * s;
    gate = dgate;
}

template <typename T>
__device__ void swiglu_grad(const T* gate_up, const T* dout, T* dgate_up, i64 rows, i64 cols, i64 vector) {
    const i64 width = vector ? 8 : 1;
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        const T* gates = gate_up + row * 2 * cols;
        T* grads = dgate_up + row * 2 * cols;
        for (i64 c = global_thread() * width; c < cols; c += global_threads() * width) {
            float gate[8], up[8], d[8];
            if (vector) {
                load8(gates + c, gate);
                load8(gates + cols + c, up);
                load8(dout + row * cols + c, d);
#pragma unroll
                for (int j = 0; j < 8; j++) swiglu_grad_one<T>(d[j], gate[j], up[j]);
                store8(grads + c, gate);
                store8(grads + cols + c, up);
            } else {
                gate[0] = to_f32(gates[c]);
                up[0] = to_f32(gates[cols + c]);
                swiglu_grad_one<T>(to_f32(dout[row * cols + c]), gate[0], up[0]);
                grads[c] = from_f32<T>(gate[0]);
                grads[cols + c] = from_f32<T>(up[0]);
            }
        }
    }
}

#define ACTIVATION(T, t) \
    extern "C" __global__ void rope_##t( \
        T* x, const int* positions, const float* cos, const float* sin, i64 tokens, i64 heads, \
        i64 head_dim, i64 stride, float sign, i64 vector \
    ) { \
        rope(x, positions, cos, sin, tokens, heads, head_dim, stride, sign, vector); \
    } \
    extern "C" __global__ void swiglu_##t(const T* gate_up, T* out, i64 rows, i64 cols, i64 vector) { \
        swiglu(gate_up, out, rows, cols, vector); \
    } \
    extern "C" __global__ void swiglu_grad_##t( \
        const T* gate_up, const T* dout, T* dgate_up, i64 rows, i64 cols, i64 vector \
    ) { \
        swiglu_grad(gate_up, dout, dgate_up, rows, cols, vector); \
    }
ACTIVATION(float, f32)
ACTIVATION(bf16, bf16)
ACTIVATION(f16, f16)
