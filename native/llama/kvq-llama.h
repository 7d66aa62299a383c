// kvq-llama.h: what the C API needs from inside libllama. Compiled into the llama target, where its private headers are.

#pragma once

#include "llama.h"

#include <cstdint>

struct kvq_model_shape {
    int32_t head_dim_k;  // largest over the layers that have a KV cache
    int32_t head_dim_v;
    // greatest common divisor of all head dims: a KV type's block must divide it
    int32_t head_dim_gcd;
};

LLAMA_API kvq_model_shape kvq_model_get_shape(const llama_model * model);

struct kvq_kv_elements {
    int64_t k;
    int64_t v;
};

// Elements of a KV cache yet to be made, cells rounded as llama.cpp rounds them. Recurrent state is not counted.
LLAMA_API kvq_kv_elements kvq_model_kv_elements(const llama_model * model, const llama_context_params & params);

struct kvq_context_memory {
    int64_t kv_bytes;       // KV cache and recurrent state, as allocated
    int64_t compute_bytes;  // scratch of the graphs
    int64_t kv_bytes_f16;   // the same with K and V in F16
    int64_t kv_elements;    // of K and V together
    bool flash_attn;
};

LLAMA_API kvq_context_memory kvq_context_get_memory(const llama_context * ctx);
