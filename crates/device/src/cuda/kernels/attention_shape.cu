// Sizes of an attention, and which keys a query sees: what all attention kernels start with.

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define LOWEST (-1e30f)

struct Shape {
    i64 seq, heads, kv_heads, head_dim, window;
    // Elements from one token to the next in q ‖ k ‖ v and in the output.
    __device__ i64 qkv_stride() const {
        return (heads + 2 * kv_heads) * head_dim;
    }
    __device__ i64 out_stride() const {
        return heads * head_dim;
    }
    __device__ i64 kv_head(i64 head) const {
        return head / (heads / kv_heads);
    }
    __device__ i64 key_offset(i64 kv_head) const {
        return (heads + kv_head) * head_dim;
    }
    __device__ i64 value_offset(i64 kv_head) const {
        return (heads + kv_heads + kv_head) * head_dim;
    }
    // The first key that a query sees. `starts` is that of the row, or null.
    __device__ int first_key(const int* starts, i64 query) const {
        i64 first = starts ? starts[query] : 0;
        if (window > 0 && first < query - window + 1) first = query - window + 1;
        return (int)(first > query ? query : first);
    }
};
