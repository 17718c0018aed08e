// Numbers that follow from a key and a place: the twin of the checkpoint crate's synth/fill.rs, bit for bit.

#include "common.cuh"

__device__ __forceinline__ uint64_t fill_bits(uint64_t key, uint64_t element) {
    uint64_t z = key + element * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// mean + n * step, with n odd in +-2^24; both operations round, as they do on the host.
__device__ __forceinline__ float fill_float(uint64_t key, uint64_t element, float mean, float step) {
    const int fraction = int(fill_bits(key, element) >> 40);
    return __fadd_rn(mean, __fmul_rn(float(2 * fraction + 1 - (1 << 24)), step));
}

template <class T> __device__ void fill(uint64_t key, T *to, float mean, float step, uint64_t count) {
    const uint64_t stride = uint64_t(gridDim.x) * THREADS;
    for (uint64_t i = uint64_t(blockIdx.x) * THREADS + threadIdx.x; i < count; i += stride)
        to[i] = narrow<T>(fill_float(key, i, mean, step));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fill_f32(uint64_t key, float *to, float mean, float step, uint64_t count) {
    fill<float>(key, to, mean, step, count);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fill_bf16(uint64_t key, bf16 *to, float mean, float step, uint64_t count) {
    fill<bf16>(key, to, mean, step, count);
}

// Words of eight nibbles in 1..15, of byte j of the bits nibble j.
extern "C" __global__ void __launch_bounds__(THREADS) fill_nibbles(uint64_t key, uint32_t *to, uint64_t count) {
    const uint64_t stride = uint64_t(gridDim.x) * THREADS;
    for (uint64_t i = uint64_t(blockIdx.x) * THREADS + threadIdx.x; i < count; i += stride) {
        const uint64_t bits = fill_bits(key, i);
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) word |= (1 + (uint32_t(bits >> (8 * j) & 255) * 15 >> 8)) << (4 * j);
        to[i] = word;
    }
}
