// Causal grouped-query attention on the tensor cores, after FlashAttention-2: 16-bit inputs, f32 sums, windows
// and packed documents, heads of up to D. One program per type and D.
//
// A warp owns whole rows of what it accumulates: 32 queries (forward, gradient of queries) or 16 keys (gradients of
// keys and values). So probabilities and their gradients go from one product to the next in registers, and no two
// blocks add to the same place: the same inputs give the same bits.
//
// Keys that no query of a tile sees are never loaded: documents follow each other within a row, so the first key
// that a query sees never lies before that of an earlier query.

#define QUERIES 128
#if FLASH_HEAD_DIM > 96
#define FORWARD_KEYS 32
#else
#define FORWARD_KEYS 64
#endif
#define QUERY_GRAD_KEYS 32
#define QUERY_WARPS 4
#define KEYS 128
#define KEY_GRAD_QUERIES 64
#define KEY_WARPS 8

// ---- Queries ----

// The 32 queries of a warp: which they are, which keys they see, and this thread's four rows of them.
struct WarpQueries {
    // First and last query; the first keys that they see.
    int begin, last, first, last_first;
    int at[2][2], sees_from[2][2];

    __device__ __forceinline__ WarpQueries(const Shape& shape, const int* starts, int begin) : begin(begin) {
        const int end = (int)shape.seq - 1;
        last = begin + 31 < end ? begin + 31 : end;
        first = begin <= end ? shape.first_key(starts, begin) : 0x7fffffff;
        last_first = begin <= end ? shape.first_key(starts, last) : 0x7fffffff;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int query = begin + 16 * i + 8 * half + threadIdx.x % 32 / 4;
                at[i][half] = query;
                sees_from[i][half] = query <= end ? shape.first_key(starts, query) : 0;
            }
    }

    // Whether any of them sees any of `count` keys from `key` on.
    __device__ __forceinline__ bool see_any(int key, int count) const {
        return key <= last && key + count > first;
    }

    // Whether all of them see all of those.
    __device__ __forceinline__ bool see_all(int key, int count) const {
        return key + count - 1 <= begin && key >= last_first;
    }

    // Gives each score of a key that a query does not see this value.
    template <int N> __device__ __forceinline__ void mask(float (&scores)[2][N][4], int key, float value) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < N; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int k = key + 8 * j + threadIdx.x % 4 * 2 + e % 2;
                    if (k > at[i][e / 2] || k < sees_from[i][e / 2]) scores[i][j][e] = value;
                }
    }
};

// Whether another kernel has done all of a row's tokens before `end`: those before token `done` of all rows, where
// that is given.
__device__ __forceinline__ bool is_done(const int* done, const Shape& shape, i64 row, i64 end) {
    return done && row * shape.seq + (end < shape.seq ? end : shape.seq) <= *done;
}

// The block of a tile of queries. Grid: (rows · heads, query tiles); the longest tiles come first.
template <typename T> struct QueryBlock {
    i64 row, head, q0, stride, left;
    const T *queries, *keys, *values;
    const int* starts;
    int first_key, last_key;

    __device__ __forceinline__ QueryBlock(const Shape& shape, const T* qkv, const int* document_start, int key_tile) {
        row = blockIdx.x / shape.heads;
        head = blockIdx.x % shape.heads;
        q0 = (i64)(gridDim.y - 1 - blockIdx.y) * QUERIES;
        stride = shape.qkv_stride();
        left = shape.seq - q0;
        const T* tokens = qkv + row * shape.seq * stride;
        queries = tokens + q0 * stride + head * shape.head_dim;
        keys = tokens + shape.key_offset(shape.kv_head(head));
        values = tokens + shape.value_offset(shape.kv_head(head));
        starts = document_start ? document_start + row * shape.seq : document_start;
        first_key = shape.first_key(starts, q0) / key_tile * key_tile;
        last_key = (int)(q0 + (left < QUERIES ? left : QUERIES) - 1);
    }

    // Starts copying COUNT keys, and their values behind them.
    template <int D, int COUNT> __device__ __forceinline__ void load_stage(u32 tile, const Shape& shape, int key) const {
        constexpr int THREADS = 32 * QUERY_WARPS;
        const i64 from = key * stride, rows = shape.seq - key;
        const int hd = (int)shape.head_dim;
        Tile<D>::template load<COUNT, THREADS>(tile, keys + from, stride, rows, hd);
        Tile<D>::template load<COUNT, THREADS>(tile + COUNT * Tile<D>::ROW_BYTES, values + from, stride, rows, hd);
    }
};

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Scores become exponentials below the running maximum, and what was summed before shrinks to it. Each thread
// sums its own columns.
template <int D, int N>
__device__ __forceinline__ void soften(
    float (&s)[2][N][4], float (&max)[2][2], float (&sum)[2][2], float (&out)[2][D / 8][4], float factor
) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = max[i][half];
#pragma unroll
            for (int j = 0; j < N; j++) top = fmaxf(top, fmaxf(s[i][j][2 * half], s[i][j][2 * half + 1]));
            top = quad_max(top);
            const float shrink = fast_exp2((max[i][half] - top) * factor), below = top * factor;
            max[i][half] = top;
            float part = 0.0f;
