// kvq-quants.h: the reference codecs. They are the definition of the KV types; every faster version is judged by them.
//
// k is the number of values, a multiple of KVQ_BLOCK. x, y and the blocks need no alignment beyond their own type's.

#pragma once

#include "ggml.h"
#include "kvq-blocks.h"

#ifdef __cplusplus
extern "C" {
#endif

// A block with a NaN or an infinity in it becomes all NaN: a broken activation stays visible. Values beyond what
// d = 65504 can express are clipped to it, values too small for a half scale become 0.
GGML_API void kvq_quantize_row_q4_ve_ref(const float * x, block_q4_ve * y, int64_t k);
GGML_API void kvq_quantize_row_q2_t_ref(const float * x, block_q2_t * y, int64_t k);

GGML_API void kvq_dequantize_row_q4_ve(const block_q4_ve * x, float * y, int64_t k);
GGML_API void kvq_dequantize_row_q2_t(const block_q2_t * x, float * y, int64_t k);

// The spectral key types. The first KVQ_STRONG values of a block are expected to have KVQ_STRONG_DEVIATION times the standard
// deviation of the others, and an error in them counts KVQ_STRONG_WEIGHT times as much.
#define KVQ_STRONG_DEVIATION 0.55f
#define KVQ_STRONG_WEIGHT 32.0f

GGML_API void kvq_quantize_row_q4_ves_ref(const float * x, block_q4_ves * y, int64_t k);
GGML_API void kvq_quantize_row_q2_ts_ref(const float * x, block_q2_ts * y, int64_t k);

GGML_API void kvq_dequantize_row_q4_ves(const block_q4_ves * x, float * y, int64_t k);
GGML_API void kvq_dequantize_row_q2_ts(const block_q2_ts * x, float * y, int64_t k);

#ifdef __cplusplus
}
#endif
