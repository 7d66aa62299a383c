// The KV types inside ggml's CPU backend: set_rows, get_rows, cpy, the dot product and flash attention.

#include "check.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "test-backend.h"

#include <functional>
#include <memory>

// A graph of one op over tensors that were filled by hand, computed on the CPU backend.
struct graph {
    explicit graph(int n_threads = 2) {
        ggml_init_params params = { 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        ctx                     = ggml_init(params);
        backend                 = new_test_backend(n_threads);
    }

    ~graph() {
        ggml_backend_buffer_free(buffer);
        ggml_backend_free(backend);
        ggml_free(ctx);
    }

    ggml_tensor * tensor(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2 = 1) {
        return ggml_new_tensor_3d(ctx, type, ne0, ne1, ne2);
    }

    void allocate() { buffer = ggml_backend_alloc_ctx_tensors(ctx, backend); }

    bool compute(ggml_tensor * result) {
        ggml_cgraph * cgraph = ggml_new_graph(ctx);
        ggml_build_forward_expand(cgraph, result);
        return compute_graph(backend, cgraph);
    }

    ggml_context * ctx           = nullptr;
    ggml_backend_t backend       = nullptr;
    ggml_backend_buffer_t buffer = nullptr;
};

template <typename T> static void set(ggml_tensor * tensor, const std::vector<T> & values) {
    ggml_backend_tensor_set(tensor, values.data(), 0, values.size() * sizeof(T));
}

template <typename T> static std::vector<T> get(const ggml_tensor * tensor) {
    std::vector<T> values(ggml_nbytes(tensor) / sizeof(T));
    ggml_backend_tensor_get(tensor, values.data(), 0, ggml_nbytes(tensor));
    return values;
}

static std::vector<uint8_t> encode(ggml_type type, const std::vector<float> & x) {
    if (type == GGML_TYPE_F32) {
        const auto * bytes = (const uint8_t *) x.data();
        return std::vector<uint8_t>(bytes, bytes + x.size() * sizeof(float));
    }
    std::vector<uint8_t> data(ggml_row_size(type, (int64_t) x.size()));
    ggml_get_type_traits(type)->from_float_ref(x.data(), data.data(), (int64_t) x.size());
    return data;
}

static std::vector<float> decode(ggml_type type, const std::vector<uint8_t> & data, size_t n) {
    std::vector<float> y(n);
    ggml_get_type_traits(type)->to_float(data.data(), y.data(), (int64_t) n);
    return y;
}

static const ggml_type KV_TYPES[] = { GGML_TYPE_Q4_VE, GGML_TYPE_Q2_T, GGML_TYPE_Q4_VES, GGML_TYPE_Q2_TS };

static void test_cpy(ggml_type type, int n_threads) {
    const int64_t n    = 192;
    const int64_t rows = 5;
    graph g(n_threads);
    ggml_tensor * x    = g.tensor(GGML_TYPE_F32, n, rows);
    ggml_tensor * q    = g.tensor(type, n, rows);
    ggml_tensor * back = g.tensor(GGML_TYPE_F32, n, rows);
    ggml_tensor * cpy  = ggml_cpy(g.ctx, x, q);
    ggml_tensor * out  = ggml_cpy(g.ctx, cpy, back);
    g.allocate();
    const std::vector<float> values = random_normal(n * rows);
    set(x, values);
    if (!g.compute(out)) {
        return;
    }
    CHECK(get<uint8_t>(q) == encode(type, values), "%s: cpy from f32", ggml_type_name(type));
    CHECK(get<float>(back) == decode(type, encode(type, values), values.size()), "%s: cpy to f32",
          ggml_type_name(type));
}

// Rows named in any order are written, all others keep their bytes.
static void test_set_rows(ggml_type type, int n_threads) {
    const int64_t n                    = 128;
    const std::vector<int64_t> indices = { 6, 0, 3 };
    graph g(n_threads);
    ggml_tensor * cache = g.tensor(type, n, 8);
    ggml_tensor * x     = g.tensor(GGML_TYPE_F32, n, 3);
    ggml_tensor * idx   = g.tensor(GGML_TYPE_I64, 3, 1);
    ggml_tensor * out   = ggml_set_rows(g.ctx, cache, x, idx);
    g.allocate();
    const std::vector<uint8_t> before(ggml_nbytes(cache), 0x5a);
    const std::vector<float> values = random_normal(n * 3);
    set(cache, before);
    set(x, values);
    set(idx, indices);
    if (!g.compute(out)) {
        return;
    }

    std::vector<uint8_t> expected   = before;
    const std::vector<uint8_t> rows = encode(type, values);
    const size_t row                = ggml_row_size(type, n);
    for (size_t i = 0; i < indices.size(); i++) {
        std::copy_n(rows.begin() + i * row, row, expected.begin() + indices[i] * row);
    }
    CHECK(get<uint8_t>(cache) == expected, "%s: set_rows", ggml_type_name(type));
}

static void test_get_rows(ggml_type type, int n_threads) {
    const int64_t n                    = 320;
    const std::vector<int32_t> indices = { 4, 4, 1, 0 };
    graph g(n_threads);
    ggml_tensor * cache = g.tensor(type, n, 6);
    ggml_tensor * idx   = g.tensor(GGML_TYPE_I32, 4, 1);
    ggml_tensor * out   = ggml_get_rows(g.ctx, cache, idx);
    g.allocate();
    const std::vector<uint8_t> data = encode(type, random_normal(n * 6));
    set(cache, data);
    set(idx, indices);
    if (!g.compute(out)) {
        return;
    }

    const std::vector<float> all = decode(type, data, n * 6);
    std::vector<float> expected;
    for (const int32_t i : indices) {
        expected.insert(expected.end(), all.begin() + i * n, all.begin() + (i + 1) * n);
    }
    CHECK(get<float>(out) == expected, "%s: get_rows", ggml_type_name(type));
}

// mul_mat is the dot product; the other side is quantized to q8_0 on the way, which bounds how close it can be.
static void test_dot(ggml_type type, int64_t n, int n_threads) {
    graph g(n_threads);
    ggml_tensor * a   = g.tensor(type, n, 7);
    ggml_tensor * b   = g.tensor(GGML_TYPE_F32, n, 3);
    ggml_tensor * out = ggml_mul_mat(g.ctx, a, b);
    g.allocate();
    const std::vector<uint8_t> data = encode(type, random_normal(n * 7));
    const std::vector<float> y      = random_normal(n * 3);
    set(a, data);
    set(b, y);
    if (!g.compute(out)) {
        return;
    }

    const std::vector<float> x  = decode(type, data, n * 7);
    const std::vector<float> y8 = decode(GGML_TYPE_Q8_0, encode(GGML_TYPE_Q8_0, y), y.size());
    std::vector<float> expected;
    for (int64_t j = 0; j < 3; j++) {
        for (int64_t i = 0; i < 7; i++) {
            double sum = 0.0;
            for (int64_t k = 0; k < n; k++) {
                sum += (double) x[i * n + k] * y8[j * n + k];
            }
            expected.push_back((float) sum);
        }
    }
    const double error = nmse(get<float>(out), expected);
    CHECK(error < 1e-10, "%s, %d values: %g", ggml_type_name(type), (int) n, error);
}

struct attention_shape {
    int64_t head_dim;
    int64_t n_head;
    int64_t n_head_kv;
    int64_t n_kv;
    int64_t n_tokens;
};

static std::vector<float> exact_attention(const attention_shape & s, const std::vector<float> & q,
                                          const std::vector<float> & k, const std::vector<float> & v,
                                          const std::function<bool(int64_t, int64_t)> & visible) {
    std::vector<float> out(s.n_tokens * s.n_head * s.head_dim);
    for (int64_t h = 0; h < s.n_head; h++) {
        const int64_t hk = h / (s.n_head / s.n_head_kv);
        for (int64_t t = 0; t < s.n_tokens; t++) {
            std::vector<double> weights(s.n_kv, 0.0);
            double sum = 0.0;
            for (int64_t i = 0; i < s.n_kv; i++) {
                double dot = 0.0;
                for (int64_t d = 0; d < s.head_dim; d++) {
                    dot += (double) q[(h * s.n_tokens + t) * s.head_dim + d] * k[(hk * s.n_kv + i) * s.head_dim + d];
                }
                weights[i] = visible(t, i) ? std::exp(dot / std::sqrt((double) s.head_dim)) : 0.0;
                sum += weights[i];
            }
            for (int64_t d = 0; d < s.head_dim; d++) {
                double value = 0.0;
                for (int64_t i = 0; i < s.n_kv; i++) {
                    value += weights[i] / sum * v[(hk * s.n_kv + i) * s.head_dim + d];
                }
                out[(t * s.n_head + h) * s.head_dim + d] = (float) value;
            }
        }
    }
    return out;
}

static void test_flash_attention(ggml_type type_k, ggml_type type_v, const attention_shape & s, int n_threads) {
    graph g(n_threads);
    ggml_tensor * q    = g.tensor(GGML_TYPE_F32, s.head_dim, s.n_tokens, s.n_head);
    ggml_tensor * k    = g.tensor(type_k, s.head_dim, s.n_kv, s.n_head_kv);
    ggml_tensor * v    = g.tensor(type_v, s.head_dim, s.n_kv, s.n_head_kv);
    ggml_tensor * mask = g.tensor(GGML_TYPE_F16, s.n_kv, s.n_tokens);
    ggml_tensor * out  = ggml_flash_attn_ext(g.ctx, q, k, v, mask, 1.0f / std::sqrt((float) s.head_dim), 0.0f, 0.0f);
    g.allocate();

    const auto visible = [&](int64_t t, int64_t i) { return i <= s.n_kv - s.n_tokens + t; };  // causal
    std::vector<ggml_fp16_t> mask_values;
    for (int64_t t = 0; t < s.n_tokens; t++) {
        for (int64_t i = 0; i < s.n_kv; i++) {
            mask_values.push_back(ggml_fp32_to_fp16(visible(t, i) ? 0.0f : -INFINITY));
        }
    }
    const std::vector<float> q_values = random_normal(s.head_dim * s.n_tokens * s.n_head);
    const size_t n_cache              = s.head_dim * s.n_kv * s.n_head_kv;
    const std::vector<uint8_t> k_data = encode(type_k, random_normal(n_cache));
    const std::vector<uint8_t> v_data = encode(type_v, random_normal(n_cache));
    set(q, q_values);
    set(k, k_data);
    set(v, v_data);
    set(mask, mask_values);
    if (!g.compute(out)) {
        return;
    }

    const std::vector<float> expected =
        exact_attention(s, q_values, decode(type_k, k_data, n_cache), decode(type_v, v_data, n_cache), visible);
    const double error = nmse(get<float>(out), expected);
    // q is rounded to q8_0 against a quantized K, which costs about 1e-4 here
    CHECK(error < 5e-4, "K %s V %s, head dim %d, %d cells: %g", ggml_type_name(type_k), ggml_type_name(type_v),
          (int) s.head_dim, (int) s.n_kv, error);
}

// A matrix a KV head times the vectors of its heads, as the transforms of a calibration need it; with a mean a KV head taken
// from the vectors before, where there is a head a matrix, or added to the result after.
enum class mean_use { NONE, BEFORE, AFTER };

struct heads_shape {
    ggml_type type;
    int64_t dim, n_head_kv, group, n_tokens;
    mean_use use;
};

static std::vector<float> expected_product(const heads_shape & s, const std::vector<float> & m,
                                           const std::vector<float> & x, const std::vector<float> & mean) {
    std::vector<float> result;
    const int64_t n_head = s.n_head_kv * s.group;
    for (int64_t row = 0; row < n_head * s.n_tokens; row++) {
        const int64_t head_kv = row % n_head / s.group;
        for (int64_t i = 0; i < s.dim; i++) {
            double sum = s.use == mean_use::AFTER ? mean[(size_t) (head_kv * s.dim + i)] : 0.0;
            for (int64_t j = 0; j < s.dim; j++) {
                const double taken = s.use == mean_use::BEFORE ? mean[(size_t) (head_kv * s.dim + j)] : 0.0;
                sum += m[(size_t) ((head_kv * s.dim + i) * s.dim + j)] * (x[(size_t) (row * s.dim + j)] - taken);
            }
            result.push_back((float) sum);
        }
    }
    return result;
}

static void test_mul_heads(const heads_shape & s, int n_threads) {
    graph g(n_threads);
    const int64_t n_head = s.n_head_kv * s.group;
    ggml_tensor * matrix = g.tensor(s.type, s.dim, s.dim, s.n_head_kv);
    ggml_tensor * mean   = g.tensor(GGML_TYPE_F32, s.dim, 1, s.n_head_kv);
    ggml_tensor * x      = ggml_new_tensor_4d(g.ctx, GGML_TYPE_F32, s.dim, 1, n_head, s.n_tokens);
    ggml_tensor * y      = ggml_mul_mat(g.ctx, matrix, s.use == mean_use::BEFORE ? ggml_sub(g.ctx, x, mean) : x);
    if (s.use == mean_use::AFTER) {
        y = ggml_add(g.ctx, ggml_reshape_4d(g.ctx, y, s.dim, s.group, s.n_head_kv, s.n_tokens), mean);
    }
    g.allocate();
    std::vector<float> m = random_normal((size_t) (s.dim * s.dim * s.n_head_kv));
    std::vector<ggml_fp16_t> half(m.size());
    if (s.type == GGML_TYPE_F16) {
        ggml_fp32_to_fp16_row(m.data(), half.data(), (int64_t) m.size());
        ggml_fp16_to_fp32_row(half.data(), m.data(), (int64_t) m.size());
        set(matrix, half);
    } else {
        set(matrix, m);
    }
    const std::vector<float> v = random_normal((size_t) (s.dim * n_head * s.n_tokens));
    const std::vector<float> u = random_normal((size_t) (s.dim * s.n_head_kv));
    set(x, v);
    set(mean, u);
    if (!g.compute(y)) {
        return;
    }
    const double error = nmse(get<float>(y), expected_product(s, m, v, u));
    // ggml's own product with F16 rounds the vectors too
    const bool by_ggml = s.type == GGML_TYPE_F16 && (s.n_head_kv == 1 || s.dim % 16 != 0);
    const double bound = by_ggml || (on_gpu() && s.type == GGML_TYPE_F16) ? 1e-6 : 1e-12;
    CHECK(error < bound, "%s, dim %d, %d x %d heads, %d tokens, mean %d, %d threads: %g", ggml_type_name(s.type),
          (int) s.dim, (int) s.n_head_kv, (int) s.group, (int) s.n_tokens, (int) s.use, n_threads, error);
}

static void test_mul_heads_all(const heads_shape & s) {
    for (const ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16 }) {
        for (const mean_use use : { mean_use::NONE, mean_use::BEFORE, mean_use::AFTER }) {
            if (use == mean_use::BEFORE && s.group > 1) {
                continue;  // one vector a matrix does not fit more heads
            }
            for (const int n_threads : { 1, 5 }) {
                test_mul_heads({ type, s.dim, s.n_head_kv, s.group, s.n_tokens, use }, n_threads);
            }
        }
    }
}

