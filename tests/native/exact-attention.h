// exact-attention.h: attention over the tiers of a KV cache in double precision, and the cases that kernels are compared with
// it on. Used for the CPU's kernels and, in the SIMT emulator, for the GPU's.

#pragma once

#include "check.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

constexpr ggml_type F16    = GGML_TYPE_F16;
constexpr ggml_type BF16   = GGML_TYPE_BF16;
constexpr ggml_type Q8_0   = GGML_TYPE_Q8_0;
constexpr ggml_type Q4_0   = GGML_TYPE_Q4_0;
constexpr ggml_type Q4_VE  = GGML_TYPE_Q4_VE;
constexpr ggml_type Q2_T   = GGML_TYPE_Q2_T;
constexpr ggml_type Q4_VES = GGML_TYPE_Q4_VES;
constexpr ggml_type Q2_TS  = GGML_TYPE_Q2_TS;

enum class mask_kind {
    open,          // everything is visible
    causal,        // the last n_tokens cells are the tokens' own
    block_hidden,  // causal, and the first tier's cells 32 to 95 are hidden from all and hold NaN
    tier_hidden,   // causal, and a whole tier is hidden from all
    row_hidden,    // causal, and the first token sees nothing
    scattered,     // half the cells, drawn for each token
};

struct tier_shape {
    ggml_type type_k;
    ggml_type type_v;
    int64_t n_rows;
};

struct attention_case {
    std::vector<tier_shape> tiers;
    int64_t dim_k      = 64;
    int64_t dim_v      = 64;
    int64_t n_head     = 4;
    int64_t n_head_kv  = 2;
    int64_t n_tokens   = 1;
    int64_t n_stream   = 1;
    mask_kind mask     = mask_kind::causal;
    float max_bias     = 0.0f;
    float softcap      = 0.0f;
    bool sinks         = false;
    float q_scale      = 1.0f;
    int n_threads      = 1;
    int64_t spare_rows = 5;  // rows of each tier behind those in use
    int64_t n_columns  = 0;  // of a row, if more than its heads need
};

inline std::string describe(const attention_case & c) {
    std::string text;
    for (const tier_shape & tier : c.tiers) {
        text += std::string(text.empty() ? "" : "+") + ggml_type_name(tier.type_k) + "/" + ggml_type_name(tier.type_v) +
                ":" + std::to_string(tier.n_rows);
    }
    char rest[256];
    std::snprintf(rest, sizeof(rest),
                  ", head dims %d/%d, heads %d/%d, %d tokens, %d streams, mask %d, max_bias %g, softcap %g, sinks %d, "
                  "%d threads",
                  (int) c.dim_k, (int) c.dim_v, (int) c.n_head, (int) c.n_head_kv, (int) c.n_tokens, (int) c.n_stream,
                  (int) c.mask, c.max_bias, c.softcap, (int) c.sinks, c.n_threads);
    return text + rest;
}

inline int64_t count_cells(const attention_case & c) {
    int64_t n = 0;
    for (const tier_shape & tier : c.tiers) {
        n += tier.n_rows;
    }
    return n;
}

inline bool is_visible(const attention_case & c, int64_t token, int64_t cell, std::mt19937 & rng) {
    const int64_t n_kv  = count_cells(c);
    const int64_t first = c.tiers[0].n_rows;
    const bool causal   = cell <= n_kv - c.n_tokens + token;
    switch (c.mask) {
        case mask_kind::open:
            return true;
        case mask_kind::causal:
            return causal;
        case mask_kind::block_hidden:
            return causal && (cell < 32 || cell >= 96);
        case mask_kind::tier_hidden:
            return causal && (cell < first || cell >= first + c.tiers[1].n_rows);
        case mask_kind::row_hidden:
            return causal && token > 0;
        case mask_kind::scattered:
            return rng() % 2 == 0;
    }
    return true;
}

// [stream][token][cell]; with ALiBi the distance to the token's own cell, else 0
inline std::vector<float> make_mask(const attention_case & c) {
    std::mt19937 rng(3);
    const int64_t n_kv = count_cells(c);
    std::vector<float> mask;
    for (int64_t s = 0; s < c.n_stream; s++) {
        for (int64_t token = 0; token < c.n_tokens; token++) {
            for (int64_t cell = 0; cell < n_kv; cell++) {
                const float distance = (float) std::abs(n_kv - c.n_tokens + token - cell);
                const float bias     = c.max_bias > 0.0f ? -std::min(distance, 2000.0f) : 0.0f;
                mask.push_back(is_visible(c, token, cell, rng) ? bias : -INFINITY);
            }
        }
    }
    return mask;
}

// Press, Smith and Lewis, arXiv:2108.12409, with the rule for a number of heads that is no power of two
inline double slope_of(const attention_case & c, int64_t head) {
    if (c.max_bias <= 0.0f) {
        return 1.0;
    }
    int64_t n = 1;
    while (2 * n <= c.n_head) {
        n *= 2;
    }
    return head < n ? std::pow(2.0, -c.max_bias * (double) (head + 1) / (double) n) :
                      std::pow(2.0, -c.max_bias / 2.0 * (double) (2 * (head - n) + 1) / (double) n);
}

// What a tier's K or V decodes to; heads are padded to whole blocks.
struct tier_values {
    int64_t padded = 0;
    std::vector<float> values;  // [stream][row][head][padded]
};

