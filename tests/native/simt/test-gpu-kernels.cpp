// The GPU kernels in the SIMT emulator: encoders and decoders against the reference codecs, attention against attention in
// double precision. Built for each kind of machine: waves of 32 with nibble permutes (CUDA), and of 32 and 64 with byte
// permutes (AMD).

#include "awkward-blocks.h"
#include "exact-attention.h"
#include "kvq-gpu-attention.h"
#include "kvq-gpu-decode.h"
#include "kvq-gpu-encode.h"
#include "kvq-gpu-mul-heads.h"
#include "simt.h"

#include <map>
#include <memory>

using namespace kvq::gpu;

static const std::map<ggml_type, kv_type> TYPES = {
    { GGML_TYPE_F16, KV_F16 },       { GGML_TYPE_BF16, KV_BF16 },   { GGML_TYPE_Q8_0, KV_Q8_0 },
    { GGML_TYPE_Q4_0, KV_Q4_0 },     { GGML_TYPE_Q4_VE, KV_Q4_VE }, { GGML_TYPE_Q2_T, KV_Q2_T },
    { GGML_TYPE_Q4_VES, KV_Q4_VES }, { GGML_TYPE_Q2_TS, KV_Q2_TS },
};
static const ggml_type OWN_TYPES[] = { GGML_TYPE_Q4_VE, GGML_TYPE_Q2_T, GGML_TYPE_Q4_VES, GGML_TYPE_Q2_TS };

static void check_no_findings(const std::string & what) {
    for (const std::string & error : simt::errors()) {
        CHECK(false, "%s: %s", what.c_str(), error.c_str());
    }
    simt::clear_errors();
}

static int n_blocks_for(int64_t n, int64_t per_block) {
    return (int) ((n + per_block - 1) / per_block);
}

static std::vector<uint8_t> reference_bytes(ggml_type type, const std::vector<float> & x) {
    std::vector<uint8_t> bytes(ggml_row_size(type, (int64_t) x.size()));
    ggml_get_type_traits(type)->from_float_ref(x.data(), bytes.data(), (int64_t) x.size());
    return bytes;
}

static std::vector<float> reference_values(ggml_type type, const std::vector<uint8_t> & bytes, size_t n) {
    std::vector<float> x(n);
    ggml_get_type_traits(type)->to_float(bytes.data(), x.data(), (int64_t) n);
    return x;
}

static bool same_values(const std::vector<float> & a, const std::vector<float> & b) {
    for (size_t i = 0; i < a.size(); i++) {
        if (!(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])))) {
            return false;
        }
    }
    return a.size() == b.size();
}

static void launch_encode(ggml_type type, const encode_args & a) {
    const int64_t n = a.n_blocks_row * a.n1 * a.n2 * a.n3;
    simt::launch({ n_blocks_for(n, ENCODE_TEAMS) }, ENCODE_THREADS, [&] {
        switch (type) {
            case GGML_TYPE_Q4_VE:
                return encode_rows<KV_Q4_VE>(a);
            case GGML_TYPE_Q2_T:
                return encode_rows<KV_Q2_T>(a);
            case GGML_TYPE_Q4_VES:
                return encode_rows<KV_Q4_VES>(a);
            default:
                return encode_rows<KV_Q2_TS>(a);
        }
    });
}

// Blocks one after another, as cpy of a contiguous tensor has them.
static std::vector<uint8_t> encode(ggml_type type, const std::vector<float> & x) {
    const simt::buffer<float> src(x);
    const simt::buffer<uint8_t> dst(ggml_row_size(type, (int64_t) x.size()), 2);
    encode_args a  = {};
    a.src          = (const uint8_t *) src.data();
    a.dst          = dst.data();
    a.n_blocks_row = (int64_t) x.size() / KVQ_BLOCK;
    a.n1 = a.n2 = a.n3 = 1;
    launch_encode(type, a);
    return dst.copy();
}

static void test_encoders() {
    std::vector<float> x;
    for (const std::vector<float> & block : awkward_blocks()) {
        x.insert(x.end(), block.begin(), block.end());
    }
    for (const ggml_type type : OWN_TYPES) {
        const std::vector<uint8_t> bytes    = encode(type, x);
        const std::vector<uint8_t> expected = reference_bytes(type, x);
        size_t n_wrong                      = 0;
        for (size_t i = 0; i < bytes.size(); i++) {
            n_wrong += bytes[i] != expected[i];
        }
        CHECK(n_wrong == 0, "%s: %zu of %zu bytes differ", ggml_type_name(type), n_wrong, bytes.size());
        check_no_findings(ggml_type_name(type));
    }
}

