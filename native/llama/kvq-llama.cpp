#include "kvq-llama.h"

#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <algorithm>
#include <numeric>

// Cells of the full and of the sliding-window cache over all streams.
struct kvq_cells {
    int64_t full;
    int64_t swa;
};

static bool kvq_layer_has_kv(const llama_hparams & hparams, uint32_t il) {
    return hparams.has_kv(il) && !hparams.is_recr(il);
}

static kvq_kv_elements kvq_count_elements(const llama_hparams & hparams, kvq_cells cells) {
    kvq_kv_elements result = { 0, 0 };
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        if (kvq_layer_has_kv(hparams, il)) {
            const int64_t n = hparams.is_swa(il) ? cells.swa : cells.full;
            result.k += n * hparams.n_embd_k_gqa(il);
            result.v += hparams.is_mla() ? 0 : n * hparams.n_embd_v_gqa(il);
        }
    }
    return result;
}

kvq_model_shape kvq_model_get_shape(const llama_model * model) {
    const llama_hparams & hparams = model->hparams;
    kvq_model_shape shape         = { 0, 0, 0 };
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        if (kvq_layer_has_kv(hparams, il)) {
            const int32_t k    = (int32_t) hparams.n_embd_head_k(il);
            const int32_t v    = (int32_t) hparams.n_embd_head_v(il);
            shape.head_dim_k   = std::max(shape.head_dim_k, k);
            shape.head_dim_v   = std::max(shape.head_dim_v, v);
            shape.head_dim_gcd = std::gcd(shape.head_dim_gcd, std::gcd(k, v));
        }
    }
    return shape;
}

// The paddings are those of llama_context and llama_kv_cache_iswa.
kvq_kv_elements kvq_model_kv_elements(const llama_model * model, const llama_context_params & params) {
    const llama_hparams & hparams = model->hparams;

    const int64_t n_ctx     = GGML_PAD((int64_t) (params.n_ctx ? params.n_ctx : hparams.n_ctx_train), 256);
    const int64_t n_seq     = std::max<int64_t>(params.n_seq_max, 1);
    const int64_t n_streams = params.kv_unified ? 1 : n_seq;
    const int64_t n_cells   = params.kv_unified ? n_ctx : GGML_PAD(n_ctx / n_seq, 256);

    const int64_t window = (int64_t) hparams.n_swa * (params.kv_unified ? n_seq : 1) + params.n_ubatch;
    const int64_t n_swa  = params.swa_full ? n_cells : GGML_PAD(std::min(n_cells, window), 256);
    return kvq_count_elements(hparams, { n_cells * n_streams, n_swa * n_streams });
}

static int64_t kvq_cache_cells(const llama_kv_cache * cache) {
    return (int64_t) cache->get_size() * cache->get_n_stream();
}

static kvq_cells kvq_memory_cells(const llama_memory_i * memory) {
    if (const auto * cache = dynamic_cast<const llama_kv_cache *>(memory)) {
        return { kvq_cache_cells(cache), kvq_cache_cells(cache) };
    }
    if (const auto * cache = dynamic_cast<const llama_kv_cache_iswa *>(memory)) {
        return { kvq_cache_cells(cache->get_base()), kvq_cache_cells(cache->get_swa()) };
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        return kvq_memory_cells(hybrid->get_mem_attn());
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_iswa *>(memory)) {
        return kvq_memory_cells(hybrid->get_mem_attn());
    }
    return { 0, 0 };
}

kvq_context_memory kvq_context_get_memory(const llama_context * ctx) {
    kvq_context_memory result = {};
    for (const auto & entry : ctx->memory_breakdown()) {
        result.kv_bytes += (int64_t) entry.second.context;
        result.compute_bytes += (int64_t) entry.second.compute;
    }
    const kvq_cells cells          = kvq_memory_cells(llama_get_memory(ctx));
    const kvq_kv_elements elements = kvq_count_elements(ctx->get_model().hparams, cells);
    result.kv_elements             = elements.k + elements.v;
    // what is no KV cache that we know how to count (recurrent state) is the same in any type
    result.kv_bytes_f16 = result.kv_elements > 0 ? 2 * result.kv_elements : result.kv_bytes;
    result.flash_attn   = ctx->get_cparams().flash_attn;
    return result;
}
