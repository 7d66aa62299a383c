#include "kvq-moments.h"

#include "ggml-backend.h"
#include "kvq-llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

namespace {

constexpr char PREFIX[] = "kvq_moments_";
// attention is computed again for one query in so many; of keys with less than a certain weight, as many count as would have
// that weight together, each for several
constexpr int64_t SAMPLE_STEP = 8;
constexpr float FULL_WEIGHT   = 0.03f;

thread_local bool observing = false;

// sums[h] += sum over rows of x x^T; x [n, n_rows, dim], the rows of a head being neighbours
void add_products(const float * x, int64_t n, int64_t n_head, int64_t rows_a_head, int64_t dim, double * sums) {
    std::vector<float> part((size_t) (dim * dim));
    for (int64_t h = 0; h < n_head; h++) {
        std::fill(part.begin(), part.end(), 0.0f);
        for (int64_t t = 0; t < n; t++) {
            for (int64_t r = 0; r < rows_a_head; r++) {
                const float * row = x + ((t * n_head + h) * rows_a_head + r) * dim;
                for (int64_t i = 0; i < dim; i++) {
                    const float factor = row[i];
                    float * target     = &part[(size_t) (i * dim)];
                    for (int64_t j = 0; j < dim; j++) {
                        target[j] += factor * row[j];
                    }
                }
            }
        }
        for (int64_t i = 0; i < dim * dim; i++) {
            sums[h * dim * dim + i] += part[(size_t) i];
        }
    }
}

// sums += x x^T
void add_product(const std::vector<float> & x, std::vector<float> & sums) {
    for (size_t i = 0; i < x.size(); i++) {
        for (size_t j = 0; j < x.size(); j++) {
            sums[i * x.size() + j] += x[i] * x[j];
        }
    }
}

void add_to(std::vector<double> & sums, size_t offset, const std::vector<float> & part) {
    for (size_t i = 0; i < part.size(); i++) {
        sums[offset + i] += (double) part[i];
    }
}

void add_values(const float * x, int64_t n, int64_t width, double * sums) {
    for (int64_t t = 0; t < n; t++) {
        for (int64_t i = 0; i < width; i++) {
            sums[i] += x[t * width + i];
        }
    }
}

ggml_tensor * mark(ggml_context * ctx, ggml_tensor * tensor, char what, int32_t il, int64_t n_head_kv, float kq_scale) {
    ggml_tensor * result = ggml_cont(ctx, tensor);
    ggml_format_name(result, "%s%c %d %d %g", PREFIX, what, il, (int) n_head_kv, kq_scale);
    return result;
}

// Softmax of the first n of scores, in place.
void to_weights(std::vector<float> & scores, int64_t n) {
    const float max = *std::max_element(scores.begin(), scores.begin() + n);
    float sum       = 0.0f;
    for (int64_t t = 0; t < n; t++) {
        scores[(size_t) t] = std::exp(scores[(size_t) t] - max);
        sum += scores[(size_t) t];
    }
    for (int64_t t = 0; t < n; t++) {
        scores[(size_t) t] /= sum;
    }
}

// One KV head of a text: attention once more, for some queries.
struct attention_sample {
    const kvq_layer_moments & layer;
    int64_t h, n_skip, n_window;
    int64_t n_tokens = (int64_t) layer.text_k.size() / (layer.n_head * layer.dim_k);
    int64_t group    = (int64_t) layer.text_q.size() / (n_tokens * layer.n_head * layer.dim_k);
    std::vector<float> turned;  // keys [dim_k][n_tokens]
    std::vector<float> weights = std::vector<float>((size_t) n_tokens);
    std::vector<float> output  = std::vector<float>((size_t) layer.dim_v);
    // the sums of kvq_layer_moments
    double reach               = 0;
    std::vector<float> swing   = std::vector<float>((size_t) (layer.dim_v * layer.dim_v));
    std::vector<float> outputs = swing;

