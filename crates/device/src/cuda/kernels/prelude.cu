// What every kernel file starts with. NVRTC runs without headers, so the 16-bit floats are our own: plain
// bits in memory, f32 in registers.
//
// Kernels take pointers, i64, float and double arguments only: the host marshals every argument into eight bytes,
// and with one integer type there is no width to get wrong.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct bf16 {
    u16 bits;
};

struct f16 {
    u16 bits;
};

__device__ __forceinline__ float to_f32(float x) {
    return x;
}

__device__ __forceinline__ float to_f32(bf16 x) {
    return __uint_as_float((u32)x.bits << 16);
}

__device__ __forceinline__ float to_f32(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

template <typename T> struct Convert;

template <> struct Convert<float> {
    static __device__ __forceinline__ float from(float x) {
        return x;
    }
};

template <> struct Convert<bf16> {
    static __device__ __forceinline__ bf16 from(float x) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};

template <> struct Convert<f16> {
    static __device__ __forceinline__ f16 from(float x) {
        f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};

template <typename T> __device__ __forceinline__ T from_f32(float x) {
    return Convert<T>::from(x);
}

// The value as it would be after a trip through memory.
template <typename T> __device__ __forceinline__ float rounded(float x) {
    return to_f32(from_f32<T>(x));
}

// Eight elements at a time: one 16-byte access for 16-bit types, two for f32. The address must be 16-byte
// aligned; the host says whether it is.
template <typename T> __device__ __forceinline__ void load8(const T* p, float* out) {
    union {
        uint4 raw[sizeof(T) / 2];
        T values[8];
    } pack;
#pragma unroll
    for (int i = 0; i < (int)sizeof(T) / 2; i++) pack.raw[i] = reinterpret_cast<const uint4*>(p)[i];
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = to_f32(pack.values[i]);
}

template <typename T> __device__ __forceinline__ void store8(T* p, const float* in) {
    union {
        uint4 raw[sizeof(T) / 2];
        T values[8];
    } pack;
#pragma unroll
    for (int i = 0; i < 8; i++) pack.values[i] = from_f32<T>(in[i]);
#pragma unroll
    for (int i = 0; i < (int)sizeof(T) / 2; i++) reinterpret_cast<uint4*>(p)[i] = pack.raw[i];
}

template <int BYTES> struct Raw;
template <> struct Raw<8> {
    typedef uint2 type;
};
template <> struct Raw<16> {
    typedef uint4 type;
};

// Four elements at a time: one access of 16 bytes for f32, of 8 for 16-bit types.
template <typename T> __device__ __forceinline__ void load4(const T* p, float* out) {
    union {
        typename Raw<4 * sizeof(T)>::type raw;
        T values[4];
    } pack;
    pack.raw = *reinterpret_cast<const typename Raw<4 * sizeof(T)>::type*>(p);
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = to_f32(pack.values[i]);
}

template <typename T> __device__ __forceinline__ void store4(T* p, const float* in) {
    union {
        typename Raw<4 * sizeof(T)>::type raw;
        T values[4];
    } pack;
#pragma unroll
    for (int i = 0; i < 4; i++) pack.values[i] = from_f32<T>(in[i]);
    *reinterpret_cast<typename Raw<4 * sizeof(T)>::type*>(p) = pack.raw;
}

// Eight elements as they lie in memory: for loads that are to be in flight long before their values are used.
template <typename T> struct Eight {
    uint4 raw[sizeof(T) / 2];

    __device__ __forceinline__ void load(const T* p) {
#pragma unroll
        for (int i = 0; i < (int)sizeof(T) / 2; i++) raw[i] = reinterpret_cast<const uint4*>(p)[i];
    }

    __device__ __forceinline__ void values(float* out) const {
        load8(reinterpret_cast<const T*>(raw), out);
    }
};

// The hardware's quick power of two, a few units in f32's last place off: for values that are rounded to 16 bits at
// once, where the exact one would cost more than the memory traffic.
__device__ __forceinline__ float quick_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#define LOG2_E 1.44269504f

template <typename T> __device__ __forceinline__ float exp_for(float x) {
    return sizeof(T) == 2 ? quick_exp2(x * LOG2_E) : expf(x);
}

template <typename T> __device__ __forceinline__ float reciprocal_for(float x) {
    if (sizeof(T) != 2) return 1.0f / x;
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// splitmix64's answer for the element.
__device__ __forceinline__ u64 random_word(u64 key, u64 element) {
    u64 z = key + element * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// The upper half of it.
__device__ __forceinline__ u32 random_bits(u64 key, u64 element) {
    return (u32)(random_word(key, element) >> 32);
}

__device__ __forceinline__ i64 global_thread() {
    return (i64)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ i64 global_threads() {
    return (i64)gridDim.x * blockDim.x;
}

template <typename V> __device__ __forceinline__ V warp_sum(V x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// The sum over the block, known to every thread of it. Every thread must call it; blocks are whole warps.
// The order of additions depends on the block's size only.
template <typename V> __device__ __forceinline__ V block_sum(V x) {
    __shared__ V warps[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = blockDim.x / 32;
    x = warp_sum(x);
    // Whoever still reads the last call's values does so before this.
    __syncthreads();
    if (lane == 0) warps[warp] = x;
    __syncthreads();
    x = lane < count ? warps[lane] : (V)0;
    return warp_sum(x);
}
