#include "kvq-llama.h"
#include "pykvq-guard.h"
#include "pykvq-system.h"

#include "ggml-backend.h"
#include "llama-cpp.h"

#include "hash/hash.h"

#include <algorithm>
#include <cfloat>
#include <climits>
#include <filesystem>
#include <fstream>

namespace fs = std::filesystem;

namespace {

constexpr double MIB = 1024.0 * 1024.0;

void require_range(const char * name, int64_t value, int64_t min, int64_t max) {
    if (value < min || value > max) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "%s is %lld: it must be from %lld to %lld", name, (long long) value,
                    (long long) min, (long long) max);
    }
}

void require_number(const char * name, float value, float min = -FLT_MAX) {
    if (!(value >= min && value <= FLT_MAX)) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "%s is %g: it must be a finite number from %g on", name,
                    (double) value, (double) min);
    }
}

void require_params(const pykvq_context_params & params) {
    require_range("n_ctx", params.n_ctx, 0, 1 << 30);
    require_range("n_batch", params.n_batch, 1, 1 << 20);
    require_range("n_ubatch", params.n_ubatch, 1, 1 << 20);
    require_range("n_seq_max", params.n_seq_max, 1, (int64_t) llama_max_parallel_sequences());
    require_range("n_threads", params.n_threads, 0, 512);
    require_range("n_threads_batch", params.n_threads_batch, 0, 512);
    require_range("flash_attn", params.flash_attn, -1, 1);
    require_range("pooling_type", params.pooling_type, -1, 4);
    require_range("rope_scaling", params.rope_scaling, -1, LLAMA_ROPE_SCALING_TYPE_MAX_VALUE);
    require_range("yarn_orig_ctx", params.yarn_orig_ctx, 0, 1 << 30);
    require_number("rope_freq_base", params.rope_freq_base, 0.0f);
    require_number("rope_freq_scale", params.rope_freq_scale, 0.0f);
    require_number("yarn_ext_factor", params.yarn_ext_factor);
    require_number("yarn_attn_factor", params.yarn_attn_factor);
    require_number("yarn_beta_fast", params.yarn_beta_fast);
    require_number("yarn_beta_slow", params.yarn_beta_slow);
}

// Reads a tier; the types are valid ones, and not yet checked to be such as a tier may have.
kvq_tier_spec to_tier_spec(const pykvq_model * model, const pykvq_kv_tier & tier) {
    kvq_tier_spec spec = { pykvq_kv_type(tier.type_k, "type_k of a tier"),
                           pykvq_kv_type(tier.type_v, "type_v of a tier"), (uint32_t) tier.n_tokens };
    if (tier.n_layers > 0) {
        pykvq_require(tier.layers, "layers of a tier");
    }
    for (int32_t i = 0; i < tier.n_layers; i++) {
        const pykvq_kv_layer & layer = tier.layers[i];
        require_range("layer of a tier", layer.layer, 0, llama_model_n_layer(model->model) - 1);
        spec.layers.push_back({ layer.layer, pykvq_kv_type(layer.type_k, "type_k of a tier"),
                                pykvq_kv_type(layer.type_v, "type_v of a tier") });
    }
    return spec;
}

void require_no_f32(ggml_type type_k, ggml_type type_v) {
    if (type_k == GGML_TYPE_F32 || type_v == GGML_TYPE_F32) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "a tier cannot be f32: flash attention reads f16 and smaller");
    }
}

