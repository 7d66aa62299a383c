// kvq-gpu-codes.h: KV types as kernels read them. A row of any quantized type is taken 64 values at a time in two parts;
// a part is 32 signed bytes and a scale. Bytes come from codes by a byte permute over the codebook.

#pragma once

#include "kvq-gpu.h"

namespace kvq {
namespace gpu {

enum kv_type : int32_t {
    KV_F16,
    KV_BF16,
    KV_Q8_0,
    KV_Q4_0,
    KV_Q4_VE,
    KV_Q2_T,
    KV_Q4_VES,
    KV_Q2_TS,
    KV_TYPES,
};

KVQ_DEVICE bool is_float(int32_t type) {
    return type == KV_F16 || type == KV_BF16;
}

KVQ_BOTH constexpr uint32_t word_of(int a, int b, int c, int d) {
    return (uint32_t) (a & 255) | (uint32_t) (b & 255) << 8 | (uint32_t) (c & 255) << 16 | (uint32_t) (d & 255) << 24;
}

// A codebook of up to 16 signed bytes as words of four.
struct codebook {
    uint32_t w[4];
};

KVQ_BOTH constexpr codebook codebook_of(const int (&v)[16]) {
    return { { word_of(v[0], v[1], v[2], v[3]), word_of(v[4], v[5], v[6], v[7]), word_of(v[8], v[9], v[10], v[11]),
               word_of(v[12], v[13], v[14], v[15]) } };
}

constexpr int LEVELS_Q4_VE[16] = { KVQ_CODEBOOK_Q4_VE };
constexpr int LEVELS_Q2_T[16]  = { KVQ_CODEBOOK_Q2_T };  // the rest is 0 and never looked up
constexpr int LEVELS_Q4_0[16]  = { -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7 };

// Levels of the low and of the high nibbles of a word.
struct level_pair {
    uint32_t low;
    uint32_t high;
};

#if defined(KVQ_AMD_PERM)

KVQ_DEVICE uint32_t look_up_bytes(const codebook & book, uint32_t codes, bool sixteen) {
    const uint32_t first = pick_by_bytes(book.w[0], book.w[1], codes & 0x07070707u);
    if (!sixteen) {
        return first;
    }
    const uint32_t second = pick_by_bytes(book.w[2], book.w[3], codes & 0x07070707u);
    return pick_by_bytes(first, second, 0x03020100u | (codes & 0x08080808u) >> 1);
}

KVQ_DEVICE level_pair look_up(const codebook & book, uint32_t codes, bool sixteen) {
    return { look_up_bytes(book, codes & 0x0f0f0f0fu, sixteen),
             look_up_bytes(book, codes >> 4 & 0x0f0f0f0fu, sixteen) };
}

#else

// the levels of four neighbouring nibbles
KVQ_DEVICE uint32_t look_up_nibbles(const codebook & book, uint32_t codes, bool sixteen) {
    const uint32_t first = pick_by_nibbles(book.w[0], book.w[1], codes & 0x7777u);
    if (!sixteen) {
        return first;
    }
    const uint32_t second = pick_by_nibbles(book.w[2], book.w[3], codes & 0x7777u);
    return pick_by_nibbles(first, second, 0x3210u | (codes & 0x8888u) >> 1);
}

KVQ_DEVICE level_pair look_up(const codebook & book, uint32_t codes, bool sixteen) {
    const uint32_t first  = look_up_nibbles(book, codes, sixteen);
    const uint32_t second = look_up_nibbles(book, codes >> 16, sixteen);
    return { pick_by_nibbles(first, second, 0x6420u), pick_by_nibbles(first, second, 0x7531u) };
}

#endif

// Two bits each of a byte, to the lowest bits of four bytes
KVQ_DEVICE uint32_t spread_crumbs(uint32_t byte) {
    return (byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303u;
}

// kvq_strong_level of four codes of 6 bits, a byte each
KVQ_DEVICE uint32_t strong_levels(uint32_t codes) {
    const uint32_t triple = codes * 3;  // at most 189: no carry
    const uint32_t offset = word_of(-94, -94, -94, -94);
    return ((triple & 0x7f7f7f7fu) + (offset & 0x7f7f7f7fu)) ^ ((triple ^ offset) & 0x80808080u);
}

// 16 bytes at an address that is a multiple of two.
KVQ_DEVICE word4 load_bytes16(const uint8_t * p) {
    word4 r;
#if defined(__HIP__) && !defined(KVQ_SIMT)
    struct __attribute__((packed, aligned(2))) unaligned {
        uint32_t w[4];
    };
    const unaligned u = *(const unaligned *) p;  // the hardware takes it in one load
    KVQ_UNROLL
    for (int i = 0; i < 4; i++) {
        r.w[i] = u.w[i];
    }
#else
    if (((uintptr_t) p & 15) == 0) {
        return load((const word4 *) p);
    }
    if (((uintptr_t) p & 3) == 0) {
        KVQ_UNROLL
        for (int i = 0; i < 4; i++) {
            r.w[i] = load((const uint32_t *) p + i);
        }
        return r;
    }
    uint32_t before = load((const uint16_t *) p);
    KVQ_UNROLL
    for (int i = 0; i < 4; i++) {
        const uint32_t next = i < 3 ? load((const uint32_t *) (p + 2) + i) : load((const uint16_t *) (p + 14));
        r.w[i]              = before | next << 16;
        before              = next >> 16;
    }
#endif
    return r;
}

KVQ_DEVICE float load_half(const uint8_t * p) {
    return half_value(load((const uint16_t *) p));
}

// Part p (0 or 1) of the b-th 64 values of a quantized row: first[i] holds values 4 (at + i) of these 64, second[i] values
// 4 (at_second + i). n_values is what the row holds; behind it everything is 0.
struct row_part {
    word4 first;
    word4 second;
    float scale;
};

KVQ_DEVICE int place_of_first(int32_t type, int p) {
    return type == KV_Q8_0 || type == KV_Q4_0 ? 8 * p : 4 * p;
}

KVQ_DEVICE int place_of_second(int32_t type, int p) {
    return type == KV_Q8_0 || type == KV_Q4_0 ? 8 * p + 4 : 4 * p + 8;
}

KVQ_DEVICE row_part zero_part() {
    return { { { 0, 0, 0, 0 } }, { { 0, 0, 0, 0 } }, 0.0f };
}

KVQ_DEVICE void look_up_all(const codebook & book, const word4 & codes, int shift, bool sixteen, row_part & part) {
    KVQ_UNROLL
    for (int i = 0; i < 4; i++) {
        const level_pair pair = look_up(book, codes.w[i] >> shift & (sixteen ? ~0u : 0x33333333u), sixteen);
        part.first.w[i]       = pair.low;
        part.second.w[i]      = pair.high;
    }
}

KVQ_DEVICE row_part load_nibbles(const uint8_t * block, int header, int p, bool strong) {
    constexpr codebook book = codebook_of(LEVELS_Q4_VE);
    row_part part;
    part.scale        = load_half(block);
    const word4 codes = load_bytes16(block + header + 16 * p);
    look_up_all(book, codes, 0, true, part);
    if (strong && p == 0) {
        KVQ_UNROLL
        for (int i = 0; i < 2; i++) {
            part.first.w[i] = strong_levels((codes.w[i] & 0x0f0f0f0fu) | spread_crumbs(load(block + 2 + i)) << 4);
        }
    }
    return part;
}

KVQ_DEVICE row_part load_crumbs(const uint8_t * block, int header, int p, bool strong) {
    constexpr codebook book      = codebook_of(LEVELS_Q2_T);
    constexpr codebook book_of_4 = codebook_of(LEVELS_Q4_VE);
    row_part part;
    part.scale        = load_half(block);
    const word4 codes = load_bytes16(block + header);
    look_up_all(book, codes, 2 * p, false, part);
    if (strong && p == 0) {
        KVQ_UNROLL
        for (int i = 0; i < 2; i++) {
            const uint32_t full = (codes.w[i] & 0x03030303u) | spread_crumbs(load(block + 2 + i)) << 2;
            part.first.w[i]     = look_up(book_of_4, full, true).low;
        }
    }
    return part;
}

KVQ_DEVICE row_part load_q8_0(const uint8_t * row, int part_index) {
    const uint8_t * block = row + 34 * part_index;
    row_part part;
    part.scale  = load_half(block);
    part.first  = load_bytes16(block + 2);
    part.second = load_bytes16(block + 18);
    return part;
}

KVQ_DEVICE row_part load_q4_0(const uint8_t * row, int part_index) {
    constexpr codebook book = codebook_of(LEVELS_Q4_0);
    const uint8_t * block   = row + 18 * part_index;
    row_part part;
    part.scale = load_half(block);
    look_up_all(book, load_bytes16(block + 2), 0, true, part);
    return part;
}

KVQ_DEVICE row_part load_part(int32_t type, const uint8_t * row, int n_values, int b, int p) {
    if (64 * b + (type == KV_Q8_0 || type == KV_Q4_0 ? 32 * p : 0) >= n_values) {
        return zero_part();
    }
    switch (type) {
        case KV_Q8_0:
            return load_q8_0(row, 2 * b + p);
        case KV_Q4_0:
            return load_q4_0(row, 2 * b + p);
        case KV_Q4_VE:
            return load_nibbles(row + sizeof(block_q4_ve) * b, 2, p, false);
        case KV_Q4_VES:
            return load_nibbles(row + sizeof(block_q4_ves) * b, 4, p, true);
        case KV_Q2_T:
            return load_crumbs(row + sizeof(block_q2_t) * b, 2, p, false);
        default:
            return load_crumbs(row + sizeof(block_q2_ts) * b, 4, p, true);
    }
}

// Eight values of a row of halves or bfloat16 from the i-th on; behind the n_values-th they are 0.
KVQ_DEVICE void load_floats8(int32_t type, const uint8_t * row, int n_values, int i, float * out) {
    uint32_t bits[8];
    const uint8_t * p = row + 2 * i;
    if (i + 8 <= n_values) {
        const word4 w = load_bytes16(p);
        KVQ_UNROLL
        for (int j = 0; j < 8; j++) {
            bits[j] = w.w[j / 2] >> 16 * (j % 2) & 0xffff;
        }
    } else {
        KVQ_UNROLL
        for (int j = 0; j < 8; j++) {
            bits[j] = i + j < n_values ? load((const uint16_t *) p + j) : 0;
        }
    }
    KVQ_UNROLL
    for (int j = 0; j < 8; j++) {
        out[j] = type == KV_BF16 ? bits_to_float(bits[j] << 16) : half_value((uint16_t) bits[j]);
    }
}

}  // namespace gpu
}  // namespace kvq
