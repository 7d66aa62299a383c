// Reading a calibration file: a GGUF with the tensors that kvq-transform.h names, "blk.LAYER.NAME", all F32.

#include "gguf.h"
#include "kvq-llama.h"
#include "kvq-transform.h"
#include "llama-hparams.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace {

constexpr uint32_t FORMAT = 3;

int64_t find_key(const gguf_context * gguf, const char * name, gguf_type type) {
    const int64_t key = gguf_find_key(gguf, name);
    if (key < 0 || gguf_get_kv_type(gguf, key) != type) {
        throw std::runtime_error(std::string("it has no '") + name + "'");
    }
    return key;
}

// Rounds matrices to half precision, unless a row of n_row values would lose more than the format's relative error.
bool round_to_half(std::vector<float> & matrices, int64_t n_row) {
    std::vector<ggml_fp16_t> half(matrices.size());
    std::vector<float> rounded(matrices.size());
    ggml_fp32_to_fp16_row(matrices.data(), half.data(), (int64_t) half.size());
    ggml_fp16_to_fp32_row(half.data(), rounded.data(), (int64_t) half.size());
    for (size_t row = 0; row < matrices.size(); row += (size_t) n_row) {
        double error = 0.0, norm = 0.0;
        for (size_t i = row; i < row + (size_t) n_row; i++) {
            error += std::pow((double) matrices[i] - rounded[i], 2);
            norm += std::pow((double) matrices[i], 2);
        }
        if (!(error <= norm * std::ldexp(1.0, -22))) {
            return false;
        }
    }
    matrices = std::move(rounded);
    return true;
}

// -matrix * mean of each head
std::vector<float> negative_product(const std::vector<float> & matrices, const std::vector<float> & means,
                                    int64_t dim) {
    std::vector<float> result;
    for (size_t row = 0; row < means.size(); row++) {
        double sum = 0.0;
        for (size_t i = 0; i < (size_t) dim; i++) {
            sum += (double) matrices[row * (size_t) dim + i] * means[row / (size_t) dim * (size_t) dim + i];
        }
        result.push_back((float) -sum);
    }
    return result;
}

}  // namespace

struct kvq_transform_reader {
    std::shared_ptr<kvq_transform> result = std::make_shared<kvq_transform>();
    ggml_context * stored                 = nullptr;  // without the values
    const gguf_context * gguf             = nullptr;
    std::ifstream file;

    struct request {
        ggml_tensor ** target;
        std::string name;
        std::vector<int64_t> shape;
        std::vector<float> values;
        ggml_type type = GGML_TYPE_F32;
    };

    std::map<ggml_backend_buffer_type_t, std::vector<request>> wanted;  // of one layer