// Reads and checks the tiers of the parameters; empty without.
kvq_tier_config to_tier_config(const pykvq_model * model, const pykvq_context_params & params) {
    kvq_tier_config config;
    if (params.n_tiers == 0) {
        return config;
    }
    require_range("n_tiers", params.n_tiers, 2, (int64_t) KVQ_MAX_TIERS);
    require_range("n_sink", params.n_sink, 0, 1 << 20);
    pykvq_require(params.tiers, "tiers");
    if (params.flash_attn == 0) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "KV tiers need flash attention: leave flash_attn on or automatic");
    }
    if (const char * obstacle = kvq_model_tier_obstacle(model->model)) {
        char arch[64];
        llama_model_meta_val_str(model->model, "general.architecture", arch, sizeof(arch));
        pykvq_throw(PYKVQ_STATUS_UNSUPPORTED,
                    "KV tiers do not work with the architecture %s: %s; use f16, q8_0 or q4_0", arch, obstacle);
    }
    for (int32_t t = 0; t < params.n_tiers; ++t) {
        const pykvq_kv_tier & tier = params.tiers[t];
        const bool last            = t + 1 == params.n_tiers;
        require_range("n_tokens of a tier", tier.n_tokens, t == 0 || last ? 0 : 1, 1 << 30);
        require_range("n_layers of a tier", tier.n_layers, 0, t == 0 ? 0 : INT32_MAX);
        config.tiers.push_back(to_tier_spec(model, tier));
    }
    const auto is_half = [](ggml_type type) { return type == GGML_TYPE_F16 || type == GGML_TYPE_BF16; };
    if (!is_half(config.tiers[0].type_k) || !is_half(config.tiers[0].type_v)) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT,
                    "the first tier holds the newest tokens and must be f16 or bf16, not %s/%s", params.tiers[0].type_k,
                    params.tiers[0].type_v);
    }
    for (const kvq_tier_spec & tier : config.tiers) {
        require_no_f32(tier.type_k, tier.type_v);
        for (const kvq_layer_types & layer : tier.layers) {
            require_no_f32(layer.type_k, layer.type_v);
        }
    }
    config.n_sink   = (uint32_t) params.n_sink;
    config.n_ubatch = (uint32_t) std::min(params.n_ubatch, params.n_batch);
    return config;
}

// A quantized row must be whole blocks a head, or llama.cpp could not look at one head of it.
void require_head_dims(const pykvq_model * model, ggml_type type, const char * argument) {
    const kvq_model_shape shape = kvq_model_get_shape(model->model);
    const int64_t block         = ggml_blck_size(type);
    if (shape.head_dim_gcd % block != 0) {
        pykvq_throw(PYKVQ_STATUS_UNSUPPORTED,
                    "%s=%s stores blocks of %lld values, but this model's head dim is %d (K) and %d (V), no multiple "
                    "of it: use f16%s",
                    argument, ggml_type_name(type), (long long) block, shape.head_dim_k, shape.head_dim_v,
                    shape.head_dim_gcd % 32 == 0 ? ", q8_0 or q4_0" : "");
    }
}

// Refused before anything is allocated: Linux would grant the memory and kill the process when it is filled.
void require_memory(const pykvq_model * model, const llama_context_params & params, const kvq_tier_config & tiers) {
    const double bytes     = (double) kvq_model_kv_bytes(model->model, params, tiers);
    const double available = (double) pykvq_system_available_memory();
    const bool on_device   = params.offload_kqv && llama_supports_gpu_offload();
    if (available > 0 && !on_device && bytes > available) {
        const uint32_t n_ctx = params.n_ctx ? params.n_ctx : llama_model_n_ctx_train(model->model);
        pykvq_throw(PYKVQ_STATUS_MEMORY,
                    "the KV cache of n_ctx %u takes %.0f MiB and %.0f MiB are free: use n_ctx %d or less, or a smaller "
                    "KV type",
                    n_ctx, bytes / MIB, available / MIB,
                    std::max(256, (int) (0.9 * n_ctx * available / bytes) / 256 * 256));
    }
}

llama_context_params to_llama_params(const pykvq_context_params & params, ggml_type type_k, ggml_type type_v) {
    llama_context_params result = llama_context_default_params();
    const int32_t n_threads     = params.n_threads > 0 ? params.n_threads : pykvq_system_physical_cores();

    result.n_ctx             = (uint32_t) params.n_ctx;
    result.n_batch           = (uint32_t) params.n_batch;
    result.n_ubatch          = (uint32_t) std::min(params.n_ubatch, params.n_batch);
    result.n_seq_max         = (uint32_t) params.n_seq_max;
    result.n_threads         = n_threads;
    result.n_threads_batch   = params.n_threads_batch > 0 ? params.n_threads_batch : n_threads;
    result.rope_scaling_type = (llama_rope_scaling_type) params.rope_scaling;
    result.pooling_type      = (enum llama_pooling_type) params.pooling_type;
    result.flash_attn_type   = (llama_flash_attn_type) params.flash_attn;
    result.rope_freq_base    = params.rope_freq_base;
    result.rope_freq_scale   = params.rope_freq_scale;
    result.yarn_ext_factor   = params.yarn_ext_factor;
    result.yarn_attn_factor  = params.yarn_attn_factor;
    result.yarn_beta_fast    = params.yarn_beta_fast;
    result.yarn_beta_slow    = params.yarn_beta_slow;
    result.yarn_orig_ctx     = (uint32_t) params.yarn_orig_ctx;
    result.type_k            = type_k;
    result.type_v            = type_v;
    result.embeddings        = params.embeddings;
    result.offload_kqv       = params.offload_kqv;
    result.op_offload        = params.op_offload;
    result.swa_full          = params.swa_full;
    result.kv_unified        = params.kv_unified;
    result.no_perf           = true;
    return result;
}

