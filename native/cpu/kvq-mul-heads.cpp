// Products of a matrix a head and that head's vectors: the transforms around a calibrated KV cache. ggml's own kernel takes
// one dot product at a time, and wants the vectors copied together. A mean that is taken from the vectors before or added to
// the result after is taken along: as a node of its own it costs a barrier, at one token more than the product. Products that
// follow one another and do not need each other share one barrier for the same reason.

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "kvq-cpu.h"
#include "kvq-simd.h"

#include <algorithm>
#include <optional>

namespace kvq {
namespace {

constexpr int64_t MAX_DIM       = 512;
constexpr int64_t MIN_TURNED    = 16;  // tokens from which on it pays to turn the rows of a matrix into columns
constexpr int64_t TOKENS_A_UNIT = 64;
constexpr int AT_ONCE           = 8;
constexpr int MAX_FUSED         = 3;  // queries, values and keys

struct product {
    const ggml_tensor * matrix;  // [dim_in, dim_out, n_matrix], F32 or F16
    const ggml_tensor * in;      // [dim_in, 1, n_head, n_tokens]
    float * out;                 // [dim_out, n_head, n_tokens]
    const float * before;        // [dim_in, n_matrix], taken from what comes in, or NULL
    const float * after;         // [dim_out, n_matrix], added to what goes out, or NULL

    product(const ggml_tensor * matrix, const ggml_tensor * in, const ggml_tensor * before, const ggml_tensor * after,
            ggml_tensor * out)
        : matrix(matrix),
          in(in),
          out((float *) out->data),
          before(before ? (const float *) before->data : nullptr),
          after(after ? (const float *) after->data : nullptr) {}

    int64_t n_dim() const { return matrix->ne[0]; }

    int64_t of_head(int64_t head) const { return head / (in->ne[2] / matrix->ne[2]); }

    const char * row(int64_t head, int64_t i) const {
        return (const char *) matrix->data + i * matrix->nb[1] + of_head(head) * matrix->nb[2];
    }

    const float * x(int64_t head, int64_t token) const {
        return (const float *) ((const char *) in->data + head * in->nb[2] + token * in->nb[3]);
    }

    const float * x_mean(int64_t head) const { return before ? before + of_head(head) * matrix->ne[0] : nullptr; }

