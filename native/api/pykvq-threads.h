// pykvq-threads.h: the threads of a context.

#pragma once

#include "ggml.h"

#include <memory>

struct pykvq_threads_deleter {
    void operator()(ggml_threadpool * pool) const;
};

typedef std::unique_ptr<ggml_threadpool, pykvq_threads_deleter> pykvq_threads_ptr;

// Threads that stay for as long as the pool does: they poll for some milliseconds after a graph, so that the next token
// finds them awake, then sleep. Must outlive the contexts that it is attached to.
pykvq_threads_ptr pykvq_threads_make(int32_t n_threads);
