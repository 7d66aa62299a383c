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

bool kvq_layer_has_kv(const llama_hparams & hparams, uint32_t il) {
    return hparams.has_kv(il) && !hparams.is_recr(il);
}

static int64_t kvq_count_elements(const llama_hparams & hparams, kvq_cells cells) {
    int64_t result = 0;
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        if (kvq_layer_has_kv(hparams, il)) {
            const int64_t n_embd = hparams.n_embd_k_gqa(il) + (hparams.is_mla() ? 0 : hparams.n_embd_v_gqa(il));
            result += (hparams.is_swa(il) ? cells.swa : cells.full) * n_embd;
        }
    }
    return result;
}

std::string kvq_model_find_damage(const llama_model * model) {
    const llama_hparams & hparams = model->hparams;
    for (const float eps : { hparams.f_norm_eps, hparams.f_norm_rms_eps, hparams.f_norm_group_eps }) {
        if (!(eps >= 0.0f && eps < 1.0f)) {
            return "the epsilon of a normalisation is " + std::to_string(eps);
        }
    }
    for (const auto & [name, tensor] : model->tensors_by_name) {
        if (tensor->type != GGML_TYPE_F32 && !ggml_get_type_traits(tensor->type)->to_float) {
            return "tensor '" + name + "' has type " + ggml_type_name(tensor->type) + ", which no weight may have";
        }
        const bool norm = name.size() > 11 && name.compare(name.size() - 11, 11, "norm.weight") == 0;
        if (norm && ggml_n_dims(tensor) == 1 && tensor->type != GGML_TYPE_F32) {
            return "tensor '" + name + "' has type " + ggml_type_name(tensor->type) + " and must be f32";
        }
    }
    return "";
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

// Bytes of a layer's K or V over n rows, each head padded to whole blocks.
static int64_t kvq_rows_bytes(ggml_type type, int64_t n_head, int64_t head_dim, int64_t n_rows) {
    return n_rows * (int64_t) ggml_row_size(type, GGML_PAD(head_dim, ggml_blck_size(type)) * n_head);
}

// The paddings are those of llama_context and llama_kv_cache_iswa.
int64_t kvq_model_kv_bytes(const llama_model * model, const llama_context_params & params,
                           const kvq_tier_config & tiers) {
    const llama_hparams & hparams = model->hparams;

    const int64_t n_ctx     = GGML_PAD((int64_t) (params.n_ctx ? params.n_ctx : hparams.n_ctx_train), 256);
    const int64_t n_seq     = std::max<int64_t>(params.n_seq_max, 1);
    const int64_t n_streams = params.kv_unified ? 1 : n_seq;
    const int64_t n_cells   = params.kv_unified ? n_ctx : GGML_PAD(n_ctx / n_seq, 256);
    const int64_t window    = (int64_t) hparams.n_swa * (params.kv_unified ? n_seq : 1) + params.n_ubatch;
    const int64_t n_swa     = params.swa_full ? n_cells : GGML_PAD(std::min(n_cells, window), 256);

    const std::vector<kvq_tier_spec> plain  = { { params.type_k, params.type_v, (uint32_t) n_cells } };
    const std::vector<kvq_tier_spec> & used = tiers.tiers.empty() ? plain : tiers.tiers;
    const std::vector<uint32_t> rows        = tiers.tiers.empty() ?
                                                  std::vector<uint32_t>{ (uint32_t) n_cells } :
                                                  kvq_tier_rows(tiers, (uint32_t) n_cells, (uint32_t) (n_seq / n_streams));
    int64_t bytes                           = 0;
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        if (!kvq_layer_has_kv(hparams, il)) {
            continue;
        }
        const int64_t n_head = hparams.n_head_kv(il);
        const auto add       = [&](ggml_type type_k, ggml_type type_v, int64_t n_rows) {
            bytes += n_streams * kvq_rows_bytes(type_k, n_head, hparams.n_embd_head_k(il), n_rows);
            bytes +=
                hparams.is_mla() ? 0 : n_streams * kvq_rows_bytes(type_v, n_head, hparams.n_embd_head_v(il), n_rows);
        };
        if (hparams.is_swa(il)) {
            add(params.type_k, params.type_v, n_swa);
            continue;
        }
        for (size_t t = 0; t < used.size(); t++) {
            const kvq_layer_types types = used[t].types_of((int32_t) il);
            add(types.type_k, types.type_v, rows[t]);
        }
    }
    return bytes;
}

// The pair of a full-attention and a sliding-window cache behind a context's memory, or NULL if it is something else.
static const llama_kv_cache_iswa * kvq_memory_iswa(const llama_memory_i * memory) {
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_attn();
    }
    return dynamic_cast<const llama_kv_cache_iswa *>(memory);
}

