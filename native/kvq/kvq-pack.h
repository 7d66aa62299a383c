// kvq-pack.h: codes of a block to the bytes of kvq-blocks.h, shared by the reference codecs and the vectorised ones.

#pragma once

#include "kvq-blocks.h"

// 64 codes to 4 bits each; higher bits are left out
static inline void kvq_pack_nibbles(const uint8_t * codes, uint8_t * qs) {
    for (int i = 0; i < KVQ_BLOCK / 2; i++) {
        qs[i] = (uint8_t) ((codes[i] & 15) | codes[i + KVQ_BLOCK / 2] << 4);
    }
}

// 64 codes to 2 bits each, of which only the first 16 may have higher ones; these are left out
static inline void kvq_pack_crumbs(const uint8_t * codes, uint8_t * qs) {
    for (int i = 0; i < KVQ_BLOCK / 4; i++) {
        qs[i] = (uint8_t) ((codes[i] & 3) | codes[i + 16] << 2 | codes[i + 32] << 4 | codes[i + 48] << 6);
    }
}

// The bits from shift on of the KVQ_STRONG first codes, two each
static inline void kvq_pack_extra(const uint8_t * codes, int shift, uint8_t * qh) {
    for (int half = 0; half < 2; half++) {
        const uint8_t * c = codes + 4 * half;
        qh[half] = (uint8_t) (c[0] >> shift | (c[1] >> shift) << 2 | (c[2] >> shift) << 4 | (c[3] >> shift) << 6);
    }
}

static inline int kvq_extra(const uint8_t * qh, int i) {
    return qh[i / 4] >> (2 * (i % 4)) & 3;
}

// What a strong value's code of 6 bits stands for
static inline int kvq_strong_level(int code) {
    return 3 * code - 94;
}
