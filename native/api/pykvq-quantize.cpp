#include "ggml-cpp.h"
#include "pykvq-guard.h"
#include "pykvq-system.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>

namespace {

// What llama.cpp quantizes model files to. bits: of a matrix in the type that most matrices get.
struct quantize_type {
    const char * name;
    llama_ftype ftype;
    ggml_type matrix_type;
    bool needs_imatrix;
};

const quantize_type QUANTIZE_TYPES[] = {
    { "f32", LLAMA_FTYPE_ALL_F32, GGML_TYPE_F32, false },
    { "f16", LLAMA_FTYPE_MOSTLY_F16, GGML_TYPE_F16, false },
    { "bf16", LLAMA_FTYPE_MOSTLY_BF16, GGML_TYPE_BF16, false },
    { "q8_0", LLAMA_FTYPE_MOSTLY_Q8_0, GGML_TYPE_Q8_0, false },
    { "q6_k", LLAMA_FTYPE_MOSTLY_Q6_K, GGML_TYPE_Q6_K, false },
    { "q5_k_m", LLAMA_FTYPE_MOSTLY_Q5_K_M, GGML_TYPE_Q5_K, false },
    { "q5_k_s", LLAMA_FTYPE_MOSTLY_Q5_K_S, GGML_TYPE_Q5_K, false },
    { "q5_1", LLAMA_FTYPE_MOSTLY_Q5_1, GGML_TYPE_Q5_1, false },
    { "q5_0", LLAMA_FTYPE_MOSTLY_Q5_0, GGML_TYPE_Q5_0, false },
    { "q4_k_m", LLAMA_FTYPE_MOSTLY_Q4_K_M, GGML_TYPE_Q4_K, false },
    { "q4_k_s", LLAMA_FTYPE_MOSTLY_Q4_K_S, GGML_TYPE_Q4_K, false },
    { "q4_1", LLAMA_FTYPE_MOSTLY_Q4_1, GGML_TYPE_Q4_1, false },
    { "q4_0", LLAMA_FTYPE_MOSTLY_Q4_0, GGML_TYPE_Q4_0, false },
    { "iq4_nl", LLAMA_FTYPE_MOSTLY_IQ4_NL, GGML_TYPE_IQ4_NL, false },
    { "iq4_xs", LLAMA_FTYPE_MOSTLY_IQ4_XS, GGML_TYPE_IQ4_XS, false },
    { "q3_k_l", LLAMA_FTYPE_MOSTLY_Q3_K_L, GGML_TYPE_Q3_K, false },
    { "q3_k_m", LLAMA_FTYPE_MOSTLY_Q3_K_M, GGML_TYPE_Q3_K, false },
    { "q3_k_s", LLAMA_FTYPE_MOSTLY_Q3_K_S, GGML_TYPE_Q3_K, false },
    { "iq3_m", LLAMA_FTYPE_MOSTLY_IQ3_M, GGML_TYPE_IQ3_S, false },
    { "iq3_s", LLAMA_FTYPE_MOSTLY_IQ3_S, GGML_TYPE_IQ3_S, false },
    { "iq3_xs", LLAMA_FTYPE_MOSTLY_IQ3_XS, GGML_TYPE_IQ3_S, true },
    { "iq3_xxs", LLAMA_FTYPE_MOSTLY_IQ3_XXS, GGML_TYPE_IQ3_XXS, true },
    { "q2_k", LLAMA_FTYPE_MOSTLY_Q2_K, GGML_TYPE_Q2_K, false },
    { "q2_k_s", LLAMA_FTYPE_MOSTLY_Q2_K_S, GGML_TYPE_Q2_K, true },
    { "iq2_m", LLAMA_FTYPE_MOSTLY_IQ2_M, GGML_TYPE_IQ2_S, true },
    { "iq2_s", LLAMA_FTYPE_MOSTLY_IQ2_S, GGML_TYPE_IQ2_XS, true },
    { "iq2_xs", LLAMA_FTYPE_MOSTLY_IQ2_XS, GGML_TYPE_IQ2_XS, true },
    { "iq2_xxs", LLAMA_FTYPE_MOSTLY_IQ2_XXS, GGML_TYPE_IQ2_XXS, true },
    { "iq1_m", LLAMA_FTYPE_MOSTLY_IQ1_M, GGML_TYPE_IQ1_M, true },
    { "iq1_s", LLAMA_FTYPE_MOSTLY_IQ1_S, GGML_TYPE_IQ1_S, true },
    { "tq2_0", LLAMA_FTYPE_MOSTLY_TQ2_0, GGML_TYPE_TQ2_0, false },
    { "tq1_0", LLAMA_FTYPE_MOSTLY_TQ1_0, GGML_TYPE_TQ1_0, false },
};
constexpr int32_t N_QUANTIZE_TYPES = sizeof(QUANTIZE_TYPES) / sizeof(QUANTIZE_TYPES[0]);

const quantize_type * find_quantize_type(const char * name) {
    for (const quantize_type & type : QUANTIZE_TYPES) {
        if (name && std::strcmp(type.name, name) == 0) {
            return &type;
        }
    }
    return nullptr;
}

const quantize_type & require_quantize_type(const char * name) {
    const quantize_type * type = find_quantize_type(name);
    if (!type) {
        std::string list;
        for (const quantize_type & valid : QUANTIZE_TYPES) {
            list += (list.empty() ? "" : ", ") + std::string(valid.name);
        }
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "unknown model type '%s'; valid: %s", name ? name : "(null)",
                    list.c_str());
    }
    return *type;
}

