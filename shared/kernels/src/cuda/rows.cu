// Kernels that take rows one by one: norm, embedding, residuals, copies, argmax, and the rows of a paged cache.

#include "common.cuh"

// y = weight * x / sqrt(mean(x^2) + eps); one block a row.
template <class T>
__device__ void rms_norm(const T *x, const float *weight, T *y, uint32_t width, float eps) {
    __shared__ float scratch[WARPS];
    x += size_t(blockIdx.x) * width;
    y += size_t(blockIdx.x) * width;
    float squares = 0.0f;
    for (uint32_t i = threadIdx.x; i < width; i += THREADS) {
        const float v = widen(x[i]);
        squares = fmaf(v, v, squares);
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / float(width) + eps);
    for (uint32_t i = threadIdx.x; i < width; i += THREADS) y[i] = narrow<T>(widen(x[i]) * scale * weight[i]);
}

#define RMS_NORM(T, NAME)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        rms_norm_##NAME(const T *x, const float *weight, T *y, uint32_t width, float eps) {                            \
        rms_norm<T>(x, weight, y, width, eps);                                                                         \
    }
RMS_NORM(float, f32)
RMS_NORM(bf16, bf16)

// Rows of a table by id; an id outside it gives NaN, which every later row shows.
template <class W, class T>
__device__ void embedding(const W *table, const uint32_t *ids, T *y, uint32_t vocabulary, uint32_t width) {
    const uint32_t id = ids[blockIdx.x];
    y += size_t(blockIdx.x) * width;
    const W *row = table + size_t(id) * width;
    for (uint32_t i = threadIdx.x; i < width; i += THREADS)
        y[i] = narrow<T>(id < vocabulary ? widen(row[i]) : __int_as_float(0x7fffffff));
}

#define EMBEDDING(W, T, NAME)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        embedding_##NAME(const W *table, const uint32_t *ids, T *y, uint32_t vocabulary, uint32_t width) {             \
        embedding<W, T>(table, ids, y, vocabulary, width);                                                             \
    }
EMBEDDING(float, float, f32_f32)
EMBEDDING(f16, float, f16_f32)
EMBEDDING(bf16, float, bf16_f32)
EMBEDDING(float, bf16, f32_bf16)
EMBEDDING(f16, bf16, f16_bf16)
EMBEDDING(bf16, bf16, bf16_bf16)

// y = a + b, added in float32 and rounded once.
template <class T> __device__ void add(const T *a, const T *b, T *y, size_t count) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < count) y[i] = narrow<T>(widen(a[i]) + widen(b[i]));
}

// y = factor * x.
template <class T> __device__ void scale(const T *x, T *y, float factor, size_t count) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < count) y[i] = narrow<T>(factor * widen(x[i]));
}

// Columns `at .. at + from_width` of y's rows become x's rows `rows[..]`, or x's own order without `rows`.
template <class T>
__device__ void copy_columns(const T *x, const uint32_t *rows, T *y, uint32_t from_width, uint32_t to_width,
                             uint32_t at) {
    const size_t from = rows ? rows[blockIdx.x] : blockIdx.x;
    x += from * from_width;
    y += size_t(blockIdx.x) * to_width + at;
    for (uint32_t i = threadIdx.x; i < from_width; i += THREADS) y[i] = x[i];
}

#define ELEMENTS(T, NAME)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) add_##NAME(const T *a, const T *b, T *y, size_t count) {     \
        add<T>(a, b, y, count);                                                                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) scale_##NAME(const T *x, T *y, float factor, size_t count) { \
        scale<T>(x, y, factor, count);                                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        copy_columns_##NAME(const T *x, const uint32_t *rows, T *y, uint32_t from_width, uint32_t to_width,            \
                            uint32_t at) {                                                                             \
        copy_columns<T>(x, rows, y, from_width, to_width, at);                                                         \
    }
ELEMENTS(float, f32)
ELEMENTS(bf16, bf16)

extern "C" __global__ void __launch_bounds__(THREADS) widen_bf16(const bf16 *x, float *y, size_t count) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < count) y[i] = widen(x[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS) narrow_bf16(const float *x, bf16 *y, size_t count) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < count) y[i] = narrow<bf16>(x[i]);
}

// Lowers `first` to the index of the first row with a value that is no finite number; one block a row.
template <class T> __device__ void first_not_finite(const T *x, uint32_t *first, uint32_t width) {
    x += size_t(blockIdx.x) * width;
    bool finite = true;
    for (uint32_t i = threadIdx.x; i < width; i += THREADS) finite &= isfinite(widen(x[i]));
    if (!__syncthreads_and(finite) && threadIdx.x == 0) atomicMin(first, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    first_not_finite_f32(const float *x, uint32_t *first, uint32_t width) {
    first_not_finite<float>(x, first, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    first_not_finite_bf16(const bf16 *x, uint32_t *first, uint32_t width) {
    first_not_finite<bf16>(x, first, width);
}

// The index of each row's largest value, the lowest among equals; then the index of the row's first NaN or 2^32 - 1.
extern "C" __global__ void __launch_bounds__(THREADS) argmax_f32(const float *x, uint2 *y, uint32_t width) {
    __shared__ float best_values[WARPS];
    __shared__ uint32_t best_ids[WARPS], first_nans[WARPS];
    x += size_t(blockIdx.x) * width;
    float best = -INFINITY;
    uint32_t id = UINT32_MAX, nan = UINT32_MAX;
    for (uint32_t i = threadIdx.x; i < width; i += THREADS) {
        const float v = x[i];
        if (isnan(v)) {
            nan = min(nan, i);
        } else if (id == UINT32_MAX || v > best) {
            best = v, id = i;
        }
    }
    const auto take = [&](float value, uint32_t other) {
        if (value > best || (value == best && other < id)) best = value, id = other;
    };
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
        const float value = __shfl_xor_sync(0xffffffffu, best, mask);
        take(value, __shfl_xor_sync(0xffffffffu, id, mask));
        nan = min(nan, __shfl_xor_sync(0xffffffffu, nan, mask));
    }
    const int warp = threadIdx.x / WARP;
    if (threadIdx.x % WARP == 0) best_values[warp] = best, best_ids[warp] = id, first_nans[warp] = nan;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < WARPS; i++) {
        take(best_values[i], best_ids[i]);
        nan = min(nan, first_nans[i]);
    }
    y[blockIdx.x] = make_uint2(id, nan);
}

// Copies rows of a cache from slot to slot. Runs (blockIdx.x) do not touch each other's slots; the moves of one run are
// made in their order, each column by one thread. Rows are counted in `words` of 4 or 2 bytes.
template <class W>
__device__ void move_rows(W *cache, const uint2 *moves, const uint32_t *runs, uint32_t words) {
    const uint32_t column = blockIdx.y * THREADS + threadIdx.x;
    if (column >= words) return;
    for (uint32_t i = runs[blockIdx.x]; i < runs[blockIdx.x + 1]; i++) {
        const uint2 move = moves[i];
        cache[size_t(move.y) * words + column] = cache[size_t(move.x) * words + column];
    }
}

#define MOVE_ROWS(W, NAME)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        move_rows_##NAME(W *cache, const uint2 *moves, const uint32_t *runs, uint32_t words) {                         \
        move_rows<W>(cache, moves, runs, words);                                                                       \
    }
MOVE_ROWS(uint32_t, 4)
MOVE_ROWS(uint16_t, 2)
