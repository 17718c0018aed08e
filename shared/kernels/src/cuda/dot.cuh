// Products of a few rows with a few weight rows by one warp.
//
// Lane l owns inputs (32 s + l) * 8 ... + 7 of every step s: one chain of fmaf a lane in ascending order, then the
// lanes are added by halves. Where several warps share an output, warp p of n takes the steps p, p + n, ... and the
// warps are added in order. So an output's bits depend on the weight's shape and format and on its row, not on how
// many rows or outputs a warp takes along.
#pragma once

#include "common.cuh"

constexpr int STEP = WARP * 8;

// Weight formats: one row's pointers, and the eight weights of one lane as loaded.
struct F32 {
    struct Row {
        const float *data;
    };
    struct Chunk {
        float4 a, b;
    };
    static __device__ Row row(const void *data, const void *, size_t row, uint32_t inputs) {
        return {static_cast<const float *>(data) + row * inputs};
    }
    static __device__ Chunk load(const Row &row, uint32_t k) {
        const float4 *from = reinterpret_cast<const float4 *>(row.data + k);
        return {__ldg(from), __ldg(from + 1)};
    }
    static __device__ Chunk load_part(const Row &row, uint32_t k, uint32_t count) {
        float w[8];
        ::load_part(row.data + k, count, w);
        return {{w[0], w[1], w[2], w[3]}, {w[4], w[5], w[6], w[7]}};
    }
    static __device__ void widen(const Chunk &c, float (&w)[8]) {
        w[0] = c.a.x, w[1] = c.a.y, w[2] = c.a.z, w[3] = c.a.w;
        w[4] = c.b.x, w[5] = c.b.y, w[6] = c.b.z, w[7] = c.b.w;
    }
    static __device__ float scale(const Chunk &) { return 1.0f; }
    static constexpr bool SCALED = false;
};

template <class H> struct Half {
    struct Row {
        const H *data;
    };
    struct Chunk {
        uint4 raw;
    };
    static __device__ Row row(const void *data, const void *, size_t row, uint32_t inputs) {
        return {static_cast<const H *>(data) + row * inputs};
    }
    static __device__ Chunk load(const Row &row, uint32_t k) {
        return {__ldg(reinterpret_cast<const uint4 *>(row.data + k))};
    }
    static __device__ Chunk load_part(const Row &row, uint32_t k, uint32_t count) {
        const uint16_t *from = reinterpret_cast<const uint16_t *>(row.data) + k;
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t low = 2 * i < count ? from[2 * i] : 0;
            const uint32_t high = 2 * i + 1 < count ? from[2 * i + 1] : 0;
            pairs[i] = low | high << 16;
        }
        return {{pairs[0], pairs[1], pairs[2], pairs[3]}};
    }
    static __device__ float scale(const Chunk &) { return 1.0f; }
    static constexpr bool SCALED = false;
};

struct Bf16 : Half<bf16> {
    static __device__ void widen(const Chunk &c, float (&w)[8]) { widen8(c.raw, w); }
};

struct F16 : Half<f16> {
    static __device__ void widen(const Chunk &c, float (&w)[8]) {
        const uint32_t pairs[4] = {c.raw.x, c.raw.y, c.raw.z, c.raw.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[2 * i] = __half2float(__ushort_as_half(static_cast<uint16_t>(pairs[i])));
            w[2 * i + 1] = __half2float(__ushort_as_half(static_cast<uint16_t>(pairs[i] >> 16)));
        }
    }
};

// As published: eight unsigned nibbles (offset 8) a word, one bf16 scale a group of 32 inputs. A chunk lies inside one
// group, so its sum is taken over the whole numbers -8..7 and scaled once.
struct Int4 {
    struct Row {
        const uint32_t *data;
        const uint16_t *scales;
    };
    struct Chunk {
        uint32_t word;
        uint16_t scale;
    };
    static __device__ Row row(const void *data, const void *scales, size_t row, uint32_t inputs) {
        return {static_cast<const uint32_t *>(data) + row * (inputs / 8),
                static_cast<const uint16_t *>(scales) + row * (inputs / 32)};
    }
    static __device__ Chunk load(const Row &row, uint32_t k) {
        return {__ldg(row.data + k / 8), __ldg(row.scales + k / 32)};
    }
    // The input width is a multiple of 32: no chunk is cut.
    static __device__ Chunk load_part(const Row &row, uint32_t k, uint32_t) { return load(row, k); }
    static __device__ void widen(const Chunk &c, float (&w)[8]) {
        // A nibble left at bit 4 i of a float's mantissa is 2^23 + u 2^(4 i): one exact fmaf leaves u - 8.
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int place = j < 5 ? 4 * j : 4 * (j - 3);
            const uint32_t word = j < 5 ? c.word : c.word >> 12;
            const float biased = __uint_as_float((word & (0xfu << place)) | 0x4b000000u);
            const float step = 1.0f / (1 << place);
            w[j] = fmaf(biased, step, -(8388608.0f * step + 8.0f));
        }
    }
    static __device__ float scale(const Chunk &c) { return __uint_as_float(uint32_t(c.scale) << 16); }
    static constexpr bool SCALED = true;
};

template <class F>
__device__ __forceinline__ void multiply(const float (&w)[8], float scale, const float (&x)[8], float &acc) {
    if (F::SCALED) {
        float sum = w[0] * x[0];
#pragma unroll
        for (int j = 1; j < 8; j++) sum = fmaf(w[j], x[j], sum);
        acc = fmaf(scale, sum, acc);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) acc = fmaf(w[j], x[j], acc);
    }
}

// Adds the products of the R rows at x + at[r] with weights w[O] over the steps `part`, `part + parts`, ... to acc, U
// steps of weights in flight. VECTOR: all pointers are 16-byte aligned and `inputs` is a multiple of 8.
template <class X, class F, bool VECTOR, int R, int O, int U>
__device__ __forceinline__ void dot(const typename F::Row (&w)[O], const X *x, const uint32_t (&at)[R],
                                    uint32_t inputs, uint32_t part, uint32_t parts, float (&acc)[R * O]) {
    const uint32_t lane = threadIdx.x % WARP;
    for (uint32_t step = part; step * STEP < inputs; step += parts * U) {
        typename F::Chunk chunks[U][O];
#pragma unroll
        for (int u = 0; u < U; u++) {
            const uint32_t k = (step + u * parts) * STEP + lane * 8;
            if (k < inputs) {
#pragma unroll
                for (int o = 0; o < O; o++)
                    chunks[u][o] = VECTOR ? F::load(w[o], k) : F::load_part(w[o], k, inputs - k);
            }
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            const uint32_t k = (step + u * parts) * STEP + lane * 8;
            if (k < inputs) {
                float weights[O][8];
#pragma unroll
                for (int o = 0; o < O; o++) F::widen(chunks[u][o], weights[o]);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    float values[8];
                    if (VECTOR) {
                        load8(x + (at[r] + k), values);
                    } else {
                        load_part(x + (at[r] + k), inputs - k, values);
                    }
#pragma unroll
                    for (int o = 0; o < O; o++)
                        multiply<F>(weights[o], F::scale(chunks[u][o]), values, acc[r * O + o]);
                }
            }
        }
    }
}

// Values of a reduced acc[N] that a lane holds, and the first one's index; lanes that repeat another's have none.
template <int N> struct Held {
    static constexpr int COUNT = N > WARP ? N / WARP : 1;
    static constexpr int SHARING = N < WARP ? WARP / N : 1;
    static __device__ bool any(int lane) { return lane % SHARING == 0; }
    static __device__ int first(int lane) { return lane / SHARING * COUNT; }
};
