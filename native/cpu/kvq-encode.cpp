// The encoders of the KV types, the scale search vectorised over the values of a block. Byte for byte what the reference
// encoders of native/kvq give.

#include "kvq-codebooks.h"
#include "kvq-cpu.h"
#include "kvq-pack.h"
#include "kvq-quants.h"
#include "kvq-simd.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvq {
namespace {

constexpr int VECTORS     = KVQ_BLOCK / LANES;
constexpr int SUM_VECTORS = 16 / LANES;  // partial sums of each kind

// The magnitudes of a block, and where the signs are.
struct block_values {
    vfloat magnitude[VECTORS];
    vint negative[VECTORS];
    float absmax;  // NaN if any value is not finite
};

block_values load_block(const float * x) {
    block_values b;
    vfloat largest = {};
    vint broken    = {};
    for (int i = 0; i < VECTORS; i++) {
        const vint bits = (vint) load(x + i * LANES);
        b.negative[i]   = bits < 0;
        b.magnitude[i]  = (vfloat) (bits & 0x7fffffff);
        broken |= (bits & 0x7f800000) == 0x7f800000;
        largest = max(largest, b.magnitude[i]);
    }
    float lanes[LANES];
    int32_t flags[LANES];
    store(lanes, largest);
    store(flags, broken);
    const bool finite = std::none_of(flags, flags + LANES, [](int32_t f) { return f != 0; });
    b.absmax          = finite ? *std::max_element(lanes, lanes + LANES) : NAN;
    return b;
}

typedef float vfloat4 __attribute__((vector_size(16)));
typedef float vfloat8 __attribute__((vector_size(32)));

// kvq_add_partial_sums in registers
float add_partial_sums(const vfloat * sums) {
    vfloat8 halves[2];
    vfloat4 quarters[2];
    std::memcpy(halves, sums, sizeof(halves));
    const vfloat8 eight = halves[0] + halves[1];
    std::memcpy(quarters, &eight, sizeof(quarters));
    const vfloat4 four = quarters[0] + quarters[1];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// The nearest level of each |x| / scale
template <int N_LEVELS> vfloat nearest_level(const kvq_codebook & cb, vfloat scaled) {
    vfloat level = splat(cb.levels[0]);
#pragma GCC unroll 8
    for (int t = 0; t + 1 < N_LEVELS; t++) {
        const float step = cb.levels[t + 1] - cb.levels[t];
        level += scaled >= cb.thresholds[t] ? splat(step) : vfloat{};
    }
    return level;
}

// unit: the magnitudes over absmax. See kvq_block_search_scale in kvq-quants.c.
template <int N_LEVELS> float search_scale(const kvq_codebook & cb, const vfloat * unit) {
    float best       = 1.0f / 127.0f;
    float best_score = -1.0f;
    for (int r = 0; r < cb.n_ratios; r++) {
        const float inverse    = 1.0f / ((cb.ratio_min + (float) r * cb.ratio_step) / 127.0f);
        vfloat xq[SUM_VECTORS] = {};
        vfloat qq[SUM_VECTORS] = {};
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; i++) {
            const vfloat level = nearest_level<N_LEVELS>(cb, unit[i] * inverse);
            xq[i % SUM_VECTORS] += unit[i] * level;
            qq[i % SUM_VECTORS] += level * level;
        }
        const float sum_xq = add_partial_sums(xq);
        const float sum_qq = add_partial_sums(qq);
        const float score  = sum_xq * sum_xq / sum_qq;
        if (score > best_score) {
            best_score = score;
            best       = sum_xq / sum_qq;
        }
    }
    return best;
}

// Writes the 64 codes of a block (0 is the lowest level) and returns its scale as a half.
template <int N_LEVELS> uint16_t encode_block(const kvq_codebook & cb, const float * x, uint8_t * codes) {
    block_values b = load_block(x);
    std::memset(codes, N_LEVELS, KVQ_BLOCK);
    if (std::isnan(b.absmax)) {
        return KVQ_HALF_NAN;
    }
    if (b.absmax < KVQ_SCALE_ZERO) {
        return 0;
    }
    for (vfloat & magnitude : b.magnitude) {
        magnitude /= b.absmax;
    }
    const float scale  = std::min(search_scale<N_LEVELS>(cb, b.magnitude) * b.absmax, KVQ_HALF_MAX);
    const uint16_t d   = ggml_fp32_to_fp16(scale);
    const float d_unit = ggml_fp16_to_fp32(d) / b.absmax;
    if (d_unit == 0.0f) {
        return d;
    }
    for (int i = 0; i < VECTORS; i++) {
        const vfloat scaled = b.magnitude[i] / d_unit;
        vint level          = {};
        for (int t = 0; t + 1 < N_LEVELS; t++) {
            level -= scaled >= cb.thresholds[t];  // true is -1
        }
        const vint code = b.negative[i] ? N_LEVELS - 1 - level : N_LEVELS + level;
        for (int j = 0; j < LANES; j++) {
            codes[i * LANES + j] = (uint8_t) code[j];
        }
    }
    return d;
}

// The spectral types. What value i of a block is rounded to, for each lane of one vector of the block.
struct rounded {
    vfloat level;
    vint code;
};

// levels ascend; a value half-way between two goes to the larger
template <int N> rounded nearest(const int8_t (&levels)[N], vfloat x) {
    const vfloat twice = 2.0f * x;
    rounded r          = { splat(levels[0]), {} };
#pragma GCC unroll 16
    for (int i = 1; i < N; i++) {
        const vint reached = twice >= (float) (levels[i - 1] + levels[i]);
        r.level += reached ? splat((float) (levels[i] - levels[i - 1])) : vfloat{};
        r.code -= reached;  // true is -1
    }
    return r;
}

rounded nearest_step(vfloat x) {
    const vfloat position = max((x + 94.0f) * (1.0f / 3.0f) + 0.5f, vfloat{});
    const vint code       = __builtin_convertvector(position > 63.0f ? splat(63.0f) : position, vint);
    return { __builtin_convertvector(3 * code - 94, vfloat), code };  // kvq_strong_level
}

constexpr int8_t LEVELS_16[16] = { KVQ_CODEBOOK_Q4_VE };
constexpr int8_t LEVELS_4[4]   = { KVQ_CODEBOOK_Q2_T };

struct spectral_4 {
    static constexpr float unit = KVQ_DEVIATION_16;

