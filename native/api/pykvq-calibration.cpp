#include "kvq-moments.h"
#include "pykvq-guard.h"

#include <algorithm>

struct pykvq_moments {
    kvq_moments moments;
    std::vector<pykvq_layer_moments> layers;
};

namespace {

pykvq_layer_moments to_view(int32_t il, const kvq_layer_moments & layer) {
    return { il,
             (int32_t) layer.n_head,
             (int32_t) layer.dim_k,
             (int32_t) layer.dim_v,
             layer.n_query,
             layer.n_key,
             layer.qq.data(),
             layer.kk.data(),
             layer.vv.data(),
             layer.k.data(),
             layer.v.data() };
}

// Computes one text from position 0; only its last token's logits, since none are read.
void compute_text(pykvq_context * context, const int32_t * tokens, int32_t n_tokens) {
    const int32_t n_batch = (int32_t) llama_n_batch(context->ctx);
    for (int32_t start = 0; start < n_tokens; start += n_batch) {
        const int32_t n = std::min(n_batch, n_tokens - start);
        std::vector<int32_t> pos;
        for (int32_t i = 0; i < n; i++) {
            pos.push_back(start + i);
        }
        const std::vector<int32_t> seq((size_t) n, 0);
        std::vector<int8_t> wanted((size_t) n, 0);
        wanted.back()             = 1;
        const pykvq_status status = pykvq_decode(context, tokens + start, pos.data(), seq.data(), wanted.data(), n);
        if (status != PYKVQ_STATUS_OK) {
            pykvq_throw(status, "%s", pykvq_last_error());
        }
    }
}

}  // namespace

pykvq_status pykvq_moments_collect(pykvq_model * model, const pykvq_context_params * params, const int32_t * tokens,
                                   int32_t n_tokens, pykvq_progress_fn progress, void * progress_data,
                                   pykvq_moments ** moments) {
    return pykvq_guard([&] {
        pykvq_require(params, "params");
        pykvq_require(tokens, "tokens");
        pykvq_require(moments, "moments");
        if (n_tokens < 1) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "n_tokens is %d: give at least one", n_tokens);
        }
        auto result = std::make_unique<pykvq_moments>();
        const kvq_moments::scope scope;
        const auto context   = pykvq_context_make(model, *params, kvq_moments::on_node, &result->moments);
        const int32_t n_text = (int32_t) llama_n_ctx_seq(context->ctx);
        for (int32_t start = 0; start < n_tokens; start += n_text) {
            if (progress && !progress((float) start / (float) n_tokens, progress_data)) {
                pykvq_throw(PYKVQ_STATUS_ABORTED, "the calibration was stopped");
            }
            pykvq_kv_clear(context.get());
            compute_text(context.get(), tokens + start, std::min(n_text, n_tokens - start));
        }
        for (const auto & [il, layer] : result->moments.get_layers()) {
            result->layers.push_back(to_view(il, layer));
        }
        *moments = result.release();
    });
}

int32_t pykvq_moments_layer_count(const pykvq_moments * moments) {
    return (int32_t) moments->layers.size();
}

pykvq_status pykvq_moments_get_layer(const pykvq_moments * moments, int32_t i, pykvq_layer_moments * layer) {
    return pykvq_guard([&] {
        pykvq_require(moments, "moments");
        pykvq_require(layer, "layer");
        if (i < 0 || i >= pykvq_moments_layer_count(moments)) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "i is %d: there are %d layers", i,
                        pykvq_moments_layer_count(moments));
        }
        *layer = moments->layers[(size_t) i];
    });
}

void pykvq_moments_free(pykvq_moments * moments) {
    delete moments;
}
