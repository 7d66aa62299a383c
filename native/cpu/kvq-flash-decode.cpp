// Attention for one or a few tokens. All query heads of a KV head are computed together, so that a block is decoded once
// a group. Lanes are the dims of a head. The blocks that a token sees, times the KV heads, are shared out over the
// threads; each leaves a maximum, a sum and an accumulator a head, merged by log-sum-exp.

#include "ggml-cpu-impl.h"
#include "kvq-flash-attn.h"
#include "kvq-simd.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvq {
namespace {

// Query heads whose accumulators fit the registers together with 4 keys.
#if KVQ_LANES == 16 || defined(KVQ_NEON)
constexpr int HEADS_AT_ONCE = 4;
#else
constexpr int HEADS_AT_ONCE = 2;
#endif

// What a thread has seen of one token's cells.
struct partial {
    float * max;  // [n_head]
    float * sum;  // [n_head]
    float * acc;  // [n_head, dv_pad]
};

// A thread's memory. Everything is a multiple of a cache line, so that no two threads write to the same.
struct scratch {
    float * tile;          // [BLOCK, larger of the two widths] decoded K, then V
    float * scores;        // [group, BLOCK] then weights
    float * best;          // [group] largest score
    float * bias;          // [BLOCK]
    float * q;             // [n_head, dk_pad] scaled
    visibility * visible;  // [tokens of all streams, n_blocks]
};

int64_t line(int64_t n_floats) {
    return (n_floats + 15) / 16 * 16;
}

int64_t n_queries(const attention & a) {
    return a.n_tokens * a.n_streams;
}

int64_t partial_floats(const attention & a) {
    return line(a.n_head * (2 + a.dv_pad));
}

int64_t scratch_floats(const attention & a) {
    return line(BLOCK * std::max(a.width_k, a.width_v)) + line(a.group * BLOCK) + line(a.group) + line(BLOCK) +
           line(a.n_head * a.dk_pad) + line((n_queries(a) * a.n_blocks + 3) / 4);
}

scratch make_scratch(const attention & a, float * memory) {
    scratch s;
    s.tile    = memory;
    s.scores  = s.tile + line(BLOCK * std::max(a.width_k, a.width_v));
    s.best    = s.scores + line(a.group * BLOCK);
    s.bias    = s.best + line(a.group);
    s.q       = s.bias + line(BLOCK);
    s.visible = (visibility *) (s.q + line(a.n_head * a.dk_pad));
    return s;
}

partial partial_of(const attention & a, float * memory, int64_t thread, int64_t query) {
    partial p;
    p.max = memory + (thread * n_queries(a) + query) * partial_floats(a);
    p.sum = p.max + a.n_head;
    p.acc = p.sum + a.n_head;
    return p;
}

// Dot products of 4 keys and HEADS query heads.
template <int HEADS> void score_keys(const float * k, int64_t width, const float * q, int64_t dk, float * scores) {
    constexpr int N = (HEADS * 4 + LANES - 1) / LANES * LANES;
    vfloat acc[N]   = {};
    for (int64_t d = 0; d < dk; d += LANES) {
        const vfloat keys[4] = { load(k + d), load(k + width + d), load(k + 2 * width + d), load(k + 3 * width + d) };
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) {
            const vfloat query = load(q + h * dk + d);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                acc[4 * h + i] += query * keys[i];
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; i += LANES) {
        float sums[LANES];
        store(sums, sum_each(acc + i));
        for (int h = i / 4; h < std::min(HEADS, (i + LANES) / 4); h++) {
            std::memcpy(scores + h * BLOCK, sums + 4 * h - i, 4 * sizeof(float));
        }
    }
}

template <int HEADS>
void score_heads(const attention & a, const float * k, const float * q, int64_t n, float * scores) {
    for (int64_t i = 0; i < n; i += 4) {
        score_keys<HEADS>(k + i * a.width_k, a.width_k, q, a.dk_pad, scores + i);
    }
}

// acc[h] += sum over n cells of weights[h] v, HEADS heads and VECTORS vectors of dims
template <int HEADS, int VECTORS>
void add_values(const float * v, int64_t width, const float * weights, int64_t n, float * acc, int64_t stride) {
    vfloat sum[HEADS][VECTORS];
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) {
#pragma GCC unroll 4
        for (int d = 0; d < VECTORS; d++) {
            sum[h][d] = load(acc + h * stride + d * LANES);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        vfloat values[VECTORS];
#pragma GCC unroll 4
        for (int d = 0; d < VECTORS; d++) {
            values[d] = load(v + i * width + d * LANES);
        }
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) {
            const vfloat weight = splat(weights[h * BLOCK + i]);
#pragma GCC unroll 4
            for (int d = 0; d < VECTORS; d++) {
                sum[h][d] += weight * values[d];
            }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) {
#pragma GCC unroll 4
        for (int d = 0; d < VECTORS; d++) {
            store(acc + h * stride + d * LANES, sum[h][d]);
        }
    }
}

template <int HEADS>
void add_values_heads(const attention & a, const float * v, const float * weights, int64_t n, float * acc) {
    constexpr int VECTORS = LANES == 8 ? 2 : 4;
    int64_t d             = 0;
    for (; d + VECTORS * LANES <= a.dv_pad; d += VECTORS * LANES) {
        add_values<HEADS, VECTORS>(v + d, a.width_v, weights, n, acc + d, a.dv_pad);
    }
    for (; d < a.dv_pad; d += LANES) {
        add_values<HEADS, 1>(v + d, a.width_v, weights, n, acc + d, a.dv_pad);
    }
}

float largest(const float * x) {
    vfloat best = load(x);
    for (int64_t i = LANES; i < BLOCK; i += LANES) {
        best = max(best, load(x + i));
    }
    float lanes[LANES];
    store(lanes, best);
    return *std::max_element(lanes, lanes + LANES);
}

// Scores to biased scores; cells behind the n-th and hidden ones to -inf.
void bias_scores(const attention & a, float * scores, int64_t n, const float * bias, float slope) {
    if (a.logit_softcap != 0.0f) {
        for (int64_t i = 0; i < BLOCK; i += LANES) {
            store(scores + i, a.logit_softcap * tanh_vector(load(scores + i)));
        }
    }
    std::fill(scores + n, scores + BLOCK, -INFINITY);
    if (bias) {
        for (int64_t i = 0; i < BLOCK; i += LANES) {  // a hidden cell may hold a NaN from a broken activation
            const vfloat b = load(bias + i);
            store(scores + i, b == -INFINITY ? b : load(scores + i) + slope * b);
        }
    }
}

// Scores of one head to weights; the maximum, the sum and the accumulator follow.
void weigh(const attention & a, float * scores, float block_max, float * max, float * sum, float * acc) {
    if (block_max > *max) {
        const float rescale = std::exp(*max - block_max);
        for (int64_t d = 0; d < a.dv_pad; d += LANES) {
            store(acc + d, load(acc + d) * rescale);
        }
        *sum *= rescale;
        *max = block_max;
    }
    const float base = *max == -INFINITY ? 0.0f : *max;
    vfloat total     = {};
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        const vfloat weights = exp_nonpositive(load(scores + i) - base);
        total += weights;
        store(scores + i, weights);
    }
    float lanes[LANES];
    store(lanes, total);
    for (int i = 0; i < LANES; i++) {
        *sum += lanes[i];
    }
}

