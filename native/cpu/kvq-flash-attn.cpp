// Flash attention over the tiers of a KV cache, any mix of types. Correctness first: a block of K and V is decoded to
// float once for all query rows that read it (the heads of a KV head, and a few tokens), then plain dot products and an
// online softmax (Milakov and Gimelshein, arXiv:1805.02867).

#include "kvq-cpu.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

constexpr int64_t MAX_TIERS = 4;
constexpr int64_t MAX_ROWS  = 16;  // query rows computed together
constexpr int64_t BLOCK     = 32;  // cells decoded together

struct tier {
    const ggml_tensor * k;
    const ggml_tensor * v;
    int64_t start;  // its first cell's place in the mask
};

struct attention {
    const ggml_tensor * q;
    const ggml_tensor * mask;
    const ggml_tensor * sinks;
    ggml_tensor * dst;
    tier tiers[MAX_TIERS];
    int64_t n_tiers;
    int64_t n_kv;  // cells of all tiers
    int64_t dk;
    int64_t dv;
    float scale;
    float max_bias;
    float logit_softcap;
};

// One query head of one token, and what it has seen so far.
struct query_row {
    const float * q;
    const ggml_fp16_t * mask;  // [n_kv]
    int64_t token;
    int64_t head;
    float slope;  // ALiBi
    float max;
    float sum;
    float * acc;  // [dv]
};

// The rows that read the same KV head.
struct work_item {
    int64_t stream;
    int64_t head_kv;
    int64_t n_rows;
    query_row rows[MAX_ROWS];
};

struct scratch {
    float * k;       // [BLOCK, width of a padded head]
    float * v;       // [BLOCK, width of a padded head]
    float * scores;  // [MAX_ROWS, BLOCK]
    float * acc;     // [MAX_ROWS, dv]
};

int64_t padded_dim(const attention & a, bool values) {
    int64_t width = 0;
    for (int64_t t = 0; t < a.n_tiers; t++) {
        width = std::max(width, values ? a.tiers[t].v->ne[0] : a.tiers[t].k->ne[0]);
    }
    return width;
}

int64_t scratch_floats(const attention & a) {
    return BLOCK * (padded_dim(a, false) + padded_dim(a, true) + MAX_ROWS) + MAX_ROWS * a.dv;
}

scratch make_scratch(const attention & a, float * memory) {
    scratch s;
    s.k      = memory;
    s.v      = s.k + BLOCK * padded_dim(a, false);
    s.scores = s.v + BLOCK * padded_dim(a, true);
    s.acc    = s.scores + BLOCK * MAX_ROWS;
    return s;
}

attention read_op(ggml_tensor * dst) {
    attention a;
    a.q       = dst->src[0];
    a.mask    = dst->src[3];
    a.sinks   = dst->src[4];
    a.dst     = dst;
    a.dk      = dst->src[1]->ne[0];
    a.dv      = dst->src[2]->ne[0];
    a.n_kv    = 0;
    a.n_tiers = 0;
    for (int64_t t = 0; t < MAX_TIERS; t++) {
        const ggml_tensor * k = dst->src[t == 0 ? 1 : 3 + 2 * t];
        if (!k) {
            break;
        }
        a.tiers[a.n_tiers++] = { k, dst->src[t == 0 ? 2 : 4 + 2 * t], a.n_kv };
        a.n_kv += k->ne[1];
    }
    std::memcpy(&a.scale, (const float *) dst->op_params + 0, sizeof(float));
    std::memcpy(&a.max_bias, (const float *) dst->op_params + 1, sizeof(float));
    std::memcpy(&a.logit_softcap, (const float *) dst->op_params + 2, sizeof(float));
    if (a.logit_softcap != 0.0f) {
        a.scale /= a.logit_softcap;
    }
    GGML_ASSERT(a.mask && a.mask->ne[0] >= a.n_kv && a.q->type == GGML_TYPE_F32);
    return a;
}

// Slope of a head, as in ggml_soft_max_ext.
float alibi_slope(const attention & a, int64_t head) {
    if (a.max_bias <= 0.0f) {
        return 1.0f;
    }
    const int64_t n_log2 = (int64_t) 1 << (int64_t) std::floor(std::log2((double) a.q->ne[2]));
    const float m0       = std::pow(2.0f, -a.max_bias / (float) n_log2);
    const float m1       = std::pow(2.0f, -a.max_bias / 2.0f / (float) n_log2);
    return head < n_log2 ? std::pow(m0, (float) (head + 1)) : std::pow(m1, (float) (2 * (head - n_log2) + 1));
}

void add_row(const attention & a, work_item & item, int64_t token, int64_t head, float * acc) {
    const ggml_tensor * q = a.q;
    const ggml_tensor * m = a.mask;
    query_row & row       = item.rows[item.n_rows];
    row.q     = (const float *) ((const char *) q->data + token * q->nb[1] + head * q->nb[2] + item.stream * q->nb[3]);
    row.mask  = (const ggml_fp16_t *) ((const char *) m->data + token * m->nb[1] + head % m->ne[2] * m->nb[2] +
                                      item.stream % m->ne[3] * m->nb[3]);
    row.token = token;
    row.head  = head;
    row.slope = alibi_slope(a, head);
    row.max   = -INFINITY;
    row.sum   = 0.0f;
    row.acc   = acc + item.n_rows * a.dv;
    std::fill_n(row.acc, a.dv, 0.0f);
    item.n_rows++;
}

