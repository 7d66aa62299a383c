#include "kvq-quants.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#define KVQ_HALF_NAN 0x7e00
#define KVQ_HALF_MAX 65504.0f

// One half of a symmetric codebook and the scales worth trying for it.
typedef struct {
    int n_levels;         // positive levels
    float levels[8];      // ascending
    float thresholds[8];  // halfway between neighbours: thresholds[i] separates levels[i] and levels[i + 1]
    float ratio_min;      // scales tried: absmax / 127 * (ratio_min + i * ratio_step), i < n_ratios
    float ratio_step;
    int n_ratios;
} kvq_codebook;

static const kvq_codebook kvq_codebook_16 = {
    .n_levels   = 8,
    .levels     = { 6, 18, 31, 44, 58, 75, 96, 127 },
    .thresholds = { 12, 24.5f, 37.5f, 51, 66.5f, 85.5f, 111.5f },
    .ratio_min  = 0.50f,
    .ratio_step = 0.05f,
    .n_ratios   = 14,
};

static const kvq_codebook kvq_codebook_4 = {
    .n_levels   = 2,
    .levels     = { 38, 127 },
    .thresholds = { 82.5f },
    .ratio_min  = 0.30f,
    .ratio_step = 0.05f,
    .n_ratios   = 15,
};

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

// sum |x| q and sum q q; eight partial sums, which a compiler turns into one vector
static void kvq_block_dots(const float * x, const float * q, float * sum_xq, float * sum_qq) {
    float xq[8] = { 0 };
    float qq[8] = { 0 };
    for (int i = 0; i < KVQ_BLOCK; i += 8) {
        for (int j = 0; j < 8; j++) {
            xq[j] += fabsf(x[i + j]) * q[i + j];
            qq[j] += q[i + j] * q[i + j];
        }
    }
    *sum_xq = ((xq[0] + xq[4]) + (xq[2] + xq[6])) + ((xq[1] + xq[5]) + (xq[3] + xq[7]));
    *sum_qq = ((qq[0] + qq[4]) + (qq[2] + qq[6])) + ((qq[1] + qq[5]) + (qq[3] + qq[7]));
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
    if (amax < 127.0f * 0x1p-25f) {  // the scale would round to 0
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
        for (int i = 0; i < KVQ_BLOCK / 2; i++) {
            y[b].qs[i] = (uint8_t) (codes[i] | codes[i + KVQ_BLOCK / 2] << 4);
        }
    }
}

void kvq_quantize_row_q2_t_ref(const float * x, block_q2_t * y, int64_t k) {
    assert(k % KVQ_BLOCK == 0);
    for (int64_t b = 0; b < k / KVQ_BLOCK; b++) {
        uint8_t codes[KVQ_BLOCK];
        y[b].d = kvq_block_encode(&kvq_codebook_4, x + b * KVQ_BLOCK, codes);
        for (int i = 0; i < KVQ_BLOCK / 4; i++) {
            y[b].qs[i] = (uint8_t) (codes[i] | codes[i + 16] << 2 | codes[i + 32] << 4 | codes[i + 48] << 6);
        }
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