    void store_result(int64_t head, int64_t token, int64_t row, vfloat y) const {
        if (after) {
            y += load(after + of_head(head) * matrix->ne[1] + row);
        }
        store(out + (token * in->ne[2] + head) * matrix->ne[1] + row, y);
    }
};

// LANES values of the result for one token, row by row.
template <typename T> void multiply_rows(const product & p, int64_t head, int64_t first_row, int64_t token) {
    const float * x    = p.x(head, token);
    const float * mean = p.x_mean(head);
    const T * rows[LANES];
    for (int r = 0; r < LANES; r++) {
        rows[r] = (const T *) p.row(head, first_row + r);
    }
    vfloat sums[LANES] = {};
    for (int64_t j = 0; j < p.n_dim(); j += LANES) {
        const vfloat value = mean ? load(x + j) - load(mean + j) : load(x + j);
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++) {
            sums[r] += load(rows[r] + j) * value;
        }
    }
    p.store_result(head, token, first_row, sum_each(sums));
}

template <int N>
void multiply_columns(const product & p, const float * columns, int64_t head, int64_t first_row, int64_t token) {
    alignas(64) float centred[N][MAX_DIM];
    const float * mean = p.x_mean(head);
    const float * x[N];
    for (int t = 0; t < N; t++) {
        x[t] = p.x(head, token + t);
        if (mean) {
            for (int64_t j = 0; j < p.n_dim(); j += LANES) {
                store(centred[t] + j, load(x[t] + j) - load(mean + j));
            }
            x[t] = centred[t];
        }
    }
    vfloat sums[N] = {};
    for (int64_t j = 0; j < p.n_dim(); j++) {
        const vfloat column = load(columns + j * LANES);
#pragma GCC unroll 8
        for (int t = 0; t < N; t++) {
            sums[t] += column * x[t][j];
        }
    }
    for (int t = 0; t < N; t++) {
        p.store_result(head, token + t, first_row, sums[t]);
    }
}

// LANES rows of a matrix, turned: columns[dim_in][LANES].
template <typename T> void turn_rows(const product & p, int64_t head, int64_t first_row, float * columns) {
    for (int r = 0; r < LANES; r++) {
        const T * row = (const T *) p.row(head, first_row + r);
        for (int64_t j = 0; j < p.n_dim(); j += LANES) {
            const vfloat values = load(row + j);
            for (int i = 0; i < LANES; i++) {
                columns[(j + i) * LANES + r] = values[i];
            }
        }
    }
}

// LANES values of the result for tokens [begin, end).
template <typename T> void multiply(const product & p, int64_t head, int64_t first_row, int64_t begin, int64_t end) {
    if (end - begin < MIN_TURNED) {
        for (int64_t t = begin; t < end; t++) {
            multiply_rows<T>(p, head, first_row, t);
        }
        return;
    }
    alignas(64) float columns[MAX_DIM * LANES];
    turn_rows<T>(p, head, first_row, columns);
    int64_t t = begin;
    for (; t + AT_ONCE <= end; t += AT_ONCE) {
        multiply_columns<AT_ONCE>(p, columns, head, first_row, t);
    }
    for (; t < end; t++) {
        multiply_columns<1>(p, columns, head, first_row, t);
    }
}

void compute(const product & p, const ggml_compute_params * params) {
    const auto multiply_part = p.matrix->type == GGML_TYPE_F16 ? multiply<ggml_fp16_t> : multiply<float>;
    const int64_t n_tokens   = p.in->ne[3];
    const int64_t n_blocks   = p.matrix->ne[1] / LANES;
    const int64_t n_spans    = (n_tokens + TOKENS_A_UNIT - 1) / TOKENS_A_UNIT;
    const int64_t n_units    = p.in->ne[2] * n_blocks * n_spans;
    const int64_t first      = params->ith * n_units / params->nth;
    const int64_t last       = (params->ith + 1) * n_units / params->nth;
    if (n_spans == 1) {
        // a token waits for its matrices to come from memory: ask for all of them at once
        const char * begin = p.row(first / n_blocks, first % n_blocks * LANES);
        const char * end   = p.row((last - 1) / n_blocks, (last - 1) % n_blocks * LANES) + LANES * p.matrix->nb[1];
        for (; begin < end; begin += 64) {
            __builtin_prefetch(begin, 0, 2);
        }
    }
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t head  = unit / (n_blocks * n_spans);
        const int64_t begin = unit % n_spans * TOKENS_A_UNIT;
        multiply_part(p, head, unit / n_spans % n_blocks * LANES, begin, std::min(begin + TOKENS_A_UNIT, n_tokens));
    }
}

// The first node after node i that computes, if it is an op of this kind and alone reads what node i gives, as its src[slot];
// else -1. Views may lie between.
int find_only_reader(const ggml_cgraph * graph, int i, ggml_op op, int slot) {
    for (int j = i + 1; j < graph->n_nodes; j++) {
        const ggml_tensor * node = graph->nodes[j];
        const bool view          = ggml_op_is_empty(node->op);
        if (node->src[view ? 0 : slot] != graph->nodes[i]) {
            if (view) {
                continue;  // of something else
            }
            return -1;
        }
        if (ggml_node_get_use_count(graph, i) != 1 || (graph->nodes[i]->flags & GGML_TENSOR_FLAG_OUTPUT)) {
            return -1;
        }
        if (!view) {
            return node->op == op ? j : -1;
        }
        i = j;
    }
    return -1;
}

// Whether `mean` is one vector for each matrix of a product.
bool is_mean(const ggml_tensor * mean, int64_t dim, const ggml_tensor * matrix) {
    return mean->type == GGML_TYPE_F32 && ggml_is_contiguous(mean) && mean->ne[0] == dim && mean->ne[1] == 1 &&
           mean->ne[2] == matrix->ne[2] && mean->ne[3] == 1;
}

bool overlap(const ggml_tensor * a, const ggml_tensor * b) {
    const char * a_data = (const char *) a->data;
    const char * b_data = (const char *) b->data;
    return a_data < b_data + ggml_nbytes(b) && b_data < a_data + ggml_nbytes(a);
}

// A product as the graph has it, and the last node that is done with it.
struct planned_product {
    product p;
    const ggml_tensor * dst;
    int last;
};

