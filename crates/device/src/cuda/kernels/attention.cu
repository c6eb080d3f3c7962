// Causal grouped-query attention with tiles in shared memory: the plain one, for any head size up to 256, any
// length, windows and packed documents. Scores exist one tile at a time. Everything is f32 inside, and no sum
// depends on timing.
//
// A block is 16 × 16 threads. Thread (ty, tx) owns rows ty, ty + 16, ... of the tile on the left of a product;
// on the right it owns rows tx, tx + 16, ... (scores), or columns 4·tx + 64·c (outputs). A tile's rows are
// D + 4 floats apart, so that the 16-byte reads of eight neighbouring rows fall into different banks. The small
// tile of weights between two products is written and read by the same warp.
//
// Head sizes are rounded up to D = 64, 128 or 256; what lies beyond the head is zero.

#define SIDE 16
#define THREADS 256

// Copies ROWS rows of a head into a tile, as f32, with zeros beyond `rows` and `head_dim`.
template <typename T, int D, int ROWS>
__device__ __forceinline__ void load_tile(float* tile, const T* from, i64 stride, i64 rows, i64 head_dim, i64 vector) {
    for (int item = threadIdx.x; item < ROWS * (D / 8); item += THREADS) {
        const int row = item / (D / 8), c = item % (D / 8) * 8;
        float v[8];
        if (row < rows && vector && c + 8 <= head_dim) {
            load8(from + row * stride + c, v);
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[j] = row < rows && c + j < head_dim ? to_f32(from[row * stride + c + j]) : 0.0f;
            }
        }
        float4* to = (float4*)(tile + row * (D + 4) + c);
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
}

// scores[i][j] = a's row ty + 16i · b's row tx + 16j.
template <int D, int RA, int RB>
__device__ __forceinline__ void dot_rows(const float* a, const float* b, float (&scores)[RA][RB], int ty, int tx) {
#pragma unroll
    for (int i = 0; i < RA; i++)
#pragma unroll
        for (int j = 0; j < RB; j++) scores[i][j] = 0.0f;
#pragma unroll 4
    for (int d = 0; d < D; d += 4) {
        float4 x[RA], y[RB];
#pragma unroll
        for (int i = 0; i < RA; i++) x[i] = *(const float4*)(a + (ty + SIDE * i) * (D + 4) + d);
#pragma unroll
        for (int j = 0; j < RB; j++) y[j] = *(const float4*)(b + (tx + SIDE * j) * (D + 4) + d);
#pragma unroll
        for (int i = 0; i < RA; i++)
#pragma unroll
            for (int j = 0; j < RB; j++) {
                scores[i][j] += x[i].x * y[j].x;
                scores[i][j] += x[i].y * y[j].y;
                scores[i][j] += x[i].z * y[j].z;
                scores[i][j] += x[i].w * y[j].w;
            }
    }
}

// Leaves a thread's scores where its warp finds them as weights of the next product.
template <int K, int RA, int RB>
__device__ __forceinline__ void store_weights(float* weights, const float (&values)[RA][RB], int ty, int tx) {
    // The last product's reads of these rows, all by this warp, come first.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < RA; i++)
#pragma unroll
        for (int j = 0; j < RB; j++) weights[(ty + SIDE * i) * (K + 4) + tx + SIDE * j] = values[i][j];
    __syncwarp();
}

__device__ __forceinline__ float component(const float4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// out[i][columns of tx] += Σ_k weights[ty + 16i][k] · b[k][columns of tx]
template <int D, int K, int RA>
__device__ __forceinline__ void add_weighted_rows(
    const float* weights, const float* b, float (&out)[RA][D / SIDE], int ty, int tx
) {
#pragma unroll 2
    for (int k = 0; k < K; k += 4) {
        float4 w[RA];
#pragma unroll
        for (int i = 0; i < RA; i++) w[i] = *(const float4*)(weights + (ty + SIDE * i) * (K + 4) + k);
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int c = 0; c < D / 64; c++) {
                const float4 v = *(const float4*)(b + (k + n) * (D + 4) + c * 64 + tx * 4);
#pragma unroll
                for (int i = 0; i < RA; i++) {
                    const float x = component(w[i], n);
                    out[i][c * 4 + 0] += x * v.x;
                    out[i][c * 4 + 1] += x * v.y;
                    out[i][c * 4 + 2] += x * v.z;
                    out[i][c * 4 + 3] += x * v.w;
                }
            }
    }
}