#pragma unroll
            for (int j = 0; j < N; j++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    s[i][j][e] = fast_exp2(s[i][j][e] * factor - below);
                    part += s[i][j][e];
                }
            sum[i][half] = sum[i][half] * shrink + part;
#pragma unroll
            for (int j = 0; j < D / 8; j++) {
                out[i][j][2 * half] *= shrink;
                out[i][j][2 * half + 1] *= shrink;
            }
        }
}

template <typename T, int D>
__device__ __forceinline__ void forward(
    const T* qkv, const int* document_start, T* out, float* lse, const int* done, const Shape& shape, float scale
) {
    constexpr int THREADS = 32 * QUERY_WARPS, STAGE = 2 * FORWARD_KEYS * Tile<D>::ROW_BYTES;
    extern __shared__ __align__(256) char shared_tiles[];
    const u32 q_tile = shared_address(shared_tiles);
    const QueryBlock<T> block(shape, qkv, document_start, FORWARD_KEYS);
    if (is_done(done, shape, block.row, block.q0 + QUERIES)) return;
    const int hd = (int)shape.head_dim, row0 = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    const WarpQueries queries(shape, block.starts, (int)block.q0 + row0);
    const float factor = scale * LOG2E;

    Tile<D>::template load<QUERIES, THREADS>(q_tile, block.queries, block.stride, block.left, hd);
    const auto load_stage = [&](u32 tile, int k) { block.template load_stage<D, FORWARD_KEYS>(tile, shape, k); };
    int k0 = block.first_key;
    u32 current = q_tile + QUERIES * Tile<D>::ROW_BYTES, next = current + STAGE;
    load_stage(current, k0);

    float max[2][2], sum[2][2], acc[2][D / 8][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            max[i][half] = LOWEST;
            sum[i][half] = 0.0f;
        }
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[i][j][e] = 0.0f;
    }
    for (; k0 <= block.last_key; k0 += FORWARD_KEYS) {
        wait_for_copies();
        // This stage is there, and nobody reads the other one any more.
        __syncthreads();
        if (k0 + FORWARD_KEYS <= block.last_key) load_stage(next, k0 + FORWARD_KEYS);
        if (queries.see_any(k0, FORWARD_KEYS)) {
            float s[2][FORWARD_KEYS / 8][4];
            dot_rows<T, D>(s, q_tile, row0, current);
            if (!queries.see_all(k0, FORWARD_KEYS)) queries.mask(s, k0, -__int_as_float(0x7f800000));
            soften<D>(s, max, sum, acc, factor);
            add_weighted_rows<T, D>(acc, s, current + FORWARD_KEYS * Tile<D>::ROW_BYTES);
        }
        const u32 other = current;
        current = next;
        next = other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float total = quad_sum(sum[i][half]);
            const i64 query = queries.at[i][half];
            inverse[half] = 1.0f / total;
            if (lane % 4 == 0 && query < shape.seq) {
                lse[(block.row * shape.heads + block.head) * shape.seq + query] =
                    (max[i][half] * factor + log2f(total)) * LN2;
            }
        }
        leave<T, D>(shared_tiles, row0 + 16 * i, acc[i], inverse[0], inverse[1]);
    }
    T* to = out + (block.row * shape.seq + queries.begin) * shape.out_stride() + block.head * hd;
    Tile<D>::template store<32>(shared_tiles, row0, to, shape.out_stride(), shape.seq - queries.begin, hd);
}