// set_rows: rows in any order, heads and streams with strides, indices of both widths.
static void test_set_rows() {
    const int64_t n0 = 3 * KVQ_BLOCK, n1 = 5, n2 = 2, n3 = 2, n_rows = 9;
    for (const ggml_type type : OWN_TYPES) {
        for (const bool wide : { false, true }) {
            const std::vector<float> x = random_normal((size_t) (n0 * n1 * n2 * n3));
            const size_t row_bytes     = ggml_row_size(type, n0);
            std::vector<int64_t> rows;
            std::vector<int32_t> narrow;
            for (int64_t i = 0; i < n1 * n2; i++) {
                rows.push_back(7 * i % n_rows);
                narrow.push_back((int32_t) rows.back());
            }
            const simt::buffer<float> src(x);
            const simt::buffer<int64_t> index(rows);
            const simt::buffer<int32_t> index_narrow(narrow);
            std::vector<uint8_t> expected(row_bytes * (size_t) (n_rows * n2 * n3), 0xa5);
            const simt::buffer<uint8_t> dst(expected, 2);
            encode_args a   = {};
            a.src           = (const uint8_t *) src.data();
            a.dst           = dst.data();
            a.rows          = wide ? (const uint8_t *) index.data() : (const uint8_t *) index_narrow.data();
            a.rows_wide     = wide;
            a.n_blocks_row  = n0 / KVQ_BLOCK;
            a.n1            = n1;
            a.n2            = n2;
            a.n3            = n3;
            const int64_t w = wide ? 8 : 4;
            a.rows_n2       = n2;
            a.rows_n3       = 1;
            for (int i = 0; i < 3; i++) {
                a.src_stride[i]  = (int64_t) sizeof(float) * (i == 0 ? n0 : i == 1 ? n0 * n1 : n0 * n1 * n2);
                a.dst_stride[i]  = (int64_t) row_bytes * (i == 0 ? 1 : i == 1 ? n_rows : n_rows * n2);
                a.rows_stride[i] = w * (i == 0 ? 1 : n1);
            }
            launch_encode(type, a);
            for (int64_t i = 0; i < n1 * n2 * n3; i++) {
                const std::vector<float> row(x.begin() + i * n0, x.begin() + (i + 1) * n0);
                const std::vector<uint8_t> bytes = reference_bytes(type, row);
                const int64_t to                 = i / n1 * n_rows + rows[(size_t) (i % (n1 * n2))];
                std::copy(bytes.begin(), bytes.end(), expected.begin() + to * (int64_t) row_bytes);
            }
            CHECK(dst.copy() == expected, "%s, %s indices", ggml_type_name(type), wide ? "wide" : "narrow");
            check_no_findings("set_rows");
        }
    }
}

static void test_get_rows() {
    const int64_t n1 = 4, n_rows = 7;
    for (const auto & [type, kv] : TYPES) {
        for (const int64_t n0 : { 64, 192, 96, 80 }) {
            if (n0 % ggml_blck_size(type) != 0) {
                continue;
            }
            for (const bool to_half : { false, true }) {
                const std::vector<uint8_t> bytes = reference_bytes(type, random_normal((size_t) (n0 * n_rows)));
                const std::vector<float> all     = reference_values(type, bytes, (size_t) (n0 * n_rows));
                const std::vector<int32_t> rows  = { 6, 0, 3, 3 };
                const simt::buffer<uint8_t> src(bytes, 2);
                const simt::buffer<int32_t> index(rows);
                const simt::buffer<uint8_t> dst((size_t) (n0 * n1) * (to_half ? 2 : 4));
                decode_args a = {};
                a.src         = src.data();
                a.dst         = dst.data();
                a.rows        = (const uint8_t *) index.data();
                a.type        = kv;
                a.to_half     = to_half;
                a.n0          = n0;
                a.n1          = n1;
                a.n2 = a.n3      = 1;
                a.src_stride[0]  = (int64_t) ggml_row_size(type, n0);
                a.dst_stride[0]  = n0 * (to_half ? 2 : 4);
                a.rows_stride[0] = 4;
                simt::launch({ n_blocks_for(2 * ((n0 + 63) / 64) * n1, DECODE_THREADS) }, DECODE_THREADS,
                             [&] { decode_rows(a); });
                const std::vector<uint8_t> out = dst.copy();
                std::vector<float> result;
                std::vector<float> expected;
                for (int64_t i = 0; i < n0 * n1; i++) {
                    const float x = all[(size_t) (rows[(size_t) (i / n0)] * n0 + i % n0)];
                    expected.push_back(to_half ? simt::half_value(simt::half_bits(x)) : x);
                    result.push_back(to_half ? simt::half_value(((const uint16_t *) out.data())[i]) :
                                               ((const float *) out.data())[i]);
                }
                CHECK(same_values(result, expected), "%s, %d values, half %d", ggml_type_name(type), (int) n0, to_half);
                check_no_findings("get_rows");
            }
        }
    }
}

