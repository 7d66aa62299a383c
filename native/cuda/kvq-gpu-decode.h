// kvq-gpu-decode.h: rows of any KV type to F32 or F16: get_rows, cpy, and what prefill makes for ggml's matrix-core kernels.

#pragma once

#include "kvq-gpu-codes.h"

namespace kvq {
namespace gpu {

constexpr int DECODE_THREADS = 128;

// Strides in bytes. A thread decodes one part (32 values) of 64.
struct decode_args {
    const uint8_t * src;   // [n0 or more, ..., n2, n3]
    uint8_t * dst;         // [n0, n1, n2, n3]
    const uint8_t * rows;  // [n1, n2, n3] I32, or null: row i1 comes from row i1
    int32_t type;
    int32_t to_half;
    int64_t n0;
    int64_t n1;
    int64_t n2;
    int64_t n3;
    int64_t src_stride[3];
    int64_t dst_stride[3];
    int64_t rows_stride[3];
};

KVQ_DEVICE void store_value(const decode_args & a, uint8_t * row, int64_t i, float x) {
    if (i >= a.n0) {
        return;
    }
    if (a.to_half) {
        store((uint16_t *) row + i, half_bits(x));
    } else {
        store((float *) row + i, x);
    }
}

// The reference's product, whose zeros have its sign too.
KVQ_DEVICE void store_levels(const decode_args & a, uint8_t * row, int64_t i, const word4 & levels, float scale) {
    KVQ_UNROLL
    for (int j = 0; j < 16; j++) {
        store_value(a, row, i + j, scale * (float) (int8_t) (levels.w[j / 4] >> 8 * (j % 4)));
    }
}

KVQ_DEVICE void decode_part(const decode_args & a, const uint8_t * src, uint8_t * dst, int b, int p) {
    if (is_float(a.type)) {
        for (int i = 64 * b + 32 * p; i < 64 * b + 32 * p + 32; i += 8) {
            float values[8];
            load_floats8(a.type, src, (int) a.n0, i, values);
            KVQ_UNROLL
            for (int j = 0; j < 8; j++) {
                store_value(a, dst, i + j, values[j]);
            }
        }
        return;
    }
    const row_part part = load_part(a.type, src, (int) a.n0, b, p);
    store_levels(a, dst, 64 * b + 4 * place_of_first(a.type, p), part.first, part.scale);
    store_levels(a, dst, 64 * b + 4 * place_of_second(a.type, p), part.second, part.scale);
}

KVQ_KERNEL(DECODE_THREADS) decode_rows(const decode_args a) {
    const int64_t n_parts = 2 * ((a.n0 + 63) / 64);
    const int64_t number  = (int64_t) block_x() * DECODE_THREADS + thread_x();
    if (number >= n_parts * a.n1 * a.n2 * a.n3) {
        return;
    }
    const int part    = (int) (number % n_parts);
    const int64_t row = number / n_parts;
    const int64_t i1  = row % a.n1;
    const int64_t i2  = row / a.n1 % a.n2;
    const int64_t i3  = row / a.n1 / a.n2;
    int64_t from      = i1;
    if (a.rows) {
        from = load((const int32_t *) (a.rows + i1 * a.rows_stride[0] + i2 * a.rows_stride[1] + i3 * a.rows_stride[2]));
    }
    decode_part(a, a.src + from * a.src_stride[0] + i2 * a.src_stride[1] + i3 * a.src_stride[2],
                a.dst + i1 * a.dst_stride[0] + i2 * a.dst_stride[1] + i3 * a.dst_stride[2], part / 2, part % 2);
}

}  // namespace gpu
}  // namespace kvq
