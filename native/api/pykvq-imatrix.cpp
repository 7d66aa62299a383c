#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "llama-cpp.h"
#include "pykvq-guard.h"
#include "pykvq-system.h"

#include <cmath>
#include <cstring>
#include <map>

namespace {

// Sums over all inputs of one weight: a row a matrix (an expert), and the number of inputs it saw.
struct column_sums {
    std::vector<float> sums;
    std::vector<float> counts;
};

// Collects, while graphs run, the squares of what the matrices of the layers are multiplied with.
struct imatrix_collector {
    std::map<std::string, column_sums> weights;
    std::vector<uint8_t> input;
    std::vector<uint8_t> ids;
    bool is_finite = true;

    // Backends may rename a weight's copy to DEVICE#NAME#0.
    static std::string weight_name(const ggml_tensor * weight) {
        std::string name   = weight->name;
        const size_t start = name.find('#');
        if (start != std::string::npos) {
            name = name.substr(start + 1, name.find('#', start + 1) - start - 1);
        }
        return name;
    }

    static bool wants(const ggml_tensor * t) {
        const bool multiplies = t->op == GGML_OP_MUL_MAT || t->op == GGML_OP_MUL_MAT_ID;
        return multiplies && t->src[1]->type == GGML_TYPE_F32 && weight_name(t->src[0]).compare(0, 4, "blk.") == 0;
    }

    static void copy_data(const ggml_tensor * tensor, std::vector<uint8_t> & data) {
        data.resize(ggml_nbytes(tensor));
        ggml_backend_tensor_get(tensor, data.data(), 0, data.size());
    }

    void add_row(column_sums & weight, const ggml_tensor * x, int64_t matrix, int64_t i1, int64_t i2, int64_t i3) {
        const int64_t n   = x->ne[0];
        const float * row = (const float *) (input.data() + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3]);
        float * sums      = weight.sums.data() + matrix * n;
        float total       = 0.0f;
        for (int64_t j = 0; j < n; ++j) {
            sums[j] += row[j] * row[j];
            total += sums[j];
        }
        weight.counts[(size_t) matrix] += 1.0f;
        if (!std::isfinite(total)) {
            is_finite = false;
        }
    }

    void add(const ggml_tensor * t) {
        const ggml_tensor * w = t->src[0];
        const ggml_tensor * x = t->src[1];
        const bool by_expert  = t->op == GGML_OP_MUL_MAT_ID;
        column_sums & weight  = weights[weight_name(w)];
        weight.sums.resize((size_t) (x->ne[0] * w->ne[2] * w->ne[3]), 0.0f);
        weight.counts.resize((size_t) (w->ne[2] * w->ne[3]), 0.0f);
        copy_data(x, input);
        if (by_expert) {
            add_by_expert(weight, t);
            return;
        }
        for (int64_t i3 = 0; i3 < x->ne[3]; ++i3) {
            for (int64_t i2 = 0; i2 < x->ne[2]; ++i2) {
                const int64_t matrix = (i3 % w->ne[3]) * w->ne[2] + i2 % w->ne[2];
                for (int64_t i1 = 0; i1 < x->ne[1]; ++i1) {
                    add_row(weight, x, matrix, i1, i2, i3);
                }
            }
        }
    }

    // ids is [experts used, tokens], x is [columns, experts used or 1, tokens]
    void add_by_expert(column_sums & weight, const ggml_tensor * t) {
        const ggml_tensor * x        = t->src[1];
        const ggml_tensor * selected = t->src[2];
        copy_data(selected, ids);
        for (int64_t token = 0; token < selected->ne[1]; ++token) {
            for (int64_t k = 0; k < selected->ne[0]; ++k) {
                int32_t expert;
                std::memcpy(&expert, ids.data() + token * selected->nb[1] + k * selected->nb[0], sizeof(expert));
                if (expert >= 0 && expert < t->src[0]->ne[2]) {
                    add_row(weight, x, expert, k % x->ne[1], token, 0);
                }
            }
        }
    }
};

bool on_tensor(ggml_tensor * t, bool ask, void * user_data) {
    if (imatrix_collector::wants(t)) {
        if (!ask) {
            ((imatrix_collector *) user_data)->add(t);
        }
        return true;
    }
    return !ask;
}

