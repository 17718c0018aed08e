// What happens to queries, keys and values on their way into attention: rotation, normalisation, the cache, and the
// absorbed weights of MLA.

#include "paged.cuh"

// Rotates pair `i` of a head; `angles` holds dim / 2 cosines, then as many sines. INTERLEAVED: pairs are neighbours.
template <bool INTERLEAVED, class From, class To>
__device__ __forceinline__ void rotate_pair(const float *angles, uint32_t dim, uint32_t i, const From *from, To *to) {
    const uint32_t one = INTERLEAVED ? 2 * i : i, two = INTERLEAVED ? 2 * i + 1 : i + dim / 2;
    float a = widen(from[one]), b = widen(from[two]);
    rotate(angles[i], angles[dim / 2 + i], a, b);
    to[one] = narrow<To>(a), to[two] = narrow<To>(b);
}

struct MlaArgs {
    // [rows, heads * (nope + rope)] and [rows, kv_lora + rope], before rotation and norm.
    const void *q;
    const void *kv;
    const float *norm;
    // [positions, rope]: cosines, then sines.
    const float *angles;
    const RowRef *rows;
    void *cache;
    // [rows, heads, kv_lora + rope].
    float *queries;
    // [heads * (nope + v), kv_lora].
    const void *kv_b;
    uint32_t first_row;
    uint32_t count;
    uint32_t heads;
    uint32_t kv_lora;
    uint32_t nope;
    uint32_t rope;
    uint32_t v;
    float eps;
};

// Writes each row's normalised latent and rotated key at its slot. One block a row.
template <class T> __device__ void mla_append(const MlaArgs &a) {
    __shared__ float scratch[WARPS];
    const RowRef &row = a.rows[blockIdx.x];
    const uint32_t width = a.kv_lora + a.rope;
    const T *kv = static_cast<const T *>(a.kv) + size_t(blockIdx.x) * width;
    T *to = static_cast<T *>(a.cache) + size_t(row.slot) * width;
    float squares = 0.0f;
    for (uint32_t i = threadIdx.x; i < a.kv_lora; i += THREADS) {
        const float v = widen(kv[i]);
        squares = fmaf(v, v, squares);
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / float(a.kv_lora) + a.eps);
    for (uint32_t i = threadIdx.x; i < a.kv_lora; i += THREADS) to[i] = narrow<T>(widen(kv[i]) * scale * a.norm[i]);
    const float *angles = a.angles + size_t(row.position) * a.rope;
    for (uint32_t i = threadIdx.x; i < a.rope / 2; i += THREADS)
        rotate_pair<true>(angles, a.rope, i, kv + a.kv_lora, to + a.kv_lora);
}

extern "C" __global__ void __launch_bounds__(THREADS) mla_append_f32(const MlaArgs a) { mla_append<float>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) mla_append_bf16(const MlaArgs a) { mla_append<bf16>(a); }

constexpr uint32_t ABSORB_ROWS = 4;
constexpr uint32_t ABSORB_THREADS = 128;

