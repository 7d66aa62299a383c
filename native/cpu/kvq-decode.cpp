// Decoders to float. A type differs from another by its block only; what a processor does differently is in the three
// functions at the top: 16 int8, 32 codes of 4 bits, 64 codes of 2 bits.

#include "kvq-decode.h"

#include "ggml-cpu-impl.h"
#include "kvq-pack.h"
#include "kvq-simd.h"
#include "simd-mappings.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include <algorithm>
#include <cstring>

#if defined(KVQ_AVX512) || defined(KVQ_AVX2)
#    include <immintrin.h>
#    if defined(__GNUC__) && !defined(__clang__)
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC bug 105593, in its own AVX-512 intrinsics
#    endif
#elif defined(KVQ_NEON)
#    include <arm_neon.h>
#endif

namespace kvq {
namespace {

// The same head's rows of the next block, so that it waits in the cache: strides keep the processor from seeing that by
// itself. May lie behind the end, where a prefetch does nothing.
constexpr int64_t PREFETCH_ROWS = 64;
constexpr int64_t CACHE_LINE    = 64;

alignas(16) constexpr int8_t LEVELS_Q4_VE[16] = { KVQ_CODEBOOK_Q4_VE };
alignas(16) constexpr int8_t LEVELS_Q4_0[16]  = { -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7 };
alignas(16) constexpr int8_t LEVELS_Q2_T[16]  = { KVQ_CODEBOOK_Q2_T, KVQ_CODEBOOK_Q2_T, KVQ_CODEBOOK_Q2_T,
                                                  KVQ_CODEBOOK_Q2_T };

#if defined(KVQ_AVX512)

// 16 levels times a scale; a permute looks at the low 4 bits of an index only
__m512 scaled_levels(const int8_t * levels, float scale) {
    const __m512i wide = _mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *) levels));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_set1_ps(scale));
}

__m512i widen_codes(const uint8_t * codes) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) codes));
}

void decode_int16(const int8_t * x, float scale, float * out) {
    const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) x));
    _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_set1_ps(scale)));
}

void decode_nibbles(const uint8_t * codes, const int8_t * levels, float scale, float * low, float * high) {
    const __m512 table = scaled_levels(levels, scale);
    const __m512i wide = widen_codes(codes);
    _mm512_storeu_ps(low, _mm512_permutexvar_ps(wide, table));
    _mm512_storeu_ps(high, _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), table));
}

void decode_crumbs(const uint8_t * codes, const int8_t * levels, float scale, float * out) {
    const __m512 table =
        scaled_levels(levels, scale);  // the same four levels four times: upper index bits do not matter
    const __m512i wide = widen_codes(codes);
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(wide, table));
    _mm512_storeu_ps(out + 16, _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 2), table));
    _mm512_storeu_ps(out + 32, _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), table));
    _mm512_storeu_ps(out + 48, _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 6), table));
}

#elif defined(KVQ_AVX2)

void store_int16(__m128i x, float scale, float * out) {
    const __m256 factor = _mm256_set1_ps(scale);
    const __m256i low   = _mm256_cvtepi8_epi32(x);
    const __m256i high  = _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x));
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(low), factor));
    _mm256_storeu_ps(out + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(high), factor));
}

void decode_int16(const int8_t * x, float scale, float * out) {
    store_int16(_mm_loadu_si128((const __m128i *) x), scale, out);
}

void decode_nibbles(const uint8_t * codes, const int8_t * levels, float scale, float * low, float * high) {
    const __m128i table = _mm_load_si128((const __m128i *) levels);
    const __m128i mask  = _mm_set1_epi8(15);
    const __m128i x     = _mm_loadu_si128((const __m128i *) codes);
    store_int16(_mm_shuffle_epi8(table, _mm_and_si128(x, mask)), scale, low);
    store_int16(_mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(x, 4), mask)), scale, high);
}

void decode_crumbs(const uint8_t * codes, const int8_t * levels, float scale, float * out) {
    const __m128i table = _mm_load_si128((const __m128i *) levels);
    const __m128i mask  = _mm_set1_epi8(3);
    const __m128i x     = _mm_loadu_si128((const __m128i *) codes);
    store_int16(_mm_shuffle_epi8(table, _mm_and_si128(x, mask)), scale, out);
    store_int16(_mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(x, 2), mask)), scale, out + 16);
    store_int16(_mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(x, 4), mask)), scale, out + 32);
    store_int16(_mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(x, 6), mask)), scale, out + 48);
}

#elif defined(KVQ_NEON)

void store_int16(int8x16_t x, float scale, float * out) {
    const int16x8_t halves[2] = { vmovl_s8(vget_low_s8(x)), vmovl_s8(vget_high_s8(x)) };
    for (int i = 0; i < 2; i++) {
        vst1q_f32(out + 8 * i, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves[i]))), scale));
        vst1q_f32(out + 8 * i + 4, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(halves[i]))), scale));
    }
}

