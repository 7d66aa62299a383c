#include "kvq-quants.h"

#include "kvq-codebooks.h"
#include "kvq-pack.h"

#include <assert.h>
#include <math.h>
#include <string.h>

static const int8_t kvq_levels_16[16] = { KVQ_CODEBOOK_Q4_VE };
static const int8_t kvq_levels_4[4]   = { KVQ_CODEBOOK_Q2_T };

// How the values of a block are coded: the first KVQ_STRONG of them, and the others.
typedef struct {
    const int8_t * strong_levels;  // NULL: the levels 3 c - 94
    int n_strong_levels;
    const int8_t * levels;
    int n_levels;
    float unit;  // the standard deviation of the others' codebook
} kvq_spectral;

static const kvq_spectral kvq_spectral_4 = { NULL, 64, kvq_levels_16, 16, KVQ_DEVIATION_16 };
static const kvq_spectral kvq_spectral_2 = { kvq_levels_16, 16, kvq_levels_4, 4, KVQ_DEVIATION_4 };

static int kvq_nearest_step(float x) {
    return (int) fminf(fmaxf(floorf((x + 94.0f) * (1.0f / 3.0f) + 0.5f), 0.0f), 63.0f);
}

// levels ascend; a value half-way between two goes to the larger
static int kvq_nearest_level(const int8_t * levels, int n, float x) {
    int code = 0;
    for (int i = 1; i < n; i++) {
        code += 2.0f * x >= (float) (levels[i - 1] + levels[i]);
    }
    return code;
}

static int kvq_spectral_code(const kvq_spectral * type, int i, float x) {
    if (i >= KVQ_STRONG) {
        return kvq_nearest_level(type->levels, type->n_levels, x);
    }
    return type->strong_levels ? kvq_nearest_level(type->strong_levels, type->n_strong_levels, x) : kvq_nearest_step(x);
}

static float kvq_spectral_level(const kvq_spectral * type, int i, int code) {
    if (i >= KVQ_STRONG) {
        return type->levels[code];
    }
    return type->strong_levels ? (float) type->strong_levels[code] : (float) kvq_strong_level(code);
}

// Mean square with the strong values brought to the deviation of the others; NaN if a value is not finite.
static float kvq_spectral_mean_square(const float * x) {
    float sums[16] = { 0 };
    for (int i = 0; i < KVQ_BLOCK; i++) {
        if (!isfinite(x[i])) {
            return NAN;
        }
        const float unit = i < KVQ_STRONG ? x[i] * (1.0f / KVQ_STRONG_DEVIATION) : x[i];
        sums[i % 16] += unit * unit;
    }
    return kvq_add_partial_sums(sums) / KVQ_BLOCK;
}

// For given codes the best scale is <x,s>/<s,s> and the error it leaves falls with <x,s>^2/<s,s>, both weighted. x is
// normalised; so is the result. Sixteen partial sums, so that a vectorised encoder adds in the same order.
static float kvq_spectral_search(const kvq_spectral * type, const float * x) {
    float best       = 0.0f;
    float best_score = -1.0f;
    for (int r = 0; r < KVQ_SPECTRAL_N_RATIOS; r++) {
        const float inverse = type->unit / (KVQ_SPECTRAL_RATIO_MIN + (float) r * KVQ_SPECTRAL_RATIO_STEP);
        float xs[16]        = { 0 };
        float ss[16]        = { 0 };
        for (int i = 0; i < KVQ_BLOCK; i++) {
            const float level    = kvq_spectral_level(type, i, kvq_spectral_code(type, i, x[i] * inverse));
            const float weighted = i < KVQ_STRONG ? KVQ_STRONG_WEIGHT * level : level;
            xs[i % 16] += x[i] * weighted;
            ss[i % 16] += level * weighted;
        }
        const float sum_xs = kvq_add_partial_sums(xs);
        const float sum_ss = kvq_add_partial_sums(ss);
        const float score  = sum_xs > 0.0f ? sum_xs * sum_xs / sum_ss : 0.0f;
        if (score > best_score) {
            best_score = score;
            best       = sum_xs / sum_ss;
        }
    }
    return fmaxf(best, 0.0f);
}