// Checked parameters in llama.cpp's terms.
struct context_plan {
    llama_context_params params;
    kvq_tier_config tiers;  // empty without
};

context_plan make_plan(const pykvq_model * model, const pykvq_context_params & params) {
    require_params(params);
    context_plan plan;
    plan.tiers        = to_tier_config(model, params);
    const bool tiered = !plan.tiers.tiers.empty();
    const auto type_k = tiered ? plan.tiers.tiers[0].type_k : pykvq_kv_type(params.type_k, "type_k");
    const auto type_v = tiered ? plan.tiers.tiers[0].type_v : pykvq_kv_type(params.type_v, "type_v");
    require_head_dims(model, type_k, "type_k");
    require_head_dims(model, type_v, "type_v");
    if (ggml_is_quantized(type_v) && params.flash_attn == 0) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT,
                    "type_v=%s needs flash attention: leave flash_attn on or automatic, or use type_v=f16",
                    params.type_v);
    }
    plan.params = to_llama_params(params, type_k, type_v);
    if (tiered) {
        // a batch must fit the room that the first tier keeps for new tokens
        plan.params.n_batch         = plan.params.n_ubatch;
        plan.params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    }
    return plan;
}

// What a saved state must agree in: "f16/f16" or "f16/f16:128+q4_ve/q4_ve, 4 sinks".
std::string describe_layout(const context_plan & plan) {
    if (plan.tiers.tiers.empty()) {
        return pykvq_format("%s/%s", ggml_type_name(plan.params.type_k), ggml_type_name(plan.params.type_v));
    }
    std::string text;
    for (const kvq_tier_spec & tier : plan.tiers.tiers) {
        text += pykvq_format("%s%s/%s:%u", text.empty() ? "" : "+", ggml_type_name(tier.type_k),
                             ggml_type_name(tier.type_v), tier.n_tokens);
        for (const kvq_layer_types & layer : tier.layers) {
            text += pykvq_format(",%d:%s/%s", layer.il, ggml_type_name(layer.type_k), ggml_type_name(layer.type_v));
        }
    }
    return text + pykvq_format(", %u sinks", plan.tiers.n_sink);
}

llama_context * init_context(const pykvq_model * model, const context_plan & plan,
                             std::shared_ptr<const kvq_transform> transform = nullptr) {
    const kvq_tier_scope tiers(plan.tiers.tiers.empty() ? nullptr : &plan.tiers);
    const kvq_transform_scope transforms(std::move(transform));
    llama_context * ctx = llama_init_from_model(model->model, plan.params);
    if (!ctx) {
        const std::string reason = pykvq_logged_errors();
        const bool memory        = reason.find("alloc") != std::string::npos;
        pykvq_throw(memory ? PYKVQ_STATUS_MEMORY : PYKVQ_STATUS_UNSUPPORTED, "cannot create a context: %s",
                    reason.c_str());
    }
    return ctx;
}

std::shared_ptr<const kvq_transform> load_transform(const pykvq_model * model, const pykvq_context_params & params) {
    if (!params.calibration) {
        return nullptr;
    }
    try {
        return kvq_transform::load(params.calibration, model->model, params.offload_kqv);
    } catch (const std::runtime_error & error) {
        pykvq_throw(PYKVQ_STATUS_FORMAT, "cannot use the calibration '%s': %s; make a new one with pykvq-calibrate",
                    params.calibration, error.what());
    }
}

