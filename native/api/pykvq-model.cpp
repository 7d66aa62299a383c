#include "ggml-backend.h"
#include "kvq-llama.h"
#include "pykvq-guard.h"

#include <climits>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

namespace fs = std::filesystem;

namespace {

struct file_closer {
    void operator()(FILE * file) const { std::fclose(file); }
};

llama_model_params to_llama_params(const pykvq_model_params & params) {
    llama_model_params result          = llama_model_default_params();
    result.n_gpu_layers                = params.n_gpu_layers;
    result.main_gpu                    = params.main_gpu;
    result.load_mode                   = params.metadata_only                ? LLAMA_LOAD_MODE_NONE :
                                         params.use_mmap && params.use_mlock ? LLAMA_LOAD_MODE_MMAP_MLOCK :
                                         params.use_mmap                     ? LLAMA_LOAD_MODE_MMAP :
                                         params.use_mlock                    ? LLAMA_LOAD_MODE_MLOCK :
                                                                               LLAMA_LOAD_MODE_NONE;
    result.vocab_only                  = params.vocab_only;
    result.check_tensors               = params.check_tensors;
    result.no_alloc                    = params.metadata_only;
    result.progress_callback           = params.progress;
    result.progress_callback_user_data = params.progress_data;
    return result;
}

std::string join_gpu_names() {
    std::string names;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        if (ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            names += (names.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(dev));
        }
    }
    return names.empty() ? "none" : names;
}

// As llama_model_params wants them, with a NULL behind the last.
std::vector<ggml_backend_dev_t> find_devices(const std::string & names) {
    std::vector<ggml_backend_dev_t> devices;
    std::stringstream list(names);
    for (std::string name; names != "none" && std::getline(list, name, ',');) {
        ggml_backend_dev_t dev = ggml_backend_dev_by_name(name.c_str());
        if (!dev || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "device is '%s': there is no such GPU; known are: %s",
                        name.c_str(), join_gpu_names().c_str());
        }
        devices.push_back(dev);
    }
    devices.push_back(nullptr);
    return devices;
}

// Wraps the user's progress callback to remember whether it was what stopped the load.
struct progress_state {
    pykvq_progress_fn fn;
    void * data;
    bool stopped;
};

bool on_progress(float progress, void * user_data) {
    auto * state   = (progress_state *) user_data;
    state->stopped = state->fn && !state->fn(progress, state->data);
    return !state->stopped;
}

int32_t copy_string(const char * text, char * buf, size_t size) {
    if (size > 0) {
        std::snprintf(buf, size, "%s", text);
    }
    return (int32_t) std::strlen(text);
}

void require_token(const pykvq_model * model, int32_t token) {
    const int32_t n_vocab = llama_vocab_n_tokens(model->vocab);
    if (token < 0 || token >= n_vocab) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "token %d is out of range: the vocabulary has ids 0 to %d", token,
                    n_vocab - 1);
    }
}

// llama.cpp returns a count, or minus the count when there was no room.
int32_t needed(int32_t result) {
    if (result == INT32_MIN) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "the text is too long: its length does not fit 32 bits");
    }
    return result < 0 ? -result : result;
}

}  // namespace

void pykvq_require_tokens(const pykvq_model * model, const int32_t * tokens, int32_t n_tokens) {
    const int32_t n_vocab = llama_vocab_n_tokens(model->vocab);
    for (int32_t i = 0; i < n_tokens; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "tokens[%d] is %d: the vocabulary has ids 0 to %d", i, tokens[i],
                        n_vocab - 1);
        }
    }
}