// queries = [q_nope W_UK | rotated q_pe] of one head (blockIdx.x) and up to ABSORB_ROWS rows; a thread owns columns and
// takes the products in the order of the head's numbers.
template <class T, class W> __device__ void mla_absorb(const MlaArgs &a) {
    float *nope = static_cast<float *>(dynamic_shared());
    const uint32_t head = blockIdx.x, first = a.first_row + blockIdx.y * ABSORB_ROWS;
    const uint32_t rows = min(a.count - blockIdx.y * ABSORB_ROWS, ABSORB_ROWS);
    const uint32_t from_width = a.nope + a.rope, to_width = a.kv_lora + a.rope;
    const T *q = static_cast<const T *>(a.q) + (size_t(first) * a.heads + head) * from_width;
    float *to = a.queries + (size_t(blockIdx.y) * ABSORB_ROWS * a.heads + head) * to_width;
    const size_t q_row = size_t(a.heads) * from_width, to_row = size_t(a.heads) * to_width;
    for (uint32_t i = threadIdx.x; i < ABSORB_ROWS * a.nope; i += ABSORB_THREADS) {
        const uint32_t row = i / a.nope;
        nope[i] = row < rows ? widen(q[row * q_row + i % a.nope]) : 0.0f;
    }
    for (uint32_t i = threadIdx.x; i < rows * (a.rope / 2); i += ABSORB_THREADS) {
        const uint32_t row = i / (a.rope / 2);
        const float *angles = a.angles + size_t(a.rows[first + row].position) * a.rope;
        rotate_pair<true>(angles, a.rope, i % (a.rope / 2), q + row * q_row + a.nope, to + row * to_row + a.kv_lora);
    }
    __syncthreads();
    const W *weights = static_cast<const W *>(a.kv_b) + size_t(head) * (a.nope + a.v) * a.kv_lora;
    for (uint32_t column = blockIdx.z * ABSORB_THREADS + threadIdx.x; column < a.kv_lora;
         column += gridDim.z * ABSORB_THREADS) {
        float sums[ABSORB_ROWS] = {};
#pragma unroll 16
        for (uint32_t n = 0; n < a.nope; n++) {
            const float w = widen(weights[size_t(n) * a.kv_lora + column]);
#pragma unroll
            for (int r = 0; r < ABSORB_ROWS; r++) sums[r] = fmaf(nope[r * a.nope + n], w, sums[r]);
        }
        for (uint32_t r = 0; r < rows; r++) to[r * to_row + column] = sums[r];
    }
}

#define MLA_ABSORB(T, W, NAME)                                                                                         \
    extern "C" __global__ void __launch_bounds__(ABSORB_THREADS) mla_absorb_##NAME(const MlaArgs a) {                  \
        mla_absorb<T, W>(a);                                                                                           \
    }
MLA_ABSORB(float, float, f32_f32)
MLA_ABSORB(float, f16, f32_f16)
MLA_ABSORB(float, bf16, f32_bf16)
MLA_ABSORB(bf16, float, bf16_f32)
MLA_ABSORB(bf16, f16, bf16_f16)
MLA_ABSORB(bf16, bf16, bf16_bf16)

struct GqaArgs {
    // [rows, heads * dim], [rows, kv_heads * dim] and the same, before rotation.
    const void *q;
    const void *k;
    const void *v;
    // [positions, dim]: cosines, then sines.
    const float *angles;
    const RowRef *rows;
    void *cache;
    // [rows, heads, dim].
    float *queries;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t dim;
};

// Rotates queries and keys and writes each row's keys and values at its slot. One block a row.
template <class T, bool INTERLEAVED> __device__ void gqa_append(const GqaArgs &a) {
    const RowRef &row = a.rows[blockIdx.x];
    const uint32_t half = a.dim / 2, kv_width = a.kv_heads * a.dim;
    const float *angles = a.angles + size_t(row.position) * a.dim;
    const T *q = static_cast<const T *>(a.q) + size_t(blockIdx.x) * a.heads * a.dim;
    const T *k = static_cast<const T *>(a.k) + size_t(blockIdx.x) * kv_width;
    const T *v = static_cast<const T *>(a.v) + size_t(blockIdx.x) * kv_width;
    float *queries = a.queries + size_t(blockIdx.x) * a.heads * a.dim;
    T *to = static_cast<T *>(a.cache) + size_t(row.slot) * 2 * kv_width;
    for (uint32_t i = threadIdx.x; i < a.heads * half; i += THREADS) {
        const uint32_t at = i / half * a.dim;
        rotate_pair<INTERLEAVED>(angles, a.dim, i % half, q + at, queries + at);
    }
    for (uint32_t i = threadIdx.x; i < a.kv_heads * half; i += THREADS) {
        const uint32_t at = i / half * a.dim;
        rotate_pair<INTERLEAVED>(angles, a.dim, i % half, k + at, to + at);
    }
    for (uint32_t i = threadIdx.x; i < kv_width; i += THREADS) to[kv_width + i] = v[i];
}

#define GQA_APPEND(T, NAME, INTERLEAVED)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) gqa_append_##NAME(const GqaArgs a) {                         \
        gqa_append<T, INTERLEAVED>(a);                                                                                 \
    }
GQA_APPEND(float, f32_interleaved, true)
GQA_APPEND(float, f32_halves, false)
GQA_APPEND(bf16, bf16_interleaved, true)
GQA_APPEND(bf16, bf16_halves, false)