// Queries, values and keys enter a cache by three products in a row, which share a barrier; one that reads another's result
// waits for it.
static void test_products_in_a_row(int64_t n_tokens, int n_threads) {
    const heads_shape shapes[] = { { GGML_TYPE_F32, 64, 3, 3, n_tokens, mean_use::NONE },
                                   { GGML_TYPE_F32, 64, 3, 3, n_tokens, mean_use::NONE },
                                   { GGML_TYPE_F32, 64, 3, 1, n_tokens, mean_use::AFTER },
                                   { GGML_TYPE_F32, 64, 3, 1, n_tokens, mean_use::BEFORE } };
    const size_t n_products    = sizeof(shapes) / sizeof(shapes[0]);
    graph g(n_threads);
    ggml_cgraph * cgraph = ggml_new_graph(g.ctx);
    std::vector<ggml_tensor *> matrices, means, inputs, results;
    for (const heads_shape & s : shapes) {
        const int64_t n_head = s.n_head_kv * s.group;
        matrices.push_back(g.tensor(s.type, s.dim, s.dim, s.n_head_kv));
        means.push_back(g.tensor(GGML_TYPE_F32, s.dim, 1, s.n_head_kv));
        inputs.push_back(results.size() == 1 ? results[0] :
                                               ggml_new_tensor_4d(g.ctx, GGML_TYPE_F32, s.dim, 1, n_head, s.n_tokens));
        ggml_tensor * x = inputs.back();
        ggml_tensor * y =
            ggml_mul_mat(g.ctx, matrices.back(), s.use == mean_use::BEFORE ? ggml_sub(g.ctx, x, means.back()) : x);
        results.push_back(s.use == mean_use::AFTER ? ggml_add(g.ctx, y, means.back()) : y);
        ggml_build_forward_expand(cgraph, results.back());
    }
    g.allocate();
    std::vector<std::vector<float>> expected;
    for (size_t i = 0; i < n_products; i++) {
        const heads_shape & s      = shapes[i];
        const std::vector<float> m = random_normal((size_t) ggml_nelements(matrices[i]));
        const std::vector<float> u = random_normal((size_t) ggml_nelements(means[i]));
        const std::vector<float> x = i == 1 ? expected[0] : random_normal((size_t) ggml_nelements(inputs[i]));
        set(matrices[i], m);
        set(means[i], u);
        if (i != 1) {
            set(inputs[i], x);
        }
        expected.push_back(expected_product(s, m, x, u));
    }
    if (!compute_graph(g.backend, cgraph)) {
        return;
    }
    for (size_t i = 0; i < n_products; i++) {
        const double error = nmse(get<float>(results[i]), expected[i]);
        CHECK(error < 1e-12, "product %d of a row, %d tokens, %d threads: %g", (int) i, (int) n_tokens, n_threads,
              error);
    }
}

