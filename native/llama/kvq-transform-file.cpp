// Reading a calibration file: a GGUF with the tensors that kvq-transform.h names, "blk.LAYER.NAME", all F32.

#include "gguf.h"
#include "kvq-llama.h"
#include "kvq-transform.h"
#include "llama-hparams.h"
#include "llama-model.h"

#include <cmath>
#include <stdexcept>

namespace {

constexpr uint32_t FORMAT = 1;

int64_t find_key(const gguf_context * gguf, const char * name, gguf_type type) {
    const int64_t key = gguf_find_key(gguf, name);
    if (key < 0 || gguf_get_kv_type(gguf, key) != type) {
        throw std::runtime_error(std::string("it has no '") + name + "'");
    }
    return key;
}

}  // namespace

struct kvq_transform_reader {
    std::shared_ptr<kvq_transform> result = std::make_shared<kvq_transform>();
    ggml_context * stored                 = nullptr;
    std::map<ggml_backend_buffer_type_t, std::vector<std::pair<ggml_tensor **, const ggml_tensor *>>> wanted;

    void want(int32_t il, const char * name, std::vector<int64_t> shape, ggml_backend_buffer_type_t type,
              ggml_tensor *& target) {
        const std::string full     = "blk." + std::to_string(il) + "." + name;
        const ggml_tensor * tensor = ggml_get_tensor(stored, full.c_str());
        shape.resize(GGML_MAX_DIMS, 1);
        if (!tensor || tensor->type != GGML_TYPE_F32 || !std::equal(shape.begin(), shape.end(), tensor->ne)) {
            throw std::runtime_error("its tensor '" + full +
                                     "' is missing or has another shape than the model's heads");
        }
        const float * values = (const float *) tensor->data;
        for (int64_t i = 0; i < ggml_nelements(tensor); i++) {
            if (!std::isfinite(values[i])) {
                throw std::runtime_error("its tensor '" + full + "' holds a value that is not finite");
            }
        }
        wanted[type].emplace_back(&target, tensor);
    }

    void want_layer(const llama_hparams & hparams, int32_t il, ggml_backend_buffer_type_t type) {
        const int64_t n_head = hparams.n_head_kv((uint32_t) il);
        const int64_t dim_k  = hparams.n_embd_head_k((uint32_t) il);
        const int64_t dim_v  = hparams.n_embd_head_v((uint32_t) il);
        auto & layer         = result->layers[il];
        want(il, "k", { dim_k, dim_k, n_head }, type, layer.k);
        want(il, "q", { dim_k, dim_k, n_head }, type, layer.q);
        want(il, "v", { dim_v, dim_v, n_head }, type, layer.v);
        want(il, "out", { dim_v, dim_v, n_head }, type, layer.out);
        want(il, "k_mean", { dim_k, n_head }, type, layer.k_mean);
        want(il, "v_mean", { dim_v, n_head }, type, layer.v_mean);
    }

    // Copies what is wanted to where the layers compute.
    void place() {
        for (auto & [type, tensors] : wanted) {
            ggml_context_ptr context(ggml_init({ tensors.size() * ggml_tensor_overhead(), nullptr, true }));
            for (auto & [target, source] : tensors) {
                *target = ggml_dup_tensor(context.get(), source);
                ggml_set_name(*target, source->name);
            }
            ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), type));
            if (!buffer) {
                throw std::bad_alloc();
            }
            ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            for (auto & [target, source] : tensors) {
                ggml_backend_tensor_set(*target, source->data, 0, ggml_nbytes(source));
            }
            result->buffers.emplace_back(std::move(context), std::move(buffer));
        }
    }

    void read(const std::string & path, const llama_model * model, bool offload) {
        const gguf_context_ptr gguf(gguf_init_from_file(path.c_str(), { /*.no_alloc =*/false, /*.ctx =*/&stored }));
        const ggml_context_ptr owner(stored);
        if (!gguf) {
            throw std::runtime_error("it is missing, damaged or no GGUF file");
        }
        const uint32_t format = gguf_get_val_u32(gguf.get(), find_key(gguf.get(), "kvq.format", GGUF_TYPE_UINT32));
        if (format != FORMAT) {
            throw std::runtime_error("it has format " + std::to_string(format) + " and this version reads format " +
                                     std::to_string(FORMAT));
        }
        result->spectral_keys =
            gguf_get_val_bool(gguf.get(), find_key(gguf.get(), "kvq.spectral_keys", GGUF_TYPE_BOOL));
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
            }
        }
        place();
    }
};

std::shared_ptr<const kvq_transform> kvq_transform::load(const std::string & path, const llama_model * model,
                                                         bool offload) {
    kvq_transform_reader reader;
    reader.read(path, model, offload);
    return reader.result;
}
