// kvq-moments.h: what a calibration needs of the queries, keys and values that attention sees: their second moments, and what
// an error in them would cost.

#pragma once

#include "ggml.h"
#include "llama.h"

#include <cstdint>
#include <map>
#include <vector>

// Sums over tokens, a KV head each; the queries of all heads that read a KV head count for it.
struct kvq_layer_moments {
    int64_t n_head  = 0;  // KV heads
    int64_t dim_k   = 0;
    int64_t dim_v   = 0;
    int64_t n_query = 0;  // queries a KV head
    int64_t n_key   = 0;
    std::vector<double> qq;  // [n_head, dim_k, dim_k]
    std::vector<double> kk;
    std::vector<double> vv;  // [n_head, dim_v, dim_v]
    std::vector<double> k;   // [n_head, dim_k]
    std::vector<double> v;

    // Over some of the queries, of layers that see all tokens: sums over the keys that are no sinks and outside the window, p being the attention to them
    int64_t n_sample = 0;        // queries a query head
    std::vector<double> reach;   // [n_head], p^2
    std::vector<double> swing;   // [n_head, dim_v, dim_v], p^2 (v - o) (v - o)^T, o being the attention's output
    std::vector<double> output;  // [n_head, dim_v, dim_v], o o^T

    // of the text that is being computed; [n_tokens, heads, dim]
    std::vector<float> text_q, text_k, text_v;
    float kq_scale = 0;
};

// While it is running on a thread, graphs built there mark what attention gets, and on_node, as the context's cb_eval, adds
// it up.
class LLAMA_API kvq_moments {
public:
    struct LLAMA_API scope {
        scope();
        ~scope();
    };

    // The first n_skip tokens of each micro-batch do not count; the window is that of a cache, whose tokens stay exact.
    kvq_moments(const llama_model * model, int64_t n_skip, int64_t n_window)
        : model(model), n_skip(n_skip), n_window(n_window) {}

    // Called where a graph enters attention, with q [dim, n_head, n_tokens], k and v [dim, n_head_kv, n_tokens] or NULL; scores
    // are kq_scale q k.
    static void observe(ggml_context * ctx, int32_t il, float kq_scale, ggml_tensor *& q, ggml_tensor *& k,
                        ggml_tensor *& v);

    // ggml_backend_sched_eval_callback; user_data is the kvq_moments
    static bool on_node(ggml_tensor * node, bool ask, void * user_data);

    const std::map<int32_t, kvq_layer_moments> & get_layers() const { return layers; }
    // Mean logarithm of the squared norm of what enters a layer, or of the nearest that is known; 0 if none is.
    double log_residual_before(int32_t il) const;

private:
    void add(int32_t il, char what, int64_t n_head, float kq_scale, const ggml_tensor * node);
    void add_residual(int32_t il, const ggml_tensor * node);

    const llama_model * model;
    int64_t n_skip;
    int64_t n_window;
    std::map<int32_t, kvq_layer_moments> layers;
    std::map<int32_t, double> log_residuals;  // behind each layer, sum over tokens
    std::map<int32_t, int64_t> n_residuals;
    std::vector<float> values;  // scratch
};
