// What every kernel shares: number formats, vector loads, reductions in one fixed order.
//
// Compiled with -fmad=false: only an explicit fmaf fuses, so that every instantiation of a template rounds alike.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using bf16 = __nv_bfloat16;
using f16 = __half;

constexpr int WARP = 32;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(f16 x) { return __half2float(x); }

template <class T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) { return __float2bfloat16_rn(x); }

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Eight neighbouring values; `from` is 16-byte aligned.
__device__ __forceinline__ void load8(const float *from, float (&to)[8]) {
    const float4 a = __ldg(reinterpret_cast<const float4 *>(from));
    const float4 b = __ldg(reinterpret_cast<const float4 *>(from) + 1);
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
    to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

__device__ __forceinline__ void widen8(uint4 raw, float (&to)[8]) {
    const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[2 * i] = bf16_low(pairs[i]);
        to[2 * i + 1] = bf16_high(pairs[i]);
    }
}

__device__ __forceinline__ void load8(const bf16 *from, float (&to)[8]) {
    widen8(__ldg(reinterpret_cast<const uint4 *>(from)), to);
}

// Up to eight neighbouring values without alignment, zero behind `count`.
template <class T> __device__ __forceinline__ void load_part(const T *from, uint32_t count, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] = i < count ? widen(from[i]) : 0.0f;
}

// The shared memory that a launch asks for beside the kernel's own.
__device__ __forceinline__ void *dynamic_shared() {
    extern __shared__ uint4 bytes[];
    return bytes;
}

// Sums each of N values over 2 * MASK neighbouring lanes, always by halves: (l + l^MASK), then MASK / 2, ... 1.
// Lane l of the 2 * MASK is left with values l * N / (2 * MASK) ..., at least one, at the front of `v`.
template <int N, int MASK> __device__ __forceinline__ void reduce(float *v, int lane) {
    constexpr int LEFT = N > 1 ? N / 2 : 1;
    if constexpr (N > 1) {
        const bool upper = lane & MASK;
#pragma unroll
        for (int i = 0; i < LEFT; i++) {
            const float keep = upper ? v[i + LEFT] : v[i];
            const float send = upper ? v[i] : v[i + LEFT];
            v[i] = keep + __shfl_xor_sync(0xffffffffu, send, MASK);
        }
    } else {
        v[0] += __shfl_xor_sync(0xffffffffu, v[0], MASK);
    }
    if constexpr (MASK > 1) reduce<LEFT, MASK / 2>(v, lane);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}

// A NaN does not win over a number; all NaN gives NaN or -inf, never a crash.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
    return x;
}

// Sum over a block of THREADS, the same in every thread; warps are added in their order.
__device__ __forceinline__ float block_sum(float x, float *scratch) {
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += scratch[i];
    __syncthreads();
    return sum;
}

// Writes one result as T, or as float32 where the caller asked for that.
template <class T> __device__ __forceinline__ void store(void *to, size_t index, float value, bool wide) {
    if (wide) {
        static_cast<float *>(to)[index] = value;
    } else {
        static_cast<T *>(to)[index] = narrow<T>(value);
    }
}

__device__ __forceinline__ void rotate(float cosine, float sine, float &a, float &b) {
    const float u = a, v = b;
    a = u * cosine - v * sine;
    b = v * cosine + u * sine;
}