void decode_int16(const int8_t * x, float scale, float * out) {
    store_int16(vld1q_s8(x), scale, out);
}

void decode_nibbles(const uint8_t * codes, const int8_t * levels, float scale, float * low, float * high) {
    const int8x16_t table = vld1q_s8(levels);
    const uint8x16_t x    = vld1q_u8(codes);
    store_int16(vqtbl1q_s8(table, vandq_u8(x, vdupq_n_u8(15))), scale, low);
    store_int16(vqtbl1q_s8(table, vshrq_n_u8(x, 4)), scale, high);
}

void decode_crumbs(const uint8_t * codes, const int8_t * levels, float scale, float * out) {
    const int8x16_t table = vld1q_s8(levels);
    const uint8x16_t mask = vdupq_n_u8(3);
    const uint8x16_t x    = vld1q_u8(codes);
    store_int16(vqtbl1q_s8(table, vandq_u8(x, mask)), scale, out);
    store_int16(vqtbl1q_s8(table, vandq_u8(vshrq_n_u8(x, 2), mask)), scale, out + 16);
    store_int16(vqtbl1q_s8(table, vandq_u8(vshrq_n_u8(x, 4), mask)), scale, out + 32);
    store_int16(vqtbl1q_s8(table, vshrq_n_u8(x, 6)), scale, out + 48);
}

#else

void decode_int16(const int8_t * x, float scale, float * out) {
    for (int i = 0; i < 16; i++) {
        out[i] = scale * x[i];
    }
}

void decode_nibbles(const uint8_t * codes, const int8_t * levels, float scale, float * low, float * high) {
    for (int i = 0; i < 16; i++) {
        low[i]  = scale * levels[codes[i] & 15];
        high[i] = scale * levels[codes[i] >> 4];
    }
}

void decode_crumbs(const uint8_t * codes, const int8_t * levels, float scale, float * out) {
    for (int i = 0; i < 64; i++) {
        out[i] = scale * levels[codes[i % 16] >> (2 * (i / 16)) & 3];
    }
}

#endif

// Codes of the strong values of a spectral key block: the low `bits` of qs and two more of qh.
#if defined(__AVX2__)

__m256i strong_codes(const uint8_t * qs, const uint8_t * qh, int bits) {
    const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) qs));
    const __m256i low   = _mm256_and_si256(codes, _mm256_set1_epi32((1 << bits) - 1));
    const __m256i extra =
        _mm256_srlv_epi32(_mm256_set1_epi32(qh[0] | qh[1] << 8), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    const __m256i high = _mm256_and_si256(extra, _mm256_set1_epi32(3));
    return _mm256_or_si256(low, _mm256_slli_epi32(high, bits));
}

void decode_strong_q4(const block_q4_ves & x, float scale, float * out) {
    const __m256i codes  = strong_codes(x.qs, x.qh, 4);
    const __m256i thrice = _mm256_add_epi32(codes, _mm256_slli_epi32(codes, 1));
    const __m256i levels = _mm256_add_epi32(thrice, _mm256_set1_epi32(kvq_strong_level(0)));
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(levels), _mm256_set1_ps(scale)));
}

void decode_strong_q2(const block_q2_ts & x, float scale, float * out) {
    const __m256i table  = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *) LEVELS_Q4_VE));
    const __m256i bytes  = _mm256_shuffle_epi8(table, strong_codes(x.qs, x.qh, 2));
    const __m256i levels = _mm256_srai_epi32(_mm256_slli_epi32(bytes, 24), 24);
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(levels), _mm256_set1_ps(scale)));
}

#else

void decode_strong_q4(const block_q4_ves & x, float scale, float * out) {
    for (int i = 0; i < KVQ_STRONG; i++) {
        out[i] = scale * (float) kvq_strong_level((x.qs[i] & 15) | kvq_extra(x.qh, i) << 4);
    }
}

void decode_strong_q2(const block_q2_ts & x, float scale, float * out) {
    for (int i = 0; i < KVQ_STRONG; i++) {
        out[i] = scale * (float) LEVELS_Q4_VE[(x.qs[i] & 3) | kvq_extra(x.qh, i) << 2];
    }
}

#endif

void decode_row_f32(const float * x, int64_t n, float * out, const ggml_type_traits *) {
    std::memcpy(out, x, n * sizeof(float));
}

void decode_row_f16(const uint16_t * x, int64_t n, float * out, const ggml_type_traits *) {
    decode_halves(x, n, out);
}

void decode_row_bf16(const uint16_t * x, int64_t n, float * out, const ggml_type_traits *) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = (uint32_t) x[i] << 16;
        std::memcpy(out + i, &bits, sizeof(bits));
    }
}