// Tier to tier, as ageing does it: get_rows, then set_rows.
static void test_requantize() {
    for (const auto & [from, kv] : TYPES) {
        for (const ggml_type to : OWN_TYPES) {
            const size_t n                   = 8 * KVQ_BLOCK;
            const std::vector<uint8_t> bytes = reference_bytes(from, random_normal(n));
            const simt::buffer<uint8_t> src(bytes);
            const simt::buffer<float> values(n);
            decode_args a = {};
            a.src         = src.data();
            a.dst         = (uint8_t *) values.data();
            a.type        = kv;
            a.n0          = (int64_t) n;
            a.n1 = a.n2 = a.n3 = 1;
            simt::launch({ 1 }, DECODE_THREADS, [&] { decode_rows(a); });
            const std::vector<uint8_t> expected = reference_bytes(to, reference_values(from, bytes, n));
            CHECK(encode(to, values.copy()) == expected, "%s to %s", ggml_type_name(from), ggml_type_name(to));
            check_no_findings("requantize");
        }
    }
}

static void test_mul_heads() {
    const int n_in = 64, n_out = 96, n_head = 4, group = 2;
    for (const bool half : { false, true }) {
        for (const int n_tokens : { 1, 31, 70 }) {
            std::vector<float> m       = random_normal((size_t) (n_in * n_out * n_head / group));
            const std::vector<float> x = random_normal((size_t) (n_in * n_head * n_tokens));
            std::vector<uint16_t> rounded(m.size());
            ggml_fp32_to_fp16_row(m.data(), rounded.data(), (int64_t) m.size());
            if (half) {
                ggml_fp16_to_fp32_row(rounded.data(), m.data(), (int64_t) m.size());
            }
            const simt::buffer<float> matrix(m);
            const simt::buffer<uint16_t> half_matrix(rounded);
            const simt::buffer<float> in(x);
            const simt::buffer<float> out((size_t) (n_out * n_head * n_tokens));
            mul_heads_args a = {};
            a.matrix         = half ? (const void *) half_matrix.data() : matrix.data();
            a.half_matrix    = half;
            a.x              = in.data();
            a.y              = out.data();
            a.n_in           = n_in;
            a.n_out          = n_out;
            a.n_tokens       = n_tokens;
            a.group          = group;
            a.matrix_row     = n_in;
            a.matrix_head    = n_in * n_out;
            a.x_head         = n_in;
            a.x_token        = n_in * n_head;
            a.y_head         = n_out;
            a.y_token        = n_out * n_head;
            simt::launch({ n_blocks_for(n_tokens, HEADS_TILE), n_out / HEADS_TILE, n_head }, HEADS_THREADS,
                         [&] { mul_heads(a); });
            std::vector<float> expected;
            for (int i = 0; i < n_tokens * n_head * n_out; i++) {
                const int row   = i / n_out % n_head / group * n_out + i % n_out;
                const float * v = &x[(size_t) (i / n_out * n_in)];
                double sum      = 0.0;
                for (int j = 0; j < n_in; j++) {
                    sum += (double) m[(size_t) (row * n_in + j)] * v[j];
                }
                expected.push_back((float) sum);
            }
            const double error = nmse(out.copy(), expected);
            CHECK(error < 1e-12, "%d tokens, half %d: %g", n_tokens, half, error);
            check_no_findings("mul_heads");
        }
    }
}

// --- attention ---

template <int BLOCKS, int TEAMS, int COLUMNS> static void launch_attention(const attention_args & a) {
    const int n_sets = (a.group + COLUMNS - 1) / COLUMNS;
    const int n      = (int) (a.n_tokens * a.mask_streams);
    simt::launch({ a.n_spans, a.n_head_kv * n_sets, n }, TEAM * TEAMS, [&] { attend_span<BLOCKS, TEAMS, COLUMNS>(a); });
    simt::launch({ a.n_head, n }, MERGE_THREADS, [&] { merge_spans(a); });
}