// sums[row, head, query] = Σ dout · out; 16 threads each. Grid-stride over tokens · heads.
template <typename T>
__device__ __forceinline__ void row_sums(
    const T* out, const T* dout, float* sums, const int* done, i64 tokens, const Shape& shape
) {
    const int c = threadIdx.x % 16 * 8;
    const i64 items = tokens * shape.heads;
    // Whole warps go round together, for the shuffles.
    for (i64 base = (done ? *done : 0) * shape.heads + global_thread() / 32 * 2; base < items; base += global_threads() / 16) {
        const i64 item = base + threadIdx.x % 32 / 16;
        float sum = 0.0f;
        if (item < items && c < shape.head_dim) {
            float x[8], y[8];
            load8(out + item * shape.head_dim + c, x);
            load8(dout + item * shape.head_dim + c, y);
#pragma unroll
            for (int i = 0; i < 8; i++) sum += x[i] * y[i];
        }
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        const i64 token = item / shape.heads, head = item % shape.heads;
        if (item < items && c == 0) sums[(token / shape.seq * shape.heads + head) * shape.seq + token % shape.seq] = sum;
    }
}

// The gradient of the queries. Keys and values have two tiles each, one of them under way.
template <typename T, int D>
__device__ __forceinline__ void query_grad(
    const T* qkv, const int* document_start, const float* lse, const T* dout, const float* sums, T* dqkv,
    const int* done, const Shape& shape, float scale
) {
    constexpr int THREADS = 32 * QUERY_WARPS, STAGE = 2 * QUERY_GRAD_KEYS * Tile<D>::ROW_BYTES;
    extern __shared__ __align__(256) char shared_tiles[];
    const u32 q_tile = shared_address(shared_tiles);
    const u32 dout_tile = q_tile + QUERIES * Tile<D>::ROW_BYTES;
    const u32 stages = dout_tile + QUERIES * Tile<D>::ROW_BYTES;
    const QueryBlock<T> block(shape, qkv, document_start, QUERY_GRAD_KEYS);
    if (is_done(done, shape, block.row, block.q0 + QUERIES)) return;
    const int hd = (int)shape.head_dim, row0 = threadIdx.x / 32 * 32;
    const WarpQueries queries(shape, block.starts, (int)block.q0 + row0);
    const float factor = scale * LOG2E;

    const T* dout_rows = dout + (block.row * shape.seq + block.q0) * shape.out_stride() + block.head * hd;
    Tile<D>::template load<QUERIES, THREADS>(q_tile, block.queries, block.stride, block.left, hd);
    Tile<D>::template load<QUERIES, THREADS>(dout_tile, dout_rows, shape.out_stride(), block.left, hd);
    const auto load_stage = [&](u32 tile, int k) { block.template load_stage<D, QUERY_GRAD_KEYS>(tile, shape, k); };
    int k0 = block.first_key;
    u32 current = stages, next = stages + STAGE;
    load_stage(current, k0);

    float norm[2][2], minus[2][2], acc[2][D / 8][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const i64 query = queries.at[i][half];
            const i64 at = (block.row * shape.heads + block.head) * shape.seq + query;
            norm[i][half] = query < shape.seq ? lse[at] * LOG2E : 0.0f;
            minus[i][half] = query < shape.seq ? sums[at] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[i][j][e] = 0.0f;
    }
    for (; k0 <= block.last_key; k0 += QUERY_GRAD_KEYS) {
        wait_for_copies();
        // This stage is there, and nobody reads the other one any more.
        __syncthreads();
        if (k0 + QUERY_GRAD_KEYS <= block.last_key) load_stage(next, k0 + QUERY_GRAD_KEYS);
        if (queries.see_any(k0, QUERY_GRAD_KEYS)) {
            float p[2][QUERY_GRAD_KEYS / 8][4], dp[2][QUERY_GRAD_KEYS / 8][4];
            dot_rows<T, D>(p, q_tile, row0, current);
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < QUERY_GRAD_KEYS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) p[i][j][e] = fast_exp2(p[i][j][e] * factor - norm[i][e / 2]);
            if (!queries.see_all(k0, QUERY_GRAD_KEYS)) queries.mask(p, k0, 0.0f);
            dot_rows<T, D>(dp, dout_tile, row0, current + QUERY_GRAD_KEYS * Tile<D>::ROW_BYTES);
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < QUERY_GRAD_KEYS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) p[i][j][e] *= dp[i][j][e] - minus[i][e / 2];
            add_weighted_rows<T, D>(acc, p, current);
        }
        const u32 other = current;
        current = next;
        next = other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) leave<T, D>(shared_tiles, row0 + 16 * i, acc[i], scale, scale);
    T* to = dqkv + (block.row * shape.seq + queries.begin) * block.stride + block.head * hd;
    Tile<D>::template store<32>(shared_tiles, row0, to, block.stride, shape.seq - queries.begin, hd);
}

