// Plain attention, forward and backward, in double precision: one block per query, one block per key.
// Slow and obvious; what the fused kernels are compared with. The backward takes out and lse as the forward
// stored them, as the fused one does: what their rounding does to small gradients is not the backward's error.

#ifdef HALF
__device__ double load(const unsigned short* p) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(*p));
    return f;
}
#else
__device__ double load(const unsigned short* p) { return __uint_as_float((unsigned)*p << 16); }
#endif

// The dot product of two vectors of d elements, by one warp.
__device__ double dot(const unsigned short* a, const unsigned short* b, int d) {
    double sum = 0;
    for (int c = threadIdx.x % 32; c < d; c += 32) sum += load(a + c) * load(b + c);
    for (int mask = 16; mask; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
    return sum;
}

__device__ double block_sum(double x) {
    __shared__ double parts[32];
    for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) x += parts[w];
    return x;
}

__device__ double block_max(double x) {
    __shared__ double parts[32];
    for (int mask = 16; mask; mask >>= 1) x = fmax(x, __shfl_xor_sync(~0u, x, mask));
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
    for (int w = 1; w < blockDim.x / 32; ++w) x = fmax(x, parts[w]);
    return x;
}

// out and lse of one query. Grid (seq, heads, rows), 128 threads, seq doubles of shared memory.
extern "C" __global__ void forward(const unsigned short* qkv, double* out, double* lse, int seq, int heads, int kv_heads,
                                   int d, double scale) {
    extern __shared__ double p[];
    int i = blockIdx.x, h = blockIdx.y, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    long cols = (heads + 2 * kv_heads) * (long)d, token = blockIdx.z * (long)seq;
    int kv = h / (heads / kv_heads);
    const unsigned short* q = qkv + (token + i) * cols + h * d;
    const unsigned short* k = qkv + token * cols + (heads + kv) * d;
    const unsigned short* v = k + kv_heads * d;

    for (int j = warp; j <= i; j += warps) {
        double s = dot(q, k + j * cols, d) * scale;
        if (threadIdx.x % 32 == 0) p[j] = s;
    }
    __syncthreads();
    double max = -1e300;
    for (int j = threadIdx.x; j <= i; j += blockDim.x) max = fmax(max, p[j]);
    max = block_max(max);
    double sum = 0;
    for (int j = threadIdx.x; j <= i; j += blockDim.x) sum += exp(p[j] - max);
    sum = block_sum(sum);
    if (threadIdx.x == 0) lse[(blockIdx.z * (long)heads + h) * seq + i] = max + log(sum);
    if (threadIdx.x < d) {
        double o = 0;
        for (int j = 0; j <= i; ++j) o += exp(p[j] - max) * load(v + j * cols + threadIdx.x);
        out[((token + i) * heads + h) * d + threadIdx.x] = o / sum;
    }
}

// Row sum and dq of one query, from the stored out and lse. Grid and shared memory as for forward.
extern "C" __global__ void query(const unsigned short* qkv, const unsigned short* out, const float* lse,
                                 const unsigned short* dout, double* row_sums, double* dq, int seq, int heads,
                                 int kv_heads, int d, double scale) {
    extern __shared__ double ds[];
    int i = blockIdx.x, h = blockIdx.y, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    long cols = (heads + 2 * kv_heads) * (long)d, token = blockIdx.z * (long)seq;
    int kv = h / (heads / kv_heads);
    const unsigned short* q = qkv + (token + i) * cols + h * d;
    const unsigned short* k = qkv + token * cols + (heads + kv) * d;
    const unsigned short* v = k + kv_heads * d;
    const unsigned short* g = dout + ((token + i) * heads + h) * d;
    long row = (blockIdx.z * (long)heads + h) * seq + i;

    double D = dot(out + ((token + i) * heads + h) * d, g, d);
    if (threadIdx.x == 0) row_sums[row] = D;
    for (int j = warp; j <= i; j += warps) {
        double s = dot(q, k + j * cols, d) * scale;
        double dp = dot(g, v + j * cols, d);
        if (threadIdx.x % 32 == 0) ds[j] = exp(s - lse[row]) * (dp - D) * scale;
    }
    __syncthreads();
    if (threadIdx.x < d) {
        double x = 0;
        for (int j = 0; j <= i; ++j) x += ds[j] * load(k + j * cols + threadIdx.x);
        dq[((token + i) * heads + h) * d + threadIdx.x] = x;
    }
}

// dk and dv of one key. Grid (seq, kv_heads, rows), 128 threads, 2 * seq doubles of shared memory.
extern "C" __global__ void key(const unsigned short* qkv, const float* lse, const unsigned short* dout,
                               const double* row_sums, double* dk, double* dv, int seq, int heads, int kv_heads, int d,
                               double scale) {
    extern __shared__ double p[];
    double* ds = p + seq;
    int j = blockIdx.x, kv = blockIdx.y, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int group = heads / kv_heads;
    long cols = (heads + 2 * kv_heads) * (long)d, token = blockIdx.z * (long)seq;
    const unsigned short* k = qkv + (token + j) * cols + (heads + kv) * d;
    const unsigned short* v = k + kv_heads * d;
    double sum_k = 0, sum_v = 0;
    for (int h = kv * group; h < (kv + 1) * group; ++h) {
        const unsigned short* q = qkv + token * cols + h * d;
        const unsigned short* g = dout + (token * heads + h) * d;
        long row = (blockIdx.z * (long)heads + h) * seq;
        __syncthreads();
        for (int i = j + warp; i < seq; i += warps) {
            double s = dot(q + i * cols, k, d) * scale;
            double dp = dot(g + (long)i * heads * d, v, d);
            if (threadIdx.x % 32 == 0) {
                double e = exp(s - lse[row + i]);
                p[i] = e;
                ds[i] = e * (dp - row_sums[row + i]) * scale;
            }
        }
        __syncthreads();
        if (threadIdx.x < d) {
            for (int i = j; i < seq; ++i) {
                sum_v += p[i] * load(g + (long)i * heads * d + threadIdx.x);
                sum_k += ds[i] * load(q + i * cols + threadIdx.x);
            }
        }
    }
    if (threadIdx.x < d) {
        long at = ((token + j) * kv_heads + kv) * d + threadIdx.x;
        dk[at] = sum_k;
        dv[at] = sum_v;
    }
}
