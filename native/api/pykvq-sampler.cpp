#include "pykvq-guard.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace {

constexpr int32_t MAX_PENALTY_LAST_N = 1 << 20;

void require_params(const pykvq_sampler_params & params) {
    const struct {
        const char * name;
        float value;
        float min;
        float max;
    } ranges[] = {
        { "temperature", params.temperature, 0.0f, 1e6f },
        { "top_p", params.top_p, 0.0f, 1.0f },
        { "min_p", params.min_p, 0.0f, 1.0f },
        { "typical_p", params.typical_p, 0.0f, 1.0f },
        { "repeat_penalty", params.repeat_penalty, 1e-6f, 1e6f },
        { "frequency_penalty", params.frequency_penalty, -1e6f, 1e6f },
        { "presence_penalty", params.presence_penalty, -1e6f, 1e6f },
        { "mirostat_tau", params.mirostat_tau, 0.0f, 1e6f },
        { "mirostat_eta", params.mirostat_eta, 0.0f, 1e6f },
    };
    for (const auto & range : ranges) {
        if (!(range.value >= range.min && range.value <= range.max)) {  // also refuses NaN
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "%s is %g: it must be from %g to %g", range.name,
                        (double) range.value, (double) range.min, (double) range.max);
        }
    }
    if (params.mirostat_mode < 0 || params.mirostat_mode > 2) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "mirostat_mode is %d: it must be 0 (off), 1 or 2",
                    params.mirostat_mode);
    }
    // the sampler allocates that many tokens at once
    if (params.penalty_last_n < -1 || params.penalty_last_n > MAX_PENALTY_LAST_N) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "penalty_last_n is %d: it must be -1 (training context) or 0 to %d",
                    params.penalty_last_n, MAX_PENALTY_LAST_N);
    }
}

std::vector<llama_logit_bias> to_logit_bias(const pykvq_sampler_params & params, int32_t n_vocab) {
    std::vector<llama_logit_bias> result;
    for (int32_t i = 0; i < params.n_logit_bias; ++i) {
        const int32_t token = params.logit_bias_tokens[i];
        if (token < 0 || token >= n_vocab) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "logit bias for token %d: the vocabulary has ids 0 to %d", token,
                        n_vocab - 1);
        }
        result.push_back({ token, params.logit_bias_values[i] });
    }
    return result;
}

// The order of llama-cpp-python: bias, penalties, then greedy, mirostat, or the filters and a draw.
void build_chain(llama_sampler * chain, const pykvq_model * model, const pykvq_sampler_params & params) {
    const int32_t n_vocab = llama_vocab_n_tokens(model->vocab);
    const auto bias       = to_logit_bias(params, n_vocab);
    const auto add        = [chain](llama_sampler * sampler) { llama_sampler_chain_add(chain, sampler); };

    if (!bias.empty()) {
        add(llama_sampler_init_logit_bias(n_vocab, (int32_t) bias.size(), bias.data()));
    }
    const int32_t last_n = params.penalty_last_n < 0 ?
                               std::min(llama_model_n_ctx_train(model->model), MAX_PENALTY_LAST_N) :
                               params.penalty_last_n;
    add(llama_sampler_init_penalties(n_vocab, last_n, params.repeat_penalty, params.frequency_penalty,
                                     params.presence_penalty));
    if (params.temperature == 0.0f) {
        add(llama_sampler_init_greedy());
        return;
    }
    if (params.mirostat_mode == 1) {
        const int32_t m = 100;  // tokens the paper's estimator of s looks at (arXiv:2007.14966)
        add(llama_sampler_init_temp(params.temperature));
        add(llama_sampler_init_mirostat(n_vocab, params.seed, params.mirostat_tau, params.mirostat_eta, m));
        return;
    }
    if (params.mirostat_mode == 2) {
        add(llama_sampler_init_temp(params.temperature));
        add(llama_sampler_init_mirostat_v2(params.seed, params.mirostat_tau, params.mirostat_eta));
        return;
    }
    const size_t min_keep = 1;
    add(llama_sampler_init_top_k(params.top_k));
    add(llama_sampler_init_typical(params.typical_p, min_keep));
    add(llama_sampler_init_top_p(params.top_p, min_keep));
    add(llama_sampler_init_min_p(params.min_p, min_keep));
    add(llama_sampler_init_temp(params.temperature));
    add(llama_sampler_init_dist(params.seed));
}