void write_imatrix(const imatrix_collector & collector, int32_t n_chunks, int32_t n_chunk, const char * path) {
    const gguf_context_ptr file(gguf_init_empty());
    const ggml_context_ptr tensors(
        ggml_init({ (2 * collector.weights.size() + 1) * ggml_tensor_overhead(), nullptr, true }));
    gguf_set_val_str(file.get(), "general.type", "imatrix");
    gguf_set_arr_str(file.get(), "imatrix.datasets", nullptr, 0);
    gguf_set_val_u32(file.get(), "imatrix.chunk_count", (uint32_t) n_chunks);
    gguf_set_val_u32(file.get(), "imatrix.chunk_size", (uint32_t) n_chunk);
    const auto add = [&](const std::string & name, const std::vector<float> & values, int64_t n_rows) {
        ggml_tensor * tensor =
            ggml_new_tensor_2d(tensors.get(), GGML_TYPE_F32, (int64_t) values.size() / n_rows, n_rows);
        ggml_set_name(tensor, name.c_str());
        gguf_add_tensor(file.get(), tensor);
        gguf_set_tensor_data(file.get(), name.c_str(), values.data());
    };
    for (const auto & [name, weight] : collector.weights) {
        const auto n_matrix = (int64_t) weight.counts.size();
        add(name + ".in_sum2", weight.sums, n_matrix);
        add(name + ".counts", weight.counts, n_matrix);
    }
    if (!gguf_write_to_file(file.get(), path, false)) {
        pykvq_throw(PYKVQ_STATUS_IO, "cannot write the importance matrix '%s': is the disk full?", path);
    }
}

void decode_chunk(llama_context * ctx, const int32_t * tokens, int32_t n_tokens) {
    llama_memory_clear(llama_get_memory(ctx), false);
    // llama_batch takes pointers to non-const; it does not write through them
    const int32_t result = llama_decode(ctx, llama_batch_get_one(const_cast<int32_t *>(tokens), n_tokens));
    if (result != 0) {
        pykvq_throw(PYKVQ_STATUS_INTERNAL, "llama_decode failed with %d: %s", result, pykvq_logged_errors().c_str());
    }
}

void require_tokens(const pykvq_model * model, const int32_t * tokens, int32_t n_tokens, int32_t n_chunk) {
    if (n_chunk < 16 || n_tokens < n_chunk) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT,
                    "n_chunk is %d and the text has %d tokens: a chunk has at least 16, and the text one chunk",
                    n_chunk, n_tokens);
    }
    pykvq_require_tokens(model, tokens, n_tokens);
}

}  // namespace

pykvq_status pykvq_imatrix_write(pykvq_model * model, const int32_t * tokens, int32_t n_tokens, int32_t n_chunk,
                                 int32_t n_threads, const char * out_path, pykvq_progress_fn progress,
                                 void * progress_data) {
    return pykvq_guard([&] {
        pykvq_require(model, "model");
        pykvq_require(tokens, "tokens");
        pykvq_require(out_path, "out_path");
        require_tokens(model, tokens, n_tokens, n_chunk);
        if (model->vocab_only || model->metadata_only || !llama_model_has_decoder(model->model)) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT,
                        "an importance matrix needs a decoder model that was loaded with its weights");
        }
        imatrix_collector collector;
        llama_context_params params = llama_context_default_params();
        params.n_ctx                = (uint32_t) n_chunk;
        params.n_batch              = (uint32_t) n_chunk;
        params.n_ubatch             = (uint32_t) std::min(n_chunk, 512);
        params.n_threads = params.n_threads_batch = n_threads > 0 ? n_threads : pykvq_system_physical_cores();
        params.n_outputs_max                      = 1;
        params.cb_eval                            = on_tensor;
        params.cb_eval_user_data                  = &collector;
        const llama_context_ptr ctx(llama_init_from_model(model->model, params));
        if (!ctx) {
            pykvq_throw(PYKVQ_STATUS_MEMORY, "cannot create a context: %s", pykvq_logged_errors().c_str());
        }
        const int32_t n_chunks = n_tokens / n_chunk;
        for (int32_t i = 0; i < n_chunks; ++i) {
            if (progress && !progress((float) i / (float) n_chunks, progress_data)) {
                pykvq_throw(PYKVQ_STATUS_ABORTED, "the importance matrix was stopped at chunk %d of %d", i, n_chunks);
            }
            decode_chunk(ctx.get(), tokens + i * n_chunk, n_chunk);
            if (!collector.is_finite) {
                pykvq_throw(PYKVQ_STATUS_FORMAT, "the model's activations are not finite: its weights are damaged");
            }
        }
        write_imatrix(collector, n_chunks, n_chunk, out_path);
    });
}
