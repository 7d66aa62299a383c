#include "kvq-quants.h"

#include "kvq-codebooks.h"
#include "kvq-pack.h"

#include <assert.h>
#include <math.h>
#include <string.h>

// The nearest level of |x[i]| / scale, without gathers so that a compiler can vectorise it.
static void kvq_block_round(const kvq_codebook * cb, const float * x, float inv_scale, float * q) {
    for (int i = 0; i < KVQ_BLOCK; i++) {
        q[i] = cb->levels[0];
    }
    for (int t = 0; t + 1 < cb->n_levels; t++) {
        const float threshold = cb->thresholds[t];
        const float step      = cb->levels[t + 1] - cb->levels[t];
        for (int i = 0; i < KVQ_BLOCK; i++) {
            q[i] += fabsf(x[i]) * inv_scale >= threshold ? step : 0.0f;
        }
    }
}

// sum |x| q and sum q q; sixteen partial sums, so that a vectorised encoder adds in the same order
static void kvq_block_dots(const float * x, const float * q, float * sum_xq, float * sum_qq) {
    float xq[16] = { 0 };
    float qq[16] = { 0 };
    for (int i = 0; i < KVQ_BLOCK; i += 16) {
        for (int j = 0; j < 16; j++) {
            xq[j] += fabsf(x[i + j]) * q[i + j];
            qq[j] += q[i + j] * q[i + j];
        }
    }
    *sum_xq = kvq_add_partial_sums(xq);
    *sum_qq = kvq_add_partial_sums(qq);
}

// The scale of least squared error. For given codes q the best scale is <x,q>/<q,q> and leaves |x|^2 - <x,q>^2/<q,q>,
// so the candidate with the largest <x,q>^2/<q,q> wins. x is normalised to absmax 1; so is the result.
static float kvq_block_search_scale(const kvq_codebook * cb, const float * x) {
    float best       = 1.0f / 127.0f;
    float best_score = -1.0f;
    for (int i = 0; i < cb->n_ratios; i++) {
        const float scale = (cb->ratio_min + (float) i * cb->ratio_step) / 127.0f;
        float q[KVQ_BLOCK];
        float sum_xq;
        float sum_qq;
        kvq_block_round(cb, x, 1.0f / scale, q);
        kvq_block_dots(x, q, &sum_xq, &sum_qq);
        const float score = sum_xq * sum_xq / sum_qq;
        if (score > best_score) {
            best_score = score;
            best       = sum_xq / sum_qq;
        }
    }
    return best;
}

// Largest magnitude of a block, or NaN if any value is not finite.
static float kvq_block_absmax(const float * x) {
    float amax = 0.0f;
    for (int i = 0; i < KVQ_BLOCK; i++) {
        if (!isfinite(x[i])) {
            return NAN;
        }
        amax = fmaxf(amax, fabsf(x[i]));
    }
    return amax;
}

// Writes the 64 codes of a block (0 is the lowest level) and returns its scale as a half.
static uint16_t kvq_block_encode(const kvq_codebook * cb, const float * x, uint8_t * codes) {
    const float amax = kvq_block_absmax(x);
    memset(codes, cb->n_levels, KVQ_BLOCK);  // the smallest positive level: decodes to +0 under d = 0
    if (isnan(amax)) {
        return KVQ_HALF_NAN;
    }
    if (amax < KVQ_SCALE_ZERO) {
        return 0;
    }

    float unit[KVQ_BLOCK];
    for (int i = 0; i < KVQ_BLOCK; i++) {
        unit[i] = x[i] / amax;
    }
    const float scale  = fminf(kvq_block_search_scale(cb, unit) * amax, KVQ_HALF_MAX);
    const uint16_t d   = ggml_fp32_to_fp16(scale);
    const float d_unit = ggml_fp16_to_fp32(d) / amax;
    if (d_unit == 0.0f) {
        return d;
    }

    // codes for the scale as it is stored
    for (int i = 0; i < KVQ_BLOCK; i++) {
        const float magnitude = fabsf(unit[i]) / d_unit;
        int level             = 0;
        for (int t = 0; t + 1 < cb->n_levels; t++) {
            level += magnitude >= cb->thresholds[t];
        }
        codes[i] = (uint8_t) (signbit(unit[i]) ? cb->n_levels - 1 - level : cb->n_levels + level);
    }
    return d;
}

void kvq_quantize_row_q4_ve_ref(const float * x, block_q4_ve * y, int64_t k) {
    assert(k % KVQ_BLOCK == 0);
    for (int64_t b = 0; b < k / KVQ_BLOCK; b++) {
        uint8_t codes[KVQ_BLOCK];
        y[b].d = kvq_block_encode(&kvq_codebook_16, x + b * KVQ_BLOCK, codes);
        kvq_pack_nibbles(codes, y[b].qs);
    }
}

void kvq_quantize_row_q2_t_ref(const float * x, block_q2_t * y, int64_t k) {
    assert(k % KVQ_BLOCK == 0);
    for (int64_t b = 0; b < k / KVQ_BLOCK; b++) {
        uint8_t codes[KVQ_BLOCK];
        y[b].d = kvq_block_encode(&kvq_codebook_4, x + b * KVQ_BLOCK, codes);
        kvq_pack_crumbs(codes, y[b].qs);
    }
}

void kvq_dequantize_row_q4_ve(const block_q4_ve * x, float * y, int64_t k) {
    static const int8_t codebook[16] = { KVQ_CODEBOOK_Q4_VE };
    assert(k % KVQ_BLOCK == 0);
    for (int64_t b = 0; b < k / KVQ_BLOCK; b++) {
        const float d = ggml_fp16_to_fp32(x[b].d);
        for (int i = 0; i < KVQ_BLOCK / 2; i++) {
            y[b * KVQ_BLOCK + i]                 = d * codebook[x[b].qs[i] & 15];
            y[b * KVQ_BLOCK + i + KVQ_BLOCK / 2] = d * codebook[x[b].qs[i] >> 4];
        }
    }
}

void kvq_dequantize_row_q2_t(const block_q2_t * x, float * y, int64_t k) {
    static const int8_t codebook[4] = { KVQ_CODEBOOK_Q2_T };
    assert(k % KVQ_BLOCK == 0);
    for (int64_t b = 0; b < k / KVQ_BLOCK; b++) {
        const float d = ggml_fp16_to_fp32(x[b].d);
        for (int i = 0; i < KVQ_BLOCK; i++) {
            y[b * KVQ_BLOCK + i] = d * codebook[x[b].qs[i % 16] >> (2 * (i / 16)) & 3];
        }
    }
}
