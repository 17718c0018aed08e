// y = x W^T for a few rows at a time; the weight is read once a block of rows, where it lies and as it was published.

#include "dot.cuh"

struct LinearArgs {
    const void *x;
    const void *weights;
    const void *scales;
    void *y;
    uint32_t rows;
    uint32_t inputs;
    uint32_t outputs;
    // Distances in elements between rows of x and of y.
    uint32_t x_stride;
    uint32_t y_stride;
    // A group (blockIdx.z) is a weight of its own: the first weight row of group 0, weight rows from group to group,
    // and how far its columns lie apart in x and y.
    uint32_t first;
    uint32_t w_group;
    uint32_t x_group;
    uint32_t y_group;
    // Warps that share an output: 1, 2, 4 or 8.
    uint32_t parts;
    // Whether y is float32; else it is bf16.
    uint32_t wide;
};

template <class X, class F, bool VECTOR, int R, int O, int U> __device__ void linear(const LinearArgs &a) {
    __shared__ float partial[WARPS][R * O];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const uint32_t part = warp % a.parts, place = warp / a.parts;
    const uint32_t row = blockIdx.x * R, group = blockIdx.z;
    const uint32_t output = (blockIdx.y * (WARPS / a.parts) + place) * O;
    const X *x = static_cast<const X *>(a.x) + size_t(group) * a.x_group;
    uint32_t at[R];
    typename F::Row w[O];
    float acc[R * O];
#pragma unroll
    for (int r = 0; r < R; r++) at[r] = min(row + r, a.rows - 1) * a.x_stride;
#pragma unroll
    for (int o = 0; o < O; o++) {
        const size_t index = a.first + size_t(group) * a.w_group + min(output + o, a.outputs - 1);
        w[o] = F::row(a.weights, a.scales, index, a.inputs);
    }
#pragma unroll
    for (int i = 0; i < R * O; i++) acc[i] = 0.0f;
    if (output < a.outputs) dot<X, F, VECTOR, R, O, U>(w, x, at, a.inputs, part, a.parts, acc);
    reduce<R * O, WARP / 2>(acc, lane);
    using H = Held<R * O>;
    if (a.parts > 1) {
        if (H::any(lane)) {
#pragma unroll
            for (int i = 0; i < H::COUNT; i++) partial[warp][H::first(lane) + i] = acc[i];
        }
        __syncthreads();
        if (part > 0) return;
    }
    if (!H::any(lane)) return;
#pragma unroll
    for (int i = 0; i < H::COUNT; i++) {
        const int index = H::first(lane) + i;
        const uint32_t r = row + index / O, o = output + index % O;
        float sum = acc[i];
        for (uint32_t p = 1; p < a.parts; p++) sum += partial[warp + p][index];
        if (r < a.rows && o < a.outputs) {
            store<bf16>(a.y, size_t(r) * a.y_stride + size_t(group) * a.y_group + o, sum, a.wide);
        }
    }
}

#define LINEAR(X, F, NAME, VECTOR, R, O, U)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, R > 8 ? 1 : 2) linear_##NAME(const LinearArgs a) {                       \
        linear<X, F, VECTOR, R, O, U>(a);                                                                              \
    }
#define LINEAR_ROWS(X, F, NAME)                                                                                        \
    LINEAR(X, F, NAME##_1, true, 1, 1, 4)                                                                              \
    LINEAR(X, F, NAME##_2, true, 2, 2, 4)                                                                              \
    LINEAR(X, F, NAME##_4, true, 4, 2, 4)                                                                              \
    LINEAR(X, F, NAME##_8, true, 8, 4, 1)                                                                              \
    LINEAR(X, F, NAME##_16, true, 16, 4, 1)                                                                            \
    LINEAR(X, F, NAME##_scalar, false, 4, 2, 1)

LINEAR_ROWS(float, F32, f32_f32)
LINEAR_ROWS(float, F16, f32_f16)
LINEAR_ROWS(float, Bf16, f32_bf16)
LINEAR_ROWS(float, Int4, f32_int4)
LINEAR_ROWS(bf16, F32, bf16_f32)
LINEAR_ROWS(bf16, F16, bf16_f16)
LINEAR_ROWS(bf16, Bf16, bf16_bf16)
LINEAR_ROWS(bf16, Int4, bf16_int4)
