// Products on the tensor cores: `mma.sync` m16n8k16 with 16-bit operands and f32 sums, operands in tiles of shared
// memory. Written for sm_80 and later.

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

// 16 bytes to shared memory, or as many zeros.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy4(u32 to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0) : "memory");
}

// Waits for this thread's copies.
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Four 8×8 matrices; lane 8i + r has the address of row r of the i-th. A thread gets two neighbours of row
// lane / 4 of each.
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <typename T> struct Tensor;

template <> struct Tensor<bf16> {
    // c += a · b
    static __device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ u32 pair(float low, float high) {
        u32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
};

template <> struct Tensor<f16> {
    static __device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ u32 pair(float low, float high) {
        u32 both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
};

// ---- Tiles ----

// Rows of D elements in shared memory, 16-byte chunks placed so that eight rows' chunks of one column fall into
// different banks: turned about by the row where rows are a multiple of 128 bytes, else one chunk of padding.
template <int D> struct Tile {
    static constexpr bool TURNED = D % 64 == 0;
    static constexpr int ROW_BYTES = (TURNED ? D : D + 8) * 2;

    static __device__ __forceinline__ u32 at(int row, int chunk) {
        return row * ROW_BYTES + ((TURNED ? chunk ^ (row & 7) : chunk) << 4);
    }

    // Starts copying ROWS rows of a head; zeros beyond `rows` and `head_dim`.
    template <int ROWS, int THREADS, typename T>
    static __device__ __forceinline__ void load(u32 tile, const T* from, i64 stride, i64 rows, int head_dim) {
        constexpr int CHUNKS = D / 8;
#pragma unroll
        for (int first = 0; first < ROWS * CHUNKS; first += THREADS) {
            const int item = first + threadIdx.x;
            if (ROWS * CHUNKS % THREADS != 0 && item >= ROWS * CHUNKS) break;
            const int row = item / CHUNKS, chunk = item % CHUNKS;
            const bool there = row < rows && chunk * 8 < head_dim;
            copy16(tile + at(row, chunk), there ? from + row * stride + chunk * 8 : from, there);
        }
    }

    // A warp's ROWS rows to memory, as far as `rows` and `head_dim` go.
    template <int ROWS, typename T>
    static __device__ __forceinline__ void store(const char* tile, int row0, T* to, i64 stride, i64 rows, int head_dim) {
        constexpr int CHUNKS = D / 8;
        __syncwarp();
        for (int item = threadIdx.x % 32; item < ROWS * CHUNKS; item += 32) {
            const int row = item / CHUNKS, chunk = item % CHUNKS;
            if (row < rows && chunk * 8 < head_dim) {
                *(uint4*)(to + row * stride + chunk * 8) = *(const uint4*)(tile + at(row0 + row, chunk));
            }
        }
    }
};

// Where a lane reads 16×16 operands: `first` is its address for rows 0 … and chunks 0 and 1.
template <int D> struct Operand {
    u32 first;

    // Of a left operand, or of a right one stored by the summed index.
    static __device__ __forceinline__ Operand rows(u32 tile) {
        const int lane = threadIdx.x % 32;
        return {tile + Tile<D>::at(lane % 16, lane / 16)};
    }

    // Of a right operand stored by its own columns.
    static __device__ __forceinline__ Operand columns(u32 tile) {
        const int lane = threadIdx.x % 32;
        return {tile + Tile<D>::at(lane % 8 + lane / 16 * 8, lane / 8 % 2)};
    }

    // `row` is a multiple of 8, `chunk` of 2, and tiles start at a multiple of a turned row's bytes: so the chunk
    // only flips bits.
    __device__ __forceinline__ u32 at(int row, int chunk) const {
        return (Tile<D>::TURNED ? first ^ (chunk << 4) : first + (chunk << 4)) + row * Tile<D>::ROW_BYTES;
    }
};

// c[i][j] = Σ over D of a's rows `row` + 16i … and b's rows 8j ….
template <typename T, int D, int M, int N>
__device__ __forceinline__ void dot_rows(float (&c)[M][N][4], u32 a, int row, u32 b) {
    const auto left_at = Operand<D>::rows(a + row * Tile<D>::ROW_BYTES), right_at = Operand<D>::columns(b);
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[i][j][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 left[M][4];
#pragma unroll
        for (int i = 0; i < M; i++) load_matrices(left[i], left_at.at(16 * i, 2 * k));
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            u32 right[4];
            load_matrices(right, right_at.at(8 * j, 2 * k));
#pragma unroll
            for (int i = 0; i < M; i++) {
                Tensor<T>::multiply(c[i][j], left[i], right[0], right[1]);
                Tensor<T>::multiply(c[i][j + 1], left[i], right[2], right[3]);
            }
        }
    }
}

// c[i] += weights[i] (rounded to T) · b, whose row 8j … meets the weights' column 8j ….
template <typename T, int D, int M, int N>
__device__ __forceinline__ void add_weighted_rows(float (&c)[M][D / 8][4], const float (&weights)[M][N][4], u32 b) {
    const auto right_at = Operand<D>::rows(b);
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        u32 left[M][4];
#pragma unroll
        for (int i = 0; i < M; i++) {
            left[i][0] = Tensor<T>::pair(weights[i][k][0], weights[i][k][1]);
            left[i][1] = Tensor<T>::pair(weights[i][k][2], weights[i][k][3]);
            left[i][2] = Tensor<T>::pair(weights[i][k + 1][0], weights[i][k + 1][1]);
            left[i][3] = Tensor<T>::pair(weights[i][k + 1][2], weights[i][k + 1][3]);
        }
#pragma unroll
        for (int j = 0; j < D / 8; j += 2) {
            u32 right[4];
            load_transposed(right, right_at.at(8 * k, j));
#pragma unroll
            for (int i = 0; i < M; i++) {
                Tensor<T>::multiply(c[i][j], left[i], right[0], right[1]);
                Tensor<T>::multiply(c[i][j + 1], left[i], right[2], right[3]);
            }
        }
    }
}

// Leaves 16 rows, times a factor for each half of them, in a tile that only this warp still uses.
template <typename T, int D>
__device__ __forceinline__ void leave(char* tile, int row, const float (&c)[D / 8][4], float upper, float lower) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        *(u32*)(tile + Tile<D>::at(row + lane / 4, j) + lane % 4 * 4) =
            Tensor<T>::pair(c[j][0] * upper, c[j][1] * upper);
        *(u32*)(tile + Tile<D>::at(row + lane / 4 + 8, j) + lane % 4 * 4) =
            Tensor<T>::pair(c[j][2] * lower, c[j][3] * lower);
    }
}
