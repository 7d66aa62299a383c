// pykvq-guard.h: the wall between llama.cpp's ways to fail and the caller.

#pragma once

#include "pykvq-internal.h"

#include <functional>
#include <new>

// Marks the calling thread as being inside an API call: a failed ggml check (GGML_ABORT, GGML_ASSERT) on it is then
// thrown instead of ending the process, and error lines of the log are kept for the message. On another thread (a
// compute worker) a failed check still ends the process; arguments are therefore checked before they get there.
struct pykvq_guard_scope {
    pykvq_guard_scope();
    ~pykvq_guard_scope();
};

// Hands every line that this thread logs to a function, which may throw, as long as the object lives.
struct pykvq_log_observer {
    explicit pykvq_log_observer(std::function<void(const std::string &)> on_line);
    ~pykvq_log_observer();
};

// Sets the thread's last error and returns status.
pykvq_status pykvq_fail(pykvq_status status, const char * message) noexcept;

template <typename F> pykvq_status pykvq_guard(F && function) noexcept {
    try {
        pykvq_guard_scope scope;
        pykvq_library_init();
        function();
        return PYKVQ_STATUS_OK;
    } catch (const pykvq_error & error) {
        return pykvq_fail(error.status, error.what());
    } catch (const std::bad_alloc &) {
        return pykvq_fail(PYKVQ_STATUS_MEMORY, "out of memory: use a smaller context or a smaller model");
    } catch (const std::exception & error) {
        return pykvq_fail(PYKVQ_STATUS_INTERNAL, error.what());
    } catch (...) {
        return pykvq_fail(PYKVQ_STATUS_INTERNAL, "unknown exception");
    }
}
