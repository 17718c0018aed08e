// SwiGLU blocks: one for all rows, or experts over the rows that chose them.
//
// A pair is one (row, chosen expert): pair = row * per_token + place. Pairs are sorted by expert on the device and cut
// into tiles of up to TILE_ROWS pairs of one expert, so nothing waits for the host.

#include "dot.cuh"

constexpr uint32_t TILE_ROWS = 8;
constexpr uint32_t PLAN_THREADS = 1024;

// `count` pairs of one expert from place `first` of the sorted pairs.
struct Tile {
    uint32_t expert;
    uint32_t first;
    uint32_t count;
};

// The values of the threads before this one, added up.
__device__ uint32_t exclusive_sum(uint32_t value, uint32_t *scratch) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint32_t sum = value;
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        const uint32_t before = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += before;
    }
    if (lane == WARP - 1) scratch[warp] = sum;
    __syncthreads();
    uint32_t base = 0;
    for (int i = 0; i < warp; i++) base += scratch[i];
    __syncthreads();
    return base + sum - value;
}

// Where each expert's pairs start among the sorted ones, and the tiles. One block; experts <= PLAN_THREADS. Tiles behind
// the last get a count of 0.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS)
    moe_plan(const uint32_t *ids, uint32_t *starts, Tile *tiles, uint32_t pairs, uint32_t experts, uint32_t max_tiles) {
    __shared__ uint32_t counts[PLAN_THREADS];
    __shared__ uint32_t scratch[PLAN_THREADS / WARP];
    __shared__ uint32_t used;
    const uint32_t expert = threadIdx.x;
    counts[expert] = 0;
    __syncthreads();
    for (uint32_t pair = threadIdx.x; pair < pairs; pair += PLAN_THREADS)
        if (ids[pair] < experts) atomicAdd(&counts[ids[pair]], 1);
    __syncthreads();
    const uint32_t count = counts[expert];
    uint32_t first = exclusive_sum(count, scratch);
    const uint32_t own = (count + TILE_ROWS - 1) / TILE_ROWS;
    const uint32_t tile = exclusive_sum(own, scratch);
    if (expert < experts) starts[expert] = first;
    for (uint32_t i = 0; i < own && tile + i < max_tiles; i++) {
        const uint32_t done = i * TILE_ROWS;
        tiles[tile + i] = {expert, first + done, min(count - done, TILE_ROWS)};
    }
    if (expert == PLAN_THREADS - 1) used = tile + own;
    __syncthreads();
    for (uint32_t i = used + threadIdx.x; i < max_tiles; i += PLAN_THREADS) tiles[i] = {0, 0, 0};
}

// The pairs sorted by expert, in their own order inside one. A warp an expert.
extern "C" __global__ void __launch_bounds__(THREADS)
    moe_sort(const uint32_t *ids, const uint32_t *starts, uint32_t *order, uint32_t pairs, uint32_t experts) {
    const uint32_t expert = blockIdx.x * WARPS + threadIdx.x / WARP;
    const uint32_t lane = threadIdx.x % WARP;
    if (expert >= experts) return;
    uint32_t next = starts[expert];
    for (uint32_t base = 0; base < pairs; base += WARP) {
        const bool mine = base + lane < pairs && ids[base + lane] == expert;
        const uint32_t votes = __ballot_sync(0xffffffffu, mine);
        if (mine) order[next + __popc(votes & ((1u << lane) - 1))] = base + lane;
        next += __popc(votes);
    }
}

struct MoeArgs {
    // [rows, inputs]; for `down` [pairs, inputs].
    const void *x;
    // Of all experts one after the other: [experts, outputs, inputs].
    const void *first;
    const void *first_scales;
    const void *second;
    const void *second_scales;
    // [pairs, outputs].
    void *y;
    // Null: no experts to choose from, tile i is the rows from i * TILE_ROWS on.
    const Tile *tiles;
    const uint32_t *order;
    uint32_t rows;
    uint32_t per_token;
    uint32_t inputs;
    uint32_t outputs;
    // For `down`, whether x has a row a pair.
    uint32_t x_by_pair;
};

__device__ Tile tile_of(const MoeArgs &a) {
    if (a.tiles) return a.tiles[blockIdx.x];
    const uint32_t first = blockIdx.x * TILE_ROWS;
    return {0, first, min(a.rows - first, TILE_ROWS)};
}

// The pair at place `i` of a tile; places behind the last repeat it.
__device__ uint32_t pair_of(const MoeArgs &a, const Tile &tile, uint32_t i) {
    const uint32_t place = tile.first + min(i, tile.count - 1);
    return a.order ? a.order[place] : place;
}

