// Attention of new tokens against cached keys and values. A cache is [rows, kv_heads, max_len, head_dim].
//
// A pass after the first brings few tokens, mostly one, so the work is to read the cache once: a block serves
// one query head of one new token, and each of its warps reads every eighth key with the softmax kept up to
// date. The warps' parts are added in their order: no sum depends on timing.

#define THREADS 256
#define WARPS (THREADS / 32)
// Elements of the largest head that one lane holds.
#define HELD 8
#define LOG2E 1.4426950408889634f
#define LOWEST (-1e30f)

// Keys and values of the new tokens go behind the `start` that each row has. Grid-stride over their elements.
template <typename T>
__device__ void append(
    const T* qkv, T* keys, T* values, i64 tokens, i64 seq, i64 heads, i64 kv_heads, i64 head_dim, i64 start,
    i64 max_len
) {
    const i64 cols = kv_heads * head_dim, stride = (heads + 2 * kv_heads) * head_dim;
    for (i64 item = global_thread(); item < tokens * cols; item += global_threads()) {
        const i64 token = item / cols, col = item % cols;
        const i64 row = token / seq, kv_head = col / head_dim, d = col % head_dim;
        const i64 to = ((row * kv_heads + kv_head) * max_len + start + token % seq) * head_dim + d;
        const T* from = qkv + token * stride + heads * head_dim + col;
        keys[to] = from[0];
        values[to] = from[cols];
    }
}

// One block per new token and query head: block = token · heads + head.
template <typename T>
__device__ void attend(
    const T* qkv, const T* keys, const T* values, T* out, i64 seq, i64 heads, i64 kv_heads, i64 head_dim, i64 start,
    i64 max_len, i64 window, float scale
) {
    __shared__ float tops[WARPS], totals[WARPS], parts[WARPS][THREADS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 token = blockIdx.x / heads, head = blockIdx.x % heads;
    const i64 last = start + token % seq;
    const i64 first = window > 0 && last >= window ? last - window + 1 : 0;
    const i64 cached = (token / seq * kv_heads + head / (heads / kv_heads)) * max_len * head_dim;
    const T* query = qkv + token * (heads + 2 * kv_heads) * head_dim + head * head_dim;

    float q[HELD], sum[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int d = lane + 32 * i;
        q[i] = d < head_dim ? to_f32(query[d]) : 0.0f;
        sum[i] = 0.0f;
    }
    float top = LOWEST, total = 0.0f;
    for (i64 key = first + warp; key <= last; key += WARPS) {
        const T* k = keys + cached + key * head_dim;
        const T* v = values + cached + key * head_dim;
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int d = lane + 32 * i;
            if (d < head_dim) score += q[i] * to_f32(k[d]);
        }
        score = warp_sum(score) * (scale * LOG2E);
        const float next = fmaxf(top, score);
        const float shrink = exp2f(top - next), weight = exp2f(score - next);
        total = total * shrink + weight;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int d = lane + 32 * i;
            if (d < head_dim) sum[i] = sum[i] * shrink + weight * to_f32(v[d]);
        }
        top = next;
    }
    if (lane == 0) {
        tops[warp] = top;
        totals[warp] = total;
    }
#pragma unroll
    for (int i = 0; i < HELD; i++) parts[warp][lane + 32 * i] = sum[i];
    __syncthreads();

    const int d = threadIdx.x;
    if (d >= head_dim) return;
    top = tops[0];
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, tops[w]);
    float above = 0.0f, below = 0.0f;
    for (int w = 0; w < WARPS; w++) {
        const float factor = exp2f(tops[w] - top);
        above += parts[w][d] * factor;
        below += totals[w] * factor;
    }
    out[(token * heads + head) * head_dim + d] = from_f32<T>(above / below);
}

#define CACHE(T, t) \
    extern "C" __global__ void cache_append_##t( \
        const T* qkv, T* keys, T* values, i64 tokens, i64 seq, i64 heads, i64 kv_heads, i64 head_dim, i64 start, \
        i64 max_len \
    ) { \
        append(qkv, keys, values, tokens, seq, heads, kv_heads, head_dim, start, max_len); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_cached_##t( \
        const T* qkv, const T* keys, const T* values, T* out, i64 seq, i64 heads, i64 kv_heads, i64 head_dim, \
        i64 start, i64 max_len, i64 window, float scale \
    ) { \
        attend(qkv, keys, values, out, seq, heads, kv_heads, head_dim, start, max_len, window, scale); \
    }

CACHE(float, f32)
CACHE(bf16, bf16)
CACHE(f16, f16)
