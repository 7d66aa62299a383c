#include "kvq-llama.h"
#include "kvq-moments.h"
#include "pykvq-guard.h"

#include <algorithm>
#include <numeric>

struct pykvq_moments {
    pykvq_moments(const llama_model * model, int32_t n_skip, int32_t n_window) : moments(model, n_skip, n_window) {}

    kvq_moments moments;
    std::vector<pykvq_layer_moments> layers;
};

namespace {

pykvq_layer_moments to_view(int32_t il, const kvq_layer_moments & layer, bool windowed, double log_residual) {
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
             layer.v.data(),
             windowed,
             layer.kq_scale,
             layer.n_sample,
             layer.reach.data(),
             layer.swing.data(),
             layer.output.data(),
             log_residual };
}

// Computes one text; only its last token's logits, since none are read.
void compute_text(pykvq_context * context, const int32_t * tokens, int32_t n_tokens, int32_t first_pos) {
    std::vector<int32_t> pos((size_t) n_tokens);
    std::iota(pos.begin(), pos.end(), first_pos);
    const std::vector<int32_t> seq((size_t) n_tokens, 0);
    std::vector<int8_t> wanted((size_t) n_tokens, 0);
    wanted.back()             = 1;
    const pykvq_status status = pykvq_decode(context, tokens, pos.data(), seq.data(), wanted.data(), n_tokens);
    if (status != PYKVQ_STATUS_OK) {
        pykvq_throw(status, "%s", pykvq_last_error());
    }
}

void require_positive(const char * name, int32_t value, int32_t min) {
    if (value < min) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "%s is %d: it must be at least %d", name, value, min);
    }
}

}  // namespace

pykvq_status pykvq_moments_collect(pykvq_model * model, const pykvq_context_params * params, const int32_t * tokens,
                                   int32_t n_tokens, int32_t n_text, int32_t pos_step, int32_t n_skip, int32_t n_window,
                                   pykvq_progress_fn progress, void * progress_data, pykvq_moments ** moments) {
    return pykvq_guard([&] {
        pykvq_require(model, "model");
        pykvq_require(params, "params");
        pykvq_require(tokens, "tokens");
        pykvq_require(moments, "moments");
        require_positive("n_tokens", n_tokens, 1);
        require_positive("n_text", n_text, 1);
        require_positive("pos_step", pos_step, 0);
        require_positive("n_skip", n_skip, 0);
        require_positive("n_window", n_window, 0);
        // a text is one micro-batch, so that the tokens to skip are the first of each node
        pykvq_context_params text_params = *params;
        text_params.n_ctx = text_params.n_batch = text_params.n_ubatch = n_text;
        if (llama_model_rope_type(model->model) == LLAMA_ROPE_TYPE_NONE) {
            pos_step = 0;
        }
        auto result = std::make_unique<pykvq_moments>(model->model, n_skip, n_window);
        const kvq_moments::scope scope;
        const auto context = pykvq_context_make(model, text_params, kvq_moments::on_node, &result->moments);
        for (int32_t start = 0; start < n_tokens; start += n_text) {
            if (progress && !progress((float) start / (float) n_tokens, progress_data)) {
                pykvq_throw(PYKVQ_STATUS_ABORTED, "the calibration was stopped");
            }
            pykvq_kv_clear(context.get());
            compute_text(context.get(), tokens + start, std::min(n_text, n_tokens - start), start / n_text * pos_step);
        }
        for (const auto & [il, layer] : result->moments.get_layers()) {
            result->layers.push_back(to_view(il, layer, kvq_model_layer_is_windowed(model->model, il),
                                             result->moments.log_residual_before(il)));
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