template <class X, class F, bool VECTOR, int R, int O, bool GATED>
__device__ void products(const MoeArgs &a, const Tile &tile, uint32_t output) {
    constexpr int W = GATED ? 2 * O : O;
    static_assert(R * W <= WARP, "a lane holds one result");
    const int lane = threadIdx.x % WARP;
    uint32_t at[R];
    typename F::Row w[W];
    float acc[R * W];
#pragma unroll
    for (int r = 0; r < R; r++) {
        const uint32_t pair = pair_of(a, tile, r);
        at[r] = (a.x_by_pair ? pair : pair / a.per_token) * a.inputs;
    }
#pragma unroll
    for (int o = 0; o < O; o++) {
        const size_t row = size_t(tile.expert) * a.outputs + min(output + o, a.outputs - 1);
        // Gate and up of an output lie side by side, so that after the sums neighbouring holders have both.
        w[o * (W / O)] = F::row(a.first, a.first_scales, row, a.inputs);
        if (GATED) w[o * 2 + 1] = F::row(a.second, a.second_scales, row, a.inputs);
    }
#pragma unroll
    for (int i = 0; i < R * W; i++) acc[i] = 0.0f;
    dot<X, F, VECTOR, R, W, (R * W > 16 ? 1 : 2)>(w, static_cast<const X *>(a.x), at, a.inputs, 0, 1, acc);
    using H = Held<R * W>;
    reduce<R * W, WARP / 2>(acc, lane);
    const float other = GATED ? __shfl_xor_sync(0xffffffffu, acc[0], H::SHARING) : 0.0f;
    if (!H::any(lane)) return;
    const uint32_t r = H::first(lane) / W, index = H::first(lane) % W;
    const uint32_t o = output + (GATED ? index / 2 : index);
    if (r >= tile.count || o >= a.outputs || (GATED && index % 2 == 1)) return;
    const size_t to = size_t(pair_of(a, tile, r)) * a.outputs + o;
    if constexpr (GATED) {
        static_cast<X *>(a.y)[to] = narrow<X>(acc[0] / (1.0f + expf(-acc[0])) * other);
    } else {
        static_cast<float *>(a.y)[to] = acc[0];
    }
}

template <class X, class F, bool VECTOR, int O, bool GATED> __device__ void tile_products(const MoeArgs &a) {
    const Tile tile = tile_of(a);
    const uint32_t output = (blockIdx.y * WARPS + threadIdx.x / WARP) * O;
    if (tile.count == 0 || output >= a.outputs) return;
    if (tile.count == 1) {
        products<X, F, VECTOR, 1, O, GATED>(a, tile, output);
    } else if (tile.count == 2) {
        products<X, F, VECTOR, 2, O, GATED>(a, tile, output);
    } else if (tile.count <= 4) {
        products<X, F, VECTOR, 4, O, GATED>(a, tile, output);
    } else {
        products<X, F, VECTOR, 8, O, GATED>(a, tile, output);
    }
}

#define MOE(X, F, NAME, VECTOR)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_gate_up_##NAME(const MoeArgs a) {                     \
        tile_products<X, F, VECTOR, 2, true>(a);                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_down_##NAME(const MoeArgs a) {                        \
        tile_products<X, F, VECTOR, 4, false>(a);                                                                      \
    }
#define MOE_FORMATS(X, NAME)                                                                                           \
    MOE(X, F32, NAME##_f32, true)                                                                                      \
    MOE(X, F16, NAME##_f16, true)                                                                                      \
    MOE(X, Bf16, NAME##_bf16, true)                                                                                    \
    MOE(X, Int4, NAME##_int4, true)                                                                                    \
    MOE(X, F32, NAME##_f32_scalar, false)                                                                              \
    MOE(X, F16, NAME##_f16_scalar, false)                                                                              \
    MOE(X, Bf16, NAME##_bf16_scalar, false)                                                                            \
    MOE(X, Int4, NAME##_int4_scalar, false)
MOE_FORMATS(float, f32)
MOE_FORMATS(bf16, bf16)

// Each row's experts in ascending id times their weights, then the shared expert's float32 rows if there are any.
template <class T>
__device__ void moe_combine(const float *experts, const float *weights, const float *shared, T *y, uint32_t per_token,
                            uint32_t width) {
    const uint32_t column = blockIdx.y * THREADS + threadIdx.x;
    if (column >= width) return;
    const size_t row = blockIdx.x;
    float sum = 0.0f;
    for (uint32_t k = 0; k < per_token; k++) {
        const size_t pair = row * per_token + k;
        sum = fmaf(weights[pair], experts[pair * width + column], sum);
    }
    if (shared) sum += shared[row * width + column];
    y[row * width + column] = narrow<T>(sum);
}

#define MOE_COMBINE(T, NAME)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        moe_combine_##NAME(const float *experts, const float *weights, const float *shared, T *y, uint32_t per_token,  \
                           uint32_t width) {                                                                           \
        moe_combine<T>(experts, weights, shared, y, per_token, width);                                                 \
    }
MOE_COMBINE(float, f32)
MOE_COMBINE(bf16, bf16)
