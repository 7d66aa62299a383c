#include "kvq-transform.h"

#include "ggml-backend.h"
#include "kvq-moments.h"
#include "llama-hparams.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

namespace {

thread_local std::shared_ptr<const kvq_transform> scope_transform;

// x [head_dim, n_head, n] times a matrix a KV head [head_dim, head_dim, n_head_kv]; n_head may be a multiple of n_head_kv. A
// vector a head [head_dim, 1, n_head] may be taken from x before or added to the result. The shapes are those that
// kvq_fuse_mul_heads (native/cpu) looks for.
ggml_tensor * transform_heads(ggml_context * ctx, ggml_tensor * matrix, ggml_tensor * x, ggml_tensor * before = nullptr,
                              ggml_tensor * after = nullptr) {
    ggml_tensor * vectors = ggml_view_4d(ctx, x, x->ne[0], 1, x->ne[1], x->ne[2], x->nb[1], x->nb[1], x->nb[2], 0);
    ggml_tensor * result  = ggml_mul_mat(ctx, matrix, before ? ggml_sub(ctx, vectors, before) : vectors);
    return ggml_reshape_3d(ctx, after ? ggml_add(ctx, result, after) : result, x->ne[0], x->ne[1], x->ne[2]);
}

}  // namespace

kvq_transform_scope::kvq_transform_scope(std::shared_ptr<const kvq_transform> transform) {
    scope_transform = std::move(transform);
}

kvq_transform_scope::~kvq_transform_scope() {
    scope_transform = nullptr;
}

std::shared_ptr<const kvq_transform> kvq_transform::in_scope(bool wanted) {
    return wanted ? scope_transform : nullptr;
}

size_t kvq_transform::n_bytes() const {
    size_t result = 0;
    for (const auto & [context, buffer] : buffers) {
        result += ggml_backend_buffer_get_size(buffer.get());
    }
    return result;
}

const kvq_transform * kvq_transform::of(const llama_kv_cache_context & cache) {
    return cache.kv->transform.get();
}

// A layer without a cache of its own reads another's.
const kvq_transform::layer & kvq_transform::get_layer(const llama_kv_cache & cache, int32_t il) const {
    return layers.at((int32_t) cache.layers[(size_t) cache.map_layer_ids.at(il)].il);
}

void kvq_transform::enter(ggml_context * ctx, ggml_cgraph * gf, const llama_kv_cache_context & cache, int32_t il,
                          float kq_scale, ggml_tensor *& q, ggml_tensor *& k, ggml_tensor *& v) {
    kvq_moments::observe(ctx, il, kq_scale, q, k, v);
    const kvq_transform * self = of(cache);
    if (!self) {
        return;
    }
    // the products next to one another in the graph: native/cpu computes them at once then
    for (ggml_tensor * tensor : { q, k, v }) {
        if (tensor) {
            ggml_build_forward_expand(gf, tensor);
        }
    }
    const layer & layer = self->get_layer(*cache.kv, il);
    q                   = transform_heads(ctx, layer.q, q);
    if (k) {
        k = self->store_keys(ctx, *cache.kv, il, k);
    }
    if (v) {
        // not v less its mean: the memory of v would be given to the result, and the two nodes computed one by one
        v = transform_heads(ctx, layer.v, v, nullptr, self->centred_values ? layer.v_offset : nullptr);
    }
}

ggml_tensor * kvq_transform::leave(ggml_context * ctx, const llama_kv_cache_context & cache, int32_t il,
                                   ggml_tensor * attention) {
    const kvq_transform * self = of(cache);
    if (!self) {
        return attention;
    }
    const layer & layer     = self->get_layer(*cache.kv, il);
    const int64_t head_dim  = layer.out->ne[0];
    const int64_t n_head_kv = layer.out->ne[2];
    const int64_t n_head    = attention->ne[0] / head_dim;
    const int64_t n_tokens  = attention->ne[1];
    ggml_tensor * heads     = ggml_reshape_3d(ctx, attention, head_dim, n_head, n_tokens);
    ggml_tensor * result    = transform_heads(ctx, layer.out, heads);
    if (self->centred_values) {
        result = ggml_reshape_4d(ctx, result, head_dim, n_head / n_head_kv, n_head_kv, n_tokens);
        result = ggml_add(ctx, result, layer.v_mean);
    }
    return ggml_reshape_2d(ctx, result, attention->ne[0], n_tokens);
}

ggml_tensor * kvq_transform::restore_keys(ggml_context * ctx, const llama_kv_cache & cache, int32_t il,
                                          ggml_tensor * keys) const {
    const layer & layer   = get_layer(cache, il);
    ggml_tensor * inverse = ggml_cont(ctx, ggml_transpose(ctx, layer.q));
    ggml_tensor * result  = transform_heads(ctx, inverse, keys);
    return centred_keys ? ggml_add(ctx, result, ggml_reshape_2d(ctx, layer.k_mean, result->ne[0], result->ne[1])) :
                          result;
}

ggml_tensor * kvq_transform::store_keys(ggml_context * ctx, const llama_kv_cache & cache, int32_t il,
                                        ggml_tensor * keys) const {
    const layer & layer = get_layer(cache, il);
    return transform_heads(ctx, layer.k, keys, centred_keys ? layer.k_mean : nullptr);
}

void kvq_transform::build_shift(const llama_kv_cache & cache, const llama_cparams & cparams, ggml_context * ctx,
                                ggml_cgraph * gf, ggml_tensor * k, ggml_tensor * amount, ggml_tensor * factors,
                                float freq_base, float freq_scale, int32_t il) const {
    const layer & layer = get_layer(cache, il);
    ggml_tensor * rows  = ggml_reshape_3d(ctx, k, layer.k->ne[0], layer.k->ne[2], k->ne[1] * k->ne[2]);
    ggml_tensor * keys  = restore_keys(ctx, cache, il, ggml_cast(ctx, rows, GGML_TYPE_F32));
    keys = cache.build_rope_shift(cparams, ctx, keys, amount, nullptr, factors, freq_base, freq_scale, (uint32_t) il);
    ggml_build_forward_expand(gf, ggml_cpy(ctx, store_keys(ctx, cache, il, keys), rows));
}