void score_group(const attention & a, const float * k, const float * q, int64_t n, float * scores) {
    int64_t h = 0;
    for (; h + HEADS_AT_ONCE <= a.group; h += HEADS_AT_ONCE) {
        score_heads<HEADS_AT_ONCE>(a, k, q + h * a.dk_pad, n, scores + h * BLOCK);
    }
    switch (a.group - h) {
        case 3:
            return score_heads<3>(a, k, q + h * a.dk_pad, n, scores + h * BLOCK);
        case 2:
            return score_heads<2>(a, k, q + h * a.dk_pad, n, scores + h * BLOCK);
        case 1:
            return score_heads<1>(a, k, q + h * a.dk_pad, n, scores + h * BLOCK);
        default:
            return;
    }
}

void add_values_group(const attention & a, const float * v, const float * weights, int64_t n, float * acc) {
    int64_t h = 0;
    for (; h + 4 <= a.group; h += 4) {
        add_values_heads<4>(a, v, weights + h * BLOCK, n, acc + h * a.dv_pad);
    }
    switch (a.group - h) {
        case 3:
            return add_values_heads<3>(a, v, weights + h * BLOCK, n, acc + h * a.dv_pad);
        case 2:
            return add_values_heads<2>(a, v, weights + h * BLOCK, n, acc + h * a.dv_pad);
        case 1:
            return add_values_heads<1>(a, v, weights + h * BLOCK, n, acc + h * a.dv_pad);
        default:
            return;
    }
}