void pykvq_require_gguf(const char * path) {
    const fs::path file = fs::u8path(path);
    std::error_code error;
    const fs::file_status status = fs::status(file, error);
    if (!fs::exists(status)) {
        pykvq_throw(PYKVQ_STATUS_IO, "model file not found: '%s'", path);
    }
    if (fs::is_directory(status)) {
        pykvq_throw(PYKVQ_STATUS_IO, "'%s' is a directory: give the path of a .gguf file in it", path);
    }
    if (!fs::is_regular_file(status)) {
        pykvq_throw(PYKVQ_STATUS_IO, "'%s' is no regular file: give the path of a .gguf file", path);
    }
    const std::unique_ptr<FILE, file_closer> handle(ggml_fopen(path, "rb"));
    if (!handle) {
        pykvq_throw(PYKVQ_STATUS_IO, "cannot read '%s': %s", path, std::strerror(errno));
    }
    char magic[4];
    if (std::fread(magic, 1, sizeof(magic), handle.get()) != sizeof(magic)) {
        pykvq_throw(PYKVQ_STATUS_FORMAT, "'%s' is no GGUF model: it is only %llu bytes long", path,
                    (unsigned long long) fs::file_size(file, error));
    }
    if (std::memcmp(magic, "GGUF", sizeof(magic)) != 0) {
        pykvq_throw(
            PYKVQ_STATUS_FORMAT,
            "'%s' is no GGUF model: it starts with bytes %02x %02x %02x %02x, not with 'GGUF'; convert it first", path,
            (uint8_t) magic[0], (uint8_t) magic[1], (uint8_t) magic[2], (uint8_t) magic[3]);
    }
}

pykvq_model_params pykvq_model_default_params(void) {
    return { -1, 0, nullptr, true, false, false, false, false, nullptr, nullptr };
}

pykvq_status pykvq_model_load(const char * path, const pykvq_model_params * params, pykvq_model ** model) {
    return pykvq_guard([&] {
        pykvq_require(path, "path");
        pykvq_require(params, "params");
        pykvq_require(model, "model");
        pykvq_require_gguf(path);

        progress_state progress                  = { params->progress, params->progress_data, false };
        llama_model_params llama_params          = to_llama_params(*params);
        llama_params.progress_callback           = on_progress;
        llama_params.progress_callback_user_data = &progress;
        std::vector<ggml_backend_dev_t> devices;
        if (params->device) {
            devices              = find_devices(params->device);
            llama_params.devices = devices.data();
        }

        auto result   = std::make_unique<pykvq_model>();
        result->path  = path;
        result->model = llama_model_load_from_file(path, llama_params);
        if (progress.stopped) {
            pykvq_throw(PYKVQ_STATUS_ABORTED, "loading '%s' was stopped", path);
        }
        if (!result->model) {
            pykvq_throw(PYKVQ_STATUS_FORMAT, "cannot load '%s': %s", path, pykvq_logged_errors().c_str());
        }
        const std::string damage = params->vocab_only ? "" : kvq_model_find_damage(result->model);
        if (!damage.empty()) {
            pykvq_throw(PYKVQ_STATUS_FORMAT, "'%s' is damaged: %s", path, damage.c_str());
        }
        result->vocab         = llama_model_get_vocab(result->model);
        result->vocab_only    = params->vocab_only;
        result->metadata_only = params->metadata_only;
        *model                = result.release();
    });
}

void pykvq_model_free(pykvq_model * model) {
    delete model;
}

// llama.cpp reads no sizes in this mode, and its getters end the process when they are asked
static void get_sizes(const pykvq_model * model, pykvq_model_info * info) {
    if (model->vocab_only) {
        return;
    }
    const kvq_model_shape shape = kvq_model_get_shape(model->model);
    info->n_ctx_train           = llama_model_n_ctx_train(model->model);
    info->n_embd                = llama_model_n_embd(model->model);
    info->n_layer               = llama_model_n_layer(model->model);
    info->n_head                = llama_model_n_head(model->model);
    info->n_head_kv             = llama_model_n_head_kv(model->model);
    info->head_dim_k            = shape.head_dim_k;
    info->head_dim_v            = shape.head_dim_v;
    info->n_swa                 = llama_model_n_swa(model->model);
    info->n_params              = (int64_t) llama_model_n_params(model->model);
    info->n_bytes               = (int64_t) llama_model_size(model->model);
    info->has_encoder           = llama_model_has_encoder(model->model);
    info->has_decoder           = llama_model_has_decoder(model->model);
    info->is_recurrent          = llama_model_is_recurrent(model->model);
    info->is_hybrid             = llama_model_is_hybrid(model->model);
}

