// Attention of rows over paged keys: absorbed MLA and grouped queries.
//
// Keys are walked in logical order whatever spelling (pages or tail) names them, in tiles of TILE_KEYS cut at absolute
// logical indices. A block takes one row, a few heads and CHUNK_KEYS keys; `attention_combine` adds up a row's chunks in
// order. So a row's bits depend on its own query and keys alone.

#include "paged.cuh"

constexpr uint32_t TILE_KEYS = 32;
constexpr uint32_t CHUNK_KEYS = 256;

struct AttentionArgs {
    // [rows, heads, key_width].
    const float *queries;
    const void *cache;
    const RowRef *rows;
    const uint32_t *tables;
    const uint32_t *tails;
    // [rows, heads, chunks, value_width]: sums of values not yet divided; and their (maximum, sum of weights).
    float *sums;
    float2 *stats;
    // First of `rows` that this launch takes; queries, sums and stats start at it.
    uint32_t first_row;
    uint32_t page_rows;
    // Numbers of a cached row.
    uint32_t stride;
    uint32_t heads;
    // Neighbouring heads that read the same key and value.
    uint32_t sharing;
    uint32_t key_width;
    uint32_t value_width;
    // First column of the values.
    uint32_t values;
    // Chunks of the row with the most keys.
    uint32_t chunks;
    float scale;
    // Whether keys and values can be read 16 bytes at a time.
    uint32_t aligned;
};

__device__ __forceinline__ uint32_t slot_of(const AttentionArgs &a, const RowRef &row, uint32_t key) {
    if (key >= row.prefix) return a.tails[row.tail + key - row.prefix];
    return a.tables[row.table + key / a.page_rows] * a.page_rows + key % a.page_rows;
}

__device__ __forceinline__ void load4(const float *from, float (&to)[4]) {
    const float4 v = *reinterpret_cast<const float4 *>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

__device__ __forceinline__ void load4(const bf16 *from, float (&to)[4]) {
    const uint2 v = *reinterpret_cast<const uint2 *>(from);
    to[0] = bf16_low(v.x), to[1] = bf16_high(v.x), to[2] = bf16_low(v.y), to[3] = bf16_high(v.y);
}

// Columns `column .. column + width` of the rows at slots[count] into tile[count][to_stride].
template <class T>
__device__ void load_tile(const AttentionArgs &a, const uint32_t *slots, uint32_t count, uint32_t column,
                          uint32_t width, T *tile, uint32_t to_stride) {
    const T *cache = static_cast<const T *>(a.cache) + column;
    if (a.aligned) {
        constexpr uint32_t VALUES = 16 / sizeof(T);
        const uint32_t vectors = width / VALUES;
#pragma unroll 4
        for (uint32_t i = threadIdx.x; i < count * vectors; i += THREADS) {
            const uint32_t key = i / vectors, at = i % vectors * VALUES;
            *reinterpret_cast<uint4 *>(tile + key * to_stride + at) =
                *reinterpret_cast<const uint4 *>(cache + size_t(slots[key]) * a.stride + at);
        }
    } else {
        for (uint32_t i = threadIdx.x; i < count * width; i += THREADS) {
            const uint32_t key = i / width, at = i % width;
            tile[key * to_stride + at] = cache[size_t(slots[key]) * a.stride + at];
        }
    }
}

// Scores of a tile: thread = 4 heads x 4 keys x one of SLICES interleaved parts of the key's columns.
template <class T, int HEADS>
__device__ void tile_scores(const AttentionArgs &a, const float *queries, const T *keys, uint32_t padded,
                            uint32_t count, float (*scores)[HEADS]) {
    constexpr int HEAD_TILES = HEADS / 4;
    constexpr int SLICES = THREADS / (HEAD_TILES * (TILE_KEYS / 4));
    const int slice = threadIdx.x % SLICES, tile = threadIdx.x / SLICES;
    const int head = tile % HEAD_TILES * 4, key = tile / HEAD_TILES * 4;
    float acc[16];
#pragma unroll
    for (int i = 0; i < 16; i++) acc[i] = 0.0f;
    for (uint32_t c = slice * 4; c < padded; c += SLICES * 4) {
        float q[4][4], k[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            load4(queries + (head + i) * padded + c, q[i]);
            load4(keys + (key + i) * padded + c, k[i]);
        }
#pragma unroll
        for (int h = 0; h < 4; h++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) acc[h * 4 + i] = fmaf(q[h][j], k[i][j], acc[h * 4 + i]);
            }
        }
    }
    reduce<16, SLICES / 2>(acc, threadIdx.x);
    constexpr int HELD = SLICES < 16 ? 16 / SLICES : 1;
    constexpr int SHARING = SLICES < 16 ? 1 : SLICES / 16;
    if (slice % SHARING != 0) return;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int index = slice / SHARING * HELD + i;
        const int h = head + index / 4, k = key + index % 4;
        scores[k][h] = k < count ? acc[i] * a.scale : -INFINITY;
    }
}