// One block of one KV head for the heads that share it.
void attend_group(const attention & a, const cell_block & block, int64_t stream, int64_t head_kv, const float * bias,
                  const scratch & s, const partial & p) {
    const int64_t head0 = head_kv * a.group;
    decode_keys(a, block, head_kv, stream, s.tile);
    score_group(a, s.tile, s.q + head0 * a.dk_pad, block.n, s.scores);
    bool matters = !a.skip_negligible;
    for (int64_t g = 0; g < a.group; g++) {
        bias_scores(a, s.scores + g * BLOCK, block.n, bias, alibi_slope(a, head0 + g));
        s.best[g] = largest(s.scores + g * BLOCK);
        matters |= !(s.best[g] < p.max[head0 + g] - NEGLIGIBLE);
    }
    if (!matters) {
        return;
    }
    for (int64_t g = 0; g < a.group; g++) {
        const int64_t head = head0 + g;
        weigh(a, s.scores + g * BLOCK, s.best[g], p.max + head, p.sum + head, p.acc + head * a.dv_pad);
    }
    decode_values(a, block, head_kv, stream, s.tile);
    if (bias) {
        for (int64_t i = 0; i < block.n; i++) {
            if (bias[i] == -INFINITY) {  // 0 * NaN is NaN
                std::fill_n(s.tile + i * a.width_v, a.dv_pad, 0.0f);
            }
        }
    }
    add_values_group(a, s.tile, s.scores, block.n, p.acc + head0 * a.dv_pad);
}

void load_queries(const attention & a, int64_t stream, int64_t token, float * out) {
    for (int64_t h = 0; h < a.n_head; h++, out += a.dk_pad) {
        const float * q =
            (const float *) ((const char *) a.q->data + token * a.q->nb[1] + h * a.q->nb[2] + stream * a.q->nb[3]);
        for (int64_t d = 0; d < a.dk; d++) {
            out[d] = q[d] * a.scale;
        }
        std::fill(out + a.dk, out + a.dk_pad, 0.0f);
    }
}

// Cuts what no one sees off the end of a block and loads the bias of the rest.
cell_block load_bias(cell_block block, const uint16_t * mask, float * bias) {
    while (mask[block.cell + block.n - 1] == MASK_HIDDEN) {
        block.n--;
    }
    decode_halves(mask + block.cell, block.n, bias);
    std::fill(bias + block.n, bias + BLOCK, -INFINITY);
    return block;
}

// A thread's part [begin, end) of the work for one token: its visible blocks, and of each all KV heads in turn.
void attend_token(const attention & a, int64_t query, int64_t begin, int64_t end, const scratch & s,
                  const partial & p) {
    const int64_t stream = query / a.n_tokens;
    const int64_t token  = query % a.n_tokens;
    const uint16_t * m   = mask_row(a, stream, token);
    std::fill_n(p.max, a.n_head, -INFINITY);
    std::fill_n(p.sum, a.n_head, 0.0f);
    if (begin >= end) {
        return;
    }
    std::fill_n(p.acc, a.n_head * a.dv_pad, 0.0f);
    load_queries(a, stream, token, s.q);
    int64_t unit = 0;  // number of the block's first KV head among all visible ones
    for (int64_t b = 0; b < a.n_blocks && unit < end; b++) {
        const visibility visible = s.visible[query * a.n_blocks + b];
        if (visible == visibility::hidden) {
            continue;
        }
        const int64_t head0 = std::max<int64_t>(begin - unit, 0);
        const int64_t head1 = std::min(end - unit, a.n_head_kv);
        unit += a.n_head_kv;
        if (head0 >= head1) {
            continue;
        }
        const bool mixed       = visible == visibility::mixed;
        const cell_block block = mixed ? load_bias(block_at(a, b), m, s.bias) : block_at(a, b);
        for (int64_t h = head0; h < head1; h++) {
            attend_group(a, block, stream, h, mixed ? s.bias : nullptr, s, p);
        }
    }
}

