#include "kvq-cpu.h"

#include "kvq-quants.h"

#define GGML_COMMON_DECL_C
#include "ggml-common.h"

#include <assert.h>

static const int8_t codebook_q4_ve[16] = { KVQ_CODEBOOK_Q4_VE };
static const int8_t codebook_q2_t[4]   = { KVQ_CODEBOOK_Q2_T };

void kvq_vec_dot_q4_ve_q8_0(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by,
                            int nrc) {
    GGML_UNUSED(bs);
    GGML_UNUSED(bx);
    GGML_UNUSED(by);
    GGML_UNUSED(nrc);
    assert(n % KVQ_BLOCK == 0 && nrc == 1);
    const block_q4_ve * x = vx;
    const block_q8_0 * y  = vy;

    float sum = 0.0f;
    for (int b = 0; b < n / KVQ_BLOCK; b++) {
        const block_q8_0 * y0 = &y[2 * b];
        const block_q8_0 * y1 = &y[2 * b + 1];
        int32_t sum0          = 0;
        int32_t sum1          = 0;
        for (int i = 0; i < QK8_0; i++) {
            sum0 += codebook_q4_ve[x[b].qs[i] & 15] * y0->qs[i];
            sum1 += codebook_q4_ve[x[b].qs[i] >> 4] * y1->qs[i];
        }
        sum += ggml_fp16_to_fp32(x[b].d) *
               ((float) sum0 * ggml_fp16_to_fp32(y0->d) + (float) sum1 * ggml_fp16_to_fp32(y1->d));
    }
    *s = sum;
}

void kvq_vec_dot_q2_t_q8_0(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by,
                           int nrc) {
    GGML_UNUSED(bs);
    GGML_UNUSED(bx);
    GGML_UNUSED(by);
    GGML_UNUSED(nrc);
    assert(n % KVQ_BLOCK == 0 && nrc == 1);
    const block_q2_t * x = vx;
    const block_q8_0 * y = vy;

    float sum = 0.0f;
    for (int b = 0; b < n / KVQ_BLOCK; b++) {
        const block_q8_0 * y0 = &y[2 * b];
        const block_q8_0 * y1 = &y[2 * b + 1];
        int32_t sum0          = 0;
        int32_t sum1          = 0;
        for (int i = 0; i < KVQ_BLOCK / 4; i++) {
            const uint8_t q = x[b].qs[i];
            sum0 += codebook_q2_t[q & 3] * y0->qs[i] + codebook_q2_t[q >> 2 & 3] * y0->qs[i + 16];
            sum1 += codebook_q2_t[q >> 4 & 3] * y1->qs[i] + codebook_q2_t[q >> 6] * y1->qs[i + 16];
        }
        sum += ggml_fp16_to_fp32(x[b].d) *
               ((float) sum0 * ggml_fp16_to_fp32(y0->d) + (float) sum1 * ggml_fp16_to_fp32(y1->d));
    }
    *s = sum;
}
