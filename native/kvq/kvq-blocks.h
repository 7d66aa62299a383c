// kvq-blocks.h: how a row of a KV type lies in memory. Plain C, no includes but the standard's, so that the CPU, CUDA
// and HIP sources share it. docs/formats.md says the same in prose; tests decode from the prose and compare.

#pragma once

#include <stdint.h>

// values a block: one head dim of 64, or a part of a larger one
#define KVQ_BLOCK 64

#ifdef __cplusplus
#    define KVQ_STATIC_ASSERT static_assert
#else
#    define KVQ_STATIC_ASSERT _Static_assert
#endif

// Codebook values, ascending: the Lloyd-Max levels of a standard normal (Max 1960, doi:10.1109/TIT.1960.1057548),
// scaled so that the outermost is 127. All fit int8, so a decoder is one byte shuffle and a dot product stays integer.
#define KVQ_CODEBOOK_Q4_VE -127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127
#define KVQ_CODEBOOK_Q2_T -127, -38, 38, 127

// x[i] = d * codebook[code(i)]
// code(i) = low nibble of qs[i] for i < 32, high nibble of qs[i - 32] above
typedef struct {
    uint16_t d;                 // 16 bits: scale, IEEE half, >= 0 or NaN
    uint8_t qs[KVQ_BLOCK / 2];  // 256 bits: 64 codes of 4 bits
} block_q4_ve;                  // 272 bits / 64 values = 4.25 bits a value
KVQ_STATIC_ASSERT(sizeof(block_q4_ve) == 34, "wrong q4_ve block size");

// x[i] = d * codebook[code(i)]
// code(i) = bits 2j, 2j+1 of qs[i % 16], j = i / 16
typedef struct {
    uint16_t d;                 // 16 bits: scale, IEEE half, >= 0 or NaN
    uint8_t qs[KVQ_BLOCK / 4];  // 128 bits: 64 codes of 2 bits
} block_q2_t;                   // 144 bits / 64 values = 2.25 bits a value
KVQ_STATIC_ASSERT(sizeof(block_q2_t) == 18, "wrong q2_t block size");

// The spectral key types: a calibration deals to the first values of each block what queries look at most, and these have
// two bits more.
#define KVQ_STRONG 8

// x[i] = d * s(i)
// i < 8:  s(i) = 3 * c - 94, c = code(i) | extra(i) << 4
// i >= 8: s(i) = codebook_q4_ve[code(i)]
// code as in q4_ve; extra(i) = bits 2j, 2j+1 of qh[i / 4], j = i % 4
typedef struct {
    uint16_t d;                 // 16 bits: scale, IEEE half, >= 0 or NaN
    uint8_t qh[2];              // 16 bits: 8 times 2 bits
    uint8_t qs[KVQ_BLOCK / 2];  // 256 bits: 64 codes of 4 bits
} block_q4_ves;                 // 288 bits / 64 values = 4.5 bits a value
KVQ_STATIC_ASSERT(sizeof(block_q4_ves) == 36, "wrong q4_ves block size");

// x[i] = d * s(i)
// i < 8:  s(i) = codebook_q4_ve[code(i) | extra(i) << 2]
// i >= 8: s(i) = codebook_q2_t[code(i)]
// code as in q2_t; extra as in q4_ves
typedef struct {
    uint16_t d;                 // 16 bits: scale, IEEE half, >= 0 or NaN
    uint8_t qh[2];              // 16 bits: 8 times 2 bits
    uint8_t qs[KVQ_BLOCK / 4];  // 128 bits: 64 codes of 2 bits
} block_q2_ts;                  // 160 bits / 64 values = 2.5 bits a value
KVQ_STATIC_ASSERT(sizeof(block_q2_ts) == 20, "wrong q2_ts block size");