// Tells calibrations apart: a cache filled under one is noise under another.
std::string calibration_id(const char * path) {
    std::string bytes((size_t) fs::file_size(fs::u8path(path)), '\0');
    std::ifstream(fs::u8path(path), std::ios::binary).read(bytes.data(), (std::streamsize) bytes.size());
    return hash_sha256_hex(bytes.data(), bytes.size()).substr(0, 16);
}

bool on_abort_query(void * user_data) {
    auto * context = (pykvq_context *) user_data;
    if (context->abort_fn && context->abort_fn(context->abort_data)) {
        context->abort.store(true, std::memory_order_relaxed);
    }
    return !kvq_tiers_moving() && context->abort.load(std::memory_order_relaxed);
}

void require_context(const pykvq_context * context) {
    pykvq_require(context, "context");
}

void require_batch(const pykvq_context * context, const int32_t * tokens, const int32_t * seq_id, int32_t n_tokens) {
    require_range("n_tokens", n_tokens, 1, llama_n_batch(context->ctx));
    pykvq_require_tokens(context->model, tokens, n_tokens);
    const int32_t n_seq_max = (int32_t) llama_n_seq_max(context->ctx);
    for (int32_t i = 0; i < n_tokens; ++i) {
        if (seq_id[i] < 0 || seq_id[i] >= n_seq_max) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "seq_id[%d] is %d: this context has sequences 0 to %d", i,
                        seq_id[i], n_seq_max - 1);
        }
    }
}

void throw_decode_error(pykvq_context * context, int32_t result, int32_t n_tokens) {
    switch (result) {
        case 1:
            pykvq_throw(PYKVQ_STATUS_NO_SPACE,
                        "the KV cache has no room for %d more tokens (n_ctx %u): remove tokens or use a larger n_ctx",
                        n_tokens, llama_n_ctx(context->ctx));
        case 2:
            context->abort.store(false);
            pykvq_throw(PYKVQ_STATUS_ABORTED, "the decode was stopped");
        case -1:
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "the batch is not valid: %s", pykvq_logged_errors().c_str());
        case -2:
            pykvq_throw(PYKVQ_STATUS_MEMORY, "not enough memory for a batch of %d tokens: use a smaller n_ubatch",
                        n_tokens);
        default:
            pykvq_throw(PYKVQ_STATUS_INTERNAL, "llama_decode failed with %d: %s", result,
                        pykvq_logged_errors().c_str());
    }
}

int32_t decode(pykvq_context * context, const llama_batch & batch) {
    if (context->broken) {
        pykvq_throw(PYKVQ_STATUS_INTERNAL, "a check failed in this context before: close it and make another");
    }
    try {
        return llama_decode(context->ctx, batch);
    } catch (const pykvq_error &) {
        context->broken = true;
        context->threads.release();  // the others may wait for this one at a barrier, for ever
        throw;
    }
}

// The batch position behind i (-1 counts from the end), or -1 if no output was asked for there.
int32_t output_position(const pykvq_context * context, int32_t i) {
    const auto & outputs = context->last_outputs;
    if (i < 0) {
        int32_t skip = -i;
        for (size_t j = outputs.size(); j-- > 0;) {
            if (outputs[j] && --skip == 0) {
                return (int32_t) j;
            }
        }
        return -1;
    }
    return (size_t) i < outputs.size() && outputs[i] ? i : -1;
}

llama_memory_t memory_of(const pykvq_context * context) {
    require_context(context);
    return llama_get_memory(context->ctx);
}

void require_seq(const pykvq_context * context, const char * name, int32_t seq_id, int32_t min = 0) {
    require_context(context);
    require_range(name, seq_id, min, (int64_t) llama_n_seq_max(context->ctx) - 1);
}

}  // namespace

pykvq_context_params pykvq_context_default_params(void) {
    const llama_context_params defaults = llama_context_default_params();
    pykvq_context_params params         = {};

    params.n_ctx            = 4096;
    params.n_batch          = 512;
    params.n_ubatch         = 512;
    params.n_seq_max        = 1;
    params.type_k           = "f16";
    params.type_v           = "f16";
    params.n_sink           = 4;
    params.flash_attn       = -1;
    params.pooling_type     = -1;
    params.rope_scaling     = -1;
    params.yarn_ext_factor  = defaults.yarn_ext_factor;
    params.yarn_attn_factor = defaults.yarn_attn_factor;
    params.yarn_beta_fast   = defaults.yarn_beta_fast;
    params.yarn_beta_slow   = defaults.yarn_beta_slow;
    params.offload_kqv      = true;
    params.op_offload       = true;
    params.kv_unified       = true;
    return params;
}