template <typename T, int D>
__device__ __forceinline__ void store_row(T* to, const float (&values)[D / SIDE], float factor, i64 head_dim, int tx) {
#pragma unroll
    for (int c = 0; c < D / 64; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int d = c * 64 + tx * 4 + e;
            if (d < head_dim) to[d] = from_f32<T>(values[c * 4 + e] * factor);
        }
}

// Over the 16 threads that share a ty: they are half a warp.
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
    for (int offset = SIDE / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int offset = SIDE / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// The queries of a thread, and which keys they see. Beyond the end of the sequence a query sees none.
template <int RA> struct Queries {
    int at[RA], first[RA];

    // Returns the first key that any query of the block sees. Every thread must call it.
    __device__ int prepare(const Shape& shape, const int* starts, i64 tile, int ty) {
        __shared__ int lowest;
        if (threadIdx.x == 0) lowest = 0x7fffffff;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < RA; i++) {
            const i64 query = tile + ty + SIDE * i;
            at[i] = query < shape.seq ? (int)query : -1;
            first[i] = query < shape.seq ? shape.first_key(starts, query) : 0;
            if (at[i] >= 0) atomicMin(&lowest, first[i]);
        }
        __syncthreads();
        return lowest;
    }

    __device__ bool sees(int i, i64 key) const {
        return key >= first[i] && key <= at[i];
    }
};

// Grid: (rows · heads, query tiles). The longest tiles come first.
template <typename T, int D, int BQ, int BK>
__device__ void forward(
    const T* qkv, const int* document_start, T* out, float* lse, const Shape& shape, float scale, i64 vector
) {
    constexpr int RQ = BQ / SIDE, RK = BK / SIDE;
    extern __shared__ float4 shared_tiles[];
    float* q_tile = (float*)shared_tiles;
    float* kv_tile = q_tile + BQ * (D + 4);
    float* weights = kv_tile + BK * (D + 4);
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
    const i64 row = blockIdx.x / shape.heads, head = blockIdx.x % shape.heads;
    const i64 q0 = (i64)(gridDim.y - 1 - blockIdx.y) * BQ;
    const i64 last = q0 + BQ < shape.seq ? q0 + BQ - 1 : shape.seq - 1;
    const i64 stride = shape.qkv_stride(), hd = shape.head_dim;
    const T* tokens = qkv + row * shape.seq * stride;
    const T* keys = tokens + shape.key_offset(shape.kv_head(head));
    const T* values = tokens + shape.value_offset(shape.kv_head(head));
    const int* starts = document_start ? document_start + row * shape.seq : document_start;

    Queries<RQ> queries;
    const i64 first = queries.prepare(shape, starts, q0, ty);
    load_tile<T, D, BQ>(q_tile, tokens + q0 * stride + head * hd, stride, shape.seq - q0, hd, vector);

    float max[RQ], sum[RQ], acc[RQ][D / SIDE];
#pragma unroll
    for (int i = 0; i < RQ; i++) {
        max[i] = LOWEST;
        sum[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < D / SIDE; c++) acc[i][c] = 0.0f;
    }
    for (i64 k0 = first / BK * BK; k0 <= last; k0 += BK) {
        __syncthreads();
        load_tile<T, D, BK>(kv_tile, keys + k0 * stride, stride, shape.seq - k0, hd, vector);
        __syncthreads();
        float s[RQ][RK];
        dot_rows<D>(q_tile, kv_tile, s, ty, tx);
#pragma unroll
        for (int i = 0; i < RQ; i++) {
            float top = max[i];
#pragma unroll
            for (int j = 0; j < RK; j++) {
                s[i][j] = queries.sees(i, k0 + tx + SIDE * j) ? s[i][j] * (scale * LOG2E) : -__int_as_float(0x7f800000);
                top = fmaxf(top, s[i][j]);
            }
            top = row_max(top);
            const float shrink = exp2f(max[i] - top);
            float part = 0.0f;
#pragma unroll
            for (int j = 0; j < RK; j++) {
                s[i][j] = exp2f(s[i][j] - top);
                part += s[i][j];
            }
            sum[i] = sum[i] * shrink + row_sum(part);
            max[i] = top;
#pragma unroll
            for (int c = 0; c < D / SIDE; c++) acc[i][c] *= shrink;
        }
        store_weights<BK>(weights, s, ty, tx);
        __syncthreads();
        load_tile<T, D, BK>(kv_tile, values + k0 * stride, stride, shape.seq - k0, hd, vector);
        __syncthreads();
        add_weighted_rows<D, BK>(weights, kv_tile, acc, ty, tx);
    }
#pragma unroll
    for (int i = 0; i < RQ; i++) {
        const i64 query = queries.at[i];
        if (query < 0) continue;
        T* to = out + (row * shape.seq + query) * shape.out_stride() + head * hd;
        store_row<T, D>(to, acc[i], 1.0f / sum[i], hd, tx);
        if (tx == 0) lse[(row * shape.heads + head) * shape.seq + query] = (max[i] + log2f(sum[i])) * LN2;
    }
}

