// kvq-llama.h: what the C API needs from inside libllama. Compiled into the llama target, where its private headers are.

#pragma once

#include "kvq-tiers.h"
#include "kvq-transform.h"
#include "llama.h"

#include <cstdint>

struct llama_hparams;

// Whether a layer has a KV cache: it attends, and is not recurrent.
bool kvq_layer_has_kv(const llama_hparams & hparams, uint32_t il);

struct kvq_model_shape {
    int32_t head_dim_k;  // largest over the layers that have a KV cache
    int32_t head_dim_v;
    // greatest common divisor of all head dims: a KV type's block must divide it
    int32_t head_dim_gcd;
};

// What in a loaded model would end the process in its first graph, since ggml checks it on a compute thread; "" if nothing.
LLAMA_API std::string kvq_model_find_damage(const llama_model * model);

LLAMA_API kvq_model_shape kvq_model_get_shape(const llama_model * model);

// Why this model's attention cannot run over tiers, or NULL.
LLAMA_API const char * kvq_model_tier_obstacle(const llama_model * model);

// Bytes of a KV cache yet to be made, with cells rounded as llama.cpp rounds them. Recurrent state is not counted.
LLAMA_API int64_t kvq_model_kv_bytes(const llama_model * model, const llama_context_params & params,
                                     const kvq_tier_config & tiers);

struct kvq_context_memory {
    int64_t kv_bytes;       // KV cache and recurrent state, as allocated
    int64_t compute_bytes;  // scratch of the graphs
    int64_t kv_bytes_f16;   // a cache of the same n_ctx with K and V in F16
    int64_t kv_elements;    // of K and V of n_ctx tokens
    bool flash_attn;
};

LLAMA_API kvq_context_memory kvq_context_get_memory(const llama_context * ctx);

// Memory in bytes of a model and its context, in main memory or on devices.
struct kvq_memory_use {
    int64_t weights;
    int64_t kv;
    int64_t compute;      // scratch, and the tables of cells and graphs
    int64_t calibration;  // a calibration's matrices, if one is used
};

// weights in main memory are those that cannot be mapped from the file
LLAMA_API kvq_memory_use kvq_context_get_memory_use(const llama_context * ctx, bool on_device);

// Whether a weight is used as it is in the file.
LLAMA_API bool kvq_model_tensor_is_as_in_file(const llama_model * model, const char * name);

// Whether a layer sees a sliding window only: it keeps a cache of its own, without tiers.
LLAMA_API bool kvq_model_layer_is_windowed(const llama_model * model, int32_t il);

// Does what kv_shift and kv_copy left for the next decode, so that the cache is as its book says.
LLAMA_API void kvq_context_apply_pending(llama_context * ctx);

// The tiers of a context's cache, empty if it has none.
LLAMA_API std::vector<kvq_tier_use> kvq_context_get_tiers(const llama_context * ctx);

// Layers whose attention runs on a GPU, and those on a GPU whose attention runs on the CPU, since the GPU's backend does not
// compute it.
struct kvq_attention_use {
    int32_t n_device;
    int32_t n_fallback;
};

LLAMA_API kvq_attention_use kvq_context_get_attention_use(const llama_context * ctx);