void decode_row_q8_0(const block_q8_0 * x, int64_t n, float * out, const ggml_type_traits *) {
    for (int64_t b = 0; b < n / QK8_0; b++) {
        const float d = GGML_CPU_FP16_TO_FP32(x[b].d);
        decode_int16(x[b].qs, d, out + b * QK8_0);
        decode_int16(x[b].qs + 16, d, out + b * QK8_0 + 16);
    }
}

void decode_row_q4_0(const block_q4_0 * x, int64_t n, float * out, const ggml_type_traits *) {
    for (int64_t b = 0; b < n / QK4_0; b++) {
        decode_nibbles(x[b].qs, LEVELS_Q4_0, GGML_CPU_FP16_TO_FP32(x[b].d), out + b * QK4_0, out + b * QK4_0 + 16);
    }
}

void decode_row_q4_ve(const block_q4_ve * x, int64_t n, float * out, const ggml_type_traits *) {
    for (int64_t b = 0; b < n / KVQ_BLOCK; b++, out += KVQ_BLOCK) {
        const float d = GGML_CPU_FP16_TO_FP32(x[b].d);
        decode_nibbles(x[b].qs, LEVELS_Q4_VE, d, out, out + 32);
        decode_nibbles(x[b].qs + 16, LEVELS_Q4_VE, d, out + 16, out + 48);
    }
}

void decode_row_q2_t(const block_q2_t * x, int64_t n, float * out, const ggml_type_traits *) {
    for (int64_t b = 0; b < n / KVQ_BLOCK; b++) {
        decode_crumbs(x[b].qs, LEVELS_Q2_T, GGML_CPU_FP16_TO_FP32(x[b].d), out + b * KVQ_BLOCK);
    }
}

void decode_row_q4_ves(const block_q4_ves * x, int64_t n, float * out, const ggml_type_traits *) {
    for (int64_t b = 0; b < n / KVQ_BLOCK; b++, out += KVQ_BLOCK) {
        const float d = GGML_CPU_FP16_TO_FP32(x[b].d);
        decode_nibbles(x[b].qs, LEVELS_Q4_VE, d, out, out + 32);
        decode_nibbles(x[b].qs + 16, LEVELS_Q4_VE, d, out + 16, out + 48);
        decode_strong_q4(x[b], d, out);
    }
}

void decode_row_q2_ts(const block_q2_ts * x, int64_t n, float * out, const ggml_type_traits *) {
    for (int64_t b = 0; b < n / KVQ_BLOCK; b++, out += KVQ_BLOCK) {
        const float d = GGML_CPU_FP16_TO_FP32(x[b].d);
        decode_crumbs(x[b].qs, LEVELS_Q2_T, d, out);
        decode_strong_q2(x[b], d, out);
    }
}

void decode_row_other(const char * x, int64_t n, float * out, const ggml_type_traits * traits) {
    traits->to_float(x, out, n);
}

template <typename Block, void (*decode_row)(const Block *, int64_t, float *, const ggml_type_traits *)>
void decode_rows(const char * rows, size_t stride, int64_t n_rows, int64_t n_values, float * out, int64_t width,
                 const ggml_type_traits * traits) {
    const int64_t n_bytes = n_values / traits->blck_size * traits->type_size;
    for (int64_t i = 0; i < n_rows; i++, out += width) {
        const char * row = rows + i * stride;
        for (int64_t b = 0; b < n_bytes; b += CACHE_LINE) {
            __builtin_prefetch(row + PREFETCH_ROWS * stride + b);
        }
        decode_row((const Block *) row, n_values, out, traits);
        std::fill(out + n_values, out + (n_values + 15) / 16 * 16, 0.0f);
    }
}

}  // namespace

void decode_halves(const uint16_t * x, int64_t n, float * out) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        store(out + i, load(x + i));
    }
    for (; i < n; i++) {
        out[i] = GGML_CPU_FP16_TO_FP32(x[i]);
    }
}

decode_rows_t decoder_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
            return decode_rows<float, decode_row_f32>;
        case GGML_TYPE_F16:
            return decode_rows<uint16_t, decode_row_f16>;
        case GGML_TYPE_BF16:
            return decode_rows<uint16_t, decode_row_bf16>;
        case GGML_TYPE_Q8_0:
            return decode_rows<block_q8_0, decode_row_q8_0>;
        case GGML_TYPE_Q4_0:
            return decode_rows<block_q4_0, decode_row_q4_0>;
        case GGML_TYPE_Q4_VE:
            return decode_rows<block_q4_ve, decode_row_q4_ve>;
        case GGML_TYPE_Q2_T:
            return decode_rows<block_q2_t, decode_row_q2_t>;
        case GGML_TYPE_Q4_VES:
            return decode_rows<block_q4_ves, decode_row_q4_ves>;
        case GGML_TYPE_Q2_TS:
            return decode_rows<block_q2_ts, decode_row_q2_ts>;
        default:
            return decode_rows<char, decode_row_other>;
    }
}

}  // namespace kvq