    static rounded strong(vfloat x) { return nearest_step(x); }

    static rounded weak(vfloat x) { return nearest(LEVELS_16, x); }
};

struct spectral_2 {
    static constexpr float unit = KVQ_DEVIATION_4;

    static rounded strong(vfloat x) { return nearest(LEVELS_16, x); }

    static rounded weak(vfloat x) { return nearest(LEVELS_4, x); }
};

// Lanes of the i-th vector of a block that hold strong values
vint strong_lanes(int i) {
    int32_t lanes[LANES];
    for (int j = 0; j < LANES; j++) {
        lanes[j] = i * LANES + j < KVQ_STRONG ? -1 : 0;
    }
    vint result;
    std::memcpy(&result, lanes, sizeof(result));
    return result;
}

template <class T> rounded round_values(int i, vfloat x) {
    if (i * LANES >= KVQ_STRONG) {
        return T::weak(x);
    }
    const rounded strong = T::strong(x);
    if (LANES <= KVQ_STRONG) {
        return strong;
    }
    const vint is_strong = strong_lanes(i);
    const rounded weak   = T::weak(x);
    return { is_strong ? strong.level : weak.level, is_strong ? strong.code : weak.code };
}

// See kvq_spectral_mean_square and kvq_spectral_search in kvq-quants-spectral.c.
float spectral_mean_square(const vfloat * x) {
    vfloat sums[SUM_VECTORS] = {};
    for (int i = 0; i < VECTORS; i++) {
        const vfloat unit = strong_lanes(i) ? x[i] * (1.0f / KVQ_STRONG_DEVIATION) : x[i];
        sums[i % SUM_VECTORS] += unit * unit;
    }
    return add_partial_sums(sums) / KVQ_BLOCK;
}

template <class T> float search_spectral_scale(const vfloat * x) {
    float best       = 0.0f;
    float best_score = -1.0f;
    for (int r = 0; r < KVQ_SPECTRAL_N_RATIOS; r++) {
        const float inverse    = T::unit / (KVQ_SPECTRAL_RATIO_MIN + (float) r * KVQ_SPECTRAL_RATIO_STEP);
        vfloat xs[SUM_VECTORS] = {};
        vfloat ss[SUM_VECTORS] = {};
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; i++) {
            const vfloat level    = round_values<T>(i, x[i] * inverse).level;
            const vfloat weighted = strong_lanes(i) ? KVQ_STRONG_WEIGHT * level : level;
            xs[i % SUM_VECTORS] += x[i] * weighted;
            ss[i % SUM_VECTORS] += level * weighted;
        }
        const float sum_xs = add_partial_sums(xs);
        const float sum_ss = add_partial_sums(ss);
        const float score  = sum_xs > 0.0f ? sum_xs * sum_xs / sum_ss : 0.0f;
        if (score > best_score) {
            best_score = score;
            best       = sum_xs / sum_ss;
        }
    }
    return std::fmax(best, 0.0f);
}

