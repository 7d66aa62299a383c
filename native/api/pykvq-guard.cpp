#include "pykvq-guard.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#ifdef PYKVQ_BACKEND_DL
#    include <filesystem>
#    ifdef _WIN32
#        define WIN32_LEAN_AND_MEAN
#        include <windows.h>
#    else
#        include <dlfcn.h>
#    endif
#endif

namespace {

constexpr size_t MAX_LOGGED_ERRORS = 8;

struct thread_state {
    int depth = 0;  // nested API calls
    std::string last_error;
    std::string log_line;  // ggml logs lines in pieces
    ggml_log_level log_level = GGML_LOG_LEVEL_NONE;
    std::vector<std::string> errors;
    const std::atomic<bool> * stop = nullptr;  // while it is true, failures are what the caller asked for
    std::function<void(const std::string &)> observer;
};

thread_local thread_state state;

struct log_sink {
    std::mutex mutex;
    pykvq_log_fn fn   = nullptr;
    void * user_data  = nullptr;
    int32_t min_level = PYKVQ_LOG_ERROR;
};

log_sink & get_log_sink() {
    static log_sink sink;
    return sink;
}

int32_t to_log_level(ggml_log_level level) {
    switch (level) {
        case GGML_LOG_LEVEL_ERROR:
            return PYKVQ_LOG_ERROR;
        case GGML_LOG_LEVEL_WARN:
            return PYKVQ_LOG_WARN;
        case GGML_LOG_LEVEL_INFO:
            return PYKVQ_LOG_INFO;
        default:
            return PYKVQ_LOG_DEBUG;
    }
}

// Warnings about what the caller asked for.
bool is_wanted(const std::string & line) {
    return line.find("model default pooling_type is") != std::string::npos;
}

void emit_log_line(ggml_log_level level, const std::string & line) {
    if (level == GGML_LOG_LEVEL_ERROR && state.depth > 0 && state.errors.size() < MAX_LOGGED_ERRORS) {
        state.errors.push_back(line);
    }
    if (is_wanted(line) || (state.stop && state.stop->load(std::memory_order_relaxed))) {
        level = GGML_LOG_LEVEL_DEBUG;
    }
    log_sink & sink = get_log_sink();
    pykvq_log_fn fn;
    void * user_data;
    {
        std::lock_guard<std::mutex> lock(sink.mutex);
        if (!sink.fn || to_log_level(level) < sink.min_level) {
            return;
        }
        fn        = sink.fn;
        user_data = sink.user_data;
    }
    // outside the lock: the callback may wait for another thread that logs
    fn(to_log_level(level), line.c_str(), user_data);
}

void on_log(ggml_log_level level, const char * text, void *) {
    if (level != GGML_LOG_LEVEL_CONT) {
        state.log_level = level;
    }
    for (const char * c = text; *c; ++c) {
        if (*c != '\n') {
            state.log_line += *c;
            continue;
        }
        std::string line;
        line.swap(state.log_line);
        if (!line.empty()) {
            emit_log_line(state.log_level, line);
            if (state.observer) {
                state.observer(line);
            }
        }
    }
}

// ggml calls this before abort(). The frames in between are C++ or C compiled with -fexceptions.
void on_abort(const char * message) {
    if (state.depth > 0) {
        throw pykvq_error(PYKVQ_STATUS_INTERNAL, pykvq_format("a check in llama.cpp failed: %s", message));
    }
    std::fprintf(stderr, "%s\n", message);
}

#ifdef PYKVQ_BACKEND_DL
// The folder this library was loaded from: the CPU variants lie beside it.
std::string library_folder() {
#    ifdef _WIN32
    HMODULE handle = nullptr;
    char path[MAX_PATH];
    GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                       (LPCSTR) &pykvq_abi_version, &handle);
    GetModuleFileNameA(handle, path, MAX_PATH);
    return std::filesystem::path(path).parent_path().string();
#    else
    Dl_info info;
    if (!dladdr((const void *) &pykvq_abi_version, &info)) {
        return ".";
    }
    return std::filesystem::path(info.dli_fname).parent_path().string();
#    endif
}
#endif