// ---- Keys ----

// What a block reads of a tile of queries, beside the tiles of q and dout.
struct QueryNumbers {
    float lse[KEY_GRAD_QUERIES], sums[KEY_GRAD_QUERIES];
    int starts[KEY_GRAD_QUERIES];
};

// Zero for each query (column) that does not see this thread's keys, which are `key` and `key` + 8.
__device__ __forceinline__ void mask_queries(
    float (&p)[1][KEY_GRAD_QUERIES / 8][4], const int* starts, int key, int q0, int window
) {
#pragma unroll
    for (int j = 0; j < KEY_GRAD_QUERIES / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int n = 8 * j + threadIdx.x % 4 * 2 + e % 2, query = q0 + n, k = key + e / 2 * 8;
            const bool outside = window > 0 && k < query - window + 1;
            if (k > query || k < starts[n] || outside) p[0][j][e] = 0.0f;
        }
}

// The gradients of keys and values, over the query heads of their group in order. Grid: (rows · kv_heads, key
// tiles); the first keys, which most queries see, come first. `two`: whether there is shared memory for a second
// stage of queries, to be filled while the first is in use.
template <typename T, int D>
__device__ __forceinline__ void key_value_grad(
    const T* qkv, const int* document_start, const float* lse, const T* dout, const float* sums, T* dqkv,
    const int* done, const Shape& shape, float scale, bool two
) {
    constexpr int THREADS = 32 * KEY_WARPS, ROWS = KEY_GRAD_QUERIES, TILE = ROWS * Tile<D>::ROW_BYTES;
    constexpr int STAGE = 2 * TILE + (int)sizeof(QueryNumbers);
    static_assert(!Tile<D>::TURNED || STAGE % Tile<D>::ROW_BYTES == 0, "turned tiles start at a multiple of a row");
    extern __shared__ __align__(256) char shared_tiles[];
    const u32 k_tile = shared_address(shared_tiles);
    const u32 v_tile = k_tile + KEYS * Tile<D>::ROW_BYTES;
    const int stages = 2 * KEYS * Tile<D>::ROW_BYTES;
    const int hd = (int)shape.head_dim, seq = (int)shape.seq, window = (int)shape.window;
    const i64 row = blockIdx.x / shape.kv_heads, kv_head = blockIdx.x % shape.kv_heads;
    const int k0 = (int)blockIdx.y * KEYS, last_key = k0 + KEYS < seq ? k0 + KEYS - 1 : seq - 1;
    const i64 stride = shape.qkv_stride(), out_stride = shape.out_stride();
    const int group = (int)(shape.heads / shape.kv_heads);
    const T* tokens = qkv + row * shape.seq * stride;
    const int* starts = document_start ? document_start + row * shape.seq : document_start;
    if (is_done(done, shape, row, k0 + KEYS)) return;

    Tile<D>::template load<KEYS, THREADS>(k_tile, tokens + shape.key_offset(kv_head) + k0 * stride, stride, seq - k0, hd);
    Tile<D>::template load<KEYS, THREADS>(v_tile, tokens + shape.value_offset(kv_head) + k0 * stride, stride, seq - k0, hd);

    // Tiles of queries from k0 on, up to the first whose queries all begin after these keys.
    int tiles = 0;
    for (int base = 0;; base += THREADS) {
        const i64 query = k0 + (i64)(base + threadIdx.x) * ROWS;
        const int count = __syncthreads_count(query < seq && shape.first_key(starts, query) <= last_key);
        tiles += count;
        if (count < THREADS) break;
    }

    // Starts copying the queries of one tile and head.
    const auto load_stage = [&](int stage, i64 head, int q0) {
        const u32 at = k_tile + stages + stage * STAGE;
        const T* q_rows = tokens + q0 * stride + head * hd;
        const T* dout_rows = dout + (row * shape.seq + q0) * out_stride + head * hd;
        Tile<D>::template load<ROWS, THREADS>(at, q_rows, stride, seq - q0, hd);
        Tile<D>::template load<ROWS, THREADS>(at + TILE, dout_rows, out_stride, seq - q0, hd);
        for (int item = threadIdx.x; item < 3 * ROWS; item += THREADS) {
            const int n = item % ROWS, which = item / ROWS;
            const bool there = q0 + n < seq && (which < 2 || starts);
            const i64 query = (row * shape.heads + head) * shape.seq + q0 + n;
            const void* from = which == 0 ? (const void*)(lse + query)
                : which == 1 ? (const void*)(sums + query) : (const void*)(starts + q0 + n);
            copy4(at + 2 * TILE + item * 4, there ? from : (const void*)lse, there);
        }
    };

    const int row0 = threadIdx.x / 32 * 16, lane = threadIdx.x % 32, warp_key = k0 + row0;
    const float factor = scale * LOG2E;
    float dk[1][D / 8][4], dv[1][D / 8][4];
#pragma unroll
    for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) dk[0][j][e] = dv[0][j][e] = 0.0f;

    i64 head = kv_head * group;
    int tile = 0, stage = 0;
    const int total = tiles * group;
    if (total > 0) load_stage(0, head, k0);
    for (int step = 0; step < total; step++) {
        const int q0 = k0 + tile * ROWS;
        const char* numbers_at = shared_tiles + stages + stage * STAGE + 2 * TILE;
        const QueryNumbers& numbers = *(const QueryNumbers*)numbers_at;
        const u32 q_tile = k_tile + stages + stage * STAGE, dout_tile = q_tile + TILE;
        if (++tile == tiles) {
            tile = 0;
            head++;
        }
        wait_for_copies();
        // This stage is there, and nobody reads the other one any more.
        __syncthreads();
        if (two && step + 1 < total) load_stage(1 - stage, head, k0 + tile * ROWS);

        const int last = q0 + ROWS <= seq ? ROWS - 1 : seq - 1 - q0;
        const int first = numbers.starts[0], last_first = numbers.starts[last];
        const int window_first = window > 0 ? q0 - window + 1 : 0, window_last = window > 0 ? q0 + last - window + 1 : 0;
        if (warp_key <= q0 + last && warp_key + 15 >= first && warp_key + 15 >= window_first) {
            float p[1][ROWS / 8][4], dp[1][ROWS / 8][4];
            dot_rows<T, D>(p, k_tile, row0, q_tile);
            dot_rows<T, D>(dp, v_tile, row0, dout_tile);
#pragma unroll
            for (int j = 0; j < ROWS / 8; j++) {
                const float2 norm = *(const float2*)(numbers.lse + 8 * j + lane % 4 * 2);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    p[0][j][e] = fast_exp2(p[0][j][e] * factor - (e % 2 ? norm.y : norm.x) * LOG2E);
                }
            }
            if (warp_key + 15 > q0 || warp_key < last_first || warp_key < window_last) {
                mask_queries(p, numbers.starts, warp_key + lane / 4, q0, window);
            }
#pragma unroll
            for (int j = 0; j < ROWS / 8; j++) {
                const float2 minus = *(const float2*)(numbers.sums + 8 * j + lane % 4 * 2);
#pragma unroll
                for (int e = 0; e < 4; e++) dp[0][j][e] = p[0][j][e] * (dp[0][j][e] - (e % 2 ? minus.y : minus.x));
            }
            add_weighted_rows<T, D>(dv, p, dout_tile);
            add_weighted_rows<T, D>(dk, dp, q_tile);
        }
        if (two) {
            stage = 1 - stage;
        } else if (step + 1 < total) {
            __syncthreads();
            load_stage(0, head, k0 + tile * ROWS);
        }
    }
    // A block without queries has not waited for its own keys yet, which would land on the results.
    wait_for_copies();
    __syncthreads();
    T* to = dqkv + (row * shape.seq + warp_key) * stride;
    leave<T, D>(shared_tiles, row0, dk[0], scale, scale);
    Tile<D>::template store<16>(shared_tiles, row0, to + shape.key_offset(kv_head), stride, seq - warp_key, hd);
    leave<T, D>(shared_tiles + KEYS * Tile<D>::ROW_BYTES, row0, dv[0], 1.0f, 1.0f);
    Tile<D>::template store<16>(
        shared_tiles + KEYS * Tile<D>::ROW_BYTES, row0, to + shape.value_offset(kv_head), stride, seq - warp_key, hd
    );
}