template <class T> void store_codes(const vfloat * x, uint8_t * codes) {
    for (int i = 0; i < VECTORS; i++) {
        const vint code = round_values<T>(i, x[i]).code;
        for (int j = 0; j < LANES; j++) {
            codes[i * LANES + j] = (uint8_t) code[j];
        }
    }
}

// Writes the 64 codes of a block and returns its scale as a half.
template <class T> uint16_t encode_spectral_block(const float * x, uint8_t * codes) {
    vfloat values[VECTORS];
    std::fill_n(values, VECTORS, splat(1.0f));
    store_codes<T>(values, codes);
    if (std::isnan(load_block(x).absmax)) {
        return KVQ_HALF_NAN;
    }
    std::memcpy(values, x, sizeof(values));
    const float rms = std::sqrt(spectral_mean_square(values));
    if (!(rms > T::unit * 0x1p-24f)) {
        return 0;
    }
    for (vfloat & value : values) {
        value /= rms;
    }
    const uint16_t d  = ggml_fp32_to_fp16(std::fmin(search_spectral_scale<T>(values) * rms, KVQ_HALF_MAX));
    const float scale = ggml_fp16_to_fp32(d);
    if (scale > 0.0f) {
        std::memcpy(values, x, sizeof(values));
        for (vfloat & value : values) {
            value /= scale;
        }
        store_codes<T>(values, codes);
    }
    return d;
}

}  // namespace
}  // namespace kvq

void kvq_quantize_row_q4_ve(const float * x, void * y, int64_t k) {
    block_q4_ve * blocks = (block_q4_ve *) y;
    for (int64_t b = 0; b < k / KVQ_BLOCK; b++) {
        uint8_t codes[KVQ_BLOCK];
        blocks[b].d = kvq::encode_block<8>(kvq_codebook_16, x + b * KVQ_BLOCK, codes);
        kvq_pack_nibbles(codes, blocks[b].qs);
    }
}

void kvq_quantize_row_q2_t(const float * x, void * y, int64_t k) {
    block_q2_t * blocks = (block_q2_t *) y;
    for (int64_t b = 0; b < k / KVQ_BLOCK; b++) {
        uint8_t codes[KVQ_BLOCK];
        blocks[b].d = kvq::encode_block<2>(kvq_codebook_4, x + b * KVQ_BLOCK, codes);
        kvq_pack_crumbs(codes, blocks[b].qs);
    }
}

void kvq_quantize_row_q4_ves(const float * x, void * y, int64_t k) {
    block_q4_ves * blocks = (block_q4_ves *) y;
    for (int64_t b = 0; b < k / KVQ_BLOCK; b++) {
        uint8_t codes[KVQ_BLOCK];
        blocks[b].d = kvq::encode_spectral_block<kvq::spectral_4>(x + b * KVQ_BLOCK, codes);
        kvq_pack_extra(codes, 4, blocks[b].qh);
        kvq_pack_nibbles(codes, blocks[b].qs);
    }
}

void kvq_quantize_row_q2_ts(const float * x, void * y, int64_t k) {
    block_q2_ts * blocks = (block_q2_ts *) y;
    for (int64_t b = 0; b < k / KVQ_BLOCK; b++) {
        uint8_t codes[KVQ_BLOCK];
        blocks[b].d = kvq::encode_spectral_block<kvq::spectral_2>(x + b * KVQ_BLOCK, codes);
        kvq_pack_extra(codes, 2, blocks[b].qh);
        kvq_pack_crumbs(codes, blocks[b].qs);
    }
}