// x - mean, then the product
std::optional<planned_product> plan_before(const ggml_cgraph * graph, int i) {
    const ggml_tensor * centred = graph->nodes[i];
    const ggml_tensor * x       = centred->src[0];
    const int j                 = find_only_reader(graph, i, GGML_OP_MUL_MAT, 1);
    if (j < 0 || x->type != GGML_TYPE_F32 || x->nb[0] != sizeof(float) || !kvq_mul_heads_supported(graph->nodes[j])) {
        return std::nullopt;
    }
    ggml_tensor * dst          = graph->nodes[j];
    const ggml_tensor * matrix = dst->src[0];
    // graph memory is given out as if the nodes ran one after another
    if (dst->src[1] != centred || x->ne[2] != matrix->ne[2] || !is_mean(centred->src[1], x->ne[0], matrix) ||
        overlap(x, dst)) {
        return std::nullopt;
    }
    return planned_product{ { matrix, x, centred->src[1], nullptr, dst }, dst, j };
}

// the product alone, or then + mean
std::optional<planned_product> plan_after(const ggml_cgraph * graph, int i) {
    ggml_tensor * result = graph->nodes[i];
    if (!kvq_mul_heads_supported(result)) {
        return std::nullopt;
    }
    const ggml_tensor * matrix = result->src[0];
    const planned_product alone{ { matrix, result->src[1], nullptr, nullptr, result }, result, i };
    const int j = find_only_reader(graph, i, GGML_OP_ADD, 0);
    if (j < 0) {
        return alone;
    }
    ggml_tensor * dst     = graph->nodes[j];
    const ggml_tensor * y = dst->src[0];  // [dim_out, n_head / n_matrix, n_matrix, n_tokens]
    const bool reshaped   = y->data == result->data && ggml_is_contiguous(y) && y->ne[0] == result->ne[0] &&
                          y->ne[1] * y->ne[2] == result->ne[2] && y->ne[3] == result->ne[3];
    if (!reshaped || y->ne[2] != matrix->ne[2] || !is_mean(dst->src[1], y->ne[0], matrix) ||
        overlap(result->src[1], dst)) {
        return alone;
    }
    return planned_product{ { matrix, result->src[1], nullptr, dst->src[1], dst }, dst, j };
}

std::optional<planned_product> plan(const ggml_cgraph * graph, int i) {
    switch (graph->nodes[i]->op) {
        case GGML_OP_SUB:
            return plan_before(graph, i);
        case GGML_OP_MUL_MAT:
            return plan_after(graph, i);
        default:
            return std::nullopt;
    }
}

// Whether the later of two products may run beside the earlier: it does not read its result, and is not written where the
// earlier one still reads.
bool independent(const planned_product & earlier, const planned_product & later) {
    return !overlap(later.p.in, earlier.dst) && !overlap(later.dst, earlier.dst) && !overlap(later.dst, earlier.p.in);
}

int next_computing(const ggml_cgraph * graph, int i) {
    while (i < graph->n_nodes && ggml_op_is_empty(graph->nodes[i]->op)) {
        i++;
    }
    return i;
}

}  // namespace
}  // namespace kvq

bool kvq_mul_heads_supported(const struct ggml_tensor * dst) {
    const ggml_tensor * m = dst->src[0];
    const ggml_tensor * x = dst->src[1];
    // ggml rounds what it multiplies with F16 weights; models' own products must not depend on how many tokens there are
    const bool type_ok = m->type == GGML_TYPE_F32 || (m->type == GGML_TYPE_F16 && m->ne[2] > 1);
    return type_ok && x->type == GGML_TYPE_F32 && x->ne[1] == 1 && m->ne[3] == 1 && m->ne[0] % kvq::LANES == 0 &&
           m->ne[1] % kvq::LANES == 0 && m->ne[0] <= kvq::MAX_DIM && m->nb[0] == ggml_type_size(m->type) &&
           x->nb[0] == sizeof(float);
}

void kvq_compute_forward_mul_heads(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    kvq::compute({ dst->src[0], dst->src[1], nullptr, nullptr, dst }, params);
}

int kvq_fuse_mul_heads(const struct ggml_cgraph * graph, int i, const struct ggml_compute_params * params) {
    std::optional<kvq::planned_product> plans[kvq::MAX_FUSED];
    int n = 0;
    for (int j = i; n < kvq::MAX_FUSED && j < graph->n_nodes; j = kvq::next_computing(graph, plans[n++]->last + 1)) {
        plans[n]       = kvq::plan(graph, j);
        const bool fit = plans[n] && std::all_of(plans, plans + n, [&](const auto & earlier) {
                             return kvq::independent(*earlier, *plans[n]);
                         });
        if (!fit) {
            break;
        }
    }
    const int n_more = n > 0 ? plans[n - 1]->last - i : 0;
    for (int k = 0; k < n && n_more > 0; k++) {
        kvq::compute(plans[k]->p, params);
    }
    return n_more;
}
