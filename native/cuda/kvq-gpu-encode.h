// kvq-gpu-encode.h: F32 to the KV types, with the scale search of the reference encoders and their bytes. Sixteen lanes work
// on a block of 64 values; lane j holds values j, j + 16, j + 32, j + 48, so that a lane's sum is one of the reference's
// sixteen partial sums, and adding lanes 8, 4, 2 and 1 apart adds in the reference's order. No lane leaves early: the
// others of its wave exchange sums with it.

#pragma once

#include "kvq-codebooks.h"
#include "kvq-gpu-codes.h"

namespace kvq {
namespace gpu {

constexpr int ENCODE_THREADS = 128;
constexpr int ENCODE_LANES   = 16;
constexpr int ENCODE_TEAMS   = ENCODE_THREADS / ENCODE_LANES;

// A lane's share of a block.
struct lane_values {
    float x[4];
};

struct lane_codes {
    uint32_t code[4];
    uint16_t d;  // alike in all lanes of a block
};

// What a value is rounded to, and its number.
struct rounding {
    float level;
    uint32_t code;
};

// Of the uniform types, by magnitude: see kvq_block_round.
template <int N_LEVELS> KVQ_DEVICE rounding nearest_magnitude(float x) {
    constexpr float levels_8[8]     = { 6, 18, 31, 44, 58, 75, 96, 127 };
    constexpr float thresholds_8[8] = { 12, 24.5f, 37.5f, 51, 66.5f, 85.5f, 111.5f };
    constexpr float levels_2[2]     = { 38, 127 };
    constexpr float thresholds_2[2] = { 82.5f };
    rounding r                      = { N_LEVELS == 8 ? levels_8[0] : levels_2[0], 0 };
    KVQ_UNROLL
    for (int t = 0; t + 1 < N_LEVELS; t++) {
        const bool above = x >= (N_LEVELS == 8 ? thresholds_8[t % 8] : thresholds_2[t % 2]);
        r.level          = above ? (N_LEVELS == 8 ? levels_8[(t + 1) % 8] : levels_2[(t + 1) % 2]) : r.level;
        r.code += above;
    }
    return r;
}

// Of the spectral types: see kvq_nearest_level and kvq_nearest_step.
template <int N> KVQ_DEVICE rounding nearest_level(float x) {
    constexpr int levels_16[16] = { KVQ_CODEBOOK_Q4_VE };
    constexpr int levels_4[4]   = { KVQ_CODEBOOK_Q2_T };
    rounding r                  = { (float) (N == 16 ? levels_16[0] : levels_4[0]), 0 };
    KVQ_UNROLL
    for (int i = 1; i < N; i++) {
        const int below  = N == 16 ? levels_16[i - 1] : levels_4[(i - 1) % 4];
        const int level  = N == 16 ? levels_16[i] : levels_4[i % 4];
        const bool above = 2.0f * x >= (float) (below + level);
        r.level          = above ? (float) level : r.level;
        r.code += above;
    }
    return r;
}

KVQ_DEVICE rounding nearest_step(float x) {
    const float place = __builtin_floorf(add(multiply(add(x, 94.0f), 1.0f / 3.0f), 0.5f));
    const int code    = (int) smaller(larger(place, 0.0f), 63.0f);
    return { (float) (3 * code - 94), (uint32_t) code };
}

template <int32_t TYPE> KVQ_DEVICE rounding nearest_spectral(float x, bool strong) {
    if (TYPE == KV_Q4_VES) {
        return strong ? nearest_step(x) : nearest_level<16>(x);
    }
    return strong ? nearest_level<16>(x) : nearest_level<4>(x);
}

// Scores of two candidates may be equal: the first wins, as in the reference.
struct best_scale {
    float scale;
    float score;
};

// kvq_block_encode
template <int N_LEVELS> KVQ_DEVICE lane_codes encode_uniform(const lane_values & v) {
    constexpr int n_ratios     = N_LEVELS == 8 ? 14 : 15;
    constexpr float ratio_min  = N_LEVELS == 8 ? 0.50f : 0.30f;
    constexpr float ratio_step = 0.05f;

    float amax = 0.0f;
    bool good  = true;
    KVQ_UNROLL
    for (int k = 0; k < 4; k++) {
        amax = larger(amax, magnitude(v.x[k]));
        good = good && is_finite(v.x[k]);
    }
    amax              = max_of_lanes(amax, ENCODE_LANES);
    const bool broken = max_of_lanes(good ? 0.0f : 1.0f, ENCODE_LANES) != 0.0f;

    float unit[4];
    KVQ_UNROLL
    for (int k = 0; k < 4; k++) {
        unit[k] = divide(v.x[k], amax);
    }
    best_scale best = { 1.0f / 127.0f, -1.0f };
    for (int i = 0; i < n_ratios; i++) {
        const float inverse = divide(1.0f, divide(add(ratio_min, multiply((float) i, ratio_step)), 127.0f));
        float xq            = 0.0f;
        float qq            = 0.0f;
        KVQ_UNROLL
        for (int k = 0; k < 4; k++) {
            const float x     = magnitude(unit[k]);
            const float level = nearest_magnitude<N_LEVELS>(multiply(x, inverse)).level;
            xq                = add(xq, multiply(x, level));
            qq                = add(qq, multiply(level, level));
        }
        xq                = sum_of_lanes(xq, ENCODE_LANES);
        qq                = sum_of_lanes(qq, ENCODE_LANES);
        const float score = divide(multiply(xq, xq), qq);
        if (score > best.score) {
            best = { divide(xq, qq), score };
        }
    }
    lane_codes r;
    r.d = half_bits(smaller(multiply(best.scale, amax), KVQ_HALF_MAX));
    r.d = broken ? KVQ_HALF_NAN : amax < KVQ_SCALE_ZERO ? 0 : r.d;

    const float d_unit = divide(half_value(r.d), amax);
    KVQ_UNROLL
    for (int k = 0; k < 4; k++) {
        const uint32_t level = nearest_magnitude<N_LEVELS>(divide(magnitude(unit[k]), d_unit)).code;
        const bool negative  = (float_to_bits(unit[k]) & 0x80000000u) != 0;
        r.code[k]            = negative ? N_LEVELS - 1 - level : N_LEVELS + level;
        r.code[k]            = broken || r.d == 0 ? N_LEVELS : r.code[k];
    }
    return r;
}

// kvq_spectral_encode
template <int32_t TYPE> KVQ_DEVICE lane_codes encode_spectral(const lane_values & v, int lane) {
    constexpr float unit_deviation = TYPE == KV_Q4_VES ? KVQ_DEVIATION_16 : KVQ_DEVIATION_4;
    const bool strong_first        = lane < KVQ_STRONG;  // only value 0 of a lane may be strong

    float square = 0.0f;
    bool good    = true;
    KVQ_UNROLL
    for (int k = 0; k < 4; k++) {
        const float x = k == 0 && strong_first ? multiply(v.x[k], 1.0f / 0.55f) : v.x[k];
        square        = add(square, multiply(x, x));
        good          = good && is_finite(v.x[k]);
    }
    const bool broken = max_of_lanes(good ? 0.0f : 1.0f, ENCODE_LANES) != 0.0f;
    const float rms   = square_root(divide(sum_of_lanes(square, ENCODE_LANES), (float) KVQ_BLOCK));

    float unit[4];
    KVQ_UNROLL
    for (int k = 0; k < 4; k++) {
        unit[k] = divide(v.x[k], rms);
    }
    best_scale best = { 0.0f, -1.0f };
    for (int i = 0; i < KVQ_SPECTRAL_N_RATIOS; i++) {
        const float inverse =
            divide(unit_deviation, add(KVQ_SPECTRAL_RATIO_MIN, multiply((float) i, KVQ_SPECTRAL_RATIO_STEP)));
        float xs = 0.0f;
        float ss = 0.0f;
        KVQ_UNROLL
        for (int k = 0; k < 4; k++) {
            const bool strong    = k == 0 && strong_first;
            const float level    = nearest_spectral<TYPE>(multiply(unit[k], inverse), strong).level;
            const float weighted = strong ? multiply(32.0f, level) : level;
            xs                   = add(xs, multiply(unit[k], weighted));
            ss                   = add(ss, multiply(level, weighted));
        }
        xs                = sum_of_lanes(xs, ENCODE_LANES);
        ss                = sum_of_lanes(ss, ENCODE_LANES);
        const float score = xs > 0.0f ? divide(multiply(xs, xs), ss) : 0.0f;
        if (score > best.score) {
            best = { divide(xs, ss), score };
        }
    }
    lane_codes r;
    r.d = half_bits(smaller(multiply(larger(best.scale, 0.0f), rms), KVQ_HALF_MAX));
    r.d = broken ? KVQ_HALF_NAN : !(rms > unit_deviation * 0x1p-24f) ? 0 : r.d;

    const float scale = half_value(r.d);
    KVQ_UNROLL
    for (int k = 0; k < 4; k++) {
        const bool strong = k == 0 && strong_first;
        const bool plain  = broken || !(scale > 0.0f);
        r.code[k]         = nearest_spectral<TYPE>(plain ? 1.0f : divide(v.x[k], scale), strong).code;
    }
    return r;
}

// The bytes of kvq-pack.h.
KVQ_DEVICE void store_scale_and_extra(const lane_codes & c, int lane, int shift, bool extra, bool active,
                                      uint8_t * block) {
    if (extra) {  // two bits of each of four lanes to a byte
        const float mine  = (float) ((c.code[0] >> shift & 3) << 2 * (lane % 4));
        const float bytes = sum_of_lanes(mine, 4);
        if (active && lane < KVQ_STRONG && lane % 4 == 0) {
            store(block + 2 + lane / 4, (uint8_t) bytes);
        }
    }
    if (active && lane == 0) {
        store((uint16_t *) block, c.d);
    }
}

template <int32_t TYPE> KVQ_DEVICE void encode_block(const lane_values & v, int lane, bool active, uint8_t * block) {
    constexpr bool nibbles  = TYPE == KV_Q4_VE || TYPE == KV_Q4_VES;
    constexpr bool spectral = TYPE == KV_Q4_VES || TYPE == KV_Q2_TS;
    lane_codes c;
    if constexpr (spectral) {
        c = encode_spectral<TYPE>(v, lane);
    } else {
        c = encode_uniform<nibbles ? 8 : 2>(v);
    }
    store_scale_and_extra(c, lane, nibbles ? 4 : 2, spectral, active, block);
    if (!active) {
        return;
    }
    uint8_t * qs = block + (spectral ? 4 : 2);
    if (nibbles) {
        store(qs + lane, (uint8_t) ((c.code[0] & 15) | c.code[2] << 4));
        store(qs + lane + 16, (uint8_t) (c.code[1] | c.code[3] << 4));
    } else {
        store(qs + lane, (uint8_t) ((c.code[0] & 3) | c.code[1] << 2 | c.code[2] << 4 | c.code[3] << 6));
    }
}

// Rows of floats to rows of a KV type: set_rows with indices, cpy without. Strides in bytes.
struct encode_args {
    const uint8_t * src;  // [n_blocks_row * 64, n1, n2, n3] F32
    uint8_t * dst;
    const uint8_t * rows;  // [n1, rows_n2, rows_n3], or null: row i1 goes to row i1
    int32_t rows_wide;     // 64-bit indices
    int64_t n_blocks_row;
    int64_t n1;
    int64_t n2;
    int64_t n3;
    int64_t src_stride[3];
    int64_t dst_stride[3];
    int64_t rows_n2;
    int64_t rows_n3;
    int64_t rows_stride[3];
};

KVQ_DEVICE int64_t target_row(const encode_args & a, int64_t i1, int64_t i2, int64_t i3) {
    if (!a.rows) {
        return i1;
    }
    const uint8_t * p =
        a.rows + i1 * a.rows_stride[0] + i2 % a.rows_n2 * a.rows_stride[1] + i3 % a.rows_n3 * a.rows_stride[2];
    return a.rows_wide ? load((const int64_t *) p) : load((const int32_t *) p);
}

KVQ_BOTH constexpr int64_t block_bytes(int32_t type) {
    return type == KV_Q4_VE  ? sizeof(block_q4_ve) :
           type == KV_Q4_VES ? sizeof(block_q4_ves) :
           type == KV_Q2_T   ? sizeof(block_q2_t) :
                               sizeof(block_q2_ts);
}

template <int32_t TYPE> KVQ_KERNEL(ENCODE_THREADS) encode_rows(const encode_args a) {
    const int lane       = thread_x() % ENCODE_LANES;
    const int64_t number = (int64_t) block_x() * ENCODE_TEAMS + thread_x() / ENCODE_LANES;
    const bool active    = number < a.n_blocks_row * a.n1 * a.n2 * a.n3;
    const int64_t b      = active ? number % a.n_blocks_row : 0;
    const int64_t row    = active ? number / a.n_blocks_row : 0;
    const int64_t i1     = row % a.n1;
    const int64_t i2     = row / a.n1 % a.n2;
    const int64_t i3     = row / a.n1 / a.n2;
    const float * src    = (const float *) (a.src + i1 * a.src_stride[0] + i2 * a.src_stride[1] + i3 * a.src_stride[2]);
    uint8_t * dst = a.dst + target_row(a, i1, i2, i3) * a.dst_stride[0] + i2 * a.dst_stride[1] + i3 * a.dst_stride[2];
    lane_values v;
    KVQ_UNROLL
    for (int k = 0; k < 4; k++) {
        v.x[k] = load(src + b * KVQ_BLOCK + 16 * k + lane);
    }
    encode_block<TYPE>(v, lane, active, dst + b * block_bytes(TYPE));
}

}  // namespace gpu
}  // namespace kvq
