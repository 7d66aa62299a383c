// pykvq.h: the plain-C interface of pykvq's native runtime.
//
// Conventions
// - Every function that can fail returns a pykvq_status. On failure pykvq_last_error() holds, for the calling
//   thread, one line with what went wrong, what was found and what to do. Output parameters are left untouched.
// - Nothing a caller passes ends the process: bad paths, bad files, bad sizes and too little memory are statuses.
// - Handles are opaque. A model may be shared by many contexts and must outlive them; freeing NULL does nothing.
// - A model is safe to read from many threads. A context belongs to one thread at a time, except
//   pykvq_context_abort(), which may be called from any thread.
// - Token, position and sequence ids are int32_t. Strings are UTF-8.
//
// native/api/build_ffi.py reads what stands between the two cdef marks; keep it free of preprocessor lines.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef _WIN32
#    ifdef PYKVQ_BUILD
#        define PYKVQ_API __declspec(dllexport)
#    else
#        define PYKVQ_API __declspec(dllimport)
#    endif
#else
#    define PYKVQ_API __attribute__((visibility("default")))
#endif

// raised whenever a struct or a signature below changes
#define PYKVQ_ABI_VERSION 5

#ifdef __cplusplus
extern "C" {
#endif

// cdef-begin

typedef struct pykvq_model pykvq_model;
typedef struct pykvq_context pykvq_context;
typedef struct pykvq_sampler pykvq_sampler;

typedef enum pykvq_status {
    PYKVQ_STATUS_OK               = 0,
    PYKVQ_STATUS_INVALID_ARGUMENT = 1,  // a value the caller can correct
    PYKVQ_STATUS_IO               = 2,  // a file is missing, unreadable or not writable
    PYKVQ_STATUS_FORMAT           = 3,  // a file or a state is damaged, cut short or of another kind
    PYKVQ_STATUS_MEMORY           = 4,  // an allocation failed
    PYKVQ_STATUS_UNSUPPORTED      = 5,  // the model cannot be run this way (head dim, architecture)
    PYKVQ_STATUS_NO_SPACE         = 6,  // the KV cache has no room for the batch; nothing was changed
    PYKVQ_STATUS_ABORTED          = 7,  // stopped by pykvq_context_abort() or by a callback
    PYKVQ_STATUS_INTERNAL         = 8   // a failed check inside the runtime: please report it
} pykvq_status;

typedef enum pykvq_log_level {
    PYKVQ_LOG_DEBUG = 1,
    PYKVQ_LOG_INFO  = 2,
    PYKVQ_LOG_WARN  = 3,
    PYKVQ_LOG_ERROR = 4
} pykvq_log_level;

// level is a pykvq_log_level; text is one line without a newline
typedef void (*pykvq_log_fn)(int32_t level, const char * text, void * user_data);
// progress runs from 0 to 1; returning false stops the load
typedef bool (*pykvq_progress_fn)(float progress, void * user_data);
// returning true stops the decode; called often, from a compute thread
typedef bool (*pykvq_abort_fn)(void * user_data);

// --- library ---

// PYKVQ_ABI_VERSION of the library
PYKVQ_API int32_t pykvq_abi_version(void);
// JSON object: {"llama_cpp": package version, "ggml": version, "compiler": ..., "build": ..., "cpu_features": {...}}
PYKVQ_API const char * pykvq_build_info(void);
// The calling thread's last error, "" if none. Valid until the thread's next failing call.
PYKVQ_API const char * pykvq_last_error(void);
// Number of KV types, and their names ("f32", "f16", "bf16", "q8_0", ..., "q4_ve", "q2_t"); NULL out of range.
PYKVQ_API int32_t pykvq_kv_type_count(void);
PYKVQ_API const char * pykvq_kv_type_name(int32_t index);
// Elements a block and bytes a block of a KV type; both 0 for an unknown name.
PYKVQ_API int32_t pykvq_kv_type_block_size(const char * name);
PYKVQ_API int32_t pykvq_kv_type_block_bytes(const char * name);
// Quantize n floats to a KV type with its reference encoder, and back. n must be a multiple of the block size;
// data holds n / block_size * block_bytes bytes.
PYKVQ_API pykvq_status pykvq_kv_type_encode(const char * name, const float * x, int64_t n, void * data);
PYKVQ_API pykvq_status pykvq_kv_type_decode(const char * name, const void * data, int64_t n, float * y);
// Lines below min_level are dropped. fn == NULL restores the default (nothing is printed). Process-wide.
PYKVQ_API void pykvq_log_set(pykvq_log_fn fn, void * user_data, int32_t min_level);

// --- model ---

typedef struct pykvq_model_params {
    int32_t n_gpu_layers;  // layers kept on the GPU, -1 = all
    int32_t main_gpu;      // the device for everything when split over none
    const char * device;   // names of the GPUs to use, with commas between, as "CUDA0"; "none"; NULL: all
    bool use_mmap;         // map the file instead of reading it
    bool use_mlock;        // keep the weights from being swapped
    bool vocab_only;       // tokenizer and metadata only, no weights
    bool metadata_only;    // sizes too, still no weights: enough for pykvq_predict_kv
    bool check_tensors;    // refuse weights that hold non-finite values
    pykvq_progress_fn progress;
    void * progress_data;
} pykvq_model_params;

// With vocab_only, what is not about tokens is 0.
typedef struct pykvq_model_info {
    int32_t n_ctx_train;
    int32_t n_embd;
    int32_t n_layer;
    int32_t n_head;     // query heads of layer 0
    int32_t n_head_kv;  // KV heads of layer 0
    int32_t head_dim_k;
    int32_t head_dim_v;
    int32_t n_swa;  // sliding window in tokens, 0 = none
    int32_t n_vocab;
    int64_t n_params;
    int64_t n_bytes;    // size of all tensors
    int32_t token_bos;  // -1 where the model has none, as for every token_* below
    int32_t token_eos;
    int32_t token_eot;
    int32_t token_nl;
    int32_t token_pad;
    int32_t token_fim_prefix;
    int32_t token_fim_suffix;
    int32_t token_fim_middle;
    bool add_bos;
    bool add_eos;
    bool has_encoder;
    bool has_decoder;
    bool is_recurrent;
    bool is_hybrid;
} pykvq_model_info;

PYKVQ_API pykvq_model_params pykvq_model_default_params(void);
PYKVQ_API pykvq_status pykvq_model_load(const char * path, const pykvq_model_params * params, pykvq_model ** model);
PYKVQ_API void pykvq_model_free(pykvq_model * model);
PYKVQ_API void pykvq_model_get_info(const pykvq_model * model, pykvq_model_info * info);
// The next four copy a string of at most size - 1 bytes plus a NUL and return its full length, or -1 if there is none.
PYKVQ_API int32_t pykvq_model_desc(const pykvq_model * model, char * buf, size_t size);
PYKVQ_API int32_t pykvq_model_meta_value(const pykvq_model * model, const char * key, char * buf, size_t size);
PYKVQ_API int32_t pykvq_model_meta_key_at(const pykvq_model * model, int32_t i, char * buf, size_t size);
PYKVQ_API int32_t pykvq_model_meta_value_at(const pykvq_model * model, int32_t i, char * buf, size_t size);
PYKVQ_API int32_t pykvq_model_meta_count(const pykvq_model * model);
// The chat template (name == NULL: the default one); NULL if there is none. Owned by the model.
PYKVQ_API const char * pykvq_model_chat_template(const pykvq_model * model, const char * name);

// Whether the weights of a tensor are used as they are in the file (and so can be mapped); false for an unknown name.
PYKVQ_API bool pykvq_model_tensor_is_as_in_file(const pykvq_model * model, const char * name);

// --- text ---

// Writes at most capacity tokens and sets *n_tokens to how many there are in all: call again with more room if it is
// above capacity (nothing is written then). parse_special turns "<|im_end|>" and the like into their tokens.
PYKVQ_API pykvq_status pykvq_tokenize(const pykvq_model * model, const char * text, int32_t n_bytes, bool add_special,
                                      bool parse_special, int32_t * tokens, int32_t capacity, int32_t * n_tokens);
// The bytes of one token, which may be a part of a code point. *n_bytes as *n_tokens above. Special tokens yield no
// bytes unless special is true.
PYKVQ_API pykvq_status pykvq_token_bytes(const pykvq_model * model, int32_t token, bool special, char * buf,
                                         int32_t capacity, int32_t * n_bytes);
// Joins tokens to text; differs from concatenated token bytes in leading spaces and byte-fallback clean-up.
PYKVQ_API pykvq_status pykvq_detokenize(const pykvq_model * model, const int32_t * tokens, int32_t n_tokens,
                                        bool remove_special, bool unparse_special, char * buf, int32_t capacity,
                                        int32_t * n_bytes);
// Whether a token ends generation (EOS, EOT, ...), and whether it is a control token. False out of range.
PYKVQ_API bool pykvq_token_is_eog(const pykvq_model * model, int32_t token);
PYKVQ_API bool pykvq_token_is_control(const pykvq_model * model, int32_t token);

// --- context ---

// The types of one layer.
typedef struct pykvq_kv_layer {
    int32_t layer;
    const char * type_k;
    const char * type_v;
} pykvq_kv_layer;

// Where tokens are kept from a certain age on. Tiers are listed youngest first; n_tokens of a sequence stay in each, the
// last one takes what is left. The first one's n_tokens is the window.
typedef struct pykvq_kv_tier {
    const char * type_k;
    const char * type_v;
    int32_t n_tokens;
    int32_t n_layers;               // layers of other types than these; none in the first tier
    const pykvq_kv_layer * layers;  // NULL without
} pykvq_kv_tier;

typedef struct pykvq_context_params {
    int32_t n_ctx;      // tokens in all sequences together, 0 = the model's training context
    int32_t n_batch;    // most tokens a decode call takes
    int32_t n_ubatch;   // micro-batch: tokens computed at once
    int32_t n_seq_max;  // sequences
    int32_t n_threads;  // 0 = the physical cores this process may use
    int32_t n_threads_batch;
    const char * type_k;  // KV types by name, when n_tiers is 0
    const char * type_v;
    int32_t n_tiers;  // 0, or 2 to 4
    const pykvq_kv_tier * tiers;
    int32_t n_sink;            // with tiers: first tokens of a sequence, which never leave the first tier
    const char * calibration;  // the calibration file of this model, NULL = none; for quantized caches and tiers
    int32_t flash_attn;        // 1 on, 0 off, -1 automatic
    int32_t pooling_type;      // -1 from the model, 0 none, 1 mean, 2 cls, 3 last, 4 rank
    float rope_freq_base;      // 0 = from the model
    float rope_freq_scale;     // 0 = from the model
    int32_t rope_scaling;      // -1 from the model, 0 none, 1 linear, 2 yarn, 3 longrope
    float yarn_ext_factor;     // -1 = from the model
    float yarn_attn_factor;
    float yarn_beta_fast;
    float yarn_beta_slow;
    int32_t yarn_orig_ctx;  // 0 = from the model
    bool embeddings;        // compute embeddings instead of logits
    bool offload_kqv;       // KV cache and attention on the GPU
    bool op_offload;
    bool swa_full;    // full-size cache for sliding-window layers
    bool kv_unified;  // one cache shared by all sequences
    bool force;       // allocate even what does not seem to fit into memory
} pykvq_context_params;

// One tier as it is now.
typedef struct pykvq_tier_info {
    const char * type_k;
    const char * type_v;
    int32_t n_capacity;  // tokens
    int32_t n_used;
    int64_t n_bytes;        // K and V of all layers, as allocated
    int64_t n_requantized;  // tokens that came down into it so far
} pykvq_tier_info;

typedef struct pykvq_context_info {
    int32_t n_ctx;
    int32_t n_ctx_seq;  // tokens one sequence may hold
    int32_t n_batch;
    int32_t n_ubatch;
    int32_t n_seq_max;
    int32_t n_threads;
    int32_t n_threads_batch;
    int64_t kv_bytes;       // bytes really allocated for the KV cache (and recurrent state)
    int64_t kv_bytes_f16;   // what the same cache would take in F16
    int64_t kv_elements;    // elements of K and V together
    int64_t compute_bytes;  // scratch for the graphs
    bool flash_attn;
    int32_t n_attention_device;    // layers whose attention runs on a GPU
    int32_t n_attention_fallback;  // layers on a GPU whose attention it does not compute: the CPU does
    bool can_shift;                // positions can be moved (context shift)
    int64_t calibration_bytes;     // memory of the transforms of a calibration, 0 without
} pykvq_context_info;

PYKVQ_API pykvq_context_params pykvq_context_default_params(void);
PYKVQ_API pykvq_status pykvq_context_create(pykvq_model * model, const pykvq_context_params * params,
                                            pykvq_context ** context);
// Bytes that the KV cache of such a context will take, and the same cache in F16. Recurrent state is not counted.
PYKVQ_API pykvq_status pykvq_predict_kv(const pykvq_model * model, const pykvq_context_params * params,
                                        int64_t * n_bytes, int64_t * n_bytes_f16);

// Memory of a model with one context, apart from a mapped model file. "device" is everything that is no main memory.
typedef struct pykvq_memory_info {
    int64_t weights_bytes;  // copies in main memory: weights that are rearranged for the processor
    int64_t kv_bytes;       // KV cache and recurrent state
    int64_t compute_bytes;  // scratch for the graphs, and the tables of cells and graphs
    int64_t device_weights_bytes;
    int64_t device_kv_bytes;
    int64_t device_compute_bytes;
    // what a calibration takes in addition, which is not in the numbers above
    int64_t calibration_bytes;
    int64_t device_calibration_bytes;
} pykvq_memory_info;

// The memory such a context will take; nothing is allocated. The model must be one of metadata_only. Logits are counted
// for one token, as most batches ask for.
PYKVQ_API pykvq_status pykvq_predict_memory(pykvq_model * model, const pykvq_context_params * params,
                                            pykvq_memory_info * info);
// Bytes of RAM that this process could still take, and of memory free on all GPUs; 0 if unknown or none.
PYKVQ_API int64_t pykvq_available_memory(void);
PYKVQ_API int64_t pykvq_available_device_memory(void);

PYKVQ_API void pykvq_context_free(pykvq_context * context);
PYKVQ_API void pykvq_context_get_info(const pykvq_context * context, pykvq_context_info * info);
// 0 for a cache without tiers
PYKVQ_API int32_t pykvq_context_tier_count(const pykvq_context * context);
PYKVQ_API pykvq_status pykvq_context_get_tier(const pykvq_context * context, int32_t i, pykvq_tier_info * info);
PYKVQ_API void pykvq_context_set_threads(pykvq_context * context, int32_t n_threads, int32_t n_threads_batch);

// Computes n_tokens tokens. tokens, pos, seq_id and want_logits are arrays of n_tokens. A position must follow the last
// one of its sequence. On PYKVQ_STATUS_NO_SPACE the cache is as before; on PYKVQ_STATUS_ABORTED the micro-batches that
// were done remain (see pykvq_kv_pos_max).
PYKVQ_API pykvq_status pykvq_decode(pykvq_context * context, const int32_t * tokens, const int32_t * pos,
                                    const int32_t * seq_id, const int8_t * want_logits, int32_t n_tokens);
// n_vocab logits, or n_embd embedding values, of the i-th token of the last batch (-1 = the last one asked for); NULL if
// they were not asked for. Valid until the next decode.
PYKVQ_API const float * pykvq_logits(pykvq_context * context, int32_t i);
PYKVQ_API const float * pykvq_embeddings(pykvq_context * context, int32_t i);
// The pooled embedding of a sequence; NULL with pooling_type none.
PYKVQ_API const float * pykvq_embeddings_seq(pykvq_context * context, int32_t seq_id);
// Loads a LoRA adapter (GGUF) and adds it, times scale, to what the context computes from now on, and the KV cache should
// be empty. It is freed with the model.
PYKVQ_API pykvq_status pykvq_context_add_lora(pykvq_context * context, const char * path, float scale);
// Stops the running decode, or the next one, with PYKVQ_STATUS_ABORTED. Any thread may call it.
PYKVQ_API void pykvq_context_abort(pykvq_context * context);
// Takes an abort request back that no decode has seen.
PYKVQ_API void pykvq_context_clear_abort(pykvq_context * context);
// fn is asked during a decode, beside pykvq_context_abort(); NULL removes it.
PYKVQ_API void pykvq_context_set_abort_callback(pykvq_context * context, pykvq_abort_fn fn, void * user_data);

// --- KV cache ---
// Ranges are [p0, p1); p0 < 0 means from the start, p1 < 0 to the end. seq_id -1 in kv_remove means every sequence.

PYKVQ_API void pykvq_kv_clear(pykvq_context * context);
// PYKVQ_STATUS_UNSUPPORTED where a part cannot be removed (recurrent state)
PYKVQ_API pykvq_status pykvq_kv_remove(pykvq_context * context, int32_t seq_id, int32_t p0, int32_t p1);
// Without kv_unified, seq_dst is replaced and only a whole sequence can be copied (else PYKVQ_STATUS_UNSUPPORTED).
PYKVQ_API pykvq_status pykvq_kv_copy(pykvq_context * context, int32_t seq_src, int32_t seq_dst, int32_t p0, int32_t p1);
PYKVQ_API pykvq_status pykvq_kv_keep(pykvq_context * context, int32_t seq_id);
// Adds delta to the positions; PYKVQ_STATUS_UNSUPPORTED where can_shift is false.
PYKVQ_API pykvq_status pykvq_kv_shift(pykvq_context * context, int32_t seq_id, int32_t p0, int32_t p1, int32_t delta);
// Smallest and largest position a sequence holds, -1 if it is empty or the id is out of range.
PYKVQ_API int32_t pykvq_kv_pos_min(const pykvq_context * context, int32_t seq_id);
PYKVQ_API int32_t pykvq_kv_pos_max(const pykvq_context * context, int32_t seq_id);

// --- state ---
// seq_id -1 saves everything, else one sequence. A saved state starts with a header that names the format, the model,
// the KV types and the size, and a checksum; pykvq_state_load checks all of it before it touches the cache.

PYKVQ_API pykvq_status pykvq_state_size(pykvq_context * context, int32_t seq_id, size_t * n_bytes);
PYKVQ_API pykvq_status pykvq_state_save(pykvq_context * context, int32_t seq_id, uint8_t * data, size_t n_bytes,
                                        size_t * n_written);
PYKVQ_API pykvq_status pykvq_state_load(pykvq_context * context, int32_t seq_id, const uint8_t * data, size_t n_bytes);

// --- calibration ---

typedef struct pykvq_moments pykvq_moments;

// Sums over the tokens of one layer, in the order [n_head, dim, dim] or [n_head, dim]: products of post-rotation queries (of
// all query heads that read a KV head), keys and values with themselves, and keys and values. Owned by the pykvq_moments.
//
// What an error costs: over n_sample queries of each query head, with p the attention to a key that is no sink and outside the
// window, v its value and o the output, reach [n_head] is the sum of p^2, swing [n_head, dim_v, dim_v] that of p^2 (v - o)
// (v - o)^T and output that of o o^T. log_residual is the mean logarithm of the squared norm of the residual stream that
// enters the layer.
typedef struct pykvq_layer_moments {
    int32_t layer;
    int32_t n_head;  // KV heads
    int32_t dim_k;
    int32_t dim_v;
    int64_t n_query;  // queries a KV head
    int64_t n_key;
    const double * qq;
    const double * kk;
    const double * vv;
    const double * k;
    const double * v;
    bool windowed;  // a sliding-window layer, which has no tiers
    float kq_scale;
    int64_t n_sample;  // 0 of a windowed layer
    const double * reach;
    const double * swing;
    const double * output;
    double log_residual;
} pykvq_layer_moments;

// Computes texts of n_text tokens each, text i from position i * pos_step on, and collects what attention sees of all but the
// first n_skip tokens of each; the newest n_window tokens cost nothing. A model that does not rotate positions starts at 0
// each time. n_ctx and batch sizes of params are ignored. Progress runs from 0 to 1; when it returns false the call ends with PYKVQ_STATUS_ABORTED.
PYKVQ_API pykvq_status pykvq_moments_collect(pykvq_model * model, const pykvq_context_params * params,
                                             const int32_t * tokens, int32_t n_tokens, int32_t n_text, int32_t pos_step,
                                             int32_t n_skip, int32_t n_window, pykvq_progress_fn progress,
                                             void * progress_data, pykvq_moments ** moments);
PYKVQ_API int32_t pykvq_moments_layer_count(const pykvq_moments * moments);
PYKVQ_API pykvq_status pykvq_moments_get_layer(const pykvq_moments * moments, int32_t i, pykvq_layer_moments * layer);
PYKVQ_API void pykvq_moments_free(pykvq_moments * moments);

// --- sampling ---

typedef struct pykvq_sampler_params {
    uint32_t seed;
    float temperature;        // 0 = greedy
    int32_t top_k;            // <= 0 = off
    float top_p;              // 1 = off
    float min_p;              // 0 = off
    float typical_p;          // 1 = off
    float repeat_penalty;     // 1 = off
    float frequency_penalty;  // 0 = off
    float presence_penalty;   // 0 = off
    int32_t penalty_last_n;   // tokens looked back, at most 1048576, -1 = the training context
    int32_t mirostat_mode;    // 0 off, 1 or 2
    float mirostat_tau;
    float mirostat_eta;
    int32_t n_logit_bias;
    const int32_t * logit_bias_tokens;
    const float * logit_bias_values;
} pykvq_sampler_params;

PYKVQ_API pykvq_sampler_params pykvq_sampler_default_params(void);
PYKVQ_API pykvq_status pykvq_sampler_create(const pykvq_model * model, const pykvq_sampler_params * params,
                                            pykvq_sampler ** sampler);
PYKVQ_API void pykvq_sampler_free(pykvq_sampler * sampler);
PYKVQ_API void pykvq_sampler_reset(pykvq_sampler * sampler);
// Draws from the logits of the i-th token of the last batch and accepts the token (penalties look back at it).
PYKVQ_API pykvq_status pykvq_sampler_sample(pykvq_sampler * sampler, pykvq_context * context, int32_t i,
                                            int32_t * token);
// The same from n_vocab logits of the caller (a mask applied, say), which are left unchanged.
PYKVQ_API pykvq_status pykvq_sampler_sample_logits(pykvq_sampler * sampler, const float * logits, int32_t n_vocab,
                                                   int32_t * token);
// Tells the sampler of a token that it did not draw (the prompt).
PYKVQ_API void pykvq_sampler_accept(pykvq_sampler * sampler, int32_t token);

// --- model files ---

// Name, elements a block and bytes a block of a tensor type, by its number in a GGUF file; NULL and 0 if there is none.
PYKVQ_API const char * pykvq_tensor_type_name(int32_t type);
PYKVQ_API int32_t pykvq_tensor_type_block_size(int32_t type);
PYKVQ_API int32_t pykvq_tensor_type_block_bytes(int32_t type);

// Types that model files can be quantized to ("q4_k_m", "q8_0", "f16", ...); NULL out of range.
PYKVQ_API int32_t pykvq_quantize_type_count(void);
PYKVQ_API const char * pykvq_quantize_type_name(int32_t index);
// Bits per weight of the type's matrices, scales included; 0 for an unknown name.
PYKVQ_API float pykvq_quantize_type_bits(const char * name);
// Whether the type is only usable with an importance matrix.
PYKVQ_API bool pykvq_quantize_type_needs_imatrix(const char * name);

typedef struct pykvq_quantize_params {
    const char * type;      // see pykvq_quantize_type_name
    const char * imatrix;   // an importance matrix (GGUF), or NULL
    int32_t n_threads;      // 0 = the physical cores this process may use
    bool allow_requantize;  // take quantized weights too, at a loss
    bool pure;              // every matrix in the same type
    pykvq_progress_fn progress;
    void * progress_data;
} pykvq_quantize_params;

PYKVQ_API pykvq_quantize_params pykvq_quantize_default_params(void);
// Writes a quantized copy of a model file. What is written so far remains when it fails or is stopped.
PYKVQ_API pykvq_status pykvq_quantize(const char * path, const char * out_path, const pykvq_quantize_params * params);
// Writes the importance matrix of a model over a text, n_chunk tokens at a time, in llama.cpp's GGUF form: for each matrix
// the sums of the squares of its inputs. A rest shorter than n_chunk is left out.
PYKVQ_API pykvq_status pykvq_imatrix_write(pykvq_model * model, const int32_t * tokens, int32_t n_tokens,
                                           int32_t n_chunk, int32_t n_threads, const char * out_path,
                                           pykvq_progress_fn progress, void * progress_data);

// cdef-end

#ifdef __cplusplus
}
#endif