    attention_sample(const kvq_layer_moments & layer, int64_t h, int64_t n_skip, int64_t n_window)
        : layer(layer), h(h), n_skip(n_skip), n_window(n_window) {
        for (int64_t j = 0; j < layer.dim_k; j++) {
            for (int64_t t = 0; t < n_tokens; t++) {
                turned.push_back(layer.text_k[(size_t) ((t * layer.n_head + h) * layer.dim_k + j)]);
            }
        }
    }

    const float * value(int64_t t) const { return &layer.text_v[(size_t) ((t * layer.n_head + h) * layer.dim_v)]; }

    void attend(int64_t query, int64_t head) {
        const float * q = &layer.text_q[(size_t) (((query * layer.n_head + h) * group + head) * layer.dim_k)];
        std::fill(weights.begin(), weights.end(), 0.0f);
        for (int64_t j = 0; j < layer.dim_k; j++) {
            const float factor = q[j] * layer.kq_scale;
            const float * row  = &turned[(size_t) (j * n_tokens)];
            for (int64_t t = 0; t <= query; t++) {
                weights[(size_t) t] += factor * row[t];
            }
        }
        to_weights(weights, query + 1);
        std::fill(output.begin(), output.end(), 0.0f);
        for (int64_t t = 0; t <= query; t++) {
            for (int64_t i = 0; i < layer.dim_v; i++) {
                output[(size_t) i] += weights[(size_t) t] * value(t)[i];
            }
        }
    }

    void sample() {
        std::vector<float> away((size_t) layer.dim_v);
        for (int64_t query = n_skip + n_window; query < n_tokens; query += SAMPLE_STEP) {
            for (int64_t head = 0; head < group; head++) {
                attend(query, head);
                add_product(output, outputs);
                float saved_up = 0.0f;
                for (int64_t t = n_skip; t <= query - n_window; t++) {
                    const float weight = weights[(size_t) t];
                    reach += (double) (weight * weight);
                    saved_up += std::min(weight, FULL_WEIGHT);
                    if (saved_up < FULL_WEIGHT) {
                        continue;
                    }
                    saved_up -= FULL_WEIGHT;
                    // p^2 for all that its weight was saved up from: p times the weight
                    const float factor = std::sqrt(weight * std::max(weight, FULL_WEIGHT));
                    for (int64_t i = 0; i < layer.dim_v; i++) {
                        away[(size_t) i] = factor * (value(t)[i] - output[(size_t) i]);
                    }
                    add_product(away, swing);
                }
            }
        }
    }
};

// Once a text's queries, keys and values are there.
void sample_attention(kvq_layer_moments & layer, int64_t n_skip, int64_t n_window) {
    const int64_t n_tokens = (int64_t) layer.text_k.size() / (layer.n_head * layer.dim_k);
    const auto square      = (size_t) (layer.dim_v * layer.dim_v);
    for (size_t h = 0; h < (size_t) layer.n_head; h++) {
        attention_sample part(layer, (int64_t) h, n_skip, n_window);
        part.sample();
        layer.reach[h] += part.reach;
        add_to(layer.swing, h * square, part.swing);
        add_to(layer.output, h * square, part.outputs);
    }
    layer.n_sample += std::max<int64_t>(0, (n_tokens - n_skip - n_window + SAMPLE_STEP - 1) / SAMPLE_STEP);
}

}  // namespace

kvq_moments::scope::scope() {
    observing = true;
}

kvq_moments::scope::~scope() {
    observing = false;
}

void kvq_moments::observe(ggml_context * ctx, int32_t il, float kq_scale, ggml_tensor *& q, ggml_tensor *& k,
                          ggml_tensor *& v) {
    if (observing && k && v) {
        const int64_t n_head_kv = k->ne[1];
        q                       = mark(ctx, q, 'q', il, n_head_kv, kq_scale);
        k                       = mark(ctx, k, 'k', il, n_head_kv, kq_scale);
        v                       = mark(ctx, v, 'v', il, n_head_kv, kq_scale);
    }
}