std::unique_ptr<pykvq_context> pykvq_context_make(pykvq_model * model, const pykvq_context_params & params,
                                                  ggml_backend_sched_eval_callback on_node, void * user_data) {
    pykvq_require(model, "model");
    if (model->vocab_only || model->metadata_only) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "the model was loaded with %s: it has no weights to run",
                    model->vocab_only ? "vocab_only" : "metadata_only");
    }
    const auto transform = load_transform(model, params);
    context_plan plan    = make_plan(model, params);
    if (!params.force) {
        require_memory(model, plan.params, plan.tiers);
    }
    plan.params.cb_eval           = on_node;
    plan.params.cb_eval_user_data = user_data;

    auto result    = std::make_unique<pykvq_context>();
    result->model  = model;
    result->layout = describe_layout(plan);
    if (transform) {
        result->layout += ", calibration " + calibration_id(params.calibration);
        result->calibration_bytes = (int64_t) transform->n_bytes();
    }
    result->ctx     = init_context(model, plan, transform);
    result->threads = pykvq_threads_make(std::max(plan.params.n_threads, plan.params.n_threads_batch));
    llama_attach_threadpool(result->ctx, result->threads.get(), nullptr);
    llama_set_abort_callback(result->ctx, on_abort_query, result.get());
    return result;
}

pykvq_status pykvq_context_create(pykvq_model * model, const pykvq_context_params * params, pykvq_context ** context) {
    return pykvq_guard([&] {
        pykvq_require(params, "params");
        pykvq_require(context, "context");
        *context = pykvq_context_make(model, *params).release();
    });
}

pykvq_status pykvq_predict_kv(const pykvq_model * model, const pykvq_context_params * params, int64_t * n_bytes,
                              int64_t * n_bytes_f16) {
    return pykvq_guard([&] {
        pykvq_require(model, "model");
        pykvq_require(params, "params");
        pykvq_require(n_bytes, "n_bytes");
        pykvq_require(n_bytes_f16, "n_bytes_f16");
        if (model->vocab_only) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "the model was loaded with vocab_only: its sizes are not known");
        }
        const context_plan plan     = make_plan(model, *params);
        llama_context_params as_f16 = plan.params;
        as_f16.type_k = as_f16.type_v = GGML_TYPE_F16;
        *n_bytes                      = kvq_model_kv_bytes(model->model, plan.params, plan.tiers);
        *n_bytes_f16                  = kvq_model_kv_bytes(model->model, as_f16, {});
    });
}

pykvq_status pykvq_predict_memory(pykvq_model * model, const pykvq_context_params * params, pykvq_memory_info * info) {
    return pykvq_guard([&] {
        pykvq_require(model, "model");
        pykvq_require(params, "params");
        pykvq_require(info, "info");
        if (!model->metadata_only) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "pykvq_predict_memory needs a model loaded with metadata_only");
        }
        context_plan plan         = make_plan(model, *params);
        plan.params.n_outputs_max = params->embeddings ? 0 : plan.params.n_seq_max;
        const llama_context_ptr ctx(init_context(model, plan));
        const kvq_memory_use host   = kvq_context_get_memory_use(ctx.get(), false);
        const kvq_memory_use device = kvq_context_get_memory_use(ctx.get(), true);
        *info                       = { host.weights, host.kv,        host.compute,     device.weights,
                                        device.kv,    device.compute, host.calibration, device.calibration };
    });
}

int64_t pykvq_available_memory(void) {
    return pykvq_system_available_memory();
}

int64_t pykvq_available_device_memory(void) {
    int64_t total             = 0;
    const pykvq_status status = pykvq_guard([&] {
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            const ggml_backend_dev_t device = ggml_backend_dev_get(i);
            size_t free                     = 0;
            size_t all                      = 0;
            if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_GPU) {
                ggml_backend_dev_memory(device, &free, &all);
                total += (int64_t) free;
            }
        }
    });
    return status == PYKVQ_STATUS_OK ? total : 0;
}

