// The reference codecs of the KV types: sizes, error limits, bits by hand, odd inputs, writes within bounds.

#include "awkward-blocks.h"
#include "check.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "kvq-quants.h"

#include <algorithm>
#include <cfloat>
#include <cstring>
#include <functional>
#include <limits>
#include <string>

struct type_limits {
    ggml_type type;
    int block_bytes;
    double bits;
    // Round-trip NMSE allowed: what was measured plus a tenth. For comparison, a Lloyd-Max quantizer leaves 0.009497 (16
    // levels) and 0.1175 (4 levels) of a normal's variance, and 0.1765 (4 levels) of a Laplacian's; a scale fitted to
    // each block does a little better.
    double normal;
    double uniform;
    double laplace;
};

static const type_limits TYPES[] = {
    { GGML_TYPE_Q4_VE, 34, 4.25, 0.0076, 0.0056, 0.0112 },
    { GGML_TYPE_Q2_T, 18, 2.25, 0.1175, 0.0680, 0.1900 },
    // a little worse here than on keys, whose first 8 values of a block are smaller than the others
    { GGML_TYPE_Q4_VES, 36, 4.50, 0.0081, 0.0059, 0.0118 },
    { GGML_TYPE_Q2_TS, 20, 2.50, 0.1323, 0.0720, 0.2111 },
};

// The strong values' levels 3 c - 94 are not symmetric and do not end at 127.
static bool is_spectral(ggml_type type) {
    return type == GGML_TYPE_Q4_VES || type == GGML_TYPE_Q2_TS;
}

static std::vector<uint8_t> encode(ggml_type type, const std::vector<float> & x) {
    // exactly as large as needed, so that AddressSanitizer sees one byte too many
    std::vector<uint8_t> data(ggml_row_size(type, (int64_t) x.size()));
    ggml_get_type_traits(type)->from_float_ref(x.data(), data.data(), (int64_t) x.size());
    return data;
}

static std::vector<float> decode(ggml_type type, const std::vector<uint8_t> & data, size_t n) {
    std::vector<float> y(n, std::numeric_limits<float>::infinity());
    ggml_get_type_traits(type)->to_float(data.data(), y.data(), (int64_t) n);
    return y;
}

static std::vector<float> round_trip(ggml_type type, const std::vector<float> & x) {
    return decode(type, encode(type, x), x.size());
}

static void test_sizes() {
    for (const auto & t : TYPES) {
        const char * name = ggml_type_name(t.type);
        CHECK(ggml_blck_size(t.type) == KVQ_BLOCK, "%s", name);
        CHECK((int) ggml_type_size(t.type) == t.block_bytes, "%s: %zu", name, ggml_type_size(t.type));
        CHECK(8.0 * ggml_row_size(t.type, 1024) / 1024 == t.bits, "%s", name);
        CHECK(ggml_is_quantized(t.type), "%s", name);
    }
    CHECK(std::string(ggml_type_name(GGML_TYPE_Q4_VE)) == "q4_ve", "%s", ggml_type_name(GGML_TYPE_Q4_VE));
    CHECK(std::string(ggml_type_name(GGML_TYPE_Q4_VES)) == "q4_ves", "%s", ggml_type_name(GGML_TYPE_Q4_VES));
    CHECK(std::string(ggml_type_name(GGML_TYPE_Q2_TS)) == "q2_ts", "%s", ggml_type_name(GGML_TYPE_Q2_TS));
    CHECK(std::string(ggml_type_name(GGML_TYPE_Q2_T)) == "q2_t", "%s", ggml_type_name(GGML_TYPE_Q2_T));
}

static void check_round_trip(const type_limits & t, const char * what, double limit, const std::vector<float> & x) {
    const double error = nmse(round_trip(t.type, x), x);
    std::printf("%s %s: NMSE %.5f (limit %.5f)\n", ggml_type_name(t.type), what, error, limit);
    CHECK(error < limit, "%s %s", ggml_type_name(t.type), what);
}

