// kvq-moments.h: second moments of the queries, keys and values that attention sees, for a calibration.

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
};

// While it is running on a thread, graphs built there mark what attention gets, and on_node, as the context's cb_eval, adds
// it up.
class LLAMA_API kvq_moments {
public:
    struct LLAMA_API scope {
        scope();
        ~scope();
    };

    // The first n_skip tokens of each micro-batch do not count.
    explicit kvq_moments(int64_t n_skip) : n_skip(n_skip) {}

    // Called where a graph enters attention, with q [dim, n_head, n_tokens], k and v [dim, n_head_kv, n_tokens] or NULL.
    static void observe(ggml_context * ctx, int32_t il, ggml_tensor *& q, ggml_tensor *& k, ggml_tensor *& v);

    // ggml_backend_sched_eval_callback; user_data is the kvq_moments
    static bool on_node(ggml_tensor * node, bool ask, void * user_data);

    const std::map<int32_t, kvq_layer_moments> & get_layers() const { return layers; }

private:
    void add(int32_t il, char what, int64_t n_head, const ggml_tensor * node);

    int64_t n_skip;
    std::map<int32_t, kvq_layer_moments> layers;
    std::vector<float> values;
};
