// kvq-codebooks.h: the codebooks and the scale search of the KV types, shared by the reference encoder and the
// vectorised one. Both give the same bytes: they add in the same order, and neither contracts a product and a sum.

#pragma once

#include "kvq-blocks.h"

#define KVQ_HALF_NAN 0x7e00
#define KVQ_HALF_MAX 65504.0f
#define KVQ_SCALE_ZERO (127.0f * 0x1p-25f)  // a block whose absmax is below this has a scale that rounds to 0

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
    8, { 6, 18, 31, 44, 58, 75, 96, 127 }, { 12, 24.5f, 37.5f, 51, 66.5f, 85.5f, 111.5f }, 0.50f, 0.05f, 14,
};

static const kvq_codebook kvq_codebook_4 = {
    2, { 38, 127 }, { 82.5f }, 0.30f, 0.05f, 15,
};

// The spectral types: scales tried are the root mean square of the block over the codebook's standard deviation, times
// these ratios.
#define KVQ_DEVIATION_16 46.5f
#define KVQ_DEVIATION_4 84.0f
#define KVQ_SPECTRAL_RATIO_MIN 0.6f
#define KVQ_SPECTRAL_RATIO_STEP 0.1f
#define KVQ_SPECTRAL_N_RATIOS 13

static inline float kvq_add_partial_sums(const float sums[16]) {
    float s[8];
    for (int i = 0; i < 8; i++) {
        s[i] = sums[i] + sums[i + 8];
    }
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}