void pykvq_context_free(pykvq_context * context) {
    delete context;
}

void pykvq_context_get_info(const pykvq_context * context, pykvq_context_info * info) {
    const llama_context * ctx       = context->ctx;
    const kvq_context_memory memory = kvq_context_get_memory(ctx);
    const llama_memory_t kv         = llama_get_memory(ctx);
    const kvq_attention_use use     = kvq_context_get_attention_use(ctx);

    *info                      = {};
    info->n_ctx                = (int32_t) llama_n_ctx(ctx);
    info->n_ctx_seq            = (int32_t) llama_n_ctx_seq(ctx);
    info->n_batch              = (int32_t) llama_n_batch(ctx);
    info->n_ubatch             = (int32_t) llama_n_ubatch(ctx);
    info->n_seq_max            = (int32_t) llama_n_seq_max(ctx);
    info->n_threads            = llama_n_threads(context->ctx);
    info->n_threads_batch      = llama_n_threads_batch(context->ctx);
    info->kv_bytes             = memory.kv_bytes;
    info->kv_bytes_f16         = memory.kv_bytes_f16;
    info->kv_elements          = memory.kv_elements;
    info->compute_bytes        = memory.compute_bytes;
    info->flash_attn           = memory.flash_attn;
    info->n_attention_device   = use.n_device;
    info->n_attention_fallback = use.n_fallback;
    info->can_shift            = kv && llama_memory_can_shift(kv);
    info->calibration_bytes    = context->calibration_bytes;
}

int32_t pykvq_context_tier_count(const pykvq_context * context) {
    return (int32_t) kvq_context_get_tiers(context->ctx).size();
}

pykvq_status pykvq_context_get_tier(const pykvq_context * context, int32_t i, pykvq_tier_info * info) {
    return pykvq_guard([&] {
        require_context(context);
        pykvq_require(info, "info");
        const auto tiers = kvq_context_get_tiers(context->ctx);
        require_range("i", i, 0, (int64_t) tiers.size() - 1);
        const kvq_tier_use & tier = tiers[(size_t) i];
        info->type_k              = ggml_type_name(tier.type_k);
        info->type_v              = ggml_type_name(tier.type_v);
        info->n_capacity          = (int32_t) tier.n_rows;
        info->n_used              = (int32_t) tier.n_used;
        info->n_bytes             = tier.n_bytes;
        info->n_requantized       = tier.n_arrived;
    });
}

void pykvq_context_set_threads(pykvq_context * context, int32_t n_threads, int32_t n_threads_batch) {
    llama_set_n_threads(context->ctx, n_threads, n_threads_batch);
}

pykvq_status pykvq_decode(pykvq_context * context, const int32_t * tokens, const int32_t * pos, const int32_t * seq_id,
                          const int8_t * want_logits, int32_t n_tokens) {
    return pykvq_guard([&] {
        require_context(context);
        pykvq_require(tokens, "tokens");
        pykvq_require(pos, "pos");
        pykvq_require(seq_id, "seq_id");
        pykvq_require(want_logits, "want_logits");
        require_batch(context, tokens, seq_id, n_tokens);

        // llama_batch takes pointers to non-const; it does not write through them
        context->n_seq_id.assign((size_t) n_tokens, 1);
        context->seq_id.assign(seq_id, seq_id + n_tokens);
        context->seq_id_ptr.resize((size_t) n_tokens);
        for (int32_t i = 0; i < n_tokens; ++i) {
            context->seq_id_ptr[(size_t) i] = &context->seq_id[(size_t) i];
        }
        llama_batch batch = {};
        batch.n_tokens    = n_tokens;
        batch.token       = const_cast<int32_t *>(tokens);
        batch.pos         = const_cast<int32_t *>(pos);
        batch.n_seq_id    = context->n_seq_id.data();
        batch.seq_id      = context->seq_id_ptr.data();
        batch.logits      = const_cast<int8_t *>(want_logits);

        context->last_outputs.clear();  // of no use any more, even if the decode fails
        const pykvq_stop_scope scope(context->abort);
        const int32_t result = decode(context, batch);
        if (result != 0) {
            throw_decode_error(context, result, n_tokens);
        }
        context->last_outputs.assign(want_logits, want_logits + n_tokens);
    });
}

