#include "pykvq-threads.h"

#include "ggml-backend.h"

// in units of 131,072 pauses of a core, some 5 ms: longer than sampling a token takes
static const uint32_t POLL = 1;

// ggml's CPU backend may be one of several variants that are loaded at run time, so its functions are asked for by name.
template <class Function> static Function * cpu_function(const char * name) {
    const ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    return (Function *) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), name);
}

pykvq_threads_ptr pykvq_threads_make(int32_t n_threads) {
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll                   = POLL;
    const auto make               = cpu_function<ggml_threadpool *(ggml_threadpool_params *)>("ggml_threadpool_new");
    return pykvq_threads_ptr(make(&params));
}

void pykvq_threads_deleter::operator()(ggml_threadpool * pool) const {
    cpu_function<void(ggml_threadpool *)>("ggml_threadpool_free")(pool);
}