template <int BLOCKS, int TEAMS> static void launch_columns(const attention_args & a) {
    if (a.group == 1) {
        return launch_attention<BLOCKS, TEAMS, 1>(a);
    }
    if (a.group == 2 || TEAMS == 2) {
        return launch_attention<BLOCKS, TEAMS, 2>(a);
    }
    if (a.group <= 4) {
        return launch_attention < BLOCKS, TEAMS, TEAMS == 1 ? 4 : 2 > (a);
    }
    return launch_attention < BLOCKS, TEAMS, TEAMS == 1 ? 8 : 2 > (a);
}

static void launch_shape(const attention_args & a) {
    const int dim = std::max(a.dk, a.dv);
    if (dim <= 64) {
        return launch_columns<1, 1>(a);
    }
    if (dim <= 128) {
        return launch_columns<2, 1>(a);
    }
    return launch_columns<2, 2>(a);
}

// What quantized keys see of the queries: see kvq-gpu-attention.h.
static std::vector<float> round_queries(const attention_case & c, const std::vector<float> & q, float scale) {
    const int64_t ends[] = { 8, 32, 64 };
    std::vector<float> out;
    for (size_t row = 0; row < q.size(); row += (size_t) c.dim_k) {
        for (int64_t d = 0; d < c.dim_k;) {
            const int64_t end =
                std::min(c.dim_k, d / 64 * 64 + *std::find_if(ends, ends + 3, [d](int64_t e) { return d % 64 < e; }));
            float amax = 0.0f;
            for (int64_t i = d; i < end; i++) {
                amax = std::max(amax, std::fabs(q[row + (size_t) i] * scale));
            }
            for (int64_t i = d; i < end; i++) {
                const float level = std::rint(q[row + (size_t) i] * scale * (127.0f / amax));
                out.push_back((float) ((double) level * (amax / 127.0f) / scale));
            }
            d = end;
        }
    }
    return out;
}

struct tier_buffers {
    simt::buffer<uint8_t> k;
    simt::buffer<uint8_t> v;
};

static void set_strides(const attention_case & c, ggml_type type, int64_t dim, int64_t n_rows, int64_t * strides) {
    const int64_t head = (int64_t) ggml_row_size(type, GGML_PAD(dim, ggml_blck_size(type)));
    strides[0]         = head * c.n_head_kv;
    strides[1]         = head;
    strides[2]         = strides[0] * (n_rows + c.spare_rows);
}

// Results against the exact ones, and against those of rounded queries.
struct attention_result {
    std::vector<float> result;
    std::vector<float> exact;
    std::vector<float> exact_rounded;
};