const float * pykvq_logits(pykvq_context * context, int32_t i) {
    const int32_t position = output_position(context, i);
    return position < 0 ? nullptr : llama_get_logits_ith(context->ctx, position);
}

const float * pykvq_embeddings(pykvq_context * context, int32_t i) {
    const int32_t position = output_position(context, i);
    return position < 0 ? nullptr : llama_get_embeddings_ith(context->ctx, position);
}

const float * pykvq_embeddings_seq(pykvq_context * context, int32_t seq_id) {
    return llama_get_embeddings_seq(context->ctx, seq_id);
}

void pykvq_context_abort(pykvq_context * context) {
    context->abort.store(true);
}

void pykvq_context_clear_abort(pykvq_context * context) {
    context->abort.store(false);
}

void pykvq_context_set_abort_callback(pykvq_context * context, pykvq_abort_fn fn, void * user_data) {
    context->abort_fn   = fn;
    context->abort_data = user_data;
}

void pykvq_kv_clear(pykvq_context * context) {
    if (llama_get_memory(context->ctx)) {
        llama_memory_clear(llama_get_memory(context->ctx), false);
    }
}

pykvq_status pykvq_kv_remove(pykvq_context * context, int32_t seq_id, int32_t p0, int32_t p1) {
    return pykvq_guard([&] {
        require_seq(context, "seq_id", seq_id, -1);
        if (!llama_memory_seq_rm(memory_of(context), seq_id, p0, p1)) {
            pykvq_throw(PYKVQ_STATUS_UNSUPPORTED,
                        "positions [%d, %d) cannot be removed alone from this model's memory: clear the sequence", p0,
                        p1);
        }
    });
}

pykvq_status pykvq_kv_copy(pykvq_context * context, int32_t seq_src, int32_t seq_dst, int32_t p0, int32_t p1) {
    return pykvq_guard([&] {
        require_seq(context, "seq_src", seq_src);
        require_seq(context, "seq_dst", seq_dst);
        // p1 beyond the end is the whole sequence too
        const bool whole = p0 <= 0 && (p1 < 0 || p1 > pykvq_kv_pos_max(context, seq_src));
        if (llama_n_ctx_seq(context->ctx) != llama_n_ctx(context->ctx) && !whole) {
            pykvq_throw(PYKVQ_STATUS_UNSUPPORTED,
                        "the sequences have caches of their own: copy all of one and remove what is too much");
        }
        llama_memory_seq_cp(memory_of(context), seq_src, seq_dst, whole ? -1 : p0, whole ? -1 : p1);
    });
}

pykvq_status pykvq_kv_keep(pykvq_context * context, int32_t seq_id) {
    return pykvq_guard([&] {
        require_seq(context, "seq_id", seq_id);
        llama_memory_seq_keep(memory_of(context), seq_id);
    });
}

pykvq_status pykvq_kv_shift(pykvq_context * context, int32_t seq_id, int32_t p0, int32_t p1, int32_t delta) {
    return pykvq_guard([&] {
        require_seq(context, "seq_id", seq_id);
        if (!llama_memory_can_shift(memory_of(context))) {
            pykvq_throw(PYKVQ_STATUS_UNSUPPORTED, "this model's positions cannot be shifted");
        }
        llama_memory_seq_add(memory_of(context), seq_id, p0, p1, delta);
    });
}

static bool has_seq(const pykvq_context * context, int32_t seq_id) {
    return llama_get_memory(context->ctx) && seq_id >= 0 && seq_id < (int32_t) llama_n_seq_max(context->ctx);
}

int32_t pykvq_kv_pos_min(const pykvq_context * context, int32_t seq_id) {
    return has_seq(context, seq_id) ? llama_memory_seq_pos_min(llama_get_memory(context->ctx), seq_id) : -1;
}

int32_t pykvq_kv_pos_max(const pykvq_context * context, int32_t seq_id) {
    return has_seq(context, seq_id) ? llama_memory_seq_pos_max(llama_get_memory(context->ctx), seq_id) : -1;
}
