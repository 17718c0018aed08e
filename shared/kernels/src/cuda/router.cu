// Which experts a row goes to: one warp a row, the rules of router.rs.

#include "common.cuh"

enum Scoring : uint32_t { SOFTMAX = 0, SIGMOID = 1 };
// How a group is scored; NONE: groups do not matter.
enum Grouping : uint32_t { NONE = 0, BEST = 1, TWO_BEST = 2 };

constexpr uint32_t NOBODY = UINT32_MAX;

struct RouterArgs {
    const float *logits;
    // One value an expert, or null.
    const float *bias;
    uint32_t *ids;
    float *weights;
    uint32_t experts;
    uint32_t per_token;
    uint32_t scoring;
    uint32_t grouping;
    uint32_t groups;
    uint32_t top_groups;
    uint32_t normalise;
    float scale;
};

// Takes the largest of values[count], the lowest index among equals, and marks it as taken by a NaN. What is NaN or
// masked by -inf is not taken: nobody is left then.
__device__ uint32_t take_best(float *values, uint32_t count, int lane) {
    float best = -INFINITY;
    uint32_t id = NOBODY;
    for (uint32_t i = lane; i < count; i += WARP) {
        const float v = values[i];
        if (v > best) best = v, id = i;
    }
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
        const float value = __shfl_xor_sync(0xffffffffu, best, mask);
        const uint32_t other = __shfl_xor_sync(0xffffffffu, id, mask);
        if (value > best || (value == best && other < id)) best = value, id = other;
    }
    if (lane == 0 && id != NOBODY) values[id] = NAN;
    __syncwarp();
    return id;
}

__device__ float group_score(const float *group, uint32_t size, bool two) {
    float first = -INFINITY, second = -INFINITY;
    for (uint32_t i = 0; i < size; i++) {
        const float c = group[i];
        if (c > first) {
            second = first, first = c;
        } else if (c > second) {
            second = c;
        }
    }
    return two && size > 1 ? first + second : first;
}

// Only -inf masks safely: a biased score can be negative, and zero would beat it.
__device__ void mask_groups(const RouterArgs &a, float *choice, float *scores, int lane) {
    const uint32_t size = a.experts / a.groups;
    for (uint32_t g = lane; g < a.groups; g += WARP)
        scores[g] = group_score(choice + g * size, size, a.grouping == TWO_BEST);
    __syncwarp();
    for (uint32_t i = 0; i < a.top_groups; i++) take_best(scores, a.groups, lane);
    // What was taken is NaN now.
    for (uint32_t i = lane; i < a.experts; i += WARP)
        if (!isnan(scores[i / size])) choice[i] = -INFINITY;
    __syncwarp();
}

// Softmax or sigmoid scores of a row; tells whether a logit was NaN.
__device__ bool score(const RouterArgs &a, const float *logits, float *scores, int lane) {
    float top = -INFINITY;
    bool nan = false;
    for (uint32_t i = lane; i < a.experts; i += WARP) {
        top = fmaxf(top, logits[i]);
        nan |= isnan(logits[i]);
    }
    nan = __any_sync(0xffffffffu, nan);
    top = warp_max(top);
    float sum = 0.0f;
    for (uint32_t i = lane; i < a.experts; i += WARP) {
        const float s = a.scoring == SOFTMAX ? expf(logits[i] - top) : 1.0f / (1.0f + expf(-logits[i]));
        scores[i] = s;
        sum += s;
    }
    const float factor = a.scoring == SOFTMAX ? 1.0f / warp_sum(sum) : 1.0f;
    for (uint32_t i = lane; i < a.experts; i += WARP) scores[i] *= factor;
    __syncwarp();
    return nan;
}

// Dynamic shared memory: scores and choice of `experts` values each, `groups` values, then `per_token` ids.
extern "C" __global__ void __launch_bounds__(WARP) router(const RouterArgs a) {
    float *scores = static_cast<float *>(dynamic_shared()), *choice = scores + a.experts, *groups = choice + a.experts;
    uint32_t *picked = reinterpret_cast<uint32_t *>(groups + a.groups);
    const int lane = threadIdx.x;
    bool lost = score(a, a.logits + size_t(blockIdx.x) * a.experts, scores, lane);
    for (uint32_t i = lane; i < a.experts; i += WARP) choice[i] = a.bias ? scores[i] + a.bias[i] : scores[i];
    __syncwarp();
    if (a.grouping != NONE && a.groups > 1) mask_groups(a, choice, groups, lane);
    for (uint32_t k = 0; k < a.per_token; k++) {
        const uint32_t id = take_best(choice, a.experts, lane);
        lost |= id == NOBODY;
        if (lane == 0) picked[k] = id;
    }
    __syncwarp();
    if (lane > 0) return;
    uint32_t *ids = a.ids + size_t(blockIdx.x) * a.per_token;
    float *weights = a.weights + size_t(blockIdx.x) * a.per_token;
    if (lost) {
        // A NaN decided, so the row cannot be routed: NaN goes on through experts that exist.
        for (uint32_t k = 0; k < a.per_token; k++) ids[k] = k, weights[k] = NAN;
        return;
    }
    for (uint32_t k = 1; k < a.per_token; k++) {
        const uint32_t id = picked[k];
        uint32_t place = k;
        for (; place > 0 && picked[place - 1] > id; place--) picked[place] = picked[place - 1];
        picked[place] = id;
    }
    float sum = 0.0f;
    for (uint32_t k = 0; k < a.per_token; k++) sum += scores[picked[k]];
    const float divisor = a.normalise ? sum + 1e-20f : 1.0f;
    for (uint32_t k = 0; k < a.per_token; k++) {
        ids[k] = picked[k];
        weights[k] = scores[picked[k]] / divisor * a.scale;
    }
}