static void test_error_limits() {
    const size_t n = 64 * 1024;
    std::uniform_real_distribution<float> uniform(-3.0f, 3.0f);
    std::exponential_distribution<float> exponential(1.0f);
    std::vector<float> flat(n);
    std::vector<float> heavy(n);
    for (size_t i = 0; i < n; i++) {
        flat[i]  = uniform(check_rng());
        heavy[i] = exponential(check_rng()) * (check_rng()() % 2 ? 1.0f : -1.0f);
    }
    for (const auto & t : TYPES) {
        check_round_trip(t, "normal", t.normal, random_normal(n));
        check_round_trip(t, "normal 1e-3", t.normal, random_normal(n, 1e-3f));
        check_round_trip(t, "normal 1e+4", t.normal, random_normal(n, 1e4f));
        check_round_trip(t, "uniform", t.uniform, flat);
        check_round_trip(t, "laplace", t.laplace, heavy);
    }
}

// The search must not lose to the obvious scale, absmax / 127.
static void test_search_beats_absmax() {
    const int8_t codebook[16]  = { KVQ_CODEBOOK_Q4_VE };
    const std::vector<float> x = random_normal(64 * 256);
    std::vector<float> y(x.size());
    for (size_t b = 0; b < x.size(); b += KVQ_BLOCK) {
        float amax = 0.0f;
        for (int i = 0; i < KVQ_BLOCK; i++) {
            amax = std::max(amax, std::fabs(x[b + i]));
        }
        for (int i = 0; i < KVQ_BLOCK; i++) {
            float best = FLT_MAX;
            for (const int8_t level : codebook) {
                const float value = amax / 127.0f * level;
                if (std::fabs(value - x[b + i]) < std::fabs(best - x[b + i])) {
                    best = value;
                }
            }
            y[b + i] = best;
        }
    }
    const double searched = nmse(round_trip(GGML_TYPE_Q4_VE, x), x);
    CHECK(searched < 0.97 * nmse(y, x), "searched %g, absmax %g", searched, nmse(y, x));
}

// A block laid out by hand, from docs/formats.md.
static void test_bits() {
    const uint16_t two = ggml_fp32_to_fp16(2.0f);
    block_q4_ve a;
    a.d = two;
    std::memset(a.qs, 0, sizeof(a.qs));
    a.qs[0]  = 0xf7;  // value 0 has code 7, value 32 code 15
    a.qs[31] = 0x80;  // value 31 has code 0, value 63 code 8
    float y[KVQ_BLOCK];
    kvq_dequantize_row_q4_ve(&a, y, KVQ_BLOCK);
    CHECK(y[0] == -12.0f && y[32] == 254.0f, "%g %g", y[0], y[32]);
    CHECK(y[31] == -254.0f && y[63] == 12.0f, "%g %g", y[31], y[63]);

    block_q2_t b;
    b.d = two;
    std::memset(b.qs, 0, sizeof(b.qs));
    b.qs[5] = 0xe4;  // values 5, 21, 37, 53 have codes 0, 1, 2, 3
    kvq_dequantize_row_q2_t(&b, y, KVQ_BLOCK);
    CHECK(y[5] == -254.0f && y[21] == -76.0f && y[37] == 76.0f && y[53] == 254.0f, "%g %g %g %g", y[5], y[21], y[37],
          y[53]);
}

static void test_non_finite() {
    const float bad[] = { NAN, INFINITY, -INFINITY };
    for (const auto & t : TYPES) {
        for (const float value : bad) {
            std::vector<float> x       = random_normal(3 * KVQ_BLOCK);
            x[KVQ_BLOCK + 17]          = value;
            const std::vector<float> y = round_trip(t.type, x);
            for (int i = 0; i < KVQ_BLOCK; i++) {
                CHECK(std::isfinite(y[i]) && std::isfinite(y[2 * KVQ_BLOCK + i]), "%s: a good block was spoiled",
                      ggml_type_name(t.type));
                CHECK(std::isnan(y[KVQ_BLOCK + i]), "%s: %g was hidden as %g", ggml_type_name(t.type), value,
                      y[KVQ_BLOCK + i]);
            }
        }
    }
}

static void test_zero_and_tiny() {
    for (const auto & t : TYPES) {
        for (const float value : { 0.0f, -0.0f, FLT_MIN, FLT_TRUE_MIN, -1e-40f, 1e-9f }) {
            const std::vector<float> y = round_trip(t.type, std::vector<float>(KVQ_BLOCK, value));
            for (const float v : y) {
                CHECK(v == 0.0f && !std::signbit(v), "%s: %g became %g", ggml_type_name(t.type), value, v);
            }
        }
        // scales around the smallest half: the absolute error stays below one step of the scale times the codebook
        for (float value = 1e-6f; value < 1e-3f; value *= 1.7f) {
            const std::vector<float> y = round_trip(t.type, std::vector<float>(KVQ_BLOCK, value));
            for (const float v : y) {
                CHECK(std::fabs(v - value) <= 127.0f * 0x1p-25f + 0.02f * value, "%s: %g became %g",
                      ggml_type_name(t.type), value, v);
            }
        }
    }
}

