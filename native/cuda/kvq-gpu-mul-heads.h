// kvq-gpu-mul-heads.h: products of a small matrix a head and that head's vectors, for the transforms of a calibration at
// prefill. ggml's own product reads the matrix once a token; here a tile of tokens shares it.

#pragma once

#include "kvq-gpu.h"

namespace kvq {
namespace gpu {

constexpr int HEADS_THREADS = 128;
constexpr int HEADS_TILE    = 32;  // rows, tokens and columns at a time

// Strides in values; a row of each is contiguous.
struct mul_heads_args {
    const void * matrix;  // [n_in, n_out, n_head / group] F32, or F16 with half_matrix
    const float * x;      // [n_in, n_head, n_tokens]
    float * y;            // [n_out, n_head, n_tokens]
    int32_t n_in;         // a multiple of HEADS_TILE, and n_out
    int32_t n_out;
    int32_t n_tokens;
    int32_t group;
    int32_t half_matrix;
    int64_t matrix_row;
    int64_t matrix_head;
    int64_t x_head;
    int64_t x_token;
    int64_t y_head;
    int64_t y_token;
};

struct mul_heads_tiles {
    float matrix[HEADS_TILE][HEADS_TILE + 1];
    float x[HEADS_TILE][HEADS_TILE + 1];
};

KVQ_DEVICE float matrix_value(const mul_heads_args & a, int64_t i) {
    return a.half_matrix ? half_value(load((const uint16_t *) a.matrix + i)) : load((const float *) a.matrix + i);
}

// Grid: tiles of tokens, tiles of rows, heads. A thread computes one row for 8 tokens.
KVQ_KERNEL(HEADS_THREADS) mul_heads(const mul_heads_args a) {
    KVQ_SHARED(mul_heads_tiles, s);
    const int column       = thread_x() % HEADS_TILE;
    const int line         = thread_x() / HEADS_TILE;
    const int token0       = block_x() * HEADS_TILE;
    const int row0         = block_y() * HEADS_TILE;
    const int head         = block_z();
    const int64_t matrix   = head / a.group * a.matrix_head + row0 * a.matrix_row;
    const float * x        = a.x + head * a.x_head + token0 * a.x_token;
    constexpr int LINES    = HEADS_THREADS / HEADS_TILE;
    constexpr int N_TOKENS = HEADS_TILE / LINES;
    float sums[N_TOKENS]   = {};
    for (int k = 0; k < a.n_in; k += HEADS_TILE) {
        barrier();
        KVQ_UNROLL
        for (int i = line; i < HEADS_TILE; i += LINES) {
            const bool inside = token0 + i < a.n_tokens;
            store(&s.matrix[i][column], matrix_value(a, matrix + i * a.matrix_row + k + column));
            store(&s.x[i][column], inside ? load(x + i * a.x_token + k + column) : 0.0f);
        }
        barrier();
        for (int j = 0; j < HEADS_TILE; j++) {
            const float m = load(&s.matrix[column][j]);
            KVQ_UNROLL
            for (int t = 0; t < N_TOKENS; t++) {
                sums[t] += m * load(&s.x[line * N_TOKENS + t][j]);
            }
        }
    }
    KVQ_UNROLL
    for (int t = 0; t < N_TOKENS; t++) {
        const int token = token0 + line * N_TOKENS + t;
        if (token < a.n_tokens) {
            store(a.y + head * a.y_head + token * a.y_token + row0 + column, sums[t]);
        }
    }
}

}  // namespace gpu
}  // namespace kvq
