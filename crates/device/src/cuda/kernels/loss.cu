// Cross-entropy of rows of logits; one block a row. The first pass keeps a running maximum and a running sum of
// exponentials, the second turns the row into its gradient; in between the row waits in shared memory, as far as it
// fits. `vector`: rows are 16-byte aligned.

// A finite stand-in for minus infinity: differences with it never become NaN.
#define LOWEST (-3.402823466e+38f)

// The sum of exp(x − max) over what was seen.
struct Running {
    float max, sum;
};

__device__ __forceinline__ Running merged(Running a, Running b) {
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum * expf(a.max - max) + b.sum * expf(b.max - max)};
}

__device__ __forceinline__ Running warp_merged(Running a) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const float max = __shfl_xor_sync(0xffffffffu, a.max, offset);
        const float sum = __shfl_xor_sync(0xffffffffu, a.sum, offset);
        // Lanes see the two in either order; merging is symmetric, so they agree to the bit.
        a = merged(a, Running{max, sum});
    }
    return a;
}

__device__ __forceinline__ Running block_merged(Running a) {
    __shared__ Running warps[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = blockDim.x / 32;
    a = warp_merged(a);
    __syncthreads();
    if (lane == 0) warps[warp] = a;
    __syncthreads();
    a = lane < count ? warps[lane] : Running{LOWEST, 0.0f};
    return warp_merged(a);
}

// exp(x − max) for many x and one max. For 16-bit logits in one step: `scaled_max` is max · log2 e.
template <typename T> __device__ __forceinline__ float exp_below(float x, float max, float scaled_max) {
    return sizeof(T) == 2 ? quick_exp2(__fmaf_rn(x, LOG2_E, -scaled_max)) : expf(x - max);
}

// One more run of eights. The exponentials are summed once their maximum is known.
template <typename T, int N> __device__ __forceinline__ Running with_eights(Running state, const Eight<T>* eights) {
    float v[N][8], max = state.max;
#pragma unroll
    for (int k = 0; k < N; k++) {
        eights[k].values(v[k]);
        // As a tree, so that the next one need not wait for the last.
        const float low = fmaxf(fmaxf(v[k][0], v[k][1]), fmaxf(v[k][2], v[k][3]));
        max = fmaxf(max, fmaxf(low, fmaxf(fmaxf(v[k][4], v[k][5]), fmaxf(v[k][6], v[k][7]))));
    }
    const float scaled_max = max * LOG2_E;
    float sum = state.sum * exp_for<T>(state.max - max);
#pragma unroll
    for (int k = 0; k < N; k++) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[k][j] = exp_below<T>(v[k][j], max, scaled_max);
        sum += ((v[k][0] + v[k][1]) + (v[k][2] + v[k][3])) + ((v[k][4] + v[k][5]) + (v[k][6] + v[k][7]));
    }
    return {max, sum};
}

// Eights of a row that a thread has on their way at once.
#define AT_ONCE (sizeof(T) == 2 ? 4 : 2)

// The thread's eights from the `start`th of the row on; those beyond its end stay as they are.
template <typename T>
__device__ __forceinline__ void load_eights(Eight<T>* eights, const T* row, i64 start, i64 groups) {
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
        const i64 at = start + threadIdx.x + k * (i64)blockDim.x;
        if (at < groups) eights[k].load(row + at * 8);
    }
}

// This thread's part of the row's statistics. The first `kept` eights stay in shared memory for the second pass. The
// next eights are on their way while these are summed.
template <typename T>
__device__ __forceinline__ Running row_statistics(const T* row, i64 vocab, i64 groups, Eight<T>* keep, i64 kept) {
    const i64 batch = AT_ONCE * (i64)blockDim.x;
    Running state = {LOWEST, 0.0f};
    Eight<T> now[AT_ONCE], next[AT_ONCE];
    load_eights(now, row, 0, groups);
    for (i64 start = 0; start < groups; start += batch) {
        load_eights(next, row, start + batch, groups);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const i64 at = start + threadIdx.x + k * (i64)blockDim.x;
            if (at < kept) keep[at] = now[k];
        }
        if (start + batch <= groups) {
            state = with_eights<T, AT_ONCE>(state, now);
        } else {
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (start + threadIdx.x + k * (i64)blockDim.x < groups) state = with_eights<T, 1>(state, now + k);
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) now[k] = next[k];
    }
    for (i64 c = groups * 8 + threadIdx.x; c < vocab; c += blockDim.x) {
        state = merged(state, Running{to_f32(row[c]), 1.0f});
    }
    return state;
}