// sums[row, head, query] = Σ dout · out; one warp each. Grid-stride over tokens · heads.
template <typename T>
__device__ void row_sums(const T* out, const T* dout, float* sums, i64 tokens, const Shape& shape) {
    const int lane = threadIdx.x % 32;
    const i64 warps = global_threads() / 32;
    for (i64 item = global_thread() / 32; item < tokens * shape.heads; item += warps) {
        const i64 token = item / shape.heads, head = item % shape.heads;
        const i64 from = item * shape.head_dim;
        float sum = 0.0f;
        for (i64 d = lane; d < shape.head_dim; d += 32) sum += to_f32(out[from + d]) * to_f32(dout[from + d]);
        sum = warp_sum(sum);
        const i64 row = token / shape.seq, query = token % shape.seq;
        if (lane == 0) sums[(row * shape.heads + head) * shape.seq + query] = sum;
    }
}

// The gradient of the queries. Grid as forward.
template <typename T, int D, int BQ, int BK>
__device__ void query_grad(
    const T* qkv, const int* document_start, const float* lse, const T* dout, const float* sums, T* dqkv,
    const Shape& shape, float scale, i64 vector
) {
    constexpr int RQ = BQ / SIDE, RK = BK / SIDE;
    extern __shared__ float4 shared_tiles[];
    float* q_tile = (float*)shared_tiles;
    float* dout_tile = q_tile + BQ * (D + 4);
    float* kv_tile = dout_tile + BQ * (D + 4);
    float* weights = kv_tile + BK * (D + 4);
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
    const i64 row = blockIdx.x / shape.heads, head = blockIdx.x % shape.heads;
    const i64 q0 = (i64)(gridDim.y - 1 - blockIdx.y) * BQ;
    const i64 last = q0 + BQ < shape.seq ? q0 + BQ - 1 : shape.seq - 1;
    const i64 stride = shape.qkv_stride(), hd = shape.head_dim, left = shape.seq - q0;
    const T* tokens = qkv + row * shape.seq * stride;
    const T* keys = tokens + shape.key_offset(shape.kv_head(head));
    const T* values = tokens + shape.value_offset(shape.kv_head(head));
    const int* starts = document_start ? document_start + row * shape.seq : document_start;

    Queries<RQ> queries;
    const i64 first = queries.prepare(shape, starts, q0, ty);
    const T* dout_rows = dout + (row * shape.seq + q0) * shape.out_stride() + head * hd;
    load_tile<T, D, BQ>(q_tile, tokens + q0 * stride + head * hd, stride, left, hd, vector);
    load_tile<T, D, BQ>(dout_tile, dout_rows, shape.out_stride(), left, hd, vector);

    float norm[RQ], minus[RQ], acc[RQ][D / SIDE];
#pragma unroll
    for (int i = 0; i < RQ; i++) {
        const i64 at = (row * shape.heads + head) * shape.seq + queries.at[i];
        norm[i] = queries.at[i] >= 0 ? lse[at] * LOG2E : 0.0f;
        minus[i] = queries.at[i] >= 0 ? sums[at] : 0.0f;
#pragma unroll
        for (int c = 0; c < D / SIDE; c++) acc[i][c] = 0.0f;
    }
    for (i64 k0 = first / BK * BK; k0 <= last; k0 += BK) {
        float s[RQ][RK], dp[RQ][RK];
        __syncthreads();
        load_tile<T, D, BK>(kv_tile, values + k0 * stride, stride, shape.seq - k0, hd, vector);
        __syncthreads();
        dot_rows<D>(dout_tile, kv_tile, dp, ty, tx);
        __syncthreads();
        load_tile<T, D, BK>(kv_tile, keys + k0 * stride, stride, shape.seq - k0, hd, vector);
        __syncthreads();
        dot_rows<D>(q_tile, kv_tile, s, ty, tx);
#pragma unroll
        for (int i = 0; i < RQ; i++)
#pragma unroll
            for (int j = 0; j < RK; j++) {
                const bool seen = queries.sees(i, k0 + tx + SIDE * j);
                const float p = seen ? exp2f(s[i][j] * (scale * LOG2E) - norm[i]) : 0.0f;
                s[i][j] = p * (dp[i][j] - minus[i]);
            }
        store_weights<BK>(weights, s, ty, tx);
        add_weighted_rows<D, BK>(weights, kv_tile, acc, ty, tx);
    }
#pragma unroll
    for (int i = 0; i < RQ; i++) {
        const i64 query = queries.at[i];
        if (query < 0) continue;
        T* to = dqkv + (row * shape.seq + query) * stride + head * hd;
        store_row<T, D>(to, acc[i], scale, hd, tx);
    }
}

