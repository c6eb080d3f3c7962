// Rotary positions and SwiGLU.

// Split-half rotation in place; one block a token. `sign` is 1 forward and -1 for the inverse. Tables, products
// and sums are each rounded to the storage type. `vector`: rows, halves of heads and tables are 16-byte aligned.
template <typename T> __device__ __forceinline__ void rotate(float& a, float& b, float c, float s) {
    const float low = rounded<T>(a * c) - rounded<T>(b * s);
    b = rounded<T>(b * c) + rounded<T>(a * s);
    a = low;
}

// Heads that a thread has on their way at once.
#define HEADS 4

// Eight columns of both halves of several heads.
template <typename T> struct Heads {
    Eight<T> low[HEADS], high[HEADS];

    __device__ __forceinline__ void load(const T* row, int head, int apart, int heads, i64 head_dim) {
#pragma unroll
        for (int k = 0; k < HEADS; k++) {
            if (head + k * apart >= heads) break;
            const T* at = row + (head + k * apart) * head_dim;
            low[k].load(at);
            high[k].load(at + head_dim / 2);
        }
    }
};

// A thread rotates the same columns of one head after another, so that it reads the tables once; the heads are on
// their way before the tables are.
template <typename T>
__device__ void rope_by_eight(
    T* x, const int* positions, const float* cos, const float* sin, i64 tokens, int heads, i64 head_dim,
    i64 stride, float sign
) {
    const int half = (int)(head_dim / 2), groups = half / 8;
    const int by_threads = (int)blockDim.x / groups, by_heads = (heads + HEADS - 1) / HEADS;
    const int apart = by_threads < by_heads ? by_threads : by_heads;
    const int column = threadIdx.x % groups * 8, first = threadIdx.x / groups;
    if (first >= apart) return;
    int position = blockIdx.x < tokens ? positions[blockIdx.x] : 0;
    for (i64 token = blockIdx.x; token < tokens; token += gridDim.x) {
        T* row = x + token * stride + column;
        Heads<T> now;
        now.load(row, first, apart, heads, head_dim);
        const i64 table = (i64)position * half + column;
        // The next token's position is known when its turn comes.
        if (token + gridDim.x < tokens) position = positions[token + gridDim.x];
        float c[8], s[8];
        load8(cos + table, c);
        load8(sin + table, s);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            c[j] = rounded<T>(c[j]);
            s[j] = sign * rounded<T>(s[j]);
        }
        for (int head = first; head < heads; head += HEADS * apart) {
            if (head != first) now.load(row, head, apart, heads, head_dim);
#pragma unroll
            for (int k = 0; k < HEADS; k++) {
                if (head + k * apart >= heads) break;
                float a[8], b[8];
                now.low[k].values(a);
                now.high[k].values(b);
#pragma unroll
                for (int j = 0; j < 8; j++) rotate<T>(a[j], b[j], c[j], s[j]);
                T* at = row + (head + k * apart) * head_dim;
                store8(at, a);
                store8(at + half, b);
            }
        }
    }
}

template <typename T>
__device__ void rope(
    T* x, const int* positions, const float* cos, const float* sin, i64 tokens, i64 heads, i64 head_dim,
    i64 stride, float sign, i64 vector
) {
    if (vector) return rope_by_eight(x, positions, cos, sin, tokens, (int)heads, head_dim, stride, sign);
    const i64 half = head_dim / 2;
    for (i64 token = blockIdx.x; token < tokens; token += gridDim.x) {
        const i64 table = (i64)positions[token] * half;
        for (i64 item = threadIdx.x; item < heads * half; item += blockDim.x) {
            T* at = x + token * stride + item / half * head_dim + item % half;
            float a = to_f32(at[0]), b = to_f32(at[half]);
            const float c = cos[table + item % half], s = sin[table + item % half];
            rotate<T>(a, b, rounded<T>(c), sign * rounded<T>(s));
            at[0] = from_f32<T>(a);
            at[half] = from_f32<T>(b);
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