// The mean square of each matrix column's input, by the name of the matrix.
using importance = std::map<std::string, std::vector<float>>;

// Reads llama.cpp's GGUF form: NAME.in_sum2 (sums over all inputs, one row a matrix) and NAME.counts (inputs a matrix).
importance read_imatrix(const char * path) {
    ggml_context * raw_tensors = nullptr;
    const gguf_context_ptr file(gguf_init_from_file(path, { false, &raw_tensors }));
    const ggml_context_ptr tensors(raw_tensors);
    if (!file || !tensors) {
        pykvq_throw(PYKVQ_STATUS_FORMAT, "cannot read the importance matrix '%s': %s", path,
                    pykvq_logged_errors().c_str());
    }
    importance result;
    const std::string suffix = ".in_sum2";
    for (ggml_tensor * sums = ggml_get_first_tensor(raw_tensors); sums;
         sums               = ggml_get_next_tensor(raw_tensors, sums)) {
        const std::string name = sums->name;
        if (name.size() <= suffix.size() || name.compare(name.size() - suffix.size(), suffix.size(), suffix) != 0) {
            continue;
        }
        const std::string matrix   = name.substr(0, name.size() - suffix.size());
        const ggml_tensor * counts = ggml_get_tensor(raw_tensors, (matrix + ".counts").c_str());
        const int64_t n_matrix     = sums->ne[1];
        if (!counts || sums->type != GGML_TYPE_F32 || counts->type != GGML_TYPE_F32 || ggml_n_dims(sums) > 2 ||
            ggml_nelements(counts) != n_matrix) {
            pykvq_throw(PYKVQ_STATUS_FORMAT, "the importance matrix '%s' is damaged at %s: make it anew", path,
                        matrix.c_str());
        }
        std::vector<float> & values = result[matrix];
        for (int64_t i = 0; i < n_matrix; ++i) {
            const float count = ((const float *) counts->data)[i];
            for (int64_t j = 0; j < sums->ne[0]; ++j) {
                const float sum = ((const float *) sums->data)[i * sums->ne[0] + j];
                // an expert that no token reached: all of its columns count alike
                const float mean = count > 0 ? sum / count : 1.0f;
                if (!std::isfinite(mean)) {
                    pykvq_throw(PYKVQ_STATUS_FORMAT, "the importance matrix '%s' holds %f at %s: make it anew", path,
                                (double) mean, matrix.c_str());
                }
                values.push_back(mean);
            }
        }
    }
    if (result.empty()) {
        pykvq_throw(PYKVQ_STATUS_FORMAT, "'%s' is no importance matrix: it has no tensor that ends in .in_sum2", path);
    }
    return result;
}