// Running maximum, sum and the factor that brings older sums to the new maximum; one head each.
template <int HEADS> struct Running {
    float maximum[HEADS], sum[HEADS], factor[HEADS];
};

// Turns a tile's scores into weights; a lane a key, a warp a head at a time.
template <int HEADS> __device__ void tile_weights(float (*scores)[HEADS], Running<HEADS> &running) {
    const int lane = threadIdx.x % WARP;
    for (int h = threadIdx.x / WARP; h < HEADS; h += WARPS) {
        const float score = scores[lane][h];
        const float before = running.maximum[h];
        const float maximum = fmaxf(before, warp_max(score));
        const float weight = expf(score - maximum);
        const float sum = warp_sum(weight);
        scores[lane][h] = weight;
        // All lanes have read the maximum before it is replaced.
        __syncwarp();
        if (lane == 0) {
            const float factor = expf(before - maximum);
            running.maximum[h] = maximum;
            running.factor[h] = factor;
            running.sum[h] = fmaf(running.sum[h], factor, sum);
        }
    }
}

// Shared memory, in this order: queries [HEADS][padded] float, keys [TILE_KEYS][padded] T, and, where values are no part
// of the keys, values [TILE_KEYS][padded values] T. GROUPS: threads cut into groups of heads, for narrow values.
template <class T, int HEADS, int GROUPS> __device__ void attention(const AttentionArgs &a) {
    constexpr int OWN = HEADS / GROUPS;
    constexpr uint32_t PAIRS = THREADS / GROUPS;
    constexpr uint32_t PAD = THREADS / (HEADS / 4 * (TILE_KEYS / 4)) * 4;
    __shared__ __align__(16) float scores[TILE_KEYS][HEADS];
    __shared__ Running<HEADS> running;
    __shared__ uint32_t slots[TILE_KEYS];

    const RowRef row = a.rows[a.first_row + blockIdx.y];
    const uint32_t end = row.prefix + row.tail_len, chunk = blockIdx.z;
    if (chunk * CHUNK_KEYS >= end) return;
    const uint32_t blocks = (a.sharing + HEADS - 1) / HEADS;
    const uint32_t group = blockIdx.x / blocks, inside = blockIdx.x % blocks * HEADS;
    const uint32_t first = group * a.sharing + inside, heads = min(a.sharing - inside, uint32_t(HEADS));
    const uint32_t padded = (a.key_width + PAD - 1) / PAD * PAD;
    const uint32_t key_column = group * a.key_width, value_column = a.values + group * a.value_width;
    const bool apart = value_column < key_column || value_column + a.value_width > key_column + a.key_width;
    const uint32_t value_stride = apart ? (a.value_width + 7) / 8 * 8 : padded;
    float *queries = static_cast<float *>(dynamic_shared());
    T *keys = reinterpret_cast<T *>(queries + HEADS * padded);
    T *values = apart ? keys + TILE_KEYS * padded : keys + (value_column - key_column);

    const float *from = a.queries + (size_t(blockIdx.y) * a.heads + first) * a.key_width;
    for (uint32_t i = threadIdx.x; i < HEADS * padded; i += THREADS) {
        const uint32_t head = i / padded, column = i % padded;
        queries[i] = head < heads && column < a.key_width ? from[head * a.key_width + column] : 0.0f;
    }
    // Columns behind the key stay zero; keys behind a tile's last are never looked at.
    for (uint32_t i = threadIdx.x; i < TILE_KEYS * padded; i += THREADS) keys[i] = narrow<T>(0.0f);
    if (threadIdx.x < HEADS) running.maximum[threadIdx.x] = -INFINITY, running.sum[threadIdx.x] = 0.0f;

    const uint32_t own = threadIdx.x / PAIRS * OWN, column = threadIdx.x % PAIRS * 2;
    float sums[OWN][2];
#pragma unroll
    for (int h = 0; h < OWN; h++) sums[h][0] = sums[h][1] = 0.0f;
    const uint32_t last = min(end, (chunk + 1) * CHUNK_KEYS);
    for (uint32_t key = chunk * CHUNK_KEYS; key < last; key += TILE_KEYS) {
        const uint32_t count = min(last - key, TILE_KEYS);
        __syncthreads();
        if (threadIdx.x < count) slots[threadIdx.x] = slot_of(a, row, key + threadIdx.x);
        __syncthreads();
        load_tile(a, slots, count, key_column, a.key_width, keys, padded);
        if (apart) load_tile(a, slots, count, value_column, a.value_width, values, value_stride);
        __syncthreads();
        tile_scores<T, HEADS>(a, queries, keys, padded, count, scores);
        __syncthreads();
        tile_weights<HEADS>(scores, running);
        __syncthreads();
        if (column < a.value_width) {
#pragma unroll
            for (int h = 0; h < OWN; h++) {
                const float factor = running.factor[own + h];
                sums[h][0] *= factor, sums[h][1] *= factor;
            }
            // With an odd width the second column of the last pair is padding that nobody stores.
            for (uint32_t k = 0; k < count; k++) {
                const float v0 = widen(values[k * value_stride + column]);
                const float v1 = widen(values[k * value_stride + column + 1]);
#pragma unroll
                for (int h = 0; h < OWN; h++) {
                    const float weight = scores[k][own + h];
                    sums[h][0] = fmaf(weight, v0, sums[h][0]);
                    sums[h][1] = fmaf(weight, v1, sums[h][1]);
                }
            }
        }
    }
    for (int h = 0; h < OWN; h++) {
        if (own + h >= heads || column >= a.value_width) continue;
        const size_t at = (size_t(blockIdx.y) * a.heads + first + own + h) * a.chunks + chunk;
        a.sums[at * a.value_width + column] = sums[h][0];
        if (column + 1 < a.value_width) a.sums[at * a.value_width + column + 1] = sums[h][1];
        if (column == 0) a.stats[at] = make_float2(running.maximum[own + h], running.sum[own + h]);
    }
}