static attention_result compute(const attention_case & c, int tiles_a_span) {
    attention_inputs in;
    attention_args a = {};
    std::vector<std::unique_ptr<tier_buffers>> buffers;
    int32_t cell = 0;
    for (size_t t = 0; t < c.tiers.size(); t++) {
        const tier_shape & shape = c.tiers[t];
        in.k.emplace_back();
        in.v.emplace_back();
        buffers.emplace_back(new tier_buffers{
            simt::buffer<uint8_t>(make_tier_bytes(in.k.back(), c, shape.type_k, c.dim_k, shape.n_rows, t == 0), 2 * t),
            simt::buffer<uint8_t>(make_tier_bytes(in.v.back(), c, shape.type_v, c.dim_v, shape.n_rows, t == 0),
                                  2 * t) });
        attention_tier & tier = a.tiers[t];
        tier.k                = buffers.back()->k.data();
        tier.v                = buffers.back()->v.data();
        tier.type_k           = TYPES.at(shape.type_k);
        tier.type_v           = TYPES.at(shape.type_v);
        tier.k_values         = (int32_t) in.k.back().padded;
        tier.v_values         = (int32_t) in.v.back().padded;
        tier.n_rows           = (int32_t) shape.n_rows;
        tier.start            = cell;
        tier.first_tile       = a.n_tiles;
        set_strides(c, shape.type_k, c.dim_k, shape.n_rows, tier.k_stride);
        set_strides(c, shape.type_v, c.dim_v, shape.n_rows, tier.v_stride);
        a.n_tiles += n_blocks_for(shape.n_rows, TILE);
        cell += tier.n_rows;
    }
    in.q    = random_normal((size_t) (c.dim_k * c.n_tokens * c.n_head * c.n_stream), c.q_scale);
    in.mask = make_mask(c);
    std::vector<uint16_t> half_mask(in.mask.size());
    ggml_fp32_to_fp16_row(in.mask.data(), half_mask.data(), (int64_t) half_mask.size());
    in.sinks = random_normal((size_t) c.n_head, 2.0f);

    a.tiles_a_span = tiles_a_span;
    a.n_spans      = n_blocks_for(a.n_tiles, tiles_a_span);
    const size_t n = (size_t) (c.n_tokens * c.n_stream * c.n_head);
    const simt::buffer<float> q(in.q);
    const simt::buffer<uint16_t> mask(half_mask);
    const simt::buffer<float> sinks(in.sinks);
    const simt::buffer<float> dst(n * (size_t) c.dim_v);
    const simt::buffer<float> span_max(n * (size_t) a.n_spans);
    const simt::buffer<float> span_sum(n * (size_t) a.n_spans);
    const simt::buffer<float> span_acc(n * (size_t) (a.n_spans * c.dim_v));
    a.q            = (const uint8_t *) q.data();
    a.mask         = c.mask == mask_kind::open && c.max_bias == 0.0f ? nullptr : (const uint8_t *) mask.data();
    a.sinks        = c.sinks ? sinks.data() : nullptr;
    a.dst          = (uint8_t *) dst.data();
    a.span_max     = span_max.data();
    a.span_sum     = span_sum.data();
    a.span_acc     = span_acc.data();
    a.mask_streams = (int32_t) c.n_stream;
    a.n_tokens     = (int32_t) c.n_tokens;
    a.n_head       = (int32_t) c.n_head;
    a.n_head_kv    = (int32_t) c.n_head_kv;
    a.group        = a.n_head / a.n_head_kv;
    a.dk           = (int32_t) c.dim_k;
    a.dv           = (int32_t) c.dim_v;
    a.n_tiers      = (int32_t) c.tiers.size();
    a.softcap      = c.softcap;
    a.scale        = 1.0f / std::sqrt((float) c.dim_k) / (c.softcap > 0.0f ? c.softcap : 1.0f);
    if (c.max_bias > 0.0f) {
        a.heads_log2 = 1;
        while (2 * a.heads_log2 <= a.n_head) {
            a.heads_log2 *= 2;
        }
        a.slope_log2a = -c.max_bias / (float) a.heads_log2;
        a.slope_log2b = a.slope_log2a / 2.0f;
    }
    const int64_t q_row = (int64_t) sizeof(float) * c.dim_k;
    a.q_stride[0]       = q_row;
    a.q_stride[1]       = q_row * c.n_tokens;
    a.q_stride[2]       = q_row * c.n_tokens * c.n_head;
    a.mask_stride[0]    = 2 * count_cells(c);
    a.mask_stride[1]    = 2 * count_cells(c) * c.n_tokens;
    a.dst_stride[0]     = (int64_t) sizeof(float) * c.dim_v;
    a.dst_stride[1]     = a.dst_stride[0] * c.n_head;
    a.dst_stride[2]     = a.dst_stride[1] * c.n_tokens;
    launch_shape(a);
    check_no_findings(describe(c));
    attention_result r;
    r.result        = dst.copy();
    r.exact         = exact_attention(c, in);
    in.q_rounded    = round_queries(c, in.q, a.scale);
    r.exact_rounded = exact_attention(c, in);
    return r;
}

// float32 sums, the exponential of float32 scores
static constexpr double NMSE_LIMIT = 1e-11;
// queries rounded to 8 bits
static constexpr double NMSE_LIMIT_ROUNDED = 1e-4;

static double worst         = 0.0;
static double worst_rounded = 0.0;

static void test_case(const attention_case & c, int tiles_a_span = 1) {
    const attention_result r = compute(c, tiles_a_span);
    const double error       = nmse(r.result, r.exact_rounded);
    const double all         = nmse(r.result, r.exact);
    CHECK(error < NMSE_LIMIT, "%s: %g", describe(c).c_str(), error);
    CHECK(all < NMSE_LIMIT_ROUNDED, "%s: %g with queries as they are", describe(c).c_str(), all);
    worst         = std::max(worst, error);
    worst_rounded = std::max(worst_rounded, all);
}

