// kvq-cuda-launch.h: from ggml's ops to the arguments of the kernels, shared by the files of the backend.

#pragma once

#include "common.cuh"
#include "kvq-cuda.h"
#include "kvq-gpu-codes.h"

namespace kvq {
namespace gpu {

// KV_TYPES for a type that the kernels do not read.
int32_t kv_type_of(ggml_type type);

// A type of ours, which ggml's kernels do not know.
bool is_own_type(ggml_type type);

// Bytes from a row, a matrix and a block of matrices to the next; with first = 0 from an element, a row and a matrix.
inline void set_strides(int64_t (&strides)[3], const ggml_tensor * tensor, int first = 1) {
    for (int i = 0; i < 3; i++) {
        strides[i] = (int64_t) tensor->nb[i + first];
    }
}

// [dim, n_rows, n_head, n_streams] of a tier to F16 rows at dst, contiguous but for head_stride and stream_stride, in bytes.
void decode_to_half(ggml_backend_cuda_context & ctx, const ggml_tensor * tier, int64_t dim, int64_t first_head,
                    int64_t n_heads, uint8_t * dst, int64_t head_stride, int64_t stream_stride);

// Why attention is not for our kernels, or null.
const char * attention_obstacle(const ggml_tensor * op);

void attend(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

}  // namespace gpu
}  // namespace kvq
