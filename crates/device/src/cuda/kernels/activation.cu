// Rotary positions and SwiGLU.

// Split-half rotation in place; one block a token. `sign` is 1 forward and -1 for the inverse. Tables, products
// and sums are each rounded to the storage type. `vector`: rows and halves of heads are 16-byte aligned.
template <typename T>
__device__ void rope(
    T* x, const int* positions, const float* cos, const float* sin, i64 tokens, i64 heads, i64 head_dim,
    i64 stride, float sign, i64 vector
) {
    const int half = (int)(head_dim / 2), width = vector ? 8 : 1, groups = half / width;
    for (i64 token = blockIdx.x; token < tokens; token += gridDim.x) {
        const i64 table = (i64)positions[token] * half;
        for (int item = threadIdx.x; item < (int)heads * groups; item += blockDim.x) {
            const int head = item / groups, i = item % groups * width;
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
                const float c = rounded<T>(cos[table + i + j]), s = sign * rounded<T>(sin[table + i + j]);
                const float low = rounded<T>(a[j] * c) - rounded<T>(b[j] * s);
                const float high = rounded<T>(b[j] * c) + rounded<T>(a[j] * s);
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

__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + expf(-x));
}

template <typename T> __device__ __forceinline__ float swiglu_one(float gate, float up) {
    return rounded<T>(silu(gate)) * up;
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
__device__ __forceinline__ void swiglu_grad_one(float dout, float& gate, float& up) {
    const float sigmoid = 1.0f / (1.0f + expf(-gate));
    const float dgate = dout * up * sigmoid * (1.0f + gate * (1.0f - sigmoid));
    up = dout * gate * sigmoid;
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
                for (int j = 0; j < 8; j++) swiglu_grad_one(d[j], gate[j], up[j]);
                store8(grads + c, gate);
                store8(grads + cols + c, up);
            } else {
                gate[0] = to_f32(gates[c]);
                up[0] = to_f32(gates[cols + c]);
                swiglu_grad_one(to_f32(dout[row * cols + c]), gate[0], up[0]);
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
