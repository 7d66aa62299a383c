// Products of a matrix a head and that head's vectors: the transforms around a calibrated KV cache. ggml's own kernel takes
// one dot product at a time, and wants the vectors copied together.

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "kvq-cpu.h"
#include "kvq-simd.h"

#include <algorithm>

namespace kvq {
namespace {

constexpr int64_t MAX_DIM       = 512;
constexpr int64_t MIN_TURNED    = 16;  // tokens from which on it pays to turn the rows of a matrix into columns
constexpr int64_t TOKENS_A_UNIT = 64;
constexpr int AT_ONCE           = 8;

struct product {
    const ggml_tensor * matrix;  // [dim_in, dim_out, n_head / group]
    const ggml_tensor * in;      // [dim_in, 1, n_head, n_tokens]
    ggml_tensor * out;           // [dim_out, 1, n_head, n_tokens]
    int64_t group;

    const float * row(int64_t head, int64_t i) const {
        return (const float *) ((const char *) matrix->data + i * matrix->nb[1] + head / group * matrix->nb[2]);
    }

    const float * x(int64_t head, int64_t token) const {
        return (const float *) ((const char *) in->data + head * in->nb[2] + token * in->nb[3]);
    }

    float * y(int64_t head, int64_t token) const {
        return (float *) ((char *) out->data + head * out->nb[2] + token * out->nb[3]);
    }
};

// LANES values of the result for one token, row by row.
void multiply_rows(const product & p, int64_t head, int64_t first_row, int64_t token) {
    const float * x = p.x(head, token);
    vfloat sums[LANES];
    for (int r = 0; r < LANES; r++) {
        const float * row = p.row(head, first_row + r);
        sums[r]           = load(row) * load(x);
        for (int64_t j = LANES; j < p.in->ne[0]; j += LANES) {
            sums[r] += load(row + j) * load(x + j);
        }
    }
    store(p.y(head, token) + first_row, sum_each(sums));
}

template <int N>
void multiply_columns(const product & p, const float * columns, int64_t head, int64_t first_row, int64_t token) {
    const float * x[N];
    vfloat sums[N] = {};
    for (int t = 0; t < N; t++) {
        x[t] = p.x(head, token + t);
    }
    for (int64_t j = 0; j < p.in->ne[0]; j++) {
        const vfloat column = load(columns + j * LANES);
#pragma GCC unroll 8
        for (int t = 0; t < N; t++) {
            sums[t] += column * x[t][j];
        }
    }
    for (int t = 0; t < N; t++) {
        store(p.y(head, token + t) + first_row, sums[t]);
    }
}

// LANES values of the result for tokens [begin, end).
void multiply(const product & p, int64_t head, int64_t first_row, int64_t begin, int64_t end) {
    if (end - begin < MIN_TURNED) {
        for (int64_t t = begin; t < end; t++) {
            multiply_rows(p, head, first_row, t);
        }
        return;
    }
    alignas(64) float columns[MAX_DIM * LANES];
    for (int r = 0; r < LANES; r++) {
        const float * row = p.row(head, first_row + r);
        for (int64_t j = 0; j < p.in->ne[0]; j++) {
            columns[j * LANES + r] = row[j];
        }
    }
    int64_t t = begin;
    for (; t + AT_ONCE <= end; t += AT_ONCE) {
        multiply_columns<AT_ONCE>(p, columns, head, first_row, t);
    }
    for (; t < end; t++) {
        multiply_columns<1>(p, columns, head, first_row, t);
    }
}

}  // namespace
}  // namespace kvq

bool kvq_mul_heads_supported(const struct ggml_tensor * dst) {
    const ggml_tensor * m = dst->src[0];
    const ggml_tensor * x = dst->src[1];
    return m->type == GGML_TYPE_F32 && x->type == GGML_TYPE_F32 && x->ne[1] == 1 && m->ne[3] == 1 &&
           m->ne[0] % kvq::LANES == 0 && m->ne[1] % kvq::LANES == 0 && m->ne[0] <= kvq::MAX_DIM &&
           m->nb[0] == sizeof(float) && x->nb[0] == sizeof(float);
}

void kvq_compute_forward_mul_heads(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    const kvq::product p   = { dst->src[0], dst->src[1], dst, dst->ne[2] / dst->src[0]->ne[2] };
    const int64_t n_tokens = dst->ne[3];
    const int64_t n_blocks = dst->ne[0] / kvq::LANES;
    const int64_t n_spans  = (n_tokens + kvq::TOKENS_A_UNIT - 1) / kvq::TOKENS_A_UNIT;
    const int64_t n_units  = dst->ne[2] * n_blocks * n_spans;
    const int64_t last     = (params->ith + 1) * n_units / params->nth;
    for (int64_t unit = params->ith * n_units / params->nth; unit < last; unit++) {
        const int64_t head  = unit / (n_blocks * n_spans);
        const int64_t begin = unit % n_spans * kvq::TOKENS_A_UNIT;
        kvq::multiply(p, head, unit / n_spans % n_blocks * kvq::LANES, begin,
                      std::min(begin + kvq::TOKENS_A_UNIT, n_tokens));
    }
}