// The full-attention cache behind a context's memory, or NULL for a memory that we do not know.
static const llama_kv_cache * kvq_memory_cache(const llama_memory_i * memory) {
    if (const llama_kv_cache_iswa * iswa = kvq_memory_iswa(memory)) {
        return iswa->get_base();
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_attn();
    }
    return dynamic_cast<const llama_kv_cache *>(memory);
}

const char * kvq_model_tier_obstacle(const llama_model * model) {
    const llama_hparams & hparams = model->hparams;
    if (hparams.is_mla()) {
        return "multi-head latent attention keeps no V";
    }
    if (hparams.indexer_top_k > 0) {
        return "its sparse attention has an index of its own";
    }
    if (llama_model_has_encoder(model)) {
        return "cross-attention is not supported";
    }
    if (model->arch == LLM_ARCH_GROK) {
        return "it cannot use flash attention";
    }
    if (llama_model_is_recurrent(model)) {
        return "it has no KV cache";
    }
    return nullptr;
}

void kvq_context_apply_pending(llama_context * ctx) {
    ctx->synchronize();
    ctx->memory_update(false);
}

std::vector<kvq_tier_use> kvq_context_get_tiers(const llama_context * ctx) {
    const llama_kv_cache * cache = kvq_memory_cache(llama_get_memory(ctx));
    return cache ? kvq_tiers::get_use_of(*cache) : std::vector<kvq_tier_use>();
}

// Cells that a cache of the same n_ctx has without tiers.
static kvq_cells kvq_context_cells(const llama_context * ctx) {
    const llama_memory_i * memory = llama_get_memory(ctx);
    const llama_kv_cache * cache  = kvq_memory_cache(memory);
    if (!cache) {
        return { 0, 0 };
    }
    kvq_cells cells = { 0, 0 };
    cells.full      = (int64_t) llama_n_ctx_seq(ctx) * cache->get_n_stream();
    cells.swa       = cells.full;
    if (const llama_kv_cache_iswa * iswa = kvq_memory_iswa(memory)) {
        cells.swa = (int64_t) iswa->get_swa()->get_size() * cache->get_n_stream();
    }
    return cells;
}

kvq_context_memory kvq_context_get_memory(const llama_context * ctx) {
    kvq_context_memory result = {};
    for (const auto & entry : ctx->memory_breakdown()) {
        result.kv_bytes += (int64_t) entry.second.context;
        result.compute_bytes += (int64_t) entry.second.compute;
    }
    if (const llama_kv_cache * cache = kvq_memory_cache(llama_get_memory(ctx))) {
        result.compute_bytes += (int64_t) kvq_tiers::compute_bytes(*cache);
    }
    result.kv_elements = kvq_count_elements(ctx->get_model().hparams, kvq_context_cells(ctx));
    // what is no KV cache that we know how to count (recurrent state) is the same in any type
    result.kv_bytes_f16 = result.kv_elements > 0 ? 2 * result.kv_elements : result.kv_bytes;
    result.flash_attn   = ctx->get_cparams().flash_attn;
    return result;
}

static bool kvq_is_device(ggml_backend_buffer_type_t buft) {
    const ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    return dev && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU;
}

// Bytes of the tables of a cache whose cells are all in use, each by one sequence.
static int64_t kvq_cells_bytes(const llama_kv_cache & cache) {
    // std::set keeps a value with three pointers and a color; the heap adds a word to it
    const auto node         = [](size_t value) { return GGML_PAD(5 * sizeof(void *) + value, 2 * sizeof(void *)); };
    const size_t cell_bytes = 2 * sizeof(llama_pos) + sizeof(llama_kv_cell_ext) + LLAMA_MAX_SEQ / 8 +
                              node(sizeof(uint32_t)) + node(sizeof(std::pair<llama_pos, uint32_t>));
    return (int64_t) (cell_bytes * cache.get_size() * cache.get_n_stream());
}

// Bytes that llama.cpp's own records of a context take: of its cells, and of the graphs it keeps.
static int64_t kvq_tables_bytes(const llama_context * ctx) {
    const llama_memory_i * memory = llama_get_memory(ctx);
    const llama_kv_cache * cache  = kvq_memory_cache(memory);
    int64_t bytes                 = cache ? kvq_cells_bytes(*cache) : 0;
    if (const llama_kv_cache_iswa * iswa = kvq_memory_iswa(memory)) {
        bytes += kvq_cells_bytes(*iswa->get_swa());
    }
    // of the largest batch, of batches that want logits, and of those that want none
    const auto n_nodes = (size_t) ctx->get_gf_res_reserve()->get_max_nodes();
    return bytes + 3 * (int64_t) (n_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false));
}