bool kvq_moments::on_node(ggml_tensor * node, bool ask, void * user_data) {
    constexpr size_t n = sizeof(PREFIX) - 1;
    auto * self        = (kvq_moments *) user_data;
    int32_t il         = 0;
    // llama.cpp's name of what a layer gives
    if (std::sscanf(node->name, "l_out-%d", &il) == 1 && node->type == GGML_TYPE_F32 && !node->view_src) {
        if (!ask) {
            self->add_residual(il, node);
        }
        return true;
    }
    // a view's name begins as that of its source
    if (node->op != GGML_OP_CONT || std::strncmp(node->name, PREFIX, n) != 0) {
        return !ask;
    }
    int n_head_kv  = 0;
    float kq_scale = 0;
    if (!ask && std::sscanf(node->name + n + 1, "%d %d %g", &il, &n_head_kv, &kq_scale) == 3) {
        self->add(il, node->name[n], n_head_kv, kq_scale, node);
    }
    return true;
}

void kvq_moments::add_residual(int32_t il, const ggml_tensor * node) {
    const int64_t n_tokens = node->ne[1];
    values.resize((size_t) ggml_nelements(node));
    ggml_backend_tensor_get(node, values.data(), 0, values.size() * sizeof(float));
    for (int64_t t = n_skip; t < n_tokens; t++) {
        const float * x = &values[(size_t) (t * node->ne[0])];
        double sum      = std::numeric_limits<double>::min();
        for (int64_t i = 0; i < node->ne[0]; i++) {
            sum += (double) (x[i] * x[i]);
        }
        log_residuals[il] += std::log(sum);
        n_residuals[il]++;
    }
}

double kvq_moments::log_residual_before(int32_t il) const {
    if (log_residuals.empty()) {
        return 0.0;
    }
    auto nearest = log_residuals.lower_bound(il);
    if (nearest != log_residuals.begin()) {
        --nearest;
    }
    return nearest->second / (double) n_residuals.at(nearest->first);
}

void kvq_moments::add(int32_t il, char what, int64_t n_head, float kq_scale, const ggml_tensor * node) {
    const int64_t dim  = node->ne[0];
    const int64_t rows = node->ne[1] / n_head;
    const int64_t n    = node->ne[2] - n_skip;
    if (n <= 0) {
        return;
    }
    kvq_layer_moments & layer = layers[il];
    layer.n_head              = n_head;
    layer.kq_scale            = kq_scale;
    std::vector<float> & text = what == 'q' ? layer.text_q : what == 'k' ? layer.text_k : layer.text_v;
    text.resize((size_t) ggml_nelements(node));
    ggml_backend_tensor_get(node, text.data(), 0, text.size() * sizeof(float));

    const float * counted = &text[(size_t) (n_skip * node->ne[1] * dim)];
    const auto add_to     = [&](std::vector<double> & products, std::vector<double> * sums) {
        products.resize((size_t) (n_head * dim * dim));
        add_products(counted, n, n_head, rows, dim, products.data());
        if (sums) {
            sums->resize((size_t) (n_head * dim));
            add_values(counted, n, n_head * dim, sums->data());
        }
    };
    switch (what) {
        case 'q':
            add_to(layer.qq, nullptr);
            layer.n_query += n * rows;
            break;
        case 'k':
            layer.dim_k = dim;
            add_to(layer.kk, &layer.k);
            layer.n_key += n;
            break;
        default:
            layer.dim_v = dim;
            add_to(layer.vv, &layer.v);
    }
    if (!layer.text_q.empty() && !layer.text_k.empty() && !layer.text_v.empty()) {
        const auto square = (size_t) (layer.dim_v * layer.dim_v);
        layer.reach.resize((size_t) n_head);
        layer.swing.resize((size_t) n_head * square);
        layer.output.resize((size_t) n_head * square);
        if (!kvq_model_layer_is_windowed(model, il)) {
            sample_attention(layer, n_skip, n_window);
        }
        layer.text_q.clear();
        layer.text_k.clear();
        layer.text_v.clear();
    }
}