// n rows of one head, decoded to float: [n, tensor->ne[0]]
void decode_rows(const ggml_tensor * tensor, int64_t head, int64_t stream, int64_t first, int64_t n, float * out) {
    const ggml_to_float_t to_float = ggml_get_type_traits(tensor->type)->to_float;
    const char * data              = (const char *) tensor->data + head * tensor->nb[2] + stream * tensor->nb[3];
    for (int64_t i = 0; i < n; i++) {
        to_float(data + (first + i) * tensor->nb[1], out + i * tensor->ne[0], tensor->ne[0]);
    }
}

// Scores of one row against n decoded keys; false if the mask hides all of them.
bool score_block(const attention & a, const query_row & row, const float * k, int64_t width, int64_t first, int64_t n,
                 float * scores) {
    bool any = false;
    for (int64_t i = 0; i < n; i++) {
        const float bias = row.slope * GGML_FP16_TO_FP32(row.mask[first + i]);
        if (bias == -INFINITY) {
            scores[i] = -INFINITY;
            continue;
        }
        float score;
        ggml_vec_dot_f32((int) a.dk, &score, 0, k + i * width, 0, row.q, 0, 1);
        score *= a.scale;
        if (a.logit_softcap != 0.0f) {
            score = a.logit_softcap * std::tanh(score);
        }
        scores[i] = score + bias;
        any       = true;
    }
    return any;
}

void accumulate_block(const attention & a, query_row & row, const float * scores, const float * v, int64_t width,
                      int64_t n) {
    const float block_max = *std::max_element(scores, scores + n);
    if (block_max > row.max) {
        const float rescale = std::exp(row.max - block_max);
        ggml_vec_scale_f32((int) a.dv, row.acc, rescale);
        row.sum *= rescale;
        row.max = block_max;
    }
    for (int64_t i = 0; i < n; i++) {
        if (scores[i] != -INFINITY) {
            const float weight = std::exp(scores[i] - row.max);
            row.sum += weight;
            ggml_vec_mad_f32((int) a.dv, row.acc, v + i * width, weight);
        }
    }
}

bool block_is_hidden(const work_item & item, int64_t first, int64_t n) {
    for (int64_t r = 0; r < item.n_rows; r++) {
        for (int64_t i = 0; i < n; i++) {
            if (GGML_FP16_TO_FP32(item.rows[r].mask[first + i]) != -INFINITY) {
                return false;
            }
        }
    }
    return true;
}

// Reads the cells [begin, end) of the whole index space.
void attend(const attention & a, work_item & item, int64_t begin, int64_t end, const scratch & s) {
    for (int64_t t = 0; t < a.n_tiers; t++) {
        const tier & tier  = a.tiers[t];
        const int64_t last = std::min(end, tier.start + tier.k->ne[1]);
        for (int64_t first = std::max(begin, tier.start); first < last; first += BLOCK) {
            const int64_t n = std::min(BLOCK, last - first);
            if (block_is_hidden(item, first, n)) {
                continue;
            }
            const int64_t row0 = first - tier.start;
            decode_rows(tier.k, item.head_kv, item.stream, row0, n, s.k);
            decode_rows(tier.v, item.head_kv, item.stream, row0, n, s.v);
            for (int64_t r = 0; r < item.n_rows; r++) {
                float * scores = s.scores + r * BLOCK;
                if (score_block(a, item.rows[r], s.k, tier.k->ne[0], first, n, scores)) {
                    accumulate_block(a, item.rows[r], scores, s.v, tier.v->ne[0], n);
                }
            }
        }
    }
}

// Adds what another part of the cells gave (log-sum-exp merge).
void merge(const attention & a, query_row & row, float max, float sum, const float * acc) {
    if (sum == 0.0f) {
        return;
    }
    const float new_max = std::max(row.max, max);
    const float mine    = std::exp(row.max - new_max);
    const float theirs  = std::exp(max - new_max);
    ggml_vec_scale_f32((int) a.dv, row.acc, mine);
    ggml_vec_mad_f32((int) a.dv, row.acc, acc, theirs);
    row.sum = row.sum * mine + sum * theirs;
    row.max = new_max;
}

void finish(const attention & a, const work_item & item, query_row & row) {
    if (a.sinks) {  // takes weight and gives nothing
        const float sink    = ((const float *) a.sinks->data)[row.head];
        const float new_max = std::max(row.max, sink);
        const float mine    = std::exp(row.max - new_max);
        ggml_vec_scale_f32((int) a.dv, row.acc, mine);
        row.sum = row.sum * mine + std::exp(sink - new_max);
    }
    ggml_vec_scale_f32((int) a.dv, row.acc, row.sum == 0.0f ? 0.0f : 1.0f / row.sum);
    const ggml_tensor * dst = a.dst;
    std::memcpy((char *) dst->data + row.head * dst->nb[1] + row.token * dst->nb[2] + item.stream * dst->nb[3], row.acc,
                a.dv * sizeof(float));
}

