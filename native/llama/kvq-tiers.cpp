#include "kvq-tiers.h"

#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace {

thread_local const kvq_tier_config * scope_config = nullptr;

// Which tiers a first tier's K tensor belongs to: attention sees only a view of that tensor.
struct tier_registry {
    std::mutex mutex;
    std::unordered_map<const ggml_tensor *, std::pair<const kvq_tiers *, int32_t>> entries;
};

tier_registry & get_registry() {
    static tier_registry registry;
    return registry;
}

}  // namespace

kvq_tier_scope::kvq_tier_scope(const kvq_tier_config * config) {
    scope_config = config;
}

kvq_tier_scope::~kvq_tier_scope() {
    scope_config = nullptr;
}

kvq_layer_types kvq_tier_spec::types_of(int32_t il) const {
    const auto own =
        std::find_if(layers.begin(), layers.end(), [il](const kvq_layer_types & layer) { return layer.il == il; });
    return own == layers.end() ? kvq_layer_types{ il, type_k, type_v } : *own;
}

// The first tier holds what never ages (sinks, window), one micro-batch of new tokens and what a block may leave behind;
// the others hold the rest of the tokens, each at most its own share.
std::vector<uint32_t> kvq_tier_rows(const kvq_tier_config & config, uint32_t n_cells, uint32_t n_seq) {
    std::vector<uint32_t> rows(config.tiers.size(), 0);
    const uint64_t kept  = (uint64_t) n_seq * (config.n_sink + config.tiers[0].n_tokens);
    const uint64_t first = config.tiers.size() == 1 ? n_cells : kept + config.n_ubatch + config.n_block;
    rows[0]              = (uint32_t) std::min<uint64_t>(n_cells, first);
    if (rows[0] == n_cells) {
        return rows;
    }
    uint64_t left = n_cells - kept;
    for (size_t t = 1; t < rows.size() && left > 0; t++) {
        const bool last      = t + 1 == rows.size();
        const uint64_t share = (uint64_t) n_seq * config.tiers[t].n_tokens;
        rows[t]              = (uint32_t) (last ? left : std::min(left, share));
        left -= rows[t];
    }
    return rows;
}

std::unique_ptr<kvq_tiers> kvq_tiers::create(const llama_hparams & hparams, bool windowed, bool shared,
                                             uint32_t n_stream, uint32_t n_seq, uint32_t & n_cells) {
    if (!scope_config || windowed || shared) {
        return nullptr;
    }
    const std::vector<uint32_t> rows = kvq_tier_rows(*scope_config, n_cells, n_stream > 1 ? 1 : n_seq);
    std::unique_ptr<kvq_tiers> result(new kvq_tiers(hparams, *scope_config, n_stream));
    result->n_asked = n_cells;
    uint32_t start  = 0;
    for (size_t t = 0; t < rows.size() && rows[t] > 0; t++) {
        result->tiers.push_back({ scope_config->tiers[t].type_k, scope_config->tiers[t].type_v, start, rows[t] });
        start += rows[t];
    }
    n_cells = start;
    return result;
}

kvq_tiers::~kvq_tiers() {
    tier_registry & registry = get_registry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    for (const layer & layer : layers) {
        registry.entries.erase(layer.k[0]);
    }
}

bool kvq_tiers::any_quantized_k() const {
    return std::any_of(tiers.begin(), tiers.end(), [](const tier & t) { return ggml_is_quantized(t.type_k); });
}

bool kvq_tiers::any_quantized_v() const {
    return std::any_of(tiers.begin(), tiers.end(), [](const tier & t) { return ggml_is_quantized(t.type_v); });
}

void kvq_tiers::add_layer(ggml_context * ctx, int32_t il, ggml_tensor * k, ggml_tensor * v) {
    layer layer = { il, hparams.n_head_kv(il), hparams.n_embd_head_k(il), hparams.n_embd_head_v(il), { k }, { v } };
    const auto new_tensor = [&](const char * name, size_t t, ggml_type type, int64_t head_dim) {
        // a head starts at a block: a head dim that is no multiple of the block is padded
        const int64_t padded = GGML_PAD(head_dim, ggml_blck_size(type));
        ggml_tensor * tensor = ggml_new_tensor_3d(ctx, type, padded * layer.n_head, tiers[t].n_rows, n_stream);
        ggml_format_name(tensor, "cache_%s_l%d_t%d", name, il, (int) t);
        return tensor;
    };
    for (size_t t = 1; t < tiers.size(); t++) {
        const kvq_layer_types types = config.tiers[t].types_of(il);
        layer.k.push_back(new_tensor("k", t, types.type_k, layer.head_dim_k));
        layer.v.push_back(new_tensor("v", t, types.type_v, layer.head_dim_v));
    }
    tier_registry & registry = get_registry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    registry.entries[k] = { this, il };
    layers.push_back(std::move(layer));
}

