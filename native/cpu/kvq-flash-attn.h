// kvq-flash-attn.h: what the two attention kernels share. Each reads K and V of any type in blocks of cells, decodes a
// block to float once for all query rows that read it and keeps an online softmax (Milakov and Gimelshein,
// arXiv:1805.02867).
//   kvq-flash-decode.cpp   few tokens: the threads share out the cells, then merge
//   kvq-flash-prefill.cpp  many tokens: the threads share out the tokens and KV heads

#pragma once

#include "ggml.h"
#include "kvq-decode.h"

#include <cstdint>

struct ggml_compute_params;

namespace kvq {

constexpr int64_t MAX_TIERS = 4;
constexpr int64_t BLOCK     = 64;  // cells decoded together, a multiple of every vector's lanes

// A block whose best score is this far below the best so far is left out. All such cells together weigh less than
// n_kv * exp(-24) = n_kv * 4e-11 of the sum: 5e-6 at 131,072 cells, below what half-precision V carries.
constexpr float NEGLIGIBLE = 24.0f;

constexpr uint16_t MASK_HIDDEN = 0xfc00;  // -inf

struct tier {
    const ggml_tensor * k;
    const ggml_tensor * v;
    int64_t start;  // its first cell's place in the mask
    int64_t n_rows;
    int64_t first_block;  // blocks are counted through all tiers; none spans two
    decode_rows_t decode_k;
    decode_rows_t decode_v;
};

struct attention {
    const ggml_tensor * q;
    const ggml_tensor * mask;  // null: everything is visible
    const ggml_tensor * sinks;
    ggml_tensor * dst;
    tier tiers[MAX_TIERS];
    int64_t n_tiers;
    int64_t n_blocks;
    int64_t n_tokens;
    int64_t n_streams;
    int64_t n_head;
    int64_t n_head_kv;
    int64_t group;  // query heads of one KV head
    int64_t dk;
    int64_t dv;
    int64_t dk_pad;  // up to a multiple of 16; queries are 0 beyond dk
    int64_t dv_pad;
    int64_t width_k;  // floats a decoded row takes
    int64_t width_v;
    float scale;
    float max_bias;
    float logit_softcap;
    bool skip_negligible;
};

enum class visibility : uint8_t {
    hidden,
    open,
    mixed,
};

// The cells of one block.
struct cell_block {
    const tier * in;
    int64_t row;   // first row in the tier
    int64_t cell;  // first place in the mask
    int64_t n;
};

cell_block block_at(const attention & a, int64_t index);

float alibi_slope(const attention & a, int64_t head);

// The mask row of a token, or null.
const uint16_t * mask_row(const attention & a, int64_t stream, int64_t token);

// What a mask row says of n cells. A bias other than 0 counts as mixed.
visibility classify(const uint16_t * mask, int64_t n);

// The block's K or V of one head to out[round up(n, 8)][width]; the rows behind the last are 0.
void decode_keys(const attention & a, const cell_block & block, int64_t head_kv, int64_t stream, float * out);
void decode_values(const attention & a, const cell_block & block, int64_t head_kv, int64_t stream, float * out);

// sum and acc[dv] of a row that has seen everything, with maximum max, to dst. A learned sink takes weight, gives nothing.
void write_row(const attention & a, int64_t stream, int64_t token, int64_t head, float max, float sum,
               const float * acc);

// Bytes of work space, and the kernels. nth threads call each with the same memory.
size_t decode_work_size(const attention & a, int nth);
size_t prefill_work_size(const attention & a, int nth);
void attend_decode(const ggml_compute_params * params, const attention & a);
void attend_prefill(const ggml_compute_params * params, const attention & a);

}  // namespace kvq
