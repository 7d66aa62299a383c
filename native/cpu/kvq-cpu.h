// kvq-cpu.h: what the CPU backend calls for the KV types.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ggml_cgraph;
struct ggml_compute_params;
struct ggml_tensor;

#ifdef __cplusplus
extern "C" {
#endif

// k values, a multiple of KVQ_BLOCK, to blocks of a KV type: the bytes of the reference encoders (kvq-quants.h), faster.
void kvq_quantize_row_q4_ve(const float * x, void * y, int64_t k);
void kvq_quantize_row_q2_t(const float * x, void * y, int64_t k);
void kvq_quantize_row_q4_ves(const float * x, void * y, int64_t k);
void kvq_quantize_row_q2_ts(const float * x, void * y, int64_t k);

// *s = <x, y> over n values, x in a KV type, y in q8_0 (two of its blocks a KV block). The signature is ggml_vec_dot_t;
// the strides and nrc are unused, nrc must be 1.
void kvq_vec_dot_q4_ve_q8_0(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc);
void kvq_vec_dot_q2_t_q8_0(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc);
void kvq_vec_dot_q4_ves_q8_0(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by,
                             int nrc);
void kvq_vec_dot_q2_ts_q8_0(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc);

// GGML_OP_MUL_MAT of a small matrix a head [dim_in, dim_out, n_head or a divisor], F32 or F16, and F32 vectors [dim_in, 1,
// n_head, n_tokens]; sums are of floats.
bool kvq_mul_heads_supported(const struct ggml_tensor * dst);
void kvq_compute_forward_mul_heads(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// If node i of the graph begins such a product, computes it, also with the GGML_OP_SUB of a mean before or the GGML_OP_ADD of
// one after, a vector a matrix [dim, 1, n_matrix], and the next products with it that do not depend on it. Returns how many
// nodes after node i are done too: 0 also for a product alone, which is then to be computed as any node.
int kvq_fuse_mul_heads(const struct ggml_cgraph * graph, int i, const struct ggml_compute_params * params);

// GGML_OP_FLASH_ATTN_EXT. K and V may go on in src[5] and src[6], src[7] and src[8], src[9] and src[10]: the tiers of one
// cache. The mask covers the cells of all of them in this order. A tier's head may be wider than the query's: what stands
// behind is not read. PYKVQ_FLASH_ATTN=ggml in the environment leaves ops without tiers to ggml's own kernel, for
// comparisons; PYKVQ_ATTENTION_SKIP=0 reads also what cannot matter (kvq-flash-attn.h says what that is).
bool kvq_flash_attn_ext_supported(const struct ggml_tensor * dst);
size_t kvq_flash_attn_ext_work_size(struct ggml_tensor * dst, int n_threads);
void kvq_compute_forward_flash_attn_ext(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