const kvq_tiers::layer & kvq_tiers::get_layer(int32_t il) const {
    return *std::find_if(layers.begin(), layers.end(), [il](const layer & layer) { return layer.il == il; });
}

void kvq_tiers::attach(ggml_context * ctx, ggml_tensor * attention, const ggml_tensor * k) {
    const ggml_tensor * root = k->view_src ? k->view_src : k;
    const kvq_tiers * self;
    int32_t il;
    {
        tier_registry & registry = get_registry();
        std::lock_guard<std::mutex> lock(registry.mutex);
        const auto entry = registry.entries.find(root);
        if (entry == registry.entries.end()) {
            return;
        }
        self = entry->second.first;
        il   = entry->second.second;
    }
    const layer & layer       = self->get_layer(il);
    const int64_t n_kv        = attention->src[3]->ne[0];
    const size_t first_stream = k->view_offs / k->nb[3];
    const auto view           = [&](ggml_tensor * tensor, int64_t n_rows) {
        const size_t row     = tensor->nb[1];
        const size_t head    = row / layer.n_head;
        const int64_t padded = tensor->ne[0] / layer.n_head;
        return ggml_view_4d(ctx, tensor, padded, n_rows, layer.n_head, k->ne[3], row, head, tensor->nb[2],
                                      tensor->nb[2] * first_stream);
    };
    for (size_t t = 1; t < self->tiers.size() && n_kv > self->tiers[t].start; t++) {
        const int64_t n_rows      = std::min<int64_t>(n_kv - self->tiers[t].start, self->tiers[t].n_rows);
        attention->src[3 + 2 * t] = view(layer.k[t], n_rows);
        attention->src[4 + 2 * t] = view(layer.v[t], n_rows);
    }
}

void kvq_tiers::copy_stream(uint32_t src, uint32_t dst) const {
    const size_t n_views = 2 * n_tensors() * layers.size();
    const ggml_context_ptr ctx(ggml_init({ n_views * ggml_tensor_overhead(), nullptr, true }));
    const auto view = [&](ggml_tensor * tensor, uint32_t stream) {
        ggml_tensor * rows =
            ggml_view_2d(ctx.get(), tensor, tensor->ne[0], tensor->ne[1], tensor->nb[1], stream * tensor->nb[2]);
        ggml_backend_view_init(rows);
        return rows;
    };
    for (const layer & layer : layers) {
        for (size_t t = 1; t < tiers.size(); t++) {
            for (ggml_tensor * tensor : { layer.k[t], layer.v[t] }) {
                ggml_backend_tensor_copy(view(tensor, src), view(tensor, dst));
            }
        }
    }
}

uint32_t kvq_tiers::n_tokens(const llama_kv_cache & cache) {
    return cache.tiers ? cache.tiers->n_asked : cache.get_size();
}

std::vector<kvq_tier_use> kvq_tiers::get_use_of(const llama_kv_cache & cache) {
    std::vector<kvq_tier_use> result;
    if (!cache.tiers) {
        return result;
    }
    const kvq_tiers & self = *cache.tiers;
    for (size_t t = 0; t < self.tiers.size(); t++) {
        const tier & tier = self.tiers[t];
        kvq_tier_use use  = { tier.type_k, tier.type_v, tier.n_rows * self.n_stream, 0, 0, tier.n_arrived };
        for (uint32_t s = 0; s < self.n_stream; s++) {
            use.n_used += tier.n_rows - (uint32_t) self.free_cells(cache, s, t, tier.n_rows).size();
        }
        for (const layer & layer : self.layers) {
            use.n_bytes += (int64_t) (ggml_nbytes(layer.k[t]) + ggml_nbytes(layer.v[t]));
        }
        result.push_back(use);
    }
    return result;
}

std::vector<kvq_layer_types> kvq_tiers::get_types_of(const llama_kv_cache & cache, int32_t il) {
    std::vector<kvq_layer_types> result;
    for (size_t t = 0; cache.tiers && t < cache.tiers->tiers.size(); t++) {
        result.push_back(cache.tiers->config.tiers[t].types_of(il));
    }
    if (result.empty()) {
        result.push_back({ il, cache.type_k(), cache.type_v() });
    }
    return result;
}

size_t kvq_tiers::compute_bytes(const llama_kv_cache & cache) {
    ggml_backend_sched_t sched = cache.tiers ? cache.tiers->sched.get() : nullptr;
    size_t n_bytes             = 0;
    for (int i = 0; sched && i < ggml_backend_sched_get_n_backends(sched); i++) {
        n_bytes += ggml_backend_sched_get_buffer_size(sched, ggml_backend_sched_get_backend(sched, i));
    }
    return n_bytes;
}
