#include "pykvq-guard.h"

#include <cmath>

pykvq_status pykvq_context_add_lora(pykvq_context * context, const char * path, float scale) {
    return pykvq_guard([&] {
        pykvq_require(context, "context");
        pykvq_require(path, "path");
        if (!std::isfinite(scale)) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "the scale of the adapter '%s' is not a finite number", path);
        }
        pykvq_require_gguf(path);
        llama_adapter_lora * lora = llama_adapter_lora_init(context->model->model, path);
        if (!lora) {
            pykvq_throw(PYKVQ_STATUS_FORMAT, "cannot load the adapter '%s': %s", path, pykvq_logged_errors().c_str());
        }
        context->loras.push_back(lora);
        context->lora_scales.push_back(scale);
        if (llama_set_adapters_lora(context->ctx, context->loras.data(), context->loras.size(),
                                    context->lora_scales.data()) != 0) {
            context->loras.pop_back();
            context->lora_scales.pop_back();
            pykvq_throw(PYKVQ_STATUS_INTERNAL, "the adapter '%s' cannot be applied: %s", path,
                        pykvq_logged_errors().c_str());
        }
    });
}