static void test_huge() {
    for (const auto & t : TYPES) {
        if (is_spectral(t.type)) {
            continue;
        }
        std::vector<float> x(KVQ_BLOCK, 1e6f);
        std::vector<float> y = round_trip(t.type, x);
        CHECK(nmse(y, x) < 1e-6, "%s: 1e6 became %g", ggml_type_name(t.type), y[0]);
        for (const float value : { FLT_MAX, 1e20f }) {
            x.assign(KVQ_BLOCK, value);
            x[3] = -value;
            y    = round_trip(t.type, x);
            CHECK(y[0] == 65504.0f * 127.0f && y[3] == -65504.0f * 127.0f, "%s: %g became %g", ggml_type_name(t.type),
                  value, y[0]);
        }
    }
}

static void test_symmetry_and_determinism() {
    for (const auto & t : TYPES) {
        if (is_spectral(t.type)) {
            continue;
        }
        const std::vector<float> x = random_normal(16 * KVQ_BLOCK);
        std::vector<float> minus(x);
        for (float & v : minus) {
            v = -v;
        }
        const std::vector<float> y       = round_trip(t.type, x);
        const std::vector<float> y_minus = round_trip(t.type, minus);
        for (size_t i = 0; i < x.size(); i++) {
            CHECK(y[i] == -y_minus[i], "%s: %g and %g", ggml_type_name(t.type), y[i], y_minus[i]);
        }
        CHECK(encode(t.type, x) == encode(t.type, x), "%s", ggml_type_name(t.type));
        // what was decoded encodes to itself
        CHECK(nmse(round_trip(t.type, y), y) < 1e-6, "%s", ggml_type_name(t.type));
    }
}

static void test_sentinels() {
    constexpr uint8_t SENTINEL = 0xa5;
    constexpr size_t GUARD     = 64;
    for (const auto & t : TYPES) {
        for (const int blocks : { 1, 2, 3, 7 }) {
            const size_t n             = (size_t) blocks * KVQ_BLOCK;
            const size_t bytes         = ggml_row_size(t.type, (int64_t) n);
            const std::vector<float> x = random_normal(n);
            std::vector<uint8_t> data(bytes + 2 * GUARD, SENTINEL);
            // odd address: rows have no alignment beyond the block's
            ggml_get_type_traits(t.type)->from_float_ref(x.data(), data.data() + GUARD, (int64_t) n);
            std::vector<float> y(n + 2 * GUARD, -7.0f);
            ggml_get_type_traits(t.type)->to_float(data.data() + GUARD, y.data() + GUARD, (int64_t) n);
            for (size_t i = 0; i < GUARD; i++) {
                CHECK(data[i] == SENTINEL && data[GUARD + bytes + i] == SENTINEL, "%s wrote outside at %zu",
                      ggml_type_name(t.type), i);
                CHECK(y[i] == -7.0f && y[GUARD + n + i] == -7.0f, "%s wrote outside at %zu", ggml_type_name(t.type), i);
            }
        }
    }
}

// The CPU backend's encoder gives the reference's bytes.
static void test_vectorised_encoder() {
    for (const auto & t : TYPES) {
        for (const std::vector<float> & x : awkward_blocks()) {
            std::vector<uint8_t> data(ggml_row_size(t.type, KVQ_BLOCK));
            ggml_get_type_traits_cpu(t.type)->from_float(x.data(), data.data(), KVQ_BLOCK);
            CHECK(data == encode(t.type, x), "%s: block of %g, %g, ...", ggml_type_name(t.type), x[0], x[1]);
        }
    }
}

int main() {
    ggml_cpu_init();
    test_vectorised_encoder();
    test_sizes();
    test_error_limits();
    test_search_beats_absmax();
    test_bits();
    test_non_finite();
    test_zero_and_tiny();
    test_huge();
    test_symmetry_and_determinism();
    test_sentinels();
    return check_result("test-kv-types");
}