static void test_types() {
    const std::vector<std::vector<tier_shape>> mixes = {
        mix({ F16 }, { 150 }),
        mix({ BF16 }, { 150 }),
        mix({ Q8_0 }, { 150 }),
        mix({ Q4_0 }, { 150 }),
        mix({ Q4_VE }, { 300 }),
        mix({ Q2_T }, { 150 }),
        mix({ Q4_VES }, { 150 }),
        mix({ Q2_TS }, { 150 }),
        { { F16, F16, 60 }, { Q4_VES, Q4_VE, 180 }, { Q2_TS, Q2_T, 70 } },
        mix({ F16, F16 }, { 40, 140 }),
        mix({ F16, Q8_0, Q4_VE, Q2_T }, { 70, 33, 1, 97 }),
        { { F16, F16, 60 }, { Q8_0, Q4_VE, 50 }, { Q4_VE, Q2_T, 40 }, { Q4_0, F16, 30 } },
        { { F16, BF16, 60 }, { Q2_T, Q8_0, 50 } },
    };
    for (const auto & tiers : mixes) {
        for (const int64_t n_tokens : { 1, 3 }) {
            attention_case c;
            c.tiers    = tiers;
            c.n_tokens = n_tokens;
            test_case(c);
        }
    }
}

static void test_head_dims() {
    const int64_t dims[][2] = { { 64, 64 },   { 80, 80 },   { 96, 96 },  { 112, 112 }, { 128, 128 },
                                { 256, 256 }, { 192, 128 }, { 128, 64 }, { 64, 128 },  { 40, 72 } };
    for (const auto & dim : dims) {
        for (const ggml_type last : { Q2_T, Q8_0 }) {
            attention_case c;
            c.tiers = mix({ F16, Q4_VE, last }, { 50, 70, 40 });
            c.dim_k = dim[0];
            c.dim_v = dim[1];
            if (dim[0] % 32 != 0 && last == Q8_0) {
                c.tiers[2].type_k = Q4_VE;  // the cache pads a head to whole blocks; ggml's own 32-value types too
                c.tiers[2].type_v = Q4_0;
            }
            test_case(c);
        }
    }
}

static void test_heads() {
    const int64_t heads[][2] = { { 1, 1 }, { 9, 3 }, { 8, 2 }, { 5, 1 }, { 16, 2 }, { 17, 1 } };
    for (const auto & n : heads) {
        attention_case c;
        c.tiers     = mix({ F16, Q4_VE }, { 60, 75 });
        c.n_head    = n[0];
        c.n_head_kv = n[1];
        test_case(c);
        c.dim_k = c.dim_v = 128;
        test_case(c, 2);
    }
}

static void test_masks_and_biases() {
    const mask_kind masks[] = { mask_kind::open,        mask_kind::causal,     mask_kind::block_hidden,
                                mask_kind::tier_hidden, mask_kind::row_hidden, mask_kind::scattered };
    for (const mask_kind mask : masks) {
        for (int variant = 0; variant < 5; variant++) {
            attention_case c;
            c.tiers    = mix({ F16, Q4_VE, Q2_T }, { 130, 64, 77 });
            c.n_head   = 6;
            c.n_tokens = 2;
            c.mask     = mask;
            c.max_bias = variant == 1 || variant == 4 ? 8.0f : 0.0f;
            c.softcap  = variant == 2 || variant == 4 ? 1.5f : 0.0f;
            c.sinks    = variant >= 3;
            test_case(c, 1 + variant % 2);
        }
    }
}

static void test_nothing_visible() {
    for (const bool sinks : { false, true }) {
        attention_case c;
        c.tiers                       = mix({ F16, Q4_VE }, { 40, 40 });
        c.mask                        = mask_kind::row_hidden;
        c.sinks                       = sinks;
        const std::vector<float> zero = compute(c, 1).result;
        CHECK(std::all_of(zero.begin(), zero.end(), [](float x) { return x == 0.0f; }), "%s", describe(c).c_str());
    }
}

static void test_streams_and_spans() {
    for (const int tiles_a_span : { 1, 2, 100 }) {
        attention_case c;
        c.tiers    = mix({ F16, Q4_VE, Q2_T }, { 60, 261, 162 });
        c.n_stream = 2;
        c.n_tokens = 2;
        c.mask     = mask_kind::scattered;
        test_case(c, tiles_a_span);
    }
}

int main() {
    test_encoders();
    test_set_rows();
    test_get_rows();
    test_requantize();
    test_mul_heads();
    test_types();
    test_head_dims();
    test_heads();
    test_masks_and_biases();
    test_nothing_visible();
    test_streams_and_spans();
    std::printf("waves of %d: worst error %g, with queries as they are %g\n", simt::WAVE, worst, worst_rounded);
    return check_result("test-gpu-kernels");
}