std::vector<llama_model_imatrix_data> to_llama_imatrix(const importance & imatrix) {
    std::vector<llama_model_imatrix_data> result;
    for (const auto & [name, values] : imatrix) {
        result.push_back({ name.c_str(), values.data(), values.size() });
    }
    result.push_back({ nullptr, nullptr, 0 });
    return result;
}

}  // namespace

int32_t pykvq_quantize_type_count(void) {
    return N_QUANTIZE_TYPES;
}

const char * pykvq_quantize_type_name(int32_t index) {
    return index >= 0 && index < N_QUANTIZE_TYPES ? QUANTIZE_TYPES[index].name : nullptr;
}

float pykvq_quantize_type_bits(const char * name) {
    const quantize_type * type = find_quantize_type(name);
    return type ? 8.0f * (float) ggml_type_size(type->matrix_type) / (float) ggml_blck_size(type->matrix_type) : 0.0f;
}

bool pykvq_quantize_type_needs_imatrix(const char * name) {
    const quantize_type * type = find_quantize_type(name);
    return type && type->needs_imatrix;
}

pykvq_quantize_params pykvq_quantize_default_params(void) {
    return { "q4_k_m", nullptr, 0, false, false, nullptr, nullptr };
}

pykvq_status pykvq_quantize(const char * path, const char * out_path, const pykvq_quantize_params * params) {
    return pykvq_guard([&] {
        pykvq_require(path, "path");
        pykvq_require(out_path, "out_path");
        pykvq_require(params, "params");
        const quantize_type & type = require_quantize_type(params->type);
        if (type.needs_imatrix && !params->imatrix) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "%s is only usable with an importance matrix", type.name);
        }
        const importance imatrix = params->imatrix ? read_imatrix(params->imatrix) : importance();
        const std::vector<llama_model_imatrix_data> imatrix_data = to_llama_imatrix(imatrix);

        llama_model_quantize_params llama_params = llama_model_quantize_default_params();
        llama_params.ftype                       = type.ftype;
        llama_params.nthread          = params->n_threads > 0 ? params->n_threads : pykvq_system_physical_cores();
        llama_params.allow_requantize = params->allow_requantize;
        llama_params.pure             = params->pure;
        llama_params.imatrix          = imatrix.empty() ? nullptr : imatrix_data.data();

        bool stopped = false;
        // llama.cpp reports its progress in the log only: "[  12/ 272] blk.0.attn_q.weight ..."
        const pykvq_log_observer observer([&](const std::string & line) {
            int done;
            int total;
            if (params->progress && std::sscanf(line.c_str(), "[%d/%d]", &done, &total) == 2 && total > 0) {
                stopped = !params->progress((float) done / (float) total, params->progress_data);
                if (stopped) {
                    throw pykvq_error(PYKVQ_STATUS_ABORTED, "stopped");
                }
            }
        });
        const bool failed = llama_model_quantize(path, out_path, &llama_params) != 0;
        if (stopped) {
            pykvq_throw(PYKVQ_STATUS_ABORTED, "quantizing '%s' was stopped", path);
        }
        if (failed) {
            // the line begins with the tensor that was being written
            const std::string lead   = "failed to quantize: ";
            const std::string logged = pykvq_logged_errors();
            const size_t reason      = logged.find(lead);
            pykvq_throw(PYKVQ_STATUS_FORMAT, "cannot quantize '%s' to %s: %s", path, type.name,
                        logged.substr(reason == std::string::npos ? 0 : reason + lead.size()).c_str());
        }
    });
}
