#include "simt.h"

#include "ggml.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

namespace simt {
namespace {

constexpr size_t STACK_BYTES = 128 * 1024;
constexpr size_t MAX_ERRORS  = 8;
constexpr int MANY           = -2;
constexpr int NOBODY         = -1;

// Who touched a byte last, and when: epochs are counted through all barriers, blocks and launches.
struct mark {
    int thread     = NOBODY;
    int block      = NOBODY;
    uint32_t epoch = 0;
};

struct byte_marks {
    mark write;
    mark read;
    bool is_written = false;
};

struct region {
    const char * begin;
    size_t n_bytes;
    bool is_shared;
    std::vector<byte_marks> marks;
};

enum class state { ready, at_barrier, in_wave, done };

struct fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    state at    = state::done;
    float value = 0.0f;  // what a lane brings to a wave operation, then what it takes away
    int mask    = 0;
    bool is_any = false;
};

struct machine {
    std::vector<std::string> errors;
    std::vector<std::unique_ptr<region>> regions;
    region * last_region = nullptr;
    std::vector<fiber> fibers;
    ucontext_t scheduler;
    const std::function<void()> * kernel = nullptr;
    int n_threads                        = 0;
    int thread                           = 0;
    int block[3]                         = { 0, 0, 0 };
    int block_number                     = 0;
    uint32_t epoch                       = 1;
    uint32_t block_epoch                 = 1;  // at the start of the block
    uint32_t launch_epoch                = 1;
    std::unique_ptr<region> shared;
    std::vector<char> shared_bytes;
};

machine m;

void report(const std::string & what) {
    if (m.errors.size() < MAX_ERRORS) {
        m.errors.push_back(what + " (block " + std::to_string(m.block_number) + ", thread " + std::to_string(m.thread) +
                           ")");
    }
}

region * find_region(const void * p) {
    const char * c      = (const char *) p;
    const auto contains = [c](const region & r) { return c >= r.begin && c < r.begin + r.n_bytes; };
    if (m.shared && contains(*m.shared)) {
        return m.shared.get();
    }
    if (m.last_region && contains(*m.last_region)) {
        return m.last_region;
    }
    for (const auto & r : m.regions) {
        if (contains(*r)) {
            m.last_region = r.get();
            return r.get();
        }
    }
    return nullptr;
}

// Whether the marked access and one of this thread now are not ordered by a barrier or a launch.
bool is_concurrent(const mark & other) {
    if (other.thread == NOBODY || other.epoch < m.launch_epoch) {
        return false;
    }
    if (other.block != m.block_number) {
        return true;
    }
    return other.thread != m.thread && other.epoch == m.epoch;
}

void touch(region & r, size_t i, bool is_write) {
    byte_marks & b     = r.marks[i];
    const char * where = r.is_shared ? "shared memory" : "global memory";
    if (r.is_shared && b.write.epoch < m.block_epoch && b.read.epoch < m.block_epoch) {
        b = byte_marks();  // left by an earlier block
    }
    if (!is_write && !b.is_written) {
        report(std::string("read of what nobody wrote, byte ") + std::to_string(i) + " of " + where);
        b.is_written = true;
    }
    if (is_concurrent(b.write) || (is_write && is_concurrent(b.read))) {
        report(std::string("race at byte ") + std::to_string(i) + " of " + where);
    }
    const mark now = { m.thread, m.block_number, m.epoch };
    if (is_write) {
        b.write      = now;
        b.is_written = true;
        return;
    }
    const bool same_time = b.read.thread != NOBODY && b.read.epoch >= m.launch_epoch &&
                           (b.read.block != m.block_number || b.read.epoch == m.epoch);
    if (same_time && b.read.block != m.block_number) {
        b.read = { MANY, MANY, m.epoch };
    } else if (same_time && b.read.thread != m.thread) {
        b.read = { MANY, m.block_number, m.epoch };
    } else {
        b.read = now;
    }
}

void yield(state at) {
    fiber & self = m.fibers[m.thread];
    self.at      = at;
    swapcontext(&self.context, &m.scheduler);
}

void run_fiber() {
    (*m.kernel)();
    yield(state::done);
}

void start(fiber & f) {
    if (!f.stack) {
        f.stack.reset(new char[STACK_BYTES]);
    }
    getcontext(&f.context);
    f.context.uc_stack.ss_sp   = f.stack.get();
    f.context.uc_stack.ss_size = STACK_BYTES;
    f.context.uc_link          = nullptr;
    makecontext(&f.context, run_fiber, 0);
    f.at = state::ready;
}

bool run_ready() {
    bool any = false;
    for (int t = 0; t < m.n_threads; t++) {
        if (m.fibers[t].at == state::ready) {
            m.thread = t;
            swapcontext(&m.scheduler, &m.fibers[t].context);
            any = true;
        }
    }
    return any;
}

void exchange(fiber * lanes, int n) {
    if (lanes[0].is_any) {
        const bool any = std::any_of(lanes, lanes + n, [](const fiber & f) { return f.value != 0.0f; });
        std::for_each(lanes, lanes + n, [any](fiber & f) { f.value = any ? 1.0f : 0.0f; });
    } else {
        std::vector<float> values;
        for (int i = 0; i < n; i++) {
            const int from = i ^ lanes[i].mask;
            values.push_back(from < n ? lanes[from].value : lanes[i].value);
        }
        for (int i = 0; i < n; i++) {
            lanes[i].value = values[(size_t) i];
        }
    }
    std::for_each(lanes, lanes + n, [](fiber & f) { f.at = state::ready; });
}

// Lets waves go on whose lanes have all come to the operation.
bool release_waves() {
    bool any = false;
    for (int first = 0; first < m.n_threads; first += WAVE) {
        const int n     = std::min(WAVE, m.n_threads - first);
        fiber * lanes   = &m.fibers[(size_t) first];
        const auto here = [lanes](const fiber & f) { return f.at == state::in_wave && f.is_any == lanes[0].is_any; };
        if (std::all_of(lanes, lanes + n, here)) {
            exchange(lanes, n);
            any = true;
        }
    }
    return any;
}

bool release_barrier() {
    const auto end = m.fibers.begin() + m.n_threads;
    if (!std::all_of(m.fibers.begin(), end, [](const fiber & f) { return f.at == state::at_barrier; })) {
        return false;
    }
    std::for_each(m.fibers.begin(), end, [](fiber & f) { f.at = state::ready; });
    m.epoch++;
    return true;
}

void run_block() {
    m.epoch++;
    m.block_epoch = m.epoch;
    for (int t = 0; t < m.n_threads; t++) {
        start(m.fibers[(size_t) t]);
    }
    while (run_ready() || release_waves() || release_barrier()) {
    }
    for (int t = 0; t < m.n_threads; t++) {
        if (m.fibers[(size_t) t].at != state::done) {
            m.thread = t;
            report(m.fibers[(size_t) t].at == state::at_barrier ? "waits at a barrier that others never reach" :
                                                                  "waits for lanes that never come");
            return;
        }
    }
}

}  // namespace