// Rows of a tier as the cache keeps them, encoded, [stream][row][head][padded], c.spare_rows of each stream behind those in
// use; what the latter decode to goes to data. The padding behind a head and the spare rows hold values that would show.
inline std::vector<uint8_t> make_tier_bytes(tier_values & data, const attention_case & c, ggml_type type, int64_t dim,
                                            int64_t n_rows, bool first) {
    data.padded            = GGML_PAD(dim, ggml_blck_size(type));
    const int64_t width    = data.padded * c.n_head_kv;
    const int64_t n_all    = (n_rows + c.spare_rows) * c.n_stream;
    std::vector<float> all = random_normal((size_t) (width * n_all));
    for (size_t i = 0; i < all.size(); i++) {
        const int64_t row = (int64_t) i / width % (n_rows + c.spare_rows);
        if ((int64_t) i % data.padded >= dim || row >= n_rows) {
            all[i] = 3.0f;
        } else if (first && c.mask == mask_kind::block_hidden && row >= 32 && row < 96) {
            all[i] = NAN;
        }
    }
    std::vector<uint8_t> bytes(ggml_row_size(type, width) * (size_t) n_all);
    if (type == GGML_TYPE_F32) {
        std::memcpy(bytes.data(), all.data(), bytes.size());
    } else {
        ggml_get_type_traits(type)->from_float_ref(all.data(), bytes.data(), (int64_t) all.size());
        ggml_get_type_traits(type)->to_float(bytes.data(), all.data(), (int64_t) all.size());
    }
    data.values.clear();
    for (int64_t s = 0; s < c.n_stream; s++) {
        const auto begin = all.begin() + s * width * (n_rows + c.spare_rows);
        data.values.insert(data.values.end(), begin, begin + n_rows * width);
    }
    return bytes;
}

struct attention_inputs {
    std::vector<tier_values> k;
    std::vector<tier_values> v;
    std::vector<float> q;          // [stream][head][token][dim_k]
    std::vector<float> q_rounded;  // what quantized keys are multiplied by, if not the same
    std::vector<float> mask;       // [stream][token][cell]
    std::vector<float> sinks;
};

inline const float * row_of(const tier_values & data, const attention_case & c, int64_t n_rows, int64_t stream,
                            int64_t row, int64_t head) {
    return &data.values[(size_t) (((stream * n_rows + row) * c.n_head_kv + head) * data.padded)];
}

// One query head of one token, [dim_v]
inline std::vector<double> exact_row(const attention_case & c, const attention_inputs & in, int64_t stream,
                                     int64_t token, int64_t head) {
    const int64_t head_kv = head / (c.n_head / c.n_head_kv);
    const int64_t n_kv    = count_cells(c);
    const size_t query    = (size_t) (((stream * c.n_head + head) * c.n_tokens + token) * c.dim_k);
    const float * mask    = &in.mask[(size_t) ((stream * c.n_tokens + token) * n_kv)];
    std::vector<double> scores;
    std::vector<const float *> values;
    int64_t cell = 0;
    for (size_t t = 0; t < c.tiers.size(); t++) {
        const bool rounded = !in.q_rounded.empty() && ggml_is_quantized(c.tiers[t].type_k);
        const float * q    = rounded ? &in.q_rounded[query] : &in.q[query];
        for (int64_t row = 0; row < c.tiers[t].n_rows; row++, cell++) {
            if (mask[cell] == -INFINITY) {
                continue;
            }
            const float * k = row_of(in.k[t], c, c.tiers[t].n_rows, stream, row, head_kv);
            double score    = 0.0;
            for (int64_t d = 0; d < c.dim_k; d++) {
                score += (double) q[d] * k[d];
            }
            score /= std::sqrt((double) c.dim_k);
            score = c.softcap > 0.0f ? c.softcap * std::tanh(score / c.softcap) : score;
            scores.push_back(score + slope_of(c, head) * mask[cell]);
            values.push_back(row_of(in.v[t], c, c.tiers[t].n_rows, stream, row, head_kv));
        }
    }
    double max = scores.empty() ? -INFINITY : *std::max_element(scores.begin(), scores.end());
    max        = c.sinks ? std::max(max, (double) in.sinks[(size_t) head]) : max;
    std::vector<double> out((size_t) c.dim_v, 0.0);
    if (max == -INFINITY) {
        return out;  // nothing visible
    }
    double sum = c.sinks ? std::exp(in.sinks[(size_t) head] - max) : 0.0;
    for (size_t i = 0; i < scores.size(); i++) {
        const double weight = std::exp(scores[i] - max);
        sum += weight;
        for (int64_t d = 0; d < c.dim_v; d++) {
            out[(size_t) d] += weight * values[i][d];
        }
    }
    for (double & value : out) {
        value /= sum;
    }
    return out;
}

// [stream][token][head][dim_v], as the op writes it
inline std::vector<float> exact_attention(const attention_case & c, const attention_inputs & in) {
    std::vector<float> out;
    for (int64_t s = 0; s < c.n_stream; s++) {
        for (int64_t token = 0; token < c.n_tokens; token++) {
            for (int64_t head = 0; head < c.n_head; head++) {
                const std::vector<double> row = exact_row(c, in, s, token, head);
                out.insert(out.end(), row.begin(), row.end());
            }
        }
    }
    return out;
}

inline std::vector<tier_shape> mix(std::initializer_list<ggml_type> types, std::initializer_list<int64_t> rows) {
    std::vector<tier_shape> tiers;
    for (size_t t = 0; t < types.size(); t++) {
        tiers.push_back({ types.begin()[t], types.begin()[t], rows.begin()[t] });
    }
    return tiers;
}