int main() {
    for (const int n_threads : { 1, 2, 5 }) {
        test_products_in_a_row(1, n_threads);
        test_products_in_a_row(70, n_threads);
    }
    for (const int64_t dim : { 16, 24, 64, 80, 256 }) {
        for (const int64_t n_tokens : { 1, 15, 21, 200 }) {
            test_mul_heads_all({ GGML_TYPE_F32, dim, 3, 3, n_tokens, mean_use::NONE });
            test_mul_heads_all({ GGML_TYPE_F32, dim, 1, 4, n_tokens, mean_use::NONE });
            test_mul_heads_all({ GGML_TYPE_F32, dim, 2, 1, n_tokens, mean_use::NONE });
        }
    }
    for (const ggml_type type : KV_TYPES) {
        for (const int n_threads : { 1, 2, 5 }) {
            test_cpy(type, n_threads);
            test_set_rows(type, n_threads);
            test_get_rows(type, n_threads);
            for (const int64_t n : { 64, 128, 192, 576 }) {
                test_dot(type, n, n_threads);
            }
        }
    }
    const attention_shape shapes[] = {
        { 64, 9, 3, 133, 1 }, { 64, 9, 3, 133, 7 }, { 128, 12, 2, 65, 1 }, { 256, 4, 1, 40, 3 }, { 64, 1, 1, 1, 1 },
    };
    const ggml_type pairs[][2] = {
        { GGML_TYPE_Q4_VE, GGML_TYPE_Q4_VE }, { GGML_TYPE_Q2_T, GGML_TYPE_Q2_T }, { GGML_TYPE_Q8_0, GGML_TYPE_Q4_VE },
        { GGML_TYPE_Q4_VE, GGML_TYPE_F16 },   { GGML_TYPE_F16, GGML_TYPE_Q2_T },
    };
    for (const auto & shape : shapes) {
        for (const auto & pair : pairs) {
            test_flash_attention(pair[0], pair[1], shape, 2);
        }
    }
    return test_backend_result("test-kv-ops");
}