// Writes the 64 codes of a block and returns its scale as a half.
static uint16_t kvq_spectral_encode(const kvq_spectral * type, const float * x, uint8_t * codes) {
    for (int i = 0; i < KVQ_BLOCK; i++) {  // the smallest positive level: decodes to +0 under d = 0
        codes[i] = (uint8_t) kvq_spectral_code(type, i, 1.0f);
    }
    const float mean_square = kvq_spectral_mean_square(x);
    if (isnan(mean_square)) {
        return KVQ_HALF_NAN;
    }
    const float rms = sqrtf(mean_square);
    if (!(rms > type->unit * 0x1p-24f)) {  // the scale would round to 0
        return 0;
    }
    float unit[KVQ_BLOCK];
    for (int i = 0; i < KVQ_BLOCK; i++) {
        unit[i] = x[i] / rms;
    }
    const uint16_t d  = ggml_fp32_to_fp16(fminf(kvq_spectral_search(type, unit) * rms, KVQ_HALF_MAX));
    const float scale = ggml_fp16_to_fp32(d);
    if (scale > 0.0f) {
        for (int i = 0; i < KVQ_BLOCK; i++) {
            codes[i] = (uint8_t) kvq_spectral_code(type, i, x[i] / scale);
        }
    }
    return d;
}

void kvq_quantize_row_q4_ves_ref(const float * x, block_q4_ves * y, int64_t k) {
    assert(k % KVQ_BLOCK == 0);
    for (int64_t b = 0; b < k / KVQ_BLOCK; b++) {
        uint8_t codes[KVQ_BLOCK];
        y[b].d = kvq_spectral_encode(&kvq_spectral_4, x + b * KVQ_BLOCK, codes);
        kvq_pack_extra(codes, 4, y[b].qh);
        kvq_pack_nibbles(codes, y[b].qs);
    }
}

void kvq_quantize_row_q2_ts_ref(const float * x, block_q2_ts * y, int64_t k) {
    assert(k % KVQ_BLOCK == 0);
    for (int64_t b = 0; b < k / KVQ_BLOCK; b++) {
        uint8_t codes[KVQ_BLOCK];
        y[b].d = kvq_spectral_encode(&kvq_spectral_2, x + b * KVQ_BLOCK, codes);
        kvq_pack_extra(codes, 2, y[b].qh);
        kvq_pack_crumbs(codes, y[b].qs);
    }
}

void kvq_dequantize_row_q4_ves(const block_q4_ves * x, float * y, int64_t k) {
    assert(k % KVQ_BLOCK == 0);
    for (int64_t b = 0; b < k / KVQ_BLOCK; b++) {
        const float d = ggml_fp16_to_fp32(x[b].d);
        for (int i = 0; i < KVQ_BLOCK; i++) {
            const int code = i < KVQ_BLOCK / 2 ? x[b].qs[i] & 15 : x[b].qs[i - KVQ_BLOCK / 2] >> 4;
            const int full = i < KVQ_STRONG ? code | kvq_extra(x[b].qh, i) << 4 : code;

            y[b * KVQ_BLOCK + i] = d * kvq_spectral_level(&kvq_spectral_4, i, full);
        }
    }
}

void kvq_dequantize_row_q2_ts(const block_q2_ts * x, float * y, int64_t k) {
    assert(k % KVQ_BLOCK == 0);
    for (int64_t b = 0; b < k / KVQ_BLOCK; b++) {
        const float d = ggml_fp16_to_fp32(x[b].d);
        for (int i = 0; i < KVQ_BLOCK; i++) {
            const int code = x[b].qs[i % 16] >> (2 * (i / 16)) & 3;
            const int full = i < KVQ_STRONG ? code | kvq_extra(x[b].qh, i) << 2 : code;

            y[b * KVQ_BLOCK + i] = d * kvq_spectral_level(&kvq_spectral_2, i, full);
        }
    }
}