// Bytes of what kvq_transform::load makes of a calibration, where it places it.
static int64_t kvq_calibration_bytes(const llama_context * ctx, bool on_device) {
    const llama_model & model = ctx->get_model();
    int64_t bytes             = 0;
    for (uint32_t il = 0; il < model.hparams.n_layer(); ++il) {
        const auto buft = ggml_backend_dev_buffer_type(model.dev_layer((int) il));
        if (!kvq_layer_has_kv(model.hparams, il) ||
            (ctx->get_cparams().offload_kqv && kvq_is_device(buft)) != on_device) {
            continue;
        }
        const int64_t n_head = model.hparams.n_head_kv(il);
        const auto add       = [&](int64_t dim, int64_t n_vectors) {
            const size_t value = ggml_type_size(kvq_transform::matrix_type(!on_device, dim, n_head));
            bytes += n_head * dim * (2 * dim * (int64_t) value + n_vectors * (int64_t) sizeof(float));
        };
        add(model.hparams.n_embd_head_k(il), 1);
        add(model.hparams.n_embd_head_v(il), 2);
    }
    return bytes;
}

kvq_memory_use kvq_context_get_memory_use(const llama_context * ctx, bool on_device) {
    kvq_memory_use use = {};
    use.calibration    = kvq_calibration_bytes(ctx, on_device);
    use.compute        = on_device ? 0 : kvq_tables_bytes(ctx);
    for (const auto & [buft, bytes] : ctx->memory_breakdown()) {
        if (kvq_is_device(buft) == on_device) {
            use.weights += buft == ggml_backend_cpu_buffer_type() ? 0 : (int64_t) bytes.model;
            use.kv += (int64_t) bytes.context;
            use.compute += (int64_t) bytes.compute;
        }
    }
    return use;
}

bool kvq_model_tensor_is_as_in_file(const llama_model * model, const char * name) {
    for (const auto & [tensor_name, tensor] : model->tensors_by_name) {
        if (tensor_name == name && tensor->buffer &&
            ggml_backend_buffer_get_type(tensor->buffer) == ggml_backend_cpu_buffer_type()) {
            return true;
        }
    }
    return false;
}

bool kvq_model_layer_is_windowed(const llama_model * model, int32_t il) {
    return model->hparams.is_swa((uint32_t) il);
}

// Whether a device computes attention of one token over tiers of these types.
static bool kvq_device_attends(ggml_backend_dev_t dev, const llama_hparams & hparams, uint32_t il,
                               const std::vector<kvq_layer_types> & tiers) {
    constexpr int64_t n_rows = 256;
    const ggml_context_ptr holder(ggml_init({ 32 * ggml_tensor_overhead(), nullptr, true }));
    ggml_context * ctx = holder.get();
    const auto rows    = [&](ggml_type type, int64_t dim) {
        return ggml_new_tensor_3d(ctx, type, GGML_PAD(dim, ggml_blck_size(type)), n_rows, hparams.n_head_kv(il));
    };
    const int64_t dk   = hparams.n_embd_head_k(il);
    const int64_t dv   = hparams.n_embd_head_v(il);
    ggml_tensor * q    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, dk, 1, hparams.n_head(il));
    ggml_tensor * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n_rows * (int64_t) tiers.size(), 1);
    ggml_tensor * op   = ggml_flash_attn_ext(ctx, q, rows(tiers[0].type_k, dk), rows(tiers[0].type_v, dv), mask, 1.0f,
                                             hparams.f_max_alibi_bias, 0.0f);
    for (size_t t = 1; t < tiers.size(); t++) {
        op->src[3 + 2 * t] = rows(tiers[t].type_k, dk);
        op->src[4 + 2 * t] = rows(tiers[t].type_v, dv);
    }
    return ggml_backend_dev_supports_op(dev, op);
}

kvq_attention_use kvq_context_get_attention_use(const llama_context * ctx) {
    kvq_attention_use use        = { 0, 0 };
    const llama_model & model    = ctx->get_model();
    const llama_kv_cache * cache = kvq_memory_cache(llama_get_memory(ctx));
    if (!cache || !ctx->get_cparams().offload_kqv || !ctx->get_cparams().flash_attn || model.hparams.is_mla()) {
        return use;
    }
    for (uint32_t il = 0; il < model.hparams.n_layer(); il++) {
        ggml_backend_dev_t dev = model.dev_layer((int) il);
        if (!kvq_layer_has_kv(model.hparams, il) || !dev ||
            ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            continue;
        }
        std::vector<kvq_layer_types> tiers = kvq_tiers::get_types_of(*cache, (int32_t) il);
        if (model.hparams.is_swa(il)) {  // not tiered
            tiers.resize(1);
        }
        (kvq_device_attends(dev, model.hparams, il, tiers) ? use.n_device : use.n_fallback)++;
    }
    return use;
}
