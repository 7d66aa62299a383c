// kvq-transform.h: keys, queries and values in the basis in which a KV cache holds them.
//
// For each layer and KV head a calibration gives invertible matrices A and B and means. Keys are stored as A (k - mean),
// queries become A^-T q, values are stored as B (v - mean), and what attention gives is multiplied by B^-1. Scores change by
// the same amount for all keys of a query, which softmax ignores, and outputs do not change, in exact arithmetic.

#pragma once

#include "ggml-cpp.h"
#include "llama.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

class llama_kv_cache;
class llama_kv_cache_context;
struct llama_cparams;

class LLAMA_API kvq_transform {
public:
    // Reads a calibration file and checks it against the model. Throws std::runtime_error with what is wrong.
    static std::shared_ptr<const kvq_transform> load(const std::string & path, const llama_model * model, bool offload);

    // How matrices of a layer are kept, if half precision holds them: a generated token reads all of them, and the CPU's product
    // of heads takes F16.
    static ggml_type matrix_type(bool on_host, int64_t dim, int64_t n_head_kv) {
        return on_host && n_head_kv > 1 && dim % 16 == 0 ? GGML_TYPE_F16 : GGML_TYPE_F32;
    }

    // Whether keys are dealt to the classes of the spectral key types.
    bool has_spectral_keys() const { return spectral_keys; }
    size_t n_bytes() const;

    // The transform of the scope that is open on this thread if wanted, else NULL.
    static std::shared_ptr<const kvq_transform> in_scope(bool wanted);

    // Around the KV cache in a graph. q [head_dim, n_head, n_tokens], k and v [head_dim, n_head_kv, n_tokens] or NULL; attention
    // [n_head * head_dim, n_tokens]. Without a transform nothing is added.
    static void enter(ggml_context * ctx, ggml_cgraph * gf, const llama_kv_cache_context & cache, int32_t il,
                      float kq_scale, ggml_tensor *& q, ggml_tensor *& k, ggml_tensor *& v);
    static ggml_tensor * leave(ggml_context * ctx, const llama_kv_cache_context & cache, int32_t il,
                               ggml_tensor * attention);

    // Stored keys [head_dim, n_head_kv, n] (F32) as the model made them, and back.
    ggml_tensor * restore_keys(ggml_context * ctx, const llama_kv_cache & cache, int32_t il, ggml_tensor * keys) const;
    ggml_tensor * store_keys(ggml_context * ctx, const llama_kv_cache & cache, int32_t il, ggml_tensor * keys) const;

    // Turns the keys of a cache without tiers by the amounts of a context shift.
    void build_shift(const llama_kv_cache & cache, const llama_cparams & cparams, ggml_context * ctx, ggml_cgraph * gf,
                     ggml_tensor * k, ggml_tensor * amount, ggml_tensor * factors, float freq_base, float freq_scale,
                     int32_t il) const;

private:
    struct layer {
        ggml_tensor * k        = nullptr;  // A, [head_dim, head_dim, n_head_kv], rows of a matrix along the second dim
        ggml_tensor * q        = nullptr;  // A^-T
        ggml_tensor * v        = nullptr;  // B
        ggml_tensor * out      = nullptr;  // B^-1
        ggml_tensor * k_mean   = nullptr;  // [head_dim, 1, n_head_kv]
        ggml_tensor * v_mean   = nullptr;
        ggml_tensor * v_offset = nullptr;  // -B v_mean
    };

    static const kvq_transform * of(const llama_kv_cache_context & cache);
    const layer & get_layer(const llama_kv_cache & cache, int32_t il) const;

    bool spectral_keys = false;
    // without: what the means would change is not ignored (a soft cap, sinks learned by the model)
    bool centred_keys   = true;
    bool centred_values = true;
    std::map<int32_t, layer> layers;
    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> buffers;

    friend struct kvq_transform_reader;
};

// While it lives, KV caches created on this thread take the transform.
struct LLAMA_API kvq_transform_scope {
    explicit kvq_transform_scope(std::shared_ptr<const kvq_transform> transform);
    ~kvq_transform_scope();
};
