#include "kvq-cpu.h"
#include "kvq-quants.h"

#define GGML_COMMON_DECL_C
#include "ggml-common.h"

#include <assert.h>

// The generic path: attention has kernels of its own, and what else asks for a dot product is rare.
static float dot_block(const float * x, const block_q8_0 * y) {
    float sum = 0.0f;
    for (int half = 0; half < 2; half++) {
        float part = 0.0f;
        for (int i = 0; i < QK8_0; i++) {
            part += x[half * QK8_0 + i] * (float) y[half].qs[i];
        }
        sum += part * ggml_fp16_to_fp32(y[half].d);
    }
    return sum;
}

void kvq_vec_dot_q4_ves_q8_0(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by,
                             int nrc) {
    GGML_UNUSED(bs);
    GGML_UNUSED(bx);
    GGML_UNUSED(by);
    GGML_UNUSED(nrc);
    assert(n % KVQ_BLOCK == 0 && nrc == 1);
    float sum = 0.0f;
    for (int b = 0; b < n / KVQ_BLOCK; b++) {
        float x[KVQ_BLOCK];
        kvq_dequantize_row_q4_ves((const block_q4_ves *) vx + b, x, KVQ_BLOCK);
        sum += dot_block(x, (const block_q8_0 *) vy + 2 * b);
    }
    *s = sum;
}

void kvq_vec_dot_q2_ts_q8_0(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by,
                            int nrc) {
    GGML_UNUSED(bs);
    GGML_UNUSED(bx);
    GGML_UNUSED(by);
    GGML_UNUSED(nrc);
    assert(n % KVQ_BLOCK == 0 && nrc == 1);
    float sum = 0.0f;
    for (int b = 0; b < n / KVQ_BLOCK; b++) {
        float x[KVQ_BLOCK];
        kvq_dequantize_row_q2_ts((const block_q2_ts *) vx + b, x, KVQ_BLOCK);
        sum += dot_block(x, (const block_q8_0 *) vy + 2 * b);
    }
    *s = sum;
}
