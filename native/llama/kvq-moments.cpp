#include "kvq-moments.h"

#include "ggml-backend.h"

#include <cstdio>
#include <cstring>

namespace {

constexpr char PREFIX[] = "kvq_moments_";

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

void add_values(const float * x, int64_t n, int64_t width, double * sums) {
    for (int64_t t = 0; t < n; t++) {
        for (int64_t i = 0; i < width; i++) {
            sums[i] += x[t * width + i];
        }
    }
}

ggml_tensor * mark(ggml_context * ctx, ggml_tensor * tensor, char what, int32_t il, int64_t n_head_kv) {
    ggml_tensor * result = ggml_cont(ctx, tensor);
    ggml_format_name(result, "%s%c %d %d", PREFIX, what, il, (int) n_head_kv);
    return result;
}

}  // namespace

kvq_moments::scope::scope() {
    observing = true;
}

kvq_moments::scope::~scope() {
    observing = false;
}

void kvq_moments::observe(ggml_context * ctx, int32_t il, ggml_tensor *& q, ggml_tensor *& k, ggml_tensor *& v) {
    if (observing && k && v) {
        const int64_t n_head_kv = k->ne[1];
        q                       = mark(ctx, q, 'q', il, n_head_kv);
        k                       = mark(ctx, k, 'k', il, n_head_kv);
        v                       = mark(ctx, v, 'v', il, n_head_kv);
    }
}

bool kvq_moments::on_node(ggml_tensor * node, bool ask, void * user_data) {
    constexpr size_t n = sizeof(PREFIX) - 1;
    // a view's name begins as that of its source
    if (node->op != GGML_OP_CONT || std::strncmp(node->name, PREFIX, n) != 0) {
        return !ask;
    }
    int32_t il    = 0;
    int n_head_kv = 0;
    if (!ask && std::sscanf(node->name + n + 1, "%d %d", &il, &n_head_kv) == 2) {
        ((kvq_moments *) user_data)->add(il, node->name[n], n_head_kv, node);
    }
    return true;
}

void kvq_moments::add(int32_t il, char what, int64_t n_head, const ggml_tensor * node) {
    const int64_t dim  = node->ne[0];
    const int64_t rows = node->ne[1] / n_head;
    const int64_t n    = node->ne[2] - n_skip;
    if (n <= 0) {
        return;
    }
    values.resize((size_t) (n * node->ne[1] * dim));
    ggml_backend_tensor_get(node, values.data(), (size_t) n_skip * node->nb[2], values.size() * sizeof(float));

    kvq_layer_moments & layer = layers[il];
    layer.n_head              = n_head;
    const auto add_to         = [&](std::vector<double> & products, std::vector<double> * sums) {
        products.resize((size_t) (n_head * dim * dim));
        add_products(values.data(), n, n_head, rows, dim, products.data());
        if (sums) {
            sums->resize((size_t) (n_head * dim));
            add_values(values.data(), n, n_head * dim, sums->data());
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
}