    // A tensor of the file, checked.
    std::vector<float> read_values(int32_t il, const char * name, std::vector<int64_t> shape) {
        const std::string full     = "blk." + std::to_string(il) + "." + name;
        const ggml_tensor * tensor = ggml_get_tensor(stored, full.c_str());
        shape.resize(GGML_MAX_DIMS, 1);
        if (!tensor || tensor->type != GGML_TYPE_F32 || !std::equal(shape.begin(), shape.end(), tensor->ne)) {
            throw std::runtime_error("its tensor '" + full +
                                     "' is missing or has another shape than the model's heads");
        }
        const size_t offset = gguf_get_tensor_offset(gguf, gguf_find_tensor(gguf, full.c_str()));
        std::vector<float> values((size_t) ggml_nelements(tensor));
        file.seekg((std::streamoff)(gguf_get_data_offset(gguf) + offset));
        if (!file.read((char *) values.data(), (std::streamsize) ggml_nbytes(tensor))) {
            throw std::runtime_error("it is cut short");
        }
        if (!std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); })) {
            throw std::runtime_error("its tensor '" + full + "' holds a value that is not finite");
        }
        return values;
    }

    request & want_matrices(int32_t il, const char * name, int64_t dim, int64_t n_head, ggml_backend_buffer_type_t type,
                            ggml_tensor *& target) {
        const std::vector<int64_t> shape = { dim, dim, n_head };
        request wish                     = { &target, name, shape, read_values(il, name, shape) };
        const ggml_type best             = kvq_transform::matrix_type(ggml_backend_buft_is_host(type), dim, n_head);
        if (best == GGML_TYPE_F16 && round_to_half(wish.values, dim)) {
            wish.type = best;
        }
        return wanted[type].emplace_back(std::move(wish));
    }

    void want_layer(const llama_hparams & hparams, int32_t il, ggml_backend_buffer_type_t type) {
        const int64_t n_head             = hparams.n_head_kv((uint32_t) il);
        const int64_t dim_k              = hparams.n_embd_head_k((uint32_t) il);
        const int64_t dim_v              = hparams.n_embd_head_v((uint32_t) il);
        const std::vector<float> k_means = read_values(il, "k_mean", { dim_k, n_head });
        const std::vector<float> v_means = read_values(il, "v_mean", { dim_v, n_head });
        auto & layer                     = result->layers[il];
        want_matrices(il, "k", dim_k, n_head, type, layer.k);
        want_matrices(il, "q", dim_k, n_head, type, layer.q);
        want_matrices(il, "out", dim_v, n_head, type, layer.out);
        const request & v                   = want_matrices(il, "v", dim_v, n_head, type, layer.v);
        const std::vector<float> v_offset   = negative_product(v.values, v_means, dim_v);
        const std::vector<int64_t> k_vector = { dim_k, 1, n_head };
        const std::vector<int64_t> v_vector = { dim_v, 1, n_head };
        wanted[type].push_back({ &layer.k_mean, "k_mean", k_vector, k_means });
        wanted[type].push_back({ &layer.v_mean, "v_mean", v_vector, v_means });
        wanted[type].push_back({ &layer.v_offset, "v_offset", v_vector, v_offset });
    }

    static void set_values(ggml_tensor * tensor, const std::vector<float> & values) {
        if (tensor->type == GGML_TYPE_F32) {
            ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
            return;
        }
        std::vector<ggml_fp16_t> half(values.size());
        ggml_fp32_to_fp16_row(values.data(), half.data(), (int64_t) half.size());
        ggml_backend_tensor_set(tensor, half.data(), 0, ggml_nbytes(tensor));
    }

    // Copies what is wanted to where the layers compute.
    void place() {
        for (auto & [type, requests] : wanted) {
            ggml_context_ptr context(ggml_init({ requests.size() * ggml_tensor_overhead(), nullptr, true }));
            for (const request & r : requests) {
                *r.target = ggml_new_tensor(context.get(), r.type, (int) r.shape.size(), r.shape.data());
                ggml_set_name(*r.target, r.name.c_str());
            }
            ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), type));
            if (!buffer) {
                throw std::bad_alloc();
            }
            ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            for (const request & r : requests) {
                set_values(*r.target, r.values);
            }
            result->buffers.emplace_back(std::move(context), std::move(buffer));
        }
        wanted.clear();
    }

    void read(const std::string & path, const llama_model * model, bool offload) {
        const gguf_context_ptr header(gguf_init_from_file(path.c_str(), { /*.no_alloc =*/true, /*.ctx =*/&stored }));
        const ggml_context_ptr owner(stored);
        if (!header) {
            throw std::runtime_error("it is missing, damaged or no GGUF file");
        }
        gguf = header.get();
        file.open(std::filesystem::u8path(path), std::ios::binary);
        const uint32_t format = gguf_get_val_u32(gguf, find_key(gguf, "kvq.format", GGUF_TYPE_UINT32));
        if (format != FORMAT) {
            throw std::runtime_error("it has format " + std::to_string(format) + " and this version reads format " +
                                     std::to_string(FORMAT));
        }
        result->spectral_keys         = gguf_get_val_bool(gguf, find_key(gguf, "kvq.spectral_keys", GGUF_TYPE_BOOL));
        const llama_hparams & hparams = model->hparams;
        result->centred_keys          = !hparams.attn_soft_cap;
        for (uint32_t il = 0; il < hparams.n_layer(); il++) {
            if (kvq_layer_has_kv(hparams, il)) {
                const bool sinks       = model->layers[il].attn_sinks;
                result->centred_keys   = result->centred_keys && !sinks;
                result->centred_values = result->centred_values && !sinks;
                want_layer(hparams, (int32_t) il,
                           offload ? ggml_backend_dev_buffer_type(model->dev_layer((int) il)) :
                                     ggml_backend_cpu_buffer_type());
                place();
            }
        }
    }
};

std::shared_ptr<const kvq_transform> kvq_transform::load(const std::string & path, const llama_model * model,
                                                         bool offload) {
    kvq_transform_reader reader;
    reader.read(path, model, offload);
    return reader.result;
}
