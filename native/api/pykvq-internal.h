// pykvq-internal.h: what the files of the C API share.

#pragma once

#include "llama.h"
#include "pykvq-threads.h"
#include "pykvq.h"

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

// A failure with the status and the line that the caller is to see.
struct pykvq_error : std::runtime_error {
    pykvq_error(pykvq_status status, const std::string & message) : std::runtime_error(message), status(status) {}

    pykvq_status status;
};

#ifdef __GNUC__
#    define PYKVQ_FORMAT(a, b) __attribute__((format(printf, a, b)))
#else
#    define PYKVQ_FORMAT(a, b)
#endif

[[noreturn]] void pykvq_throw(pykvq_status status, const char * format, ...) PYKVQ_FORMAT(2, 3);
std::string pykvq_format(const char * format, ...) PYKVQ_FORMAT(1, 2);

// Throws PYKVQ_STATUS_INVALID_ARGUMENT naming the argument when a pointer is NULL.
void pykvq_require(const void * pointer, const char * name);

// Starts llama.cpp once and takes its log and its abort hook over. Throws when no CPU backend could be loaded.
void pykvq_library_init();

// Error lines that llama.cpp logged on this thread since the guarded call began, joined and without function names.
std::string pykvq_logged_errors();

// While it lives and stop is true, llama.cpp's errors on this thread are logged as debug lines.
struct pykvq_stop_scope {
    explicit pykvq_stop_scope(const std::atomic<bool> & stop);
    ~pykvq_stop_scope();
};

// Refuses, in words, what is no GGUF at all; llama.cpp's loader checks the rest.
void pykvq_require_gguf(const char * path);

// The ggml type of a KV type name, or an error that lists the valid ones.
ggml_type pykvq_kv_type(const char * name, const char * argument);

struct pykvq_model {
    llama_model * model       = nullptr;
    const llama_vocab * vocab = nullptr;
    std::string path;
    bool vocab_only    = false;
    bool metadata_only = false;

    ~pykvq_model() { llama_model_free(model); }
};

// Refuses token ids that are not in the vocabulary.
void pykvq_require_tokens(const pykvq_model * model, const int32_t * tokens, int32_t n_tokens);

struct pykvq_context {
    pykvq_model * model = nullptr;
    llama_context * ctx = nullptr;
    pykvq_threads_ptr threads;
    std::string layout;                // the KV types and tiers, in words
    int64_t calibration_bytes = 0;     // of the transforms in memory
    std::vector<int8_t> last_outputs;  // want_logits of the last batch
    std::vector<int32_t> n_seq_id;     // the shapes that llama_batch asks for
    std::vector<int32_t> seq_id;
    std::vector<int32_t *> seq_id_ptr;
    std::vector<llama_adapter_lora *> loras;  // owned by the model
    std::vector<float> lora_scales;
    std::atomic<bool> abort{ false };
    bool broken             = false;  // a check failed while it computed
    pykvq_abort_fn abort_fn = nullptr;
    void * abort_data       = nullptr;

    ~pykvq_context() { llama_free(ctx); }
};

// A context whose graph nodes are shown to on_node, if that is not NULL.
std::unique_ptr<pykvq_context> pykvq_context_make(pykvq_model * model, const pykvq_context_params & params,
                                                  ggml_backend_sched_eval_callback on_node = nullptr,
                                                  void * user_data                         = nullptr);

struct pykvq_sampler {
    llama_sampler * chain = nullptr;
    bool only_greedy      = false;  // the chain takes the largest logit, whatever was drawn before
    std::vector<llama_token_data> candidates;

    ~pykvq_sampler() { llama_sampler_free(chain); }
};