// What a token sees of each block; returns how many blocks it sees anything of.
int64_t find_visible(const attention & a, int64_t query, visibility * visible) {
    const uint16_t * m = mask_row(a, query / a.n_tokens, query % a.n_tokens);
    int64_t n          = 0;
    for (int64_t b = 0; b < a.n_blocks; b++) {
        const cell_block block = block_at(a, b);
        visible[b]             = classify(m ? m + block.cell : nullptr, block.n);
        n += visible[b] != visibility::hidden;
    }
    return n;
}

// One head of one token from what the threads have left.
void merge(const attention & a, float * partials, int nth, int64_t query, int64_t head) {
    partial into = partial_of(a, partials, 0, query);
    float max    = -INFINITY;
    for (int t = 0; t < nth; t++) {
        max = std::max(max, partial_of(a, partials, t, query).max[head]);
    }
    float sum   = 0.0f;
    float * acc = into.acc + head * a.dv_pad;
    if (into.sum[head] == 0.0f) {
        std::fill_n(acc, a.dv_pad, 0.0f);
    }
    for (int t = 0; t < nth; t++) {
        const partial from = partial_of(a, partials, t, query);
        if (from.sum[head] == 0.0f) {
            continue;  // its accumulator was never written
        }
        const float factor = std::exp(from.max[head] - max);
        sum += from.sum[head] * factor;
        for (int64_t d = 0; d < a.dv_pad; d += LANES) {
            const vfloat mine = load(from.acc + head * a.dv_pad + d) * factor;
            store(acc + d, t == 0 ? mine : load(acc + d) + mine);
        }
    }
    write_row(a, query / a.n_tokens, query % a.n_tokens, head, max, sum, acc);
}

}  // namespace

size_t decode_work_size(const attention & a, int nth) {
    return (size_t) nth * (scratch_floats(a) + n_queries(a) * partial_floats(a)) * sizeof(float) + 64;
}

void attend_decode(const ggml_compute_params * params, const attention & a) {
    float * memory   = (float *) (((uintptr_t) params->wdata + 63) / 64 * 64);
    float * partials = memory + params->nth * scratch_floats(a);
    const scratch s  = make_scratch(a, memory + params->ith * scratch_floats(a));

    int64_t n_units = 0;  // visible blocks of all tokens times KV heads
    for (int64_t i = 0; i < n_queries(a); i++) {
        n_units += find_visible(a, i, s.visible + i * a.n_blocks) * a.n_head_kv;
    }
    const int64_t begin = params->ith * n_units / params->nth;
    const int64_t end   = (params->ith + 1) * n_units / params->nth;
    int64_t first       = 0;  // the token's first unit
    for (int64_t i = 0; i < n_queries(a); i++) {
        const visibility * of_token = s.visible + i * a.n_blocks;
        const int64_t n = (a.n_blocks - std::count(of_token, of_token + a.n_blocks, visibility::hidden)) * a.n_head_kv;
        attend_token(a, i, std::max<int64_t>(begin - first, 0), std::min(end - first, n), s,
                     partial_of(a, partials, params->ith, i));
        first += n;
    }
    ggml_barrier(params->threadpool);
    for (int64_t i = params->ith; i < n_queries(a) * a.n_head; i += params->nth) {
        merge(a, partials, params->nth, i / a.n_head, i % a.n_head);
    }
}

}  // namespace kvq