// Bytes of the UTF-8 sequence at text[i], 0 if there is no valid one (overlong forms and surrogates are let through).
size_t utf8_length(const std::string & text, size_t i) {
    const auto lead    = (uint8_t) text[i];
    const size_t bytes = lead < 0x80 ? 1 : lead >> 5 == 6 ? 2 : lead >> 4 == 14 ? 3 : lead >> 3 == 30 ? 4 : 0;
    for (size_t j = 1; j < bytes; j++) {
        if (i + j >= text.size() || (uint8_t) text[i + j] >> 6 != 2) {
            return 0;
        }
    }
    return bytes;
}

// One line of valid UTF-8: messages may quote bytes of a damaged file.
void make_printable(std::string & text) {
    for (size_t i = 0; i < text.size();) {
        const size_t bytes = utf8_length(text, i);
        if (bytes == 0 || (bytes == 1 && (uint8_t) text[i] < 0x20)) {
            text[i] = bytes == 0 ? '?' : ' ';
        }
        i += bytes == 0 ? 1 : bytes;
    }
}

// "function_name: text" -> "text"
std::string without_function_name(const std::string & line) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos || line.find_first_of(" '\"") < colon) {
        return line;
    }
    return without_function_name(line.substr(colon + 2));
}

}  // namespace

pykvq_guard_scope::pykvq_guard_scope() {
    if (state.depth++ == 0) {
        state.errors.clear();
    }
}

pykvq_guard_scope::~pykvq_guard_scope() {
    state.depth--;
}

pykvq_log_observer::pykvq_log_observer(std::function<void(const std::string &)> on_line) {
    state.observer = std::move(on_line);
}

pykvq_log_observer::~pykvq_log_observer() {
    state.observer = nullptr;
}

pykvq_status pykvq_fail(pykvq_status status, const char * message) noexcept {
    try {
        state.last_error = message;
        make_printable(state.last_error);
    } catch (...) {  // out of memory: the status alone must do
    }
    return status;
}

std::string pykvq_format(const char * format, ...) {
    va_list args;
    va_list again;
    va_start(args, format);
    va_copy(again, args);
    const int n = std::vsnprintf(nullptr, 0, format, args);
    va_end(args);
    std::string text(n > 0 ? (size_t) n : 0, '\0');
    std::vsnprintf(&text[0], text.size() + 1, format, again);
    va_end(again);
    return text;
}

void pykvq_throw(pykvq_status status, const char * format, ...) {
    char message[2048];
    va_list args;
    va_start(args, format);
    std::vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    throw pykvq_error(status, message);
}

void pykvq_require(const void * pointer, const char * name) {
    if (!pointer) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "%s must not be NULL", name);
    }
}

void pykvq_library_init() {
    static std::once_flag once;
    std::call_once(once, [] {
        llama_log_set(on_log, nullptr);
        ggml_set_abort_callback(on_abort);
#ifdef PYKVQ_BACKEND_DL
        ggml_backend_load_all_from_path(library_folder().c_str());
#endif
        if (!ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
            pykvq_throw(PYKVQ_STATUS_INTERNAL, "no CPU backend could be loaded: reinstall pykvq for this processor");
        }
        llama_backend_init();
    });
}

pykvq_stop_scope::pykvq_stop_scope(const std::atomic<bool> & stop) {
    state.stop = &stop;
}

pykvq_stop_scope::~pykvq_stop_scope() {
    state.stop = nullptr;
}

std::string pykvq_logged_errors() {
    std::string joined;
    std::vector<std::string> seen;
    for (const std::string & line : state.errors) {
        const std::string text = without_function_name(line);
        if (std::find(seen.begin(), seen.end(), text) != seen.end()) {
            continue;
        }
        seen.push_back(text);
        joined += (joined.empty() ? "" : "; ") + text;
    }
    return joined;
}

const char * pykvq_last_error(void) {
    return state.last_error.c_str();
}

void pykvq_log_set(pykvq_log_fn fn, void * user_data, int32_t min_level) {
    log_sink & sink = get_log_sink();
    std::lock_guard<std::mutex> lock(sink.mutex);
    sink.fn        = fn;
    sink.user_data = user_data;
    sink.min_level = min_level;
}
