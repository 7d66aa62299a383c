#include "kvq-cpu.h"
#include "kvq-quants.h"

#define GGML_COMMON_DECL_C
#include "ggml-common.h"

#include <assert.h>

// The generic path: attention has kernels of its own, and what else asks for a dot product is rare.
static float dot_row(int n, const void * vx, ggml_to_float_t decode, size_t block_bytes, const block_q8_0 * y) {
    float sum = 0.0f;
    for (int b = 0; b < n / KVQ_BLOCK; b++) {
        float x[KVQ_BLOCK];
        decode((const char *) vx + b * block_bytes, x, KVQ_BLOCK);
        for (int half = 0; half < 2; half++, y++) {
            float part = 0.0f;
            for (int i = 0; i < QK8_0; i++) {
                part += x[half * QK8_0 + i] * (float) y->qs[i];
            }
            sum += part * ggml_fp16_to_fp32(y->d);
        }
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
    *s = dot_row(n, vx, (ggml_to_float_t) kvq_dequantize_row_q4_ves, sizeof(block_q4_ves), vy);
}

void kvq_vec_dot_q2_ts_q8_0(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by,
                            int nrc) {
    GGML_UNUSED(bs);
    GGML_UNUSED(bx);
    GGML_UNUSED(by);
    GGML_UNUSED(nrc);
    assert(n % KVQ_BLOCK == 0 && nrc == 1);
    *s = dot_row(n, vx, (ggml_to_float_t) kvq_dequantize_row_q2_ts, sizeof(block_q2_ts), vy);
}
