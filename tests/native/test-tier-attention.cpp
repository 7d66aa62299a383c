// GGML_OP_FLASH_ATTN_EXT over one tensor of any type or the tiers of a KV cache, against attention in double precision over the decoded rows.

#include "check.h"
#include "exact-attention.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "test-backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

// A tier's K or V as the cache keeps it, [padded head dim * heads, rows, streams], and what it decodes to.
struct tier_data : tier_values {
    ggml_tensor * tensor = nullptr;
};

static tier_data make_tier(ggml_context * ctx, const attention_case & c, ggml_type type, int64_t dim, int64_t n_rows) {
    tier_data data;
    data.padded = GGML_PAD(dim, ggml_blck_size(type));
    data.tensor = ggml_new_tensor_3d(ctx, type, std::max(c.n_columns, data.padded * c.n_head_kv), n_rows + c.spare_rows,
                                     c.n_stream);
    return data;
}

static void fill_tier(tier_data & data, const attention_case & c, ggml_type type, int64_t dim, int64_t n_rows,
                      bool first) {
    ggml_tensor * tensor             = data.tensor;
    const std::vector<uint8_t> bytes = make_tier_bytes(data, c, type, dim, n_rows, first);
    const size_t row_bytes           = ggml_row_size(type, data.padded * c.n_head_kv);
    for (size_t row = 0; row < bytes.size() / row_bytes; row++) {
        ggml_backend_tensor_set(tensor, bytes.data() + row * row_bytes, row * tensor->nb[1], row_bytes);
    }
}

// The view that kvq_tiers::attach() makes: [padded, rows, heads, streams]
static ggml_tensor * make_view(ggml_context * ctx, const attention_case & c, const tier_data & data, int64_t n_rows) {
    return ggml_view_4d(ctx, data.tensor, data.padded, n_rows, c.n_head_kv, c.n_stream, data.tensor->nb[1],
                        ggml_row_size(data.tensor->type, data.padded), data.tensor->nb[2], 0);
}

// Owns what a computation needs.
struct computation {
    explicit computation(int n_threads) {
        ggml_init_params params = { 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        ctx                     = ggml_init(params);
        backend                 = new_test_backend(n_threads);
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

// The op's result and the exact one; nothing if the backend does not compute it.
static std::pair<std::vector<float>, std::vector<float>> compute(const attention_case & c) {
    computation run(c.n_threads);
    ggml_context * ctx = run.ctx;
    attention_inputs in;
    std::vector<tier_data> k;
    std::vector<tier_data> v;
    for (const tier_shape & tier : c.tiers) {
        k.push_back(make_tier(ctx, c, tier.type_k, c.dim_k, tier.n_rows));
        v.push_back(make_tier(ctx, c, tier.type_v, c.dim_v, tier.n_rows));
    }
    ggml_tensor * q    = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, c.dim_k, c.n_tokens, c.n_head, c.n_stream);
    ggml_tensor * mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, count_cells(c), c.n_tokens, 1, c.n_stream);
    ggml_tensor * sink = c.sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, c.n_head) : nullptr;
    ggml_tensor * out  = ggml_flash_attn_ext(ctx, q, make_view(ctx, c, k[0], c.tiers[0].n_rows),
                                             make_view(ctx, c, v[0], c.tiers[0].n_rows), mask,
                                             1.0f / std::sqrt((float) c.dim_k), c.max_bias, c.softcap);
    ggml_flash_attn_ext_add_sinks(out, sink);
    for (size_t t = 1; t < c.tiers.size(); t++) {
        out->src[3 + 2 * t] = make_view(ctx, c, k[t], c.tiers[t].n_rows);
        out->src[4 + 2 * t] = make_view(ctx, c, v[t], c.tiers[t].n_rows);
    }
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    run.buffer = ggml_backend_alloc_ctx_tensors(ctx, run.backend);

    for (size_t t = 0; t < c.tiers.size(); t++) {
        fill_tier(k[t], c, c.tiers[t].type_k, c.dim_k, c.tiers[t].n_rows, t == 0);
        fill_tier(v[t], c, c.tiers[t].type_v, c.dim_v, c.tiers[t].n_rows, t == 0);
        in.k.push_back(k[t]);
        in.v.push_back(v[t]);
    }
    in.q    = random_normal((size_t) ggml_nelements(q), c.q_scale);
    in.mask = make_mask(c);
    ggml_backend_tensor_set(q, in.q.data(), 0, ggml_nbytes(q));
    set_f16(mask, in.mask);
    if (c.sinks) {
        in.sinks = random_normal((size_t) c.n_head, 2.0f);
        ggml_backend_tensor_set(sink, in.sinks.data(), 0, ggml_nbytes(sink));
    }
    if (!compute_graph(run.backend, graph)) {
        return {};
    }
    std::vector<float> result((size_t) ggml_nelements(out));
    ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
    return { result, exact_attention(c, in) };
}

// float32 sums and the exponential of float32 scores; measured at most 9e-13
static constexpr double NMSE_LIMIT = 1e-11;

// on a GPU queries are rounded to 8 bits, and many tokens are computed in half precision by ggml's kernels
static constexpr double NMSE_LIMIT_GPU = 2e-4;

static double worst = 0.0;

static void test_case(const attention_case & c) {
    if (on_gpu() && c.mask == mask_kind::block_hidden && c.n_tokens > 8) {
        return;  // ggml's half-precision kernels multiply a hidden NaN by 0
    }
    const auto [result, expected] = compute(c);
    if (result.empty()) {
        return;
    }
    const double error = nmse(result, expected);
    CHECK(error < (on_gpu() ? NMSE_LIMIT_GPU : NMSE_LIMIT), "%s: %g", describe(c).c_str(), error);
    worst = std::max(worst, error);
}

static const ggml_type F32  = GGML_TYPE_F32;
static const ggml_type Q5_1 = GGML_TYPE_Q5_1;

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
    if (!on_gpu()) {
        test_against_ggml();
    }
    std::printf("worst error %g\n", worst);
    return test_backend_result("test-tier-attention");
}