// `flash.rs` knows the sizes of tiles and blocks.
#define FLASH(T, t, D) \
    extern "C" __global__ void __launch_bounds__(32 * QUERY_WARPS, 2) flash_##t##_##D( \
        const T* qkv, const int* document_start, T* out, float* lse, const int* done, i64 seq, i64 heads, i64 kv_heads, \
        i64 head_dim, i64 window, float scale \
    ) { \
        const Shape shape = {seq, heads, kv_heads, head_dim, window}; \
        forward<T, D>(qkv, document_start, out, lse, done, shape, scale); \
    } \
    extern "C" __global__ void __launch_bounds__(256) flash_row_sums_##t##_##D( \
        const T* out, const T* dout, float* sums, const int* done, i64 tokens, i64 seq, i64 heads, i64 head_dim \
    ) { \
        const Shape shape = {seq, heads, heads, head_dim, 0}; \
        row_sums(out, dout, sums, done, tokens, shape); \
    } \
    extern "C" __global__ void __launch_bounds__(32 * QUERY_WARPS, 2) flash_query_grad_##t##_##D( \
        const T* qkv, const int* document_start, const float* lse, const T* dout, const float* sums, T* dqkv, \
        const int* done, i64 seq, i64 heads, i64 kv_heads, i64 head_dim, i64 window, float scale \
    ) { \
        const Shape shape = {seq, heads, kv_heads, head_dim, window}; \
        query_grad<T, D>(qkv, document_start, lse, dout, sums, dqkv, done, shape, scale); \
    } \
    extern "C" __global__ void __launch_bounds__(32 * KEY_WARPS, 1) flash_key_value_grad_##t##_##D( \
        const T* qkv, const int* document_start, const float* lse, const T* dout, const float* sums, T* dqkv, \
        const int* done, i64 seq, i64 heads, i64 kv_heads, i64 head_dim, i64 window, float scale, i64 two \
    ) { \
        const Shape shape = {seq, heads, kv_heads, head_dim, window}; \
        key_value_grad<T, D>(qkv, document_start, lse, dout, sums, dqkv, done, shape, scale, two); \
    }
#define FLASH_EXPANDED(T, t, D) FLASH(T, t, D)

FLASH_EXPANDED(FLASH_TYPE, FLASH_TYPE, FLASH_HEAD_DIM)
