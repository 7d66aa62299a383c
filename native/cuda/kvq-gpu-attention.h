// kvq-gpu-attention.h: attention of one or a few tokens over the tiers of a KV cache. A block takes one token, up to
// COLUMNS query heads of one KV head, and a span of cells; each row of K and V is read and decoded once for all of them.
// Spans leave a maximum, a sum and an accumulator a head, which merge_spans joins by log-sum-exp.
//
// Quantized keys meet queries rounded to 8 bits (a scale for values 0 to 7, one for 8 to 31, one for 32 to 63 of each 64:
// spectral keys keep what counts most in the first 8) in dot products of four bytes. Halves, bfloat16 and all values are
// multiplied as floats.

#pragma once

#include "kvq-gpu-codes.h"

namespace kvq {
namespace gpu {

constexpr int MAX_TIERS     = 4;
constexpr int MAX_HEAD_DIM  = 256;
constexpr int TILE          = 128;  // cells scored together
constexpr int FLOAT_STAGE   = 32;   // cells of a float type that fit the memory of TILE cells of bytes
constexpr int TEAM          = 128;  // threads for each 128 dims of a head
constexpr int MERGE_THREADS = 128;

struct attention_tier {
    const uint8_t * k;
    const uint8_t * v;
    int64_t k_stride[3];  // bytes from row to row, head to head, stream to stream
    int64_t v_stride[3];
    int32_t type_k;
    int32_t type_v;
    int32_t k_values;  // of a head's row
    int32_t v_values;
    int32_t n_rows;
    int32_t start;  // place of row 0 in the mask
    int32_t first_tile;
};

// Strides in bytes.
struct attention_args {
    const uint8_t * q;     // [dk, n_tokens, n_head, n_streams] F32
    const uint8_t * mask;  // [cells, n_tokens, 1, mask_streams] F16, or null
    const float * sinks;   // [n_head] or null
    uint8_t * dst;         // [dv, n_head, n_tokens, n_streams] F32
    float * span_max;      // [n_streams * n_tokens, n_head, n_spans]
    float * span_sum;      // the same
    float * span_acc;      // [n_streams * n_tokens, n_head, n_spans, dv]
    int64_t q_stride[3];
    int64_t mask_stride[2];
    int64_t dst_stride[3];
    int32_t mask_streams;
    int32_t n_tokens;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t group;  // query heads a KV head
    int32_t dk;
    int32_t dv;
    int32_t n_tiers;
    int32_t n_tiles;
    int32_t n_spans;
    int32_t tiles_a_span;
    float scale;
    float softcap;  // 0: none
    float
        slope_log2a;  // log2 of the ALiBi slope's base for the first heads_log2 heads, and for those after; 0: no ALiBi
    float slope_log2b;
    int32_t heads_log2;
    attention_tier tiers[MAX_TIERS];
};

// BLOCKS times 64 dims a team, TEAMS teams, COLUMNS query heads.
template <int BLOCKS, int TEAMS, int COLUMNS> struct attention_shape {
    static constexpr int DIMS    = 64 * BLOCKS;  // of a team
    static constexpr int THREADS = TEAM * TEAMS;
    static constexpr int ROW_WORDS =
        DIMS / 4 + 4;  // bytes, padded so that 16-byte reads of neighbouring rows meet no bank twice
    static constexpr int ROW_FLOATS = DIMS + 4;
    static constexpr int SLOTS      = 8 * BLOCKS;  // threads that share a row of V, 8 dims each
    static constexpr int SLICES     = TEAM / SLOTS;
    static constexpr int GROUPS     = 3 * BLOCKS * TEAMS;  // scales of a rounded query

    // Decoded rows: bytes with a scale for each half of 64, or floats.
    union rows {
        alignas(16) uint32_t words[TILE * ROW_WORDS];
        float floats[FLOAT_STAGE * ROW_FLOATS];
        float joined[SLICES][DIMS];  // at the end: one column's accumulators
    };

    struct shared {
        rows stage[TEAMS];
        float row_scale[TEAMS][TILE][2 * BLOCKS];
        alignas(16) float q[COLUMNS][TEAMS * DIMS];
        alignas(16) uint32_t q_words[COLUMNS][TEAMS * DIMS / 4];
        float q_scale[COLUMNS][GROUPS];
        float scores[TEAMS][COLUMNS][TILE];
        alignas(16) float weights[TILE][COLUMNS];
        float bias[TILE];
        float max[COLUMNS];
        float sum[COLUMNS];
        float rescale[COLUMNS];
        int32_t any_visible[THREADS / 32];
    };
};

// Cells of one tile.
struct cell_tile {
    int32_t tier;
    int32_t row;
    int32_t cell;  // place in the mask
    int32_t n;
};

KVQ_DEVICE cell_tile tile_at(const attention_args & a, int index) {
    int t = 0;
    while (t + 1 < a.n_tiers && index >= a.tiers[t + 1].first_tile) {
        t++;
    }
    const int row  = (index - a.tiers[t].first_tile) * TILE;
    const int left = a.tiers[t].n_rows - row;
    return { t, row, a.tiers[t].start + row, left < TILE ? left : TILE };
}

KVQ_DEVICE float alibi_slope(const attention_args & a, int head) {
    if (a.slope_log2a == 0.0f) {
        return 1.0f;
    }
    return head < a.heads_log2 ? exp2_fast(a.slope_log2a * (float) (head + 1)) :
                                 exp2_fast(a.slope_log2b * (float) (2 * (head - a.heads_log2) + 1));
}

template <class SHAPE, int COLUMNS>
KVQ_DEVICE void load_queries(const attention_args & a, typename SHAPE::shared & s, const uint8_t * q, int n_columns) {
    constexpr int width = (int) (sizeof(s.q[0]) / sizeof(float));
    for (int i = thread_x(); i < COLUMNS * width; i += SHAPE::THREADS) {
        const int c = i / width;
        const int d = i % width;
        float x     = 0.0f;
        if (c < n_columns && d < a.dk) {
            x = load((const float *) (q + c * a.q_stride[1]) + d) * a.scale;
        }
        store(&s.q[c][d], x);
    }
    barrier();
    for (int i = thread_x(); i < COLUMNS * SHAPE::GROUPS; i += SHAPE::THREADS) {
        const int c     = i / SHAPE::GROUPS;
        const int g     = i % SHAPE::GROUPS;
        const int begin = 64 * (g / 3) + (g % 3 == 0 ? 0 : g % 3 == 1 ? 8 : 32);
        const int end   = 64 * (g / 3) + (g % 3 == 0 ? 8 : g % 3 == 1 ? 32 : 64);
        float amax      = 0.0f;
        for (int d = begin; d < end; d++) {
            amax = larger(amax, magnitude(load(&s.q[c][d])));
        }
        const float inverse = amax > 0.0f ? divide(127.0f, amax) : 0.0f;
        for (int d = begin; d < end; d += 4) {
            uint32_t word = 0;
            for (int j = 0; j < 4; j++) {
                const int level = (int) round_even(multiply(load(&s.q[c][d + j]), inverse));
                word |= (uint32_t) (level & 255) << 8 * j;
            }
            store(&s.q_words[c][d / 4], word);
        }
        store(&s.q_scale[c][g], amax / 127.0f);
    }
}

// The tile's mask to s.bias; cells behind the last are hidden. False if nothing is visible.
template <class SHAPE>
KVQ_DEVICE bool load_bias(typename SHAPE::shared & s, const uint16_t * mask, const cell_tile & tile) {
    const int t = thread_x();
    float bias  = MINUS_INFINITY;
    if (t < TILE) {
        if (t < tile.n) {
            bias = mask ? half_value(load(mask + tile.cell + t)) : 0.0f;
        }
        store(&s.bias[t], bias);
    }
    const bool any = wave_any(t < TILE && bias != MINUS_INFINITY);
    if (t % KVQ_WAVE == 0) {
        store(&s.any_visible[t / KVQ_WAVE], (int32_t) any);
    }
    barrier();
    int32_t visible = 0;
    for (int w = 0; w < SHAPE::THREADS / KVQ_WAVE; w++) {
        visible |= load(&s.any_visible[w]);
    }
    return visible != 0;
}

// Rows [first, first + n) of a tile, each team its dims, decoded. What no one sees is not read and becomes 0, since a hidden
// cell may hold a NaN.
template <class SHAPE, int BLOCKS>
KVQ_DEVICE void stage_rows(typename SHAPE::shared & s, int32_t type, const uint8_t * rows, int64_t stride, int n_values,
                           int first, int n) {
    const int team               = thread_x() / TEAM;
    const int t                  = thread_x() % TEAM;
    typename SHAPE::rows & stage = s.stage[team];
    if (is_float(type)) {
        for (int i = t; i < n * 8 * BLOCKS; i += TEAM) {
            const int cell = i / (8 * BLOCKS);
            const int d    = i % (8 * BLOCKS) * 8;
            float values[8];
            const bool visible = load(&s.bias[first + cell]) != MINUS_INFINITY;
            load_floats8(type, rows + (first + cell) * stride, visible ? n_values : 0, team * SHAPE::DIMS + d, values);
            float * out = stage.floats + cell * SHAPE::ROW_FLOATS + d;
            store((float4v *) out, float4v{ { values[0], values[1], values[2], values[3] } });
            store((float4v *) (out + 4), float4v{ { values[4], values[5], values[6], values[7] } });
        }
        return;
    }
    for (int b = 0; b < BLOCKS; b++) {
        for (int i = t; i < 2 * n; i += TEAM) {
            const int cell     = i / 2;
            const int p        = i % 2;
            const bool visible = load(&s.bias[first + cell]) != MINUS_INFINITY;
            const row_part part =
                load_part(type, rows + (first + cell) * stride, visible ? n_values : 0, team * BLOCKS + b, p);
            uint32_t * out = stage.words + cell * SHAPE::ROW_WORDS + 16 * b;
            store((word4 *) (out + place_of_first(type, p)), part.first);
            store((word4 *) (out + place_of_second(type, p)), part.second);
            store(&s.row_scale[team][cell][2 * b + p], part.scale);
        }
    }
}

// Scores of the team's dims: one thread a cell.
template <class SHAPE, int BLOCKS, int COLUMNS> KVQ_DEVICE void score_bytes(typename SHAPE::shared & s, int n) {
    const int team = thread_x() / TEAM;
    const int cell = thread_x() % TEAM;
    if (cell >= n) {
        return;
    }
    const uint32_t * row = s.stage[team].words + cell * SHAPE::ROW_WORDS;
    float sums[COLUMNS]  = {};
    KVQ_UNROLL_BY(1)
    for (int b = 0; b < BLOCKS; b++) {
        int dots[COLUMNS][3] = {};
        KVQ_UNROLL
        for (int w = 0; w < 16; w += 4) {
            const word4 k = load((const word4 *) (row + 16 * b + w));
            KVQ_UNROLL
            for (int c = 0; c < COLUMNS; c++) {
                const word4 q = load((const word4 *) &s.q_words[c][16 * (team * BLOCKS + b) + w]);
                KVQ_UNROLL
                for (int i = 0; i < 4; i++) {
                    const int g = w + i < 2 ? 0 : w < 8 ? 1 : 2;
                    dots[c][g]  = dot4(k.w[i], q.w[i], dots[c][g]);
                }
            }
        }
        const float first  = load(&s.row_scale[team][cell][2 * b]);
        const float second = load(&s.row_scale[team][cell][2 * b + 1]);
        KVQ_UNROLL
        for (int c = 0; c < COLUMNS; c++) {
            const float * scale = &s.q_scale[c][3 * (team * BLOCKS + b)];
            sums[c] += first * (load(scale) * (float) dots[c][0] + load(scale + 1) * (float) dots[c][1]) +
                       second * (load(scale + 2) * (float) dots[c][2]);
        }
    }
    KVQ_UNROLL
    for (int c = 0; c < COLUMNS; c++) {
        store(&s.scores[team][c][cell], sums[c]);
    }
}

// The same of float rows: four threads a cell.
template <class SHAPE, int COLUMNS> KVQ_DEVICE void score_floats(typename SHAPE::shared & s, int first, int n) {
    const int team      = thread_x() / TEAM;
    const int cell      = thread_x() % TEAM / 4;
    const int part      = thread_x() % 4;
    const float * row   = s.stage[team].floats + cell * SHAPE::ROW_FLOATS;
    float sums[COLUMNS] = {};
    if (cell < n) {
        for (int d = 4 * part; d < SHAPE::DIMS; d += 16) {
            const float4v k = load((const float4v *) (row + d));
            KVQ_UNROLL
            for (int c = 0; c < COLUMNS; c++) {
                const float4v q = load((const float4v *) &s.q[c][team * SHAPE::DIMS + d]);
                KVQ_UNROLL
                for (int i = 0; i < 4; i++) {
                    sums[c] += k.f[i] * q.f[i];
                }
            }
        }
    }
    KVQ_UNROLL
    for (int c = 0; c < COLUMNS; c++) {
        const float sum = sum_of_lanes(sums[c], 4);
        if (part == 0 && cell < n) {
            store(&s.scores[team][c][first + cell], sum);
        }
    }
}

template <class SHAPE, int BLOCKS, int COLUMNS>
KVQ_DEVICE void score_tile(const attention_args & a, typename SHAPE::shared & s, const cell_tile & tile,
                           const uint8_t * rows) {
    const attention_tier & tier = a.tiers[tile.tier];
    const int step              = is_float(tier.type_k) ? FLOAT_STAGE : TILE;
    for (int first = 0; first < tile.n; first += step) {
        const int n = tile.n - first < step ? tile.n - first : step;
        if (first > 0) {
            barrier();  // the stage is read
        }
        stage_rows<SHAPE, BLOCKS>(s, tier.type_k, rows, tier.k_stride[0], tier.k_values, first, n);
        barrier();
        if (is_float(tier.type_k)) {
            score_floats<SHAPE, COLUMNS>(s, first, n);
        } else {
            score_bytes<SHAPE, BLOCKS, COLUMNS>(s, n);
        }
    }
}

// Scores to weights, a wave a column; the column's maximum and sum follow.
template <class SHAPE, int TEAMS, int COLUMNS>
KVQ_DEVICE void weigh_tile(const attention_args & a, typename SHAPE::shared & s, int head0, int n) {
    const int lane = thread_x() % KVQ_WAVE;
    for (int c = thread_x() / KVQ_WAVE; c < COLUMNS; c += SHAPE::THREADS / KVQ_WAVE) {
        const float slope = alibi_slope(a, head0 + c);
        float scores[TILE / KVQ_WAVE];
        float best = MINUS_INFINITY;
        KVQ_UNROLL
        for (int i = 0; i < TILE / KVQ_WAVE; i++) {
            const int cell   = i * KVQ_WAVE + lane;
            const float bias = load(&s.bias[cell]);
            float score      = MINUS_INFINITY;
            if (bias != MINUS_INFINITY && cell < n) {
                score = 0.0f;
                KVQ_UNROLL
                for (int team = 0; team < TEAMS; team++) {
                    score += load(&s.scores[team][c][cell]);
                }
                if (a.softcap != 0.0f) {  // tanh
                    score = a.softcap * (1.0f - 2.0f / (exp2_fast(2.0f * LOG2_E * score) + 1.0f));
                }
                score += slope * bias;
            }
            scores[i] = score;
            best      = larger(best, score);
        }
        const float old  = lane == 0 ? load(&s.max[c]) : MINUS_INFINITY;  // by the lane that writes it
        best             = max_of_lanes(larger(best, old), KVQ_WAVE);
        const float base = best == MINUS_INFINITY ? 0.0f : best;
        float sum        = 0.0f;
        KVQ_UNROLL
        for (int i = 0; i < TILE / KVQ_WAVE; i++) {
            const float weight = exp2_fast(LOG2_E * (scores[i] - base));
            sum += weight;
            store(&s.weights[i * KVQ_WAVE + lane][c], weight);
        }
        sum = sum_of_lanes(sum, KVQ_WAVE);
        if (lane == 0) {
            const float rescale = exp2_fast(LOG2_E * (old - base));
            store(&s.rescale[c], rescale);
            store(&s.max[c], best);
            store(&s.sum[c], load(&s.sum[c]) * rescale + sum);
        }
    }
}

// A thread's dims of a team: 4 from place on and 4 from place + 32 on, for every type.
KVQ_DEVICE int place_of(int slot) {
    return 64 * (slot / 8) + 4 * (slot % 8);
}

template <class SHAPE, int COLUMNS>
KVQ_DEVICE void add_cell(typename SHAPE::shared & s, int cell, const float (&v)[8], float (&acc)[COLUMNS][8]) {
    KVQ_UNROLL
    for (int c = 0; c < COLUMNS; c++) {
        const float weight = load(&s.weights[cell][c]);
        KVQ_UNROLL
        for (int i = 0; i < 8; i++) {
            acc[c][i] += weight * v[i];
        }
    }
}

template <class SHAPE, int COLUMNS>
KVQ_DEVICE void add_bytes(typename SHAPE::shared & s, int n, float (&acc)[COLUMNS][8]) {
    const int team = thread_x() / TEAM;
    const int slot = thread_x() % TEAM % SHAPE::SLOTS;
    KVQ_UNROLL_BY(2)
    for (int cell = thread_x() % TEAM / SHAPE::SLOTS; cell < n; cell += SHAPE::SLICES) {
        const uint32_t * row   = s.stage[team].words + cell * SHAPE::ROW_WORDS + place_of(slot) / 4;
        const uint32_t low     = load(row);
        const uint32_t high    = load(row + 8);
        const float low_scale  = load(&s.row_scale[team][cell][2 * (slot / 8)]);
        const float high_scale = load(&s.row_scale[team][cell][2 * (slot / 8) + 1]);
        float v[8];
        KVQ_UNROLL
        for (int i = 0; i < 4; i++) {
            v[i]     = scaled_level(low, i, low_scale);
            v[i + 4] = scaled_level(high, i, high_scale);
        }
        add_cell<SHAPE, COLUMNS>(s, cell, v, acc);
    }
}

template <class SHAPE, int COLUMNS>
KVQ_DEVICE void add_floats(typename SHAPE::shared & s, int first, int n, float (&acc)[COLUMNS][8]) {
    const int team = thread_x() / TEAM;
    const int slot = thread_x() % TEAM % SHAPE::SLOTS;
    for (int cell = thread_x() % TEAM / SHAPE::SLOTS; cell < n; cell += SHAPE::SLICES) {
        const float * row  = s.stage[team].floats + cell * SHAPE::ROW_FLOATS + place_of(slot);
        const float4v low  = load((const float4v *) row);
        const float4v high = load((const float4v *) (row + 32));
        const float v[8]   = { low.f[0], low.f[1], low.f[2], low.f[3], high.f[0], high.f[1], high.f[2], high.f[3] };
        add_cell<SHAPE, COLUMNS>(s, first + cell, v, acc);
    }
}

template <class SHAPE, int BLOCKS, int COLUMNS>
KVQ_DEVICE void sum_tile(typename SHAPE::shared & s, const attention_tier & tier, int n_cells, const uint8_t * rows,
                         float (&acc)[COLUMNS][8]) {
    const bool floats = is_float(tier.type_v);
    const int step    = floats ? FLOAT_STAGE : TILE;
    for (int first = 0; first < n_cells; first += step) {
        const int n = n_cells - first < step ? n_cells - first : step;
        if (first > 0) {
            barrier();  // the stage is read
        }
        stage_rows<SHAPE, BLOCKS>(s, tier.type_v, rows, tier.v_stride[0], tier.v_values, first, n);
        barrier();  // and the weights are there
        KVQ_UNROLL
        for (int c = 0; c < COLUMNS; c++) {
            const float rescale = first == 0 ? load(&s.rescale[c]) : 1.0f;
            KVQ_UNROLL
            for (int i = 0; i < 8; i++) {
                acc[c][i] *= rescale;
            }
        }
        if (floats) {
            add_floats<SHAPE, COLUMNS>(s, first, n, acc);
        } else {
            add_bytes<SHAPE, COLUMNS>(s, n, acc);
        }
    }
}

// The slices' accumulators of each column, added up and written.
template <class SHAPE, int COLUMNS>
KVQ_DEVICE void write_span(const attention_args & a, typename SHAPE::shared & s, int64_t query, int head0,
                           int n_columns, const float (&acc)[COLUMNS][8]) {
    const int team  = thread_x() / TEAM;
    const int t     = thread_x() % TEAM;
    const int place = place_of(t % SHAPE::SLOTS);
    KVQ_UNROLL
    for (int c = 0; c < COLUMNS; c++) {
        barrier();
        float * out = &s.stage[team].joined[t / SHAPE::SLOTS][place];
        store((float4v *) out, float4v{ { acc[c][0], acc[c][1], acc[c][2], acc[c][3] } });
        store((float4v *) (out + 32), float4v{ { acc[c][4], acc[c][5], acc[c][6], acc[c][7] } });
        barrier();
        if (c >= n_columns) {
            continue;
        }
        const int64_t number = (query * a.n_head + head0 + c) * a.n_spans + block_x();
        const int d          = team * SHAPE::DIMS + t;
        if (t < SHAPE::DIMS && d < a.dv) {
            float sum = 0.0f;
            for (int i = 0; i < SHAPE::SLICES; i++) {
                sum += load(&s.stage[team].joined[i][t]);
            }
            store(a.span_acc + number * a.dv + d, sum);
        }
        if (thread_x() == 0) {
            store(a.span_max + number, load(&s.max[c]));
            store(a.span_sum + number, load(&s.sum[c]));
        }
    }
}

// Grid: spans, KV heads times columns of COLUMNS query heads, tokens of all streams.
template <int BLOCKS, int TEAMS, int COLUMNS> KVQ_KERNEL(TEAM * TEAMS) attend_span(const attention_args a) {
    using SHAPE  = attention_shape<BLOCKS, TEAMS, COLUMNS>;
    using SHARED = typename SHAPE::shared;
    KVQ_SHARED(SHARED, s);
    const int n_sets      = (a.group + COLUMNS - 1) / COLUMNS;
    const int head_kv     = block_y() / n_sets;
    const int in_group    = block_y() % n_sets * COLUMNS;
    const int head0       = head_kv * a.group + in_group;
    const int n_columns   = a.group - in_group < COLUMNS ? a.group - in_group : COLUMNS;
    const int64_t query   = block_z();
    const int64_t stream  = query / a.n_tokens;
    const int64_t token   = query % a.n_tokens;
    const uint16_t * mask = nullptr;
    if (a.mask) {
        mask = (const uint16_t *) (a.mask + token * a.mask_stride[0] + stream % a.mask_streams * a.mask_stride[1]);
    }
    load_queries<SHAPE, COLUMNS>(a, s, a.q + token * a.q_stride[0] + head0 * a.q_stride[1] + stream * a.q_stride[2],
                                 n_columns);
    if (thread_x() < COLUMNS) {
        store(&s.max[thread_x()], MINUS_INFINITY);
        store(&s.sum[thread_x()], 0.0f);
    }
    float acc[COLUMNS][8] = {};
    const int begin       = block_x() * a.tiles_a_span;
    const int end         = begin + a.tiles_a_span < a.n_tiles ? begin + a.tiles_a_span : a.n_tiles;
    for (int index = begin; index < end; index++) {
        const cell_tile tile        = tile_at(a, index);
        const attention_tier & tier = a.tiers[tile.tier];
        barrier();  // the last tile's bias, weights and stage are read
        if (!load_bias<SHAPE>(s, mask, tile)) {
            continue;
        }
        const int64_t k_offset = tile.row * tier.k_stride[0] + head_kv * tier.k_stride[1] + stream * tier.k_stride[2];
        const int64_t v_offset = tile.row * tier.v_stride[0] + head_kv * tier.v_stride[1] + stream * tier.v_stride[2];
        score_tile<SHAPE, BLOCKS, COLUMNS>(a, s, tile, tier.k + k_offset);
        barrier();
        weigh_tile<SHAPE, TEAMS, COLUMNS>(a, s, head0, tile.n);
        sum_tile<SHAPE, BLOCKS, COLUMNS>(s, tier, tile.n, tier.v + v_offset, acc);
    }
    write_span<SHAPE, COLUMNS>(a, s, query, head0, n_columns, acc);
}

// Grid: heads, tokens of all streams.
KVQ_KERNEL(MERGE_THREADS) merge_spans(const attention_args a) {
    const int head      = block_x();
    const int64_t query = block_y();
    const int64_t first = (query * a.n_head + head) * a.n_spans;
    float max           = a.sinks ? load(a.sinks + head) : MINUS_INFINITY;
    for (int i = 0; i < a.n_spans; i++) {
        max = larger(max, load(a.span_max + first + i));
    }
    const float base = max == MINUS_INFINITY ? 0.0f : max;
    float sum        = a.sinks ? exp2_fast(LOG2_E * (load(a.sinks + head) - base)) : 0.0f;
    for (int i = 0; i < a.n_spans; i++) {
        sum += load(a.span_sum + first + i) * exp2_fast(LOG2_E * (load(a.span_max + first + i) - base));
    }
    float * out = (float *) (a.dst + head * a.dst_stride[0] + query % a.n_tokens * a.dst_stride[1] +
                             query / a.n_tokens * a.dst_stride[2]);
    for (int d = thread_x(); d < a.dv; d += MERGE_THREADS) {
        float value = 0.0f;
        for (int i = 0; i < a.n_spans; i++) {
            const float factor = exp2_fast(LOG2_E * (load(a.span_max + first + i) - base));
            value += factor * load(a.span_acc + (first + i) * a.dv + d);
        }
        store(out + d, sum == 0.0f ? 0.0f : value / sum);
    }
}

}  // namespace gpu
}  // namespace kvq