struct partition {
    int64_t heads_a_group;  // query heads of one KV head
    int64_t heads_an_item;
    int64_t tokens_an_item;
    int64_t n_head_parts;
    int64_t n_token_parts;
    int64_t n_items;
};

partition make_partition(const attention & a) {
    partition p;
    p.heads_a_group  = a.q->ne[2] / a.tiers[0].k->ne[2];
    p.heads_an_item  = std::min(p.heads_a_group, MAX_ROWS);
    p.tokens_an_item = std::max<int64_t>(1, MAX_ROWS / p.heads_an_item);
    p.n_head_parts   = (p.heads_a_group + p.heads_an_item - 1) / p.heads_an_item;
    p.n_token_parts  = (a.q->ne[1] + p.tokens_an_item - 1) / p.tokens_an_item;
    p.n_items        = p.n_head_parts * p.n_token_parts * a.tiers[0].k->ne[2] * a.q->ne[3];
    return p;
}

work_item make_item(const attention & a, const partition & p, int64_t index, float * acc) {
    work_item item;
    const int64_t head_part  = index % p.n_head_parts;
    const int64_t token_part = index / p.n_head_parts % p.n_token_parts;
    item.head_kv             = index / p.n_head_parts / p.n_token_parts % a.tiers[0].k->ne[2];
    item.stream              = index / p.n_head_parts / p.n_token_parts / a.tiers[0].k->ne[2];
    item.n_rows              = 0;
    const int64_t head0      = item.head_kv * p.heads_a_group + head_part * p.heads_an_item;
    const int64_t head1      = std::min(head0 + p.heads_an_item, (item.head_kv + 1) * p.heads_a_group);
    const int64_t token0     = token_part * p.tokens_an_item;
    const int64_t token1     = std::min(token0 + p.tokens_an_item, a.q->ne[1]);
    for (int64_t token = token0; token < token1; token++) {
        for (int64_t head = head0; head < head1; head++) {
            add_row(a, item, token, head, acc);
        }
    }
    return item;
}

// One token: the threads share out the cells, then merge. A thread leaves [max, sum, acc] for each query head.
void compute_split(const ggml_compute_params * params, const attention & a, const partition & p, float * memory,
                   float * partials) {
    const int64_t n_head = a.q->ne[2];
    const int64_t stride = 2 + a.dv;
    const int64_t chunk  = ((a.n_kv + params->nth - 1) / params->nth + BLOCK - 1) / BLOCK * BLOCK;
    const scratch s      = make_scratch(a, memory);
    for (int64_t i = 0; i < p.n_items; i++) {
        work_item item = make_item(a, p, i, s.acc);
        attend(a, item, params->ith * chunk, std::min(a.n_kv, (params->ith + 1) * chunk), s);
        for (int64_t r = 0; r < item.n_rows; r++) {
            const query_row & row = item.rows[r];
            float * partial       = partials + (params->ith * n_head + row.head) * stride;
            partial[0]            = row.max;
            partial[1]            = row.sum;
            std::memcpy(partial + 2, row.acc, a.dv * sizeof(float));
        }
    }
    ggml_barrier(params->threadpool);
    for (int64_t i = params->ith; i < p.n_items; i += params->nth) {
        work_item item = make_item(a, p, i, s.acc);
        for (int64_t r = 0; r < item.n_rows; r++) {
            query_row & row = item.rows[r];
            for (int64_t t = 0; t < params->nth; t++) {
                const float * partial = partials + (t * n_head + row.head) * stride;
                merge(a, row, partial[0], partial[1], partial + 2);
            }
            finish(a, item, row);
        }
    }
}

}  // namespace

void kvq_compute_forward_flash_attn_tiers(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    const attention a        = read_op(dst);
    const partition p        = make_partition(a);
    const int64_t n_scratch  = scratch_floats(a);
    const int64_t n_partials = params->nth * a.q->ne[2] * (2 + a.dv);
    float * memory           = (float *) params->wdata + params->ith * n_scratch;
    float * partials         = (float *) params->wdata + params->nth * n_scratch;
    GGML_ASSERT(params->nth * n_scratch * sizeof(float) <= params->wsize);

    const bool room = (params->nth * n_scratch + n_partials) * sizeof(float) <= params->wsize;
    if (a.q->ne[1] == 1 && a.q->ne[3] == 1 && room) {
        compute_split(params, a, p, memory, partials);
        return;
    }
    const scratch s = make_scratch(a, memory);
    for (int64_t i = params->ith; i < p.n_items; i += params->nth) {
        work_item item = make_item(a, p, i, s.acc);
        attend(a, item, 0, a.n_kv, s);
        for (int64_t r = 0; r < item.n_rows; r++) {
            finish(a, item, item.rows[r]);
        }
    }
}
