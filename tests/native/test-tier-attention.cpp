// GGML_OP_FLASH_ATTN_EXT over one tensor of any type or the tiers of a KV cache, against attention in double precision over the decoded rows.

#include "check.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

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

static std::string describe(const attention_case & c) {
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

static int64_t count_cells(const attention_case & c) {
    int64_t n = 0;
    for (const tier_shape & tier : c.tiers) {
        n += tier.n_rows;
    }
    return n;
}

// A tier's K or V as the cache keeps it, [padded head dim * heads, rows, streams], and what it decodes to.
struct tier_data {
    ggml_tensor * tensor = nullptr;
    int64_t padded       = 0;
    std::vector<float> values;  // [stream][row][head][padded]
};

static tier_data make_tier(ggml_context * ctx, const attention_case & c, ggml_type type, int64_t dim, int64_t n_rows) {
    tier_data data;
    data.padded = GGML_PAD(dim, ggml_blck_size(type));
    data.tensor = ggml_new_tensor_3d(ctx, type, std::max(c.n_columns, data.padded * c.n_head_kv), n_rows + c.spare_rows,
                                     c.n_stream);
    return data;
}

// Random values; the padding behind a head and the rows that are not in use hold values that would show.
static void fill_tier(tier_data & data, const attention_case & c, int64_t dim, int64_t n_rows, bool first) {
    ggml_tensor * tensor   = data.tensor;
    const int64_t width    = data.padded * c.n_head_kv;
    const int64_t n_all    = tensor->ne[1] * c.n_stream;
    std::vector<float> all = random_normal((size_t) (width * n_all));
    for (size_t i = 0; i < all.size(); i++) {
        const int64_t row = (int64_t) i / width % tensor->ne[1];
        if ((int64_t) i % data.padded >= dim || row >= n_rows) {
            all[i] = 3.0f;
        } else if (first && c.mask == mask_kind::block_hidden && row >= 32 && row < 96) {
            all[i] = NAN;
        }
    }
    const size_t row_bytes = ggml_row_size(tensor->type, width);
    std::vector<uint8_t> bytes(row_bytes * (size_t) n_all);
    if (tensor->type == GGML_TYPE_F32) {
        std::memcpy(bytes.data(), all.data(), bytes.size());
    } else {
        ggml_get_type_traits(tensor->type)->from_float_ref(all.data(), bytes.data(), (int64_t) all.size());
        ggml_get_type_traits(tensor->type)->to_float(bytes.data(), all.data(), (int64_t) all.size());
    }
    for (size_t row = 0; row < (size_t) n_all; row++) {
        ggml_backend_tensor_set(tensor, bytes.data() + row * row_bytes, row * tensor->nb[1], row_bytes);
    }
    data.values.clear();
    for (int64_t s = 0; s < c.n_stream; s++) {
        const auto begin = all.begin() + s * width * tensor->ne[1];
        data.values.insert(data.values.end(), begin, begin + n_rows * width);
    }
}

// The view that kvq_tiers::attach() makes: [padded, rows, heads, streams]
static ggml_tensor * make_view(ggml_context * ctx, const attention_case & c, const tier_data & data, int64_t n_rows) {
    return ggml_view_4d(ctx, data.tensor, data.padded, n_rows, c.n_head_kv, c.n_stream, data.tensor->nb[1],
                        ggml_row_size(data.tensor->type, data.padded), data.tensor->nb[2], 0);
}

static bool is_visible(const attention_case & c, int64_t token, int64_t cell, std::mt19937 & rng) {
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
static std::vector<float> make_mask(const attention_case & c) {
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
static double slope_of(const attention_case & c, int64_t head) {
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

struct inputs {
    std::vector<tier_data> k;
    std::vector<tier_data> v;
    std::vector<float> q;     // [stream][head][token][dim_k]
    std::vector<float> mask;  // [stream][token][cell]
    std::vector<float> sinks;
};

static const float * row_of(const tier_data & data, const attention_case & c, int64_t n_rows, int64_t stream,
                            int64_t row, int64_t head) {
    return &data.values[(size_t) (((stream * n_rows + row) * c.n_head_kv + head) * data.padded)];
}

// One query head of one token, [dim_v]
static std::vector<double> exact_row(const attention_case & c, const inputs & in, int64_t stream, int64_t token,
                                     int64_t head) {
    const int64_t head_kv = head / (c.n_head / c.n_head_kv);
    const int64_t n_kv    = count_cells(c);
    const float * q       = &in.q[(size_t) (((stream * c.n_head + head) * c.n_tokens + token) * c.dim_k)];
    const float * mask    = &in.mask[(size_t) ((stream * c.n_tokens + token) * n_kv)];
    std::vector<double> scores;
    std::vector<const float *> values;
    int64_t cell = 0;
    for (size_t t = 0; t < c.tiers.size(); t++) {
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
static std::vector<float> exact_attention(const attention_case & c, const inputs & in) {
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

// Owns what a computation needs.
struct computation {
    explicit computation(int n_threads) {
        ggml_init_params params = { 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        ctx                     = ggml_init(params);
        backend                 = ggml_backend_cpu_init();
        ggml_backend_cpu_set_n_threads(backend, n_threads);
    }

    ~computation() {
        ggml_backend_buffer_free(buffer);
        ggml_backend_free(backend);
        ggml_free(ctx);
    }

    ggml_context * ctx           = nullptr;
    ggml_backend_t backend       = nullptr;
    ggml_backend_buffer_t buffer = nullptr;
};

static void set_f16(ggml_tensor * tensor, const std::vector<float> & values) {
    std::vector<ggml_fp16_t> half(values.size());
    ggml_fp32_to_fp16_row(values.data(), half.data(), (int64_t) values.size());
    ggml_backend_tensor_set(tensor, half.data(), 0, half.size() * sizeof(half[0]));
}

// The op's result and the exact one.
static std::pair<std::vector<float>, std::vector<float>> compute(const attention_case & c) {
    computation run(c.n_threads);
    ggml_context * ctx = run.ctx;
    inputs in;
    for (const tier_shape & tier : c.tiers) {
        in.k.push_back(make_tier(ctx, c, tier.type_k, c.dim_k, tier.n_rows));
        in.v.push_back(make_tier(ctx, c, tier.type_v, c.dim_v, tier.n_rows));
    }
    ggml_tensor * q    = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, c.dim_k, c.n_tokens, c.n_head, c.n_stream);
    ggml_tensor * mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, count_cells(c), c.n_tokens, 1, c.n_stream);
    ggml_tensor * sink = c.sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, c.n_head) : nullptr;
    ggml_tensor * out  = ggml_flash_attn_ext(ctx, q, make_view(ctx, c, in.k[0], c.tiers[0].n_rows),
                                             make_view(ctx, c, in.v[0], c.tiers[0].n_rows), mask,
                                             1.0f / std::sqrt((float) c.dim_k), c.max_bias, c.softcap);
    ggml_flash_attn_ext_add_sinks(out, sink);
    for (size_t t = 1; t < c.tiers.size(); t++) {
        out->src[3 + 2 * t] = make_view(ctx, c, in.k[t], c.tiers[t].n_rows);
        out->src[4 + 2 * t] = make_view(ctx, c, in.v[t], c.tiers[t].n_rows);
    }
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    run.buffer = ggml_backend_alloc_ctx_tensors(ctx, run.backend);

    for (size_t t = 0; t < c.tiers.size(); t++) {
        fill_tier(in.k[t], c, c.dim_k, c.tiers[t].n_rows, t == 0);
        fill_tier(in.v[t], c, c.dim_v, c.tiers[t].n_rows, t == 0);
    }
    in.q    = random_normal((size_t) ggml_nelements(q), c.q_scale);
    in.mask = make_mask(c);
    ggml_backend_tensor_set(q, in.q.data(), 0, ggml_nbytes(q));
    set_f16(mask, in.mask);
    if (c.sinks) {
        in.sinks = random_normal((size_t) c.n_head, 2.0f);
        ggml_backend_tensor_set(sink, in.sinks.data(), 0, ggml_nbytes(sink));
    }
    CHECK(ggml_backend_graph_compute(run.backend, graph) == GGML_STATUS_SUCCESS, "%s", describe(c).c_str());
    std::vector<float> result((size_t) ggml_nelements(out));
    ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
    return { result, exact_attention(c, in) };
}

// float32 sums and the exponential of float32 scores; measured at most 9e-13
static constexpr double NMSE_LIMIT = 1e-11;

static double worst = 0.0;

static void test_case(const attention_case & c) {
    const auto [result, expected] = compute(c);
    const double error            = nmse(result, expected);
    CHECK(error < NMSE_LIMIT, "%s: %g", describe(c).c_str(), error);
    worst = std::max(worst, error);
}

static std::vector<tier_shape> mix(std::initializer_list<ggml_type> types, std::initializer_list<int64_t> rows) {
    std::vector<tier_shape> tiers;
    for (size_t t = 0; t < types.size(); t++) {
        tiers.push_back({ types.begin()[t], types.begin()[t], rows.begin()[t] });
    }
    return tiers;
}

static const ggml_type F32    = GGML_TYPE_F32;
static const ggml_type F16    = GGML_TYPE_F16;
static const ggml_type BF16   = GGML_TYPE_BF16;
static const ggml_type Q8_0   = GGML_TYPE_Q8_0;
static const ggml_type Q4_0   = GGML_TYPE_Q4_0;
static const ggml_type Q5_1   = GGML_TYPE_Q5_1;
static const ggml_type Q4_VE  = GGML_TYPE_Q4_VE;
static const ggml_type Q2_T   = GGML_TYPE_Q2_T;
static const ggml_type Q4_VES = GGML_TYPE_Q4_VES;
static const ggml_type Q2_TS  = GGML_TYPE_Q2_TS;

static void test_types() {
    const std::vector<std::vector<tier_shape>> mixes = {
        mix({ F32 }, { 300 }),
        mix({ F16 }, { 300 }),
        mix({ BF16 }, { 300 }),
        mix({ Q8_0 }, { 300 }),
        mix({ Q4_0 }, { 300 }),
        mix({ Q5_1 }, { 300 }),
        mix({ Q4_VE }, { 300 }),
        mix({ Q2_T }, { 300 }),
        mix({ Q4_VES }, { 300 }),
        mix({ Q2_TS }, { 300 }),
        { { F16, F16, 60 }, { Q4_VES, Q4_VE, 80 }, { Q2_TS, Q2_T, 70 } },
        mix({ F16, Q4_VE }, { 100, 300 }),
        mix({ F16, Q2_T }, { 100, 300 }),
        mix({ F16, F16 }, { 100, 300 }),
        mix({ BF16, Q8_0 }, { 100, 300 }),
        mix({ F16, Q4_VE, Q2_T }, { 133, 65, 31 }),
        mix({ F16, Q8_0, Q4_VE, Q2_T }, { 70, 33, 1, 97 }),
        { { F16, F16, 60 }, { Q8_0, Q4_VE, 50 }, { Q4_VE, Q2_T, 40 }, { Q4_0, F16, 30 } },
        { { F16, BF16, 60 }, { Q2_T, Q8_0, 50 } },
    };
    for (const auto & tiers : mixes) {
        for (const int64_t n_tokens : { 1, 6, 70 }) {
            attention_case c;
            c.tiers    = tiers;
            c.n_tokens = n_tokens;
            test_case(c);
        }
    }
}

static void test_head_dims() {
    const int64_t dims[][2] = { { 64, 64 },  { 80, 80 },  { 96, 96 },   { 112, 112 }, { 128, 128 }, { 256, 256 },
                                { 128, 64 }, { 64, 128 }, { 192, 128 }, { 80, 128 },  { 96, 80 },   { 40, 72 } };
    for (const auto & dim : dims) {
        for (const int64_t n_tokens : { 1, 5 }) {
            attention_case c;
            c.tiers    = mix({ F16, Q4_VE, F16, Q2_T }, { 50, 70, 20, 40 });
            c.dim_k    = dim[0];
            c.dim_v    = dim[1];
            c.n_tokens = n_tokens;
            test_case(c);
        }
    }
}

static void test_heads() {
    const int64_t heads[][2] = { { 1, 1 }, { 9, 3 }, { 7, 7 }, { 15, 1 }, { 16, 1 }, { 17, 1 }, { 71, 1 }, { 66, 2 } };
    for (const auto & n : heads) {
        for (const int64_t n_tokens : { 1, 2, 17 }) {
            attention_case c;
            c.tiers     = mix({ F16, Q4_VE }, { 90, 75 });
            c.n_head    = n[0];
            c.n_head_kv = n[1];
            c.n_tokens  = n_tokens;
            c.n_threads = 3;
            test_case(c);
        }
    }
}

static void test_masks_and_biases() {
    const mask_kind masks[] = { mask_kind::open,        mask_kind::causal,     mask_kind::block_hidden,
                                mask_kind::tier_hidden, mask_kind::row_hidden, mask_kind::scattered };
    for (const mask_kind mask : masks) {
        for (const int64_t n_tokens : { 1, 2, 33 }) {
            for (int variant = 0; variant < 5; variant++) {
                if (mask == mask_kind::row_hidden && n_tokens == 1) {
                    continue;  // all zero: see test_nothing_visible
                }
                attention_case c;
                c.tiers     = mix({ F16, Q4_VE, Q2_T }, { 130, 64, 77 });
                c.n_head    = 6;
                c.n_tokens  = n_tokens;
                c.mask      = mask;
                c.max_bias  = variant == 1 || variant == 4 ? 8.0f : 0.0f;
                c.softcap   = variant == 2 || variant == 4 ? 1.5f : 0.0f;
                c.sinks     = variant >= 3;
                c.n_threads = 2;
                test_case(c);
            }
        }
    }
}

static void test_nothing_visible() {
    for (const bool sinks : { false, true }) {
        for (const int n_threads : { 1, 3 }) {
            attention_case c;
            c.tiers                       = mix({ F16, Q4_VE }, { 40, 40 });
            c.mask                        = mask_kind::row_hidden;
            c.sinks                       = sinks;
            c.n_threads                   = n_threads;
            const std::vector<float> zero = compute(c).first;
            CHECK(std::all_of(zero.begin(), zero.end(), [](float x) { return x == 0.0f; }), "%s", describe(c).c_str());
        }
    }
}

static void test_lengths_and_threads() {
    const int64_t lengths[][2] = { { 1, 1 }, { 31, 1 }, { 32, 32 }, { 33, 31 }, { 64, 257 }, { 5, 1000 } };
    for (const auto & length : lengths) {
        for (int n_threads = 1; n_threads <= 8; n_threads++) {
            for (const int64_t n_tokens : { 1, 2, 40 }) {
                if (n_tokens > length[0] + length[1]) {
                    continue;
                }
                attention_case c;
                c.tiers     = mix({ F16, Q4_VE }, { length[0], length[1] });
                c.n_tokens  = n_tokens;
                c.n_threads = n_threads;
                test_case(c);
            }
        }
    }
}

static void test_streams() {
    for (const int64_t n_stream : { 2, 3 }) {
        for (const int64_t n_tokens : { 1, 3, 40 }) {
            for (const int n_threads : { 1, 4 }) {
                attention_case c;
                c.tiers     = mix({ F16, Q4_VE, Q2_T }, { 60, 61, 62 });
                c.n_stream  = n_stream;
                c.n_tokens  = n_tokens;
                c.n_threads = n_threads;
                c.mask      = mask_kind::scattered;
                test_case(c);
            }
        }
    }
}

// Rows behind byte 2^31 of a tensor: they are wide, and memory that nothing touches costs nothing.
static void test_large_offsets() {
    for (const int64_t n_tokens : { 1, 3 }) {
        attention_case c;
        c.tiers     = mix({ F16, Q4_VE }, { 8, 1000 });
        c.n_columns = 1 << 22;
        c.n_tokens  = n_tokens;
        CHECK(ggml_row_size(Q4_VE, c.n_columns) * 970 > (size_t) 1 << 31, "the rows are too narrow");
        test_case(c);
    }
}

// Scores so far apart that most blocks weigh nothing and are left out; and the same with nothing left out.
static void test_negligible_blocks() {
    for (const char * skip : { "1", "0" }) {
        setenv("PYKVQ_ATTENTION_SKIP", skip, 1);
        for (const int64_t n_tokens : { 1, 40 }) {
            attention_case c;
            c.tiers    = mix({ F16, Q4_VE }, { 200, 800 });
            c.n_tokens = n_tokens;
            c.q_scale  = 30.0f;
            test_case(c);
        }
    }
    unsetenv("PYKVQ_ATTENTION_SKIP");
}

// On F16, llama.cpp's own kernel is the measure: ours is as close to it as its error allows, and no further from the truth.
static void test_against_ggml() {
    for (const int64_t n_tokens : { 1, 40 }) {
        attention_case c;
        c.tiers    = mix({ F16 }, { 1000 });
        c.n_tokens = n_tokens;
        setenv("PYKVQ_FLASH_ATTN", "ggml", 1);
        check_rng().seed(2);
        const auto [theirs, exact] = compute(c);
        unsetenv("PYKVQ_FLASH_ATTN");
        check_rng().seed(2);
        const std::vector<float> ours = compute(c).first;
        const double error            = nmse(ours, exact);
        const double their_error      = nmse(theirs, exact);
        std::printf("%d tokens, F16: NMSE %g, llama.cpp's %g\n", (int) n_tokens, error, their_error);
        CHECK(their_error > 0.0 && their_error < 1e-4, "%g", their_error);
        CHECK(error <= 4.0 * their_error, "%g and %g", error, their_error);  // twice the error, squared
        CHECK(nmse(ours, theirs) <= 4.0 * their_error, "%g and %g", nmse(ours, theirs), their_error);
    }
}

// A result may depend on the number of threads by rounding only, and on nothing else.
static void test_repeatable() {
    attention_case c;
    c.tiers     = mix({ F16, Q4_VE }, { 100, 200 });
    c.n_tokens  = 3;
    c.n_threads = 4;
    check_rng().seed(1);
    const std::vector<float> first = compute(c).first;
    for (int i = 0; i < 5; i++) {
        check_rng().seed(1);
        CHECK(compute(c).first == first, "run %d differs", i);
    }
}

int main() {
    test_types();
    test_head_dims();
    test_heads();
    test_masks_and_biases();
    test_nothing_visible();
    test_lengths_and_threads();
    test_streams();
    test_large_offsets();
    test_repeatable();
    test_negligible_blocks();
    test_against_ggml();
    std::printf("worst error %g\n", worst);
    return check_result("test-tier-attention");
}