// The gradients of keys and values, over the query heads of their group in order. Grid: (rows · kv_heads, key
// tiles); the first keys, which most queries see, come first.
template <typename T, int D, int BK, int BQ>
__device__ void key_value_grad(
    const T* qkv, const int* document_start, const float* lse, const T* dout, const float* sums, T* dqkv,
    const Shape& shape, float scale, i64 vector
) {
    constexpr int RQ = BQ / SIDE, RK = BK / SIDE;
    extern __shared__ float4 shared_tiles[];
    __shared__ float norm[BQ], minus[BQ];
    __shared__ int first[BQ];
    float* k_tile = (float*)shared_tiles;
    float* v_tile = k_tile + BK * (D + 4);
    float* q_tile = v_tile + BK * (D + 4);
    float* weights = q_tile + BQ * (D + 4);
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
    const i64 row = blockIdx.x / shape.kv_heads, kv_head = blockIdx.x % shape.kv_heads;
    const i64 k0 = (i64)blockIdx.y * BK, seq = shape.seq;
    const i64 last_key = k0 + BK < seq ? k0 + BK - 1 : seq - 1;
    const i64 stride = shape.qkv_stride(), hd = shape.head_dim, group = shape.heads / shape.kv_heads;
    const T* tokens = qkv + row * seq * stride;
    const int* starts = document_start ? document_start + row * seq : document_start;
    // Beyond this query, all windows begin after the tile's last key.
    i64 last_query = seq - 1;
    if (shape.window > 0 && last_key + shape.window - 1 < last_query) last_query = last_key + shape.window - 1;

    load_tile<T, D, BK>(k_tile, tokens + shape.key_offset(kv_head) + k0 * stride, stride, seq - k0, hd, vector);
    load_tile<T, D, BK>(v_tile, tokens + shape.value_offset(kv_head) + k0 * stride, stride, seq - k0, hd, vector);
    float dk[RK][D / SIDE], dv[RK][D / SIDE];
#pragma unroll
    for (int i = 0; i < RK; i++)
#pragma unroll
        for (int c = 0; c < D / SIDE; c++) dk[i][c] = dv[i][c] = 0.0f;

    for (i64 head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const float* head_lse = lse + (row * shape.heads + head) * seq;
        const float* head_sums = sums + (row * shape.heads + head) * seq;
        for (i64 q0 = k0 / BQ * BQ; q0 <= last_query; q0 += BQ) {
            const i64 query = q0 + threadIdx.x;
            const bool mine = threadIdx.x < BQ && query < seq;
            const int begin = mine ? shape.first_key(starts, query) : 0;
            // Also the barrier after which the last tile may be overwritten.
            if (!__syncthreads_or(mine && begin <= last_key)) continue;
            if (threadIdx.x < BQ) {
                first[threadIdx.x] = begin;
                norm[threadIdx.x] = mine ? head_lse[query] * LOG2E : 0.0f;
                minus[threadIdx.x] = mine ? head_sums[query] : 0.0f;
            }
            const T* q_rows = tokens + q0 * stride + head * hd;
            const T* dout_rows = dout + (row * seq + q0) * shape.out_stride() + head * hd;
            float s[RK][RQ], ds[RK][RQ];
            load_tile<T, D, BQ>(q_tile, dout_rows, shape.out_stride(), seq - q0, hd, vector);
            __syncthreads();
            dot_rows<D>(v_tile, q_tile, ds, ty, tx);
            __syncthreads();
            load_tile<T, D, BQ>(q_tile, q_rows, stride, seq - q0, hd, vector);
            __syncthreads();
            dot_rows<D>(k_tile, q_tile, s, ty, tx);
#pragma unroll
            for (int i = 0; i < RK; i++)
#pragma unroll
                for (int j = 0; j < RQ; j++) {
                    const int n = tx + SIDE * j;
                    const i64 key = k0 + ty + SIDE * i, q = q0 + n;
                    const bool seen = q < seq && key <= q && key >= first[n];
                    s[i][j] = seen ? exp2f(s[i][j] * (scale * LOG2E) - norm[n]) : 0.0f;
                    ds[i][j] = s[i][j] * (ds[i][j] - minus[n]);
                }
            store_weights<BQ>(weights, ds, ty, tx);
            add_weighted_rows<D, BQ>(weights, q_tile, dk, ty, tx);
            __syncthreads();
            load_tile<T, D, BQ>(q_tile, dout_rows, shape.out_stride(), seq - q0, hd, vector);
            store_weights<BQ>(weights, s, ty, tx);
            __syncthreads();
            add_weighted_rows<D, BQ>(weights, q_tile, dv, ty, tx);
        }
    }
#pragma unroll
    for (int i = 0; i < RK; i++) {
        const i64 key = k0 + ty + SIDE * i;
        if (key >= seq) continue;
        T* to = dqkv + (row * seq + key) * stride;
        store_row<T, D>(to + shape.key_offset(kv_head), dk[i], scale, hd, tx);
        store_row<T, D>(to + shape.value_offset(kv_head), dv[i], 1.0f, hd, tx);
    }
}