// Loops that a compiler vectorises: they read the whole vocabulary for each token.
void require_choice(const float * logits, int32_t n_vocab) {
    int32_t n_nan    = 0;
    int32_t n_finite = 0;
    for (int32_t id = 0; id < n_vocab; ++id) {
        n_nan += logits[id] != logits[id];
        n_finite += std::fabs(logits[id]) <= FLT_MAX;
    }
    if (n_nan > 0) {
        pykvq_throw(PYKVQ_STATUS_INTERNAL,
                    "the model's logits are not a number: its weights or its KV type are broken for this input");
    }
    if (n_finite == 0) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "no token is left to choose from: every logit is infinite");
    }
}

int32_t index_of_largest(const float * logits, int32_t n_vocab) {
    float largest = -INFINITY;
    for (int32_t id = 0; id < n_vocab; ++id) {
        largest = std::max(largest, logits[id]);
    }
    return (int32_t) (std::find(logits, logits + n_vocab, largest) - logits);
}

int32_t draw(pykvq_sampler * sampler, const float * logits, int32_t n_vocab) {
    require_choice(logits, n_vocab);
    if (sampler->only_greedy) {
        return index_of_largest(logits, n_vocab);
    }
    sampler->candidates.resize((size_t) n_vocab);
    for (int32_t id = 0; id < n_vocab; ++id) {
        sampler->candidates[(size_t) id] = { id, logits[id], 0.0f };
    }
    llama_token_data_array array = { sampler->candidates.data(), sampler->candidates.size(), -1, false };
    llama_sampler_apply(sampler->chain, &array);
    if (array.selected < 0 || (size_t) array.selected >= array.size) {
        pykvq_throw(PYKVQ_STATUS_INTERNAL, "the sampler chose no token");
    }
    const int32_t token = array.data[array.selected].id;
    llama_sampler_accept(sampler->chain, token);
    return token;
}

}  // namespace

pykvq_sampler_params pykvq_sampler_default_params(void) {
    pykvq_sampler_params params = {};

    params.seed           = LLAMA_DEFAULT_SEED;
    params.temperature    = 0.8f;
    params.top_k          = 40;
    params.top_p          = 0.95f;
    params.min_p          = 0.05f;
    params.typical_p      = 1.0f;
    params.repeat_penalty = 1.0f;
    params.penalty_last_n = 64;
    params.mirostat_tau   = 5.0f;
    params.mirostat_eta   = 0.1f;
    return params;
}

pykvq_status pykvq_sampler_create(const pykvq_model * model, const pykvq_sampler_params * params,
                                  pykvq_sampler ** sampler) {
    return pykvq_guard([&] {
        pykvq_require(model, "model");
        pykvq_require(params, "params");
        pykvq_require(sampler, "sampler");
        require_params(*params);
        auto result   = std::make_unique<pykvq_sampler>();
        result->chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
        build_chain(result->chain, model, *params);
        result->only_greedy = params->temperature == 0.0f && params->n_logit_bias == 0 &&
                              params->repeat_penalty == 1.0f && params->frequency_penalty == 0.0f &&
                              params->presence_penalty == 0.0f;
        *sampler = result.release();
    });
}

void pykvq_sampler_free(pykvq_sampler * sampler) {
    delete sampler;
}

void pykvq_sampler_reset(pykvq_sampler * sampler) {
    llama_sampler_reset(sampler->chain);
}

pykvq_status pykvq_sampler_sample(pykvq_sampler * sampler, pykvq_context * context, int32_t i, int32_t * token) {
    return pykvq_guard([&] {
        pykvq_require(sampler, "sampler");
        pykvq_require(context, "context");
        pykvq_require(token, "token");
        const float * logits = pykvq_logits(context, i);
        if (!logits) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "no logits were asked for at %d of the last batch", i);
        }
        *token = draw(sampler, logits, llama_vocab_n_tokens(context->model->vocab));
    });
}

pykvq_status pykvq_sampler_sample_logits(pykvq_sampler * sampler, const float * logits, int32_t n_vocab,
                                         int32_t * token) {
    return pykvq_guard([&] {
        pykvq_require(sampler, "sampler");
        pykvq_require(logits, "logits");
        pykvq_require(token, "token");
        if (n_vocab < 1) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "n_vocab is %d: it must be 1 or more", n_vocab);
        }
        *token = draw(sampler, logits, n_vocab);
    });
}

void pykvq_sampler_accept(pykvq_sampler * sampler, int32_t token) {
    llama_sampler_accept(sampler->chain, token);
}