const std::vector<std::string> & errors() {
    return m.errors;
}

void clear_errors() {
    m.errors.clear();
}

void launch(const grid & blocks, int n_threads, const std::function<void()> & kernel) {
    m.kernel    = &kernel;
    m.n_threads = n_threads;
    if (m.fibers.size() < (size_t) n_threads) {
        m.fibers = std::vector<fiber>((size_t) n_threads);
    }
    m.epoch++;
    m.launch_epoch = m.epoch;
    m.block_number = 0;
    for (m.block[2] = 0; m.block[2] < blocks.z; m.block[2]++) {
        for (m.block[1] = 0; m.block[1] < blocks.y; m.block[1]++) {
            for (m.block[0] = 0; m.block[0] < blocks.x; m.block[0]++) {
                run_block();
                m.block_number++;
            }
        }
    }
    m.shared.reset();
}

int thread_x() {
    return m.thread;
}

int block_x() {
    return m.block[0];
}

int block_y() {
    return m.block[1];
}

int block_z() {
    return m.block[2];
}

void barrier() {
    yield(state::at_barrier);
}

static float wave_operation(float value, int mask, bool is_any) {
    fiber & self = m.fibers[(size_t) m.thread];
    self.value   = value;
    self.mask    = mask;
    self.is_any  = is_any;
    yield(state::in_wave);
    return m.fibers[(size_t) m.thread].value;
}

float shuffle_xor(float x, int mask) {
    return wave_operation(x, mask, false);
}

bool wave_any(bool x) {
    return wave_operation(x ? 1.0f : 0.0f, 0, true) != 0.0f;
}

void * shared(size_t n_bytes) {
    if (!m.shared) {
        m.shared_bytes.assign(n_bytes + 256, 0);
        char * begin = (char *) (((uintptr_t) m.shared_bytes.data() + 255) / 256 * 256);
        m.shared.reset(new region{ begin, n_bytes, true, std::vector<byte_marks>(n_bytes) });
    }
    if (m.shared->n_bytes != n_bytes) {
        report("shared memory asked for twice");
    }
    return (void *) m.shared->begin;
}

float half_value(uint16_t h) {
    return ggml_fp16_to_fp32(h);
}

uint16_t half_bits(float x) {
    return ggml_fp32_to_fp16(x);
}

bool check_access(const void * p, size_t n_bytes, size_t alignment, bool is_write) {
    region * r = find_region(p);
    if (!r || (const char *) p + n_bytes > r->begin + r->n_bytes) {
        report(std::string(is_write ? "write" : "read") + " out of bounds");
        return false;
    }
    if ((uintptr_t) p % alignment != 0) {
        report("access that is not aligned to " + std::to_string(alignment));
    }
    const size_t first = (size_t) ((const char *) p - r->begin);
    for (size_t i = first; i < first + n_bytes; i++) {
        touch(*r, i, is_write);
    }
    return true;
}

void * allocate(size_t n_bytes, size_t offset, bool is_written) {
    char * p = (char *) std::aligned_alloc(256, (n_bytes + offset + 511) / 256 * 256);
    m.regions.emplace_back(new region{ p + offset, n_bytes, false, std::vector<byte_marks>(n_bytes) });
    for (byte_marks & b : m.regions.back()->marks) {
        b.is_written = is_written;
    }
    return p + offset;
}

void release(void * p) {
    const auto it = std::find_if(m.regions.begin(), m.regions.end(),
                                 [p](const std::unique_ptr<region> & r) { return r->begin == (const char *) p; });
    m.last_region = nullptr;
    m.regions.erase(it);
    std::free((void *) ((uintptr_t) p / 256 * 256));
}

}  // namespace simt