// Tile sizes keep shared memory under the 99 KiB that every GPU since 8.6 grants; `attention.rs` knows them.
#define ATTENTION(T, t, D, FQ, FK, GA, GB) \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_##t##_##D( \
        const T* qkv, const int* document_start, T* out, float* lse, i64 seq, i64 heads, i64 kv_heads, \
        i64 head_dim, i64 window, float scale, i64 vector \
    ) { \
        const Shape shape = {seq, heads, kv_heads, head_dim, window}; \
        forward<T, D, FQ, FK>(qkv, document_start, out, lse, shape, scale, vector); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_query_grad_##t##_##D( \
        const T* qkv, const int* document_start, const float* lse, const T* dout, const float* sums, T* dqkv, \
        i64 seq, i64 heads, i64 kv_heads, i64 head_dim, i64 window, float scale, i64 vector \
    ) { \
        const Shape shape = {seq, heads, kv_heads, head_dim, window}; \
        query_grad<T, D, GA, GB>(qkv, document_start, lse, dout, sums, dqkv, shape, scale, vector); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_key_value_grad_##t##_##D( \
        const T* qkv, const int* document_start, const float* lse, const T* dout, const float* sums, T* dqkv, \
        i64 seq, i64 heads, i64 kv_heads, i64 head_dim, i64 window, float scale, i64 vector \
    ) { \
        const Shape shape = {seq, heads, kv_heads, head_dim, window}; \
        key_value_grad<T, D, GA, GB>(qkv, document_start, lse, dout, sums, dqkv, shape, scale, vector); \
    }

#define ATTENTION_SIZES(T, t) \
    ATTENTION(T, t, 64, 64, 64, 64, 32) \
    ATTENTION(T, t, 128, 64, 64, 64, 32) \
    ATTENTION(T, t, 256, 32, 32, 32, 16) \
    extern "C" __global__ void attention_row_sums_##t( \
        const T* out, const T* dout, float* sums, i64 tokens, i64 seq, i64 heads, i64 head_dim \
    ) { \
        const Shape shape = {seq, heads, heads, head_dim, 0}; \
        row_sums(out, dout, sums, tokens, shape); \
    }

// One program per type: most runs need one of them, and each takes seconds to compile.
#if defined(ATTENTION_F32)
ATTENTION_SIZES(float, f32)
#elif defined(ATTENTION_BF16)
ATTENTION_SIZES(bf16, bf16)
#elif defined(ATTENTION_F16)
ATTENTION_SIZES(f16, f16)
#endif