void pykvq_model_get_info(const pykvq_model * model, pykvq_model_info * info) {
    *info                  = {};
    info->n_vocab          = llama_vocab_n_tokens(model->vocab);
    info->token_bos        = llama_vocab_bos(model->vocab);
    info->token_eos        = llama_vocab_eos(model->vocab);
    info->token_eot        = llama_vocab_eot(model->vocab);
    info->token_nl         = llama_vocab_nl(model->vocab);
    info->token_pad        = llama_vocab_pad(model->vocab);
    info->token_fim_prefix = llama_vocab_fim_pre(model->vocab);
    info->token_fim_suffix = llama_vocab_fim_suf(model->vocab);
    info->token_fim_middle = llama_vocab_fim_mid(model->vocab);
    info->add_bos          = llama_vocab_get_add_bos(model->vocab);
    info->add_eos          = llama_vocab_get_add_eos(model->vocab);
    get_sizes(model, info);
}

int32_t pykvq_model_desc(const pykvq_model * model, char * buf, size_t size) {
    char text[256];
    llama_model_desc(model->model, text, sizeof(text));
    return copy_string(text, buf, size);
}

int32_t pykvq_model_meta_value(const pykvq_model * model, const char * key, char * buf, size_t size) {
    return llama_model_meta_val_str(model->model, key, buf, size);
}

int32_t pykvq_model_meta_key_at(const pykvq_model * model, int32_t i, char * buf, size_t size) {
    return llama_model_meta_key_by_index(model->model, i, buf, size);
}

int32_t pykvq_model_meta_value_at(const pykvq_model * model, int32_t i, char * buf, size_t size) {
    return llama_model_meta_val_str_by_index(model->model, i, buf, size);
}

int32_t pykvq_model_meta_count(const pykvq_model * model) {
    return llama_model_meta_count(model->model);
}

const char * pykvq_model_chat_template(const pykvq_model * model, const char * name) {
    return llama_model_chat_template(model->model, name);
}

bool pykvq_model_tensor_is_as_in_file(const pykvq_model * model, const char * name) {
    return name && kvq_model_tensor_is_as_in_file(model->model, name);
}

pykvq_status pykvq_tokenize(const pykvq_model * model, const char * text, int32_t n_bytes, bool add_special,
                            bool parse_special, int32_t * tokens, int32_t capacity, int32_t * n_tokens) {
    return pykvq_guard([&] {
        pykvq_require(model, "model");
        pykvq_require(text, "text");
        pykvq_require(n_tokens, "n_tokens");
        if (n_bytes < 0 || capacity < 0) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "n_bytes is %d and capacity %d: neither may be negative",
                        n_bytes, capacity);
        }
        *n_tokens = needed(llama_tokenize(model->vocab, text, n_bytes, tokens, capacity, add_special, parse_special));
    });
}

pykvq_status pykvq_token_bytes(const pykvq_model * model, int32_t token, bool special, char * buf, int32_t capacity,
                               int32_t * n_bytes) {
    return pykvq_guard([&] {
        pykvq_require(model, "model");
        pykvq_require(n_bytes, "n_bytes");
        require_token(model, token);
        *n_bytes = needed(llama_token_to_piece(model->vocab, token, buf, capacity, 0, special));
    });
}

pykvq_status pykvq_detokenize(const pykvq_model * model, const int32_t * tokens, int32_t n_tokens, bool remove_special,
                              bool unparse_special, char * buf, int32_t capacity, int32_t * n_bytes) {
    return pykvq_guard([&] {
        pykvq_require(model, "model");
        pykvq_require(n_bytes, "n_bytes");
        for (int32_t i = 0; i < n_tokens; ++i) {
            require_token(model, tokens[i]);
        }
        *n_bytes =
            needed(llama_detokenize(model->vocab, tokens, n_tokens, buf, capacity, remove_special, unparse_special));
    });
}

bool pykvq_token_is_eog(const pykvq_model * model, int32_t token) {
    return token >= 0 && token < llama_vocab_n_tokens(model->vocab) && llama_vocab_is_eog(model->vocab, token);
}

bool pykvq_token_is_control(const pykvq_model * model, int32_t token) {
    return token >= 0 && token < llama_vocab_n_tokens(model->vocab) && llama_vocab_is_control(model->vocab, token);
}
