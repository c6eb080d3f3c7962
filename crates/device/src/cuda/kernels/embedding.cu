// Looking up rows of a table, and adding gradients back to them.

// One block a token. `vector`: rows are 16-byte aligned.
template <typename T>
__device__ void embedding(const T* table, const int* ids, T* out, i64 tokens, i64 cols, i64 vector) {
    for (i64 token = blockIdx.x; token < tokens; token += gridDim.x) {
        const T* from = table + (i64)ids[token] * cols;
        T* to = out + token * cols;
        if (vector) {
            const i64 packs = cols * (i64)sizeof(T) / 16;
            for (i64 i = threadIdx.x; i < packs; i += blockDim.x) ((uint4*)to)[i] = ((const uint4*)from)[i];
        } else {
            for (i64 i = threadIdx.x; i < cols; i += blockDim.x) to[i] = from[i];
        }
    }
}

// The position after the run of equal ids that starts at `start`.
__device__ __forceinline__ i64 end_of_run(const int* ids, const int* order, i64 start, i64 tokens) {
    const int id = ids[order[start]];
    i64 inside = start, outside = tokens;
    // Most runs are short: look next door before halving.
    if (start + 1 < tokens && ids[order[start + 1]] != id) return start + 1;
    while (outside - inside > 1) {
        const i64 middle = inside + (outside - inside) / 2;
        if (ids[order[middle]] == id) inside = middle;
        else outside = middle;
    }
    return outside;
}

// Block (x, y) handles the sorted position x, if a run of equal ids starts there, for 8 · blockDim.x columns
// from y on. No other block writes that row's columns, and tokens are added in their order.
template <typename G, typename W>
__device__ void embedding_grad(
    const G* dout, const int* ids, const int* order, W* dtable, i64 tokens, i64 cols, i64 accumulate,
    i64 vector
) {
    const i64 tile = (i64)blockIdx.y * blockDim.x * 8;
    // Eight neighbours a thread where they are loaded together, else a block's width apart.
    const i64 first = tile + (vector ? (i64)threadIdx.x * 8 : (i64)threadIdx.x);
    const i64 apart = vector ? 1 : blockDim.x;
    if (first >= cols) return;
    for (i64 start = blockIdx.x; start < tokens; start += gridDim.x) {
        const int id = ids[order[start]];
        if (start > 0 && ids[order[start - 1]] == id) continue;
        W* row = dtable + (i64)id * cols;
        float sums[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const i64 c = first + j * apart;
            sums[j] = accumulate && c < cols ? to_f32(row[c]) : 0.0f;
        }
        const i64 end = end_of_run(ids, order, start, tokens);
#pragma unroll 4
        for (i64 at = start; at < end; at++) {
            const G* from = dout + (i64)order[at] * cols;
            if (vector) {
                float v[8];
                load8(from + first, v);
#pragma unroll
                for (int j = 0; j < 8; j++) sums[j] += v[j];
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const i64 c = first + j * apart;
                    if (c < cols) sums[j] += to_f32(from[c]);
                }
            }
        }
        if (vector) {
            store8(row + first, sums);
            continue;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const i64 c = first + j * apart;
            if (c < cols) row[c] = from_f32<W>(sums[j]);
        }
    }
}

#define EMBEDDING(T, t) \
    extern "C" __global__ void embedding_##t( \
        const T* table, const int* ids, T* out, i64 tokens, i64 cols, i64 vector \
    ) { \
        embedding(table, ids, out, tokens, cols, vector); \
    }
EMBEDDING(float, f32)
EMBEDDING(bf16, bf16)
EMBEDDING(f16, f16)

#define EMBEDDING_GRAD(G, g, W, w) \
    extern "C" __global__ void embedding_grad_##g##_##w( \
        const G* dout, const int* ids, const int* order, W* dtable, i64 tokens, i64 cols, i64 accumulate, \
        i64 vector \
    ) { \
        embedding_grad(dout, ids, order, dtable, tokens, cols, accumulate, vector); \
    }
EMBEDDING_GRAD(float, f32, float, f32)
EMBEDDING_GRAD(bf16, bf16, bf16, bf16)
EMBEDDING_GRAD(bf16, bf16, float, f32)
EMBEDDING_GRAD(f16, f16, f16, f16)
EMBEDDING_GRAD(f16, f16, float, f32)
