// Packed documents as cuDNN takes them: a length for each, and where each one's elements start.

#define THREADS 1024

// The sum of what the threads before this one have, in a block of THREADS.
__device__ __forceinline__ int before(int count) {
    __shared__ int warps[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += other;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    int earlier = 0;
    for (int i = 0; i < warp; i++) earlier += warps[i];
    return earlier + sum - count;
}

// One block. The first `cap` documents of all rows, in order: `lengths` (zero where there are fewer), and, with
// one element more, which is the end, their first tokens' elements in q ‖ k ‖ v, in the output, in k or v alone and
// in lse. `done` is the first token of the documents beyond the cap, or the number of tokens. `first` holds cap + 1
// tokens meanwhile.
extern "C" __global__ void __launch_bounds__(THREADS) document_table(
    const int* document_start, int* first, int* lengths, int* qkv_at, int* out_at, int* kv_at, int* lse_at, int* done,
    i64 rows, i64 seq, i64 heads, i64 cap, i64 qkv_cols, i64 out_cols, i64 kv_cols
) {
    const i64 tokens = rows * seq, each = (tokens + THREADS - 1) / THREADS;
    const i64 begin = threadIdx.x * each, end = begin + each < tokens ? begin + each : tokens;
    const auto starts = [&](i64 token) {
        return token % seq == 0 || document_start[token] != document_start[token - 1];
    };
    for (i64 n = threadIdx.x; n <= cap; n += THREADS) first[n] = (int)tokens;
    int count = 0;
    for (i64 token = begin; token < end; token++) count += starts(token);
    // Its barrier also ends the filling above.
    i64 number = before(count);
    for (i64 token = begin; token < end; token++) {
        if (!starts(token)) continue;
        if (number <= cap) first[number] = (int)token;
        number++;
    }
    __syncthreads();
    for (i64 n = threadIdx.x; n <= cap; n += THREADS) {
        const i64 token = first[n];
        if (n < cap) lengths[n] = first[n + 1] - (int)token;
        qkv_at[n] = (int)(token * qkv_cols);
        out_at[n] = (int)(token * out_cols);
        kv_at[n] = (int)(token * kv_cols);
        lse_at[n] = (int)(token / seq * heads * seq + token % seq);
    }
    if (threadIdx.x == 0) *done = first[cap];
}

// Two tensors of `rows` rows of `width` elements of 16 bytes, from one stride between rows to another.
extern "C" __global__ void copy_two(
    const uint4* a, const uint4* b, i64 from_stride, uint4* to_a, uint4* to_b, i64 to_stride, i64 width, i64 rows
) {
    for (i64 item = global_thread(); item < 2 * rows * width; item += global_threads()) {
        const i64 column = item % width, row = item / width % rows;
        const bool second = item >= rows * width;
        (second ? to_b : to_a)[row * to_stride + column] = (second ? b : a)[row * from_stride + column];
    }
}
