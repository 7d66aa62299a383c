// kvq-simd.h: one float vector as wide as the processor's, on the compiler's vector types, so that a kernel is written
// once for AVX-512, AVX2, NEON and plain C++. Every file that includes it is compiled once a CPU variant of ggml.

#pragma once

#include "ggml-cpu-impl.h"
#include "simd-mappings.h"

#include <cstdint>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#    define KVQ_AVX512
#    define KVQ_LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#    define KVQ_AVX2
#    define KVQ_LANES 8
#else
#    define KVQ_LANES 4
#endif
#if defined(__ARM_NEON) && defined(__aarch64__)
#    define KVQ_NEON
#endif

namespace kvq {

constexpr int LANES = KVQ_LANES;

typedef float vfloat __attribute__((vector_size(KVQ_LANES * 4)));
typedef int32_t vint __attribute__((vector_size(KVQ_LANES * 4)));
typedef uint32_t vuint __attribute__((vector_size(KVQ_LANES * 4)));
typedef vfloat vfloat_unaligned __attribute__((aligned(4), may_alias));
typedef vint vint_unaligned __attribute__((aligned(4), may_alias));

static inline vfloat load(const float * x) {
    return *(const vfloat_unaligned *) x;
}

// halves
static inline vfloat load(const uint16_t * x) {
#if defined(KVQ_AVX512)
    return (vfloat) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) x));
#elif defined(KVQ_AVX2)
    return (vfloat) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) x));
#elif defined(KVQ_NEON)
    return (vfloat) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
#else
    vfloat result;
    for (int i = 0; i < LANES; i++) {
        result[i] = GGML_CPU_FP16_TO_FP32(x[i]);
    }
    return result;
#endif
}

static inline void store(float * x, vfloat v) {
    *(vfloat_unaligned *) x = v;
}

static inline void store(int32_t * x, vint v) {
    *(vint_unaligned *) x = v;
}

static inline vfloat splat(float x) {
    return x - vfloat{};
}

static inline vfloat max(vfloat a, vfloat b) {
    return a > b ? a : b;
}

// The compilers spell a shuffle by constants differently; GCC 11 has no __builtin_shufflevector.
#if defined(__clang__)
#    define KVQ_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#    define KVQ_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vint{ __VA_ARGS__ })
#endif

// lane i of the result = the sum of the lanes of a[i]: pairs are interleaved and added until one vector is left
static inline vfloat sum_each(const vfloat a[KVQ_LANES]) {
#if KVQ_LANES == 16
#    define KVQ_LOW 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#    define KVQ_HIGH 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#    define KVQ_LOW2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#    define KVQ_HIGH2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#    define KVQ_EVEN4 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#    define KVQ_ODD4 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#elif KVQ_LANES == 8
#    define KVQ_LOW 0, 8, 1, 9, 4, 12, 5, 13
#    define KVQ_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#    define KVQ_LOW2 0, 1, 8, 9, 4, 5, 12, 13
#    define KVQ_HIGH2 2, 3, 10, 11, 6, 7, 14, 15
#    define KVQ_EVEN4 0, 1, 2, 3, 8, 9, 10, 11
#    define KVQ_ODD4 4, 5, 6, 7, 12, 13, 14, 15
#else
#    define KVQ_LOW 0, 4, 1, 5
#    define KVQ_HIGH 2, 6, 3, 7
#    define KVQ_LOW2 0, 1, 4, 5
#    define KVQ_HIGH2 2, 3, 6, 7
#endif
    vfloat pairs[KVQ_LANES / 2];
    vfloat fours[KVQ_LANES / 4];
    for (int i = 0; i < KVQ_LANES / 2; i++) {
        pairs[i] = KVQ_SHUFFLE(a[2 * i], a[2 * i + 1], KVQ_LOW) + KVQ_SHUFFLE(a[2 * i], a[2 * i + 1], KVQ_HIGH);
    }
    for (int i = 0; i < KVQ_LANES / 4; i++) {
        fours[i] = KVQ_SHUFFLE(pairs[2 * i], pairs[2 * i + 1], KVQ_LOW2) +
                   KVQ_SHUFFLE(pairs[2 * i], pairs[2 * i + 1], KVQ_HIGH2);
    }
#if KVQ_LANES == 4
    return fours[0];
#else
    vfloat eights[KVQ_LANES / 8];
    for (int i = 0; i < KVQ_LANES / 8; i++) {
        eights[i] = KVQ_SHUFFLE(fours[2 * i], fours[2 * i + 1], KVQ_EVEN4) +
                    KVQ_SHUFFLE(fours[2 * i], fours[2 * i + 1], KVQ_ODD4);
    }
#    if KVQ_LANES == 8
    return eights[0];
#    else
    return KVQ_SHUFFLE(eights[0], eights[1], KVQ_EVEN4) + KVQ_SHUFFLE(eights[0], eights[1], KVQ_ODD4);
#    endif
#endif
#undef KVQ_LOW
#undef KVQ_HIGH
#undef KVQ_LOW2
#undef KVQ_HIGH2
#undef KVQ_EVEN4
#undef KVQ_ODD4
}

// exp(x) for x <= 0 within 2 units in the last place, 0 below -87; NaN stays. x = n ln 2 + r, |r| <= ln 2 / 2 by Cody
// and Waite's two-part ln 2, exp(r) by its Taylor series, 2^n by the exponent bits.
static inline vfloat exp_nonpositive(vfloat x) {
    const vfloat shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the low bits now hold round(x / ln 2)
    const vfloat n       = shifted - 12582912.0f;
    const vfloat r       = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vfloat p             = r * (1.0f / 5040) + (1.0f / 720);
    p                    = p * r + (1.0f / 120);
    p                    = p * r + (1.0f / 24);
    p                    = p * r + (1.0f / 6);
    p                    = p * r + 0.5f;
    p                    = p * r + 1.0f;
    p                    = p * r + 1.0f;
    const vfloat scaled  = (vfloat) ((vuint) p + ((vuint) shifted << 23));  // wraps below -87
    return x < -87.0f ? vfloat{} : scaled;
}

// tanh(x) with an absolute error of 2e-7
static inline vfloat tanh_vector(vfloat x) {
    const vfloat magnitude = x < 0.0f ? -x : x;
    const vfloat e         = exp_nonpositive(-2.0f * magnitude);
    const vfloat t         = (1.0f - e) / (1.0f + e);
    return x < 0.0f ? -t : t;
}

}  // namespace kvq