#define ATTENTION(T, NAME, HEADS, GROUPS)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                           \
        attention_##NAME##_##HEADS##_##GROUPS(const AttentionArgs a) {                                                 \
        attention<T, HEADS, GROUPS>(a);                                                                                \
    }
#define ATTENTION_HEADS(T, NAME)                                                                                       \
    ATTENTION(T, NAME, 4, 1)                                                                                           \
    ATTENTION(T, NAME, 4, 4)                                                                                           \
    ATTENTION(T, NAME, 8, 1)                                                                                           \
    ATTENTION(T, NAME, 8, 4)                                                                                           \
    ATTENTION(T, NAME, 16, 1)                                                                                          \
    ATTENTION(T, NAME, 16, 4)
ATTENTION_HEADS(float, f32)
ATTENTION_HEADS(bf16, bf16)

// Adds up the chunks of each row and head in their order: [rows, heads, value_width].
template <class T> __device__ void combine(const AttentionArgs &a, T *y) {
    const uint32_t head = blockIdx.x, row = blockIdx.y;
    const RowRef &ref = a.rows[a.first_row + row];
    const uint32_t chunks = (ref.prefix + ref.tail_len + CHUNK_KEYS - 1) / CHUNK_KEYS;
    const size_t at = (size_t(row) * a.heads + head) * a.chunks;
    const float2 *stats = a.stats + at;
    const float *sums = a.sums + at * a.value_width;
    float maximum = -INFINITY, total = 0.0f;
    for (uint32_t c = 0; c < chunks; c++) maximum = fmaxf(maximum, stats[c].x);
    for (uint32_t c = 0; c < chunks; c++) total = fmaf(stats[c].y, expf(stats[c].x - maximum), total);
    for (uint32_t i = threadIdx.x; i < a.value_width; i += blockDim.x) {
        float sum = 0.0f;
        for (uint32_t c = 0; c < chunks; c++)
            sum = fmaf(sums[size_t(c) * a.value_width + i], expf(stats[c].x - maximum), sum);
        y[(size_t(row) * a.heads + head) * a.value_width + i] = narrow<T>(sum / total);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_combine_f32(const AttentionArgs a, float *y) {
    combine<float>(a, y);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_combine_bf16(const AttentionArgs a, bf16 *y) {
    combine<bf16>(a, y);
}