// Each thread reads back from shared memory only what it put there.
template <typename T>
__device__ __forceinline__ void write_gradient(
    T* row, i64 vocab, i64 groups, Running whole, i64 label, float seed, bool ignored, const Eight<T>* keep,
    i64 kept
) {
    // A row that is ignored has a gradient of zero.
    const float factor = ignored ? 0.0f : seed / whole.sum, scaled_max = whole.max * LOG2_E;
    const float at_label = ignored ? 0.0f : seed;
#pragma unroll 4
    for (i64 i = threadIdx.x; i < groups; i += blockDim.x) {
        float v[8];
        if (i < kept) keep[i].values(v);
        else load8(row + i * 8, v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = exp_below<T>(v[j], whole.max, scaled_max) * factor;
        if (i == label / 8) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] -= j == label % 8 ? at_label : 0.0f;
        }
        if (ignored) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = 0.0f;
        }
        store8(row + i * 8, v);
    }
    for (i64 i = groups * 8 + threadIdx.x; i < vocab; i += blockDim.x) {
        const float p = exp_below<T>(to_f32(row[i]), whole.max, scaled_max) * factor;
        row[i] = from_f32<T>(ignored ? 0.0f : p - (i == label ? at_label : 0.0f));
    }
}

// `seed` is null when only the losses are wanted. A label beyond the vocabulary gives a loss that is not a
// number rather than a read out of bounds. `kept`: eights of a row for which there is shared memory.
template <typename T>
__device__ void cross_entropy(
    T* logits, const int* labels, float* losses, const float* seed, i64 rows, i64 vocab, i64 stride, i64 vector,
    i64 kept
) {
    extern __shared__ uint4 shared_row[];
    Eight<T>* keep = reinterpret_cast<Eight<T>*>(shared_row);
    const i64 groups = vector ? vocab / 8 : 0;
    for (i64 r = blockIdx.x; r < rows; r += gridDim.x) {
        T* row = logits + r * stride;
        const i64 label = labels[r];
        const bool ignored = label < 0;
        Running whole = {0.0f, 1.0f};
        if (!ignored) {
            // The same for the whole block, so every thread meets the barriers inside.
            whole = block_merged(row_statistics(row, vocab, groups, keep, kept));
        }
        if (threadIdx.x == 0) {
            const float own = label < 0 || label >= vocab ? __int_as_float(0x7fffffff) : to_f32(row[label]);
            losses[r] = ignored ? 0.0f : (whole.max - own) + logf(whole.sum);
        }
        if (!seed) continue;
        // The label's logit is read before anyone overwrites it.
        __syncthreads();
        write_gradient(row, vocab, groups, whole, label, seed[0], ignored, keep, ignored ? 0 : kept);
    }
}

#define CROSS_ENTROPY(T, t) \
    extern "C" __global__ void __launch_bounds__(512) cross_entropy_##t( \
        T* logits, const int* labels, float* losses, const float* seed, i64 rows, i64 vocab, i64 stride, \
        i64 vector, i64 kept \
    ) { \
        cross_entropy(logits, labels, losses, seed, rows, vocab, stride, vector, kept); \
    }
CROSS_ENTROPY(float, f32)
CROSS_ENTROPY(bf16, bf16)
CROSS_ENTROPY(f16, f16)

// Losses that are sums over a row, one block each: scale · Σ x, or scale · Σ (x − target)² where there is a
// target. With a seed the row becomes its gradient.
template <typename T>
__device__ void sum_loss(
    T* x, const T* target, float* losses, const float* seed, float scale, i64 rows, i64 cols
) {
    for (i64 r = blockIdx.x; r < rows; r += gridDim.x) {
        float sum = 0.0f;
        for (i64 c = threadIdx.x; c < cols; c += blockDim.x) {
            const float value = to_f32(x[r * cols + c]);
            const float error = target ? value - to_f32(target[r * cols + c]) : 0.0f;
            sum += target ? error * error : value;
            if (seed) x[r * cols + c] = from_f32<T>(target ? error * (2.0f * (scale * seed[0])) : scale * seed[0]);
        }
        sum = block_sum(sum);
        if (threadIdx.x == 0) losses[r] = scale * sum;
    }
}

#define SUM_LOSS(T, t) \
    extern "C" __global__ void sum_loss_##t( \
        T* x, const T* target, float* losses, const float* seed, float scale, i64 rows, i64 cols \
    ) { \
        sum_loss(x, target, losses, seed, scale, rows, cols); \
    }
SUM_LOSS(float, f32)
SUM_LOSS(bf16, bf16)
SUM_LOSS(f16, f16)
