// Attention for many tokens. Lanes are query rows (the heads of a KV head times some tokens), so that scores, softmax and
// output are vertical all through: scores[cell][row] = sum_d K[cell][d] q[d][row], output[d][row] += sum_cell V[cell][d]
// weights[cell][row]. Both are one register-blocked product; K and V are decoded once for all rows of a work item.

#include "ggml-cpu-impl.h"
#include "kvq-flash-attn.h"
#include "kvq-simd.h"

#include <algorithm>
#include <cmath>

namespace kvq {
namespace {

// The product's register block: MR values of A, broadcast, times NR vectors of rows.
#if KVQ_LANES == 16 || defined(KVQ_NEON)
constexpr int MR = 8;
constexpr int NR = 2;
#else
constexpr int MR = 4;
constexpr int NR = 2;
#endif
constexpr int64_t ROWS = NR * LANES;  // rows computed together

constexpr int64_t MAX_GROUPS = 6;  // of ROWS rows in a work item

struct partition {
    int64_t groups;  // of ROWS rows
    int64_t tokens_an_item;
    int64_t n_parts;  // token ranges of a stream
    int64_t n_items;
};

struct scratch {
    float * k;        // [BLOCK, width_k]
    float * v;        // [BLOCK, width_v]
    float * weights;  // [BLOCK, ROWS]
    float * bias;     // [BLOCK, ROWS]
    float * q;        // [groups, dk_pad, ROWS] scaled
    float * out;      // [groups, dv_pad, ROWS]
    float * max;      // [groups, ROWS]
    float * sum;      // [groups, ROWS]
};

// A KV head and a range of tokens; row r is head r % group of token r / group.
struct work_item {
    int64_t stream;
    int64_t head_kv;
    int64_t token0;
    int64_t n_tokens;
    int64_t n_rows;
};

partition make_partition(const attention & a, int nth) {
    partition p;
    const int64_t smallest = (a.group + ROWS - 1) / ROWS;
    for (p.groups = std::max(smallest, MAX_GROUPS);; p.groups--) {
        p.tokens_an_item = p.groups * ROWS / a.group;
        p.n_parts        = (a.n_tokens + p.tokens_an_item - 1) / p.tokens_an_item;
        p.n_items        = p.n_parts * a.n_head_kv * a.n_streams;
        if (p.groups == smallest || p.n_items >= 4 * nth) {
            return p;
        }
    }
}

int64_t scratch_floats(const attention & a, const partition & p) {
    return BLOCK * (a.width_k + a.width_v + 2 * ROWS) + p.groups * ROWS * (a.dk_pad + a.dv_pad + 2);
}

scratch make_scratch(const attention & a, const partition & p, float * memory) {
    scratch s;
    s.k       = memory;
    s.v       = s.k + BLOCK * a.width_k;
    s.weights = s.v + BLOCK * a.width_v;
    s.bias    = s.weights + BLOCK * ROWS;
    s.q       = s.bias + BLOCK * ROWS;
    s.out     = s.q + p.groups * ROWS * a.dk_pad;
    s.max     = s.out + p.groups * ROWS * a.dv_pad;
    s.sum     = s.max + p.groups * ROWS;
    return s;
}

work_item make_item(const attention & a, const partition & p, int64_t index) {
    work_item item;
    // the last tokens see the most: first
    item.token0   = (p.n_parts - 1 - index / (a.n_head_kv * a.n_streams)) * p.tokens_an_item;
    item.head_kv  = index % a.n_head_kv;
    item.stream   = index / a.n_head_kv % a.n_streams;
    item.n_tokens = std::min(p.tokens_an_item, a.n_tokens - item.token0);
    item.n_rows   = item.n_tokens * a.group;
    return item;
}

// c[MR][ROWS] (+)= sum over k of A(i, k) b[k][ROWS], A(i, k) = x[i * step_i + k * step_k]
template <bool ADD>
void multiply(const float * x, int64_t step_i, int64_t step_k, const float * b, int64_t n_k, float * c) {
    vfloat sum[MR][NR] = {};
    for (int64_t k = 0; k < n_k; k++) {
        vfloat right[NR];
#pragma GCC unroll 4
        for (int j = 0; j < NR; j++) {
            right[j] = load(b + k * ROWS + j * LANES);
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            const vfloat left = splat(x[i * step_i + k * step_k]);
#pragma GCC unroll 4
            for (int j = 0; j < NR; j++) {
                sum[i][j] += left * right[j];
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < NR; j++) {
            float * at = c + i * ROWS + j * LANES;
            store(at, ADD ? load(at) + sum[i][j] : sum[i][j]);
        }
    }
}

void load_queries(const attention & a, const work_item & item, const scratch & s) {
    for (int64_t r = 0; r < (item.n_rows + ROWS - 1) / ROWS * ROWS; r++) {
        float * out = s.q + r / ROWS * ROWS * a.dk_pad + r % ROWS;
        if (r >= item.n_rows) {
            for (int64_t d = 0; d < a.dk_pad; d++) {
                out[d * ROWS] = 0.0f;
            }
            continue;
        }
        const int64_t head = item.head_kv * a.group + r % a.group;
        const float * q    = (const float *) ((const char *) a.q->data + (item.token0 + r / a.group) * a.q->nb[1] +
                                           head * a.q->nb[2] + item.stream * a.q->nb[3]);
        for (int64_t d = 0; d < a.dk_pad; d++) {
            out[d * ROWS] = d < a.dk ? q[d] * a.scale : 0.0f;
        }
    }
}

// The bias of every row, lanes as the scores; rows behind the last see nothing.
void load_bias(const attention & a, const work_item & item, const cell_block & block, int64_t row0, float * bias) {
    float of_token[BLOCK];
    for (int64_t i = 0; i < ROWS; i++) {
        const int64_t r = row0 + i;
        if (r >= item.n_rows) {
            for (int64_t cell = 0; cell < block.n; cell++) {
                bias[cell * ROWS + i] = -INFINITY;
            }
            continue;
        }
        if (i == 0 || r % a.group == 0) {
            decode_halves(mask_row(a, item.stream, item.token0 + r / a.group) + block.cell, block.n, of_token);
        }
        const float slope = alibi_slope(a, item.head_kv * a.group + r % a.group);
        for (int64_t cell = 0; cell < block.n; cell++) {
            bias[cell * ROWS + i] = of_token[cell] * slope;
        }
    }
}

// Scores of n cells, biased, and the maximum of each row.
void bias_scores(const attention & a, int64_t n, const float * bias, float * scores, vfloat * max_of_row) {
    for (int j = 0; j < NR; j++) {
        vfloat best = splat(-INFINITY);
        for (int64_t cell = 0; cell < n; cell++) {
            float * at   = scores + cell * ROWS + j * LANES;
            vfloat score = load(at);
            if (a.logit_softcap != 0.0f) {
                score = a.logit_softcap * tanh_vector(score);
            }
            if (bias) {
                const vfloat b = load(bias + cell * ROWS + j * LANES);
                score          = b == -INFINITY ? b : score + b;
            }
            store(at, score);
            best = max(best, score);
        }
        max_of_row[j] = best;
    }
}

bool any_lane(vint mask) {
    int32_t lanes[LANES];
    store(lanes, mask);
    return std::any_of(lanes, lanes + LANES, [](int32_t x) { return x != 0; });
}

// Scores to weights; maximum, sum and output of the rows follow. False if no row cares for the block.
bool weigh(const attention & a, int64_t n, float * scores, const vfloat * block_max, float * max_of_row, float * sum,
           float * out) {
    bool matters = !a.skip_negligible;
    for (int j = 0; j < NR; j++) {
        matters |= any_lane(block_max[j] >= load(max_of_row + j * LANES) - NEGLIGIBLE || block_max[j] != block_max[j]);
    }
    if (!matters) {
        return false;
    }
    for (int j = 0; j < NR; j++) {
        const vfloat old_max = load(max_of_row + j * LANES);
        const vfloat new_max = max(old_max, block_max[j]);
        const vfloat base    = new_max == -INFINITY ? vfloat{} : new_max;
        const vfloat rescale = exp_nonpositive(old_max - base);
        vfloat total         = load(sum + j * LANES) * rescale;
        for (int64_t cell = 0; cell < n; cell++) {
            float * at           = scores + cell * ROWS + j * LANES;
            const vfloat weights = exp_nonpositive(load(at) - base);
            total += weights;
            store(at, weights);
        }
        store(sum + j * LANES, total);
        store(max_of_row + j * LANES, new_max);
        if (any_lane(new_max != old_max)) {
            for (int64_t d = 0; d < a.dv_pad; d++) {
                store(out + d * ROWS + j * LANES, load(out + d * ROWS + j * LANES) * rescale);
            }
        }
    }
    return true;
}

// One block for one group of rows.
void attend_rows(const attention & a, const work_item & item, const cell_block & block, int64_t group, bool mixed,
                 const scratch & s) {
    float * out     = s.out + group * ROWS * a.dv_pad;
    const float * q = s.q + group * ROWS * a.dk_pad;
    for (int64_t i = 0; i < block.n; i += MR) {
        multiply<false>(s.k + i * a.width_k, a.width_k, 1, q, a.dk_pad, s.weights + i * ROWS);
    }
    if (mixed) {
        load_bias(a, item, block, group * ROWS, s.bias);
    }
    vfloat block_max[NR];
    bias_scores(a, block.n, mixed ? s.bias : nullptr, s.weights, block_max);
    if (weigh(a, block.n, s.weights, block_max, s.max + group * ROWS, s.sum + group * ROWS, out)) {
        for (int64_t d = 0; d < a.dv_pad; d += MR) {
            multiply<true>(s.v + d, 1, a.width_v, s.weights, block.n, out + d * ROWS);
        }
    }
}

// What the tokens of a group of rows see of a block, together.
visibility classify_rows(const attention & a, const work_item & item, int64_t group, const visibility * of_token) {
    const int64_t first = group * ROWS / a.group;
    const int64_t last  = (std::min((group + 1) * ROWS, item.n_rows) - 1) / a.group;
    visibility together = of_token[first];
    for (int64_t t = first + 1; t <= last; t++) {
        together = of_token[t] == together ? together : visibility::mixed;
    }
    return together;
}

// Zeroes the values that no token may see: 0 * NaN is NaN, and freed cells keep what a broken activation left.
void clear_hidden(const attention & a, const work_item & item, const cell_block & block, float * v) {
    uint16_t seen[BLOCK] = { 0 };
    for (int64_t t = 0; t < item.n_tokens; t++) {
        const uint16_t * m = mask_row(a, item.stream, item.token0 + t) + block.cell;
        for (int64_t i = 0; i < block.n; i++) {
            seen[i] |= m[i] ^ MASK_HIDDEN;
        }
    }
    for (int64_t i = 0; i < block.n; i++) {
        if (!seen[i]) {
            std::fill_n(v + i * a.width_v, a.dv_pad, 0.0f);
        }
    }
}

void attend_item(const attention & a, const work_item & item, const scratch & s) {
    const int64_t n_groups = (item.n_rows + ROWS - 1) / ROWS;
    load_queries(a, item, s);
    std::fill_n(s.out, n_groups * ROWS * a.dv_pad, 0.0f);
    std::fill_n(s.max, n_groups * ROWS, -INFINITY);
    std::fill_n(s.sum, n_groups * ROWS, 0.0f);
    for (int64_t b = 0; b < a.n_blocks; b++) {
        const cell_block block = block_at(a, b);
        visibility of_token[MAX_GROUPS * ROWS];
        bool any_visible = false;
        bool any_mixed   = false;
        for (int64_t t = 0; t < item.n_tokens; t++) {
            const uint16_t * m = mask_row(a, item.stream, item.token0 + t);
            of_token[t]        = classify(m ? m + block.cell : nullptr, block.n);
            any_visible |= of_token[t] != visibility::hidden;
            any_mixed |= of_token[t] == visibility::mixed;
        }
        if (!any_visible) {
            continue;
        }
        decode_keys(a, block, item.head_kv, item.stream, s.k);
        decode_values(a, block, item.head_kv, item.stream, s.v);
        if (any_mixed) {
            clear_hidden(a, item, block, s.v);
        }
        for (int64_t g = 0; g < n_groups; g++) {
            const visibility visible = classify_rows(a, item, g, of_token);
            if (visible != visibility::hidden) {
                attend_rows(a, item, block, g, visible == visibility::mixed, s);
            }
        }
    }
}

void write_item(const attention & a, const work_item & item, const scratch & s) {
    for (int64_t r = 0; r < item.n_rows; r++) {
        float * acc       = s.k;  // free by now
        const float * out = s.out + r / ROWS * ROWS * a.dv_pad + r % ROWS;
        for (int64_t d = 0; d < a.dv; d++) {
            acc[d] = out[d * ROWS];
        }
        write_row(a, item.stream, item.token0 + r / a.group, item.head_kv * a.group + r % a.group, s.max[r], s.sum[r],
                  acc);
    }
}

}  // namespace

size_t prefill_work_size(const attention & a, int nth) {
    return (size_t) nth * scratch_floats(a, make_partition(a, nth)) * sizeof(float) + 64;
}

void attend_prefill(const ggml_compute_params * params, const attention & a) {
    const partition p = make_partition(a, params->nth);
    float * memory    = (float *) (((uintptr_t) params->wdata + 63) / 64 * 64);
    const scratch s   = make_scratch(a, p, memory + params->ith * scratch_floats(a, p));
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    for (int64_t i = params->ith; i < p.n_items; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const work_item item = make_item(a, p, i);
        attend_item(a, item, s);
        write_item(a, item, s);
    }
}

}  // namespace kvq
