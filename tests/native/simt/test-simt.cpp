// Tests of the emulator: kernels with a planted bug each, which it must name, and sound ones, of which it must say nothing.

#include "check.h"
#include "kvq-gpu.h"
#include "simt.h"

#include <string>

using namespace kvq::gpu;

constexpr int N = 128;

struct values {
    float x[N];
};

static std::vector<float> ramp(int n) {
    std::vector<float> x;
    for (int i = 0; i < n; i++) {
        x.push_back((float) i);
    }
    return x;
}

// Findings of one launch are all of this kind, and there is one.
static void check_found(const char * what, const char * kind) {
    CHECK(!simt::errors().empty(), "%s: not found", what);
    for (const std::string & error : simt::errors()) {
        CHECK(error.find(kind) != std::string::npos, "%s: %s", what, error.c_str());
    }
    simt::clear_errors();
}

static void check_silent(const char * what) {
    for (const std::string & error : simt::errors()) {
        CHECK(false, "%s: %s", what, error.c_str());
    }
    simt::clear_errors();
}

// Each thread takes its neighbour's value by way of shared memory.
static void rotate(const float * in, float * out, bool with_barrier) {
    KVQ_SHARED(values, s);
    const int t = thread_x();
    store(&s.x[t], load(in + block_x() * N + t));
    if (with_barrier) {
        barrier();
    }
    store(out + block_x() * N + t, load(&s.x[(t + 1) % N]));
}

static void test_barrier() {
    const simt::buffer<float> in(ramp(2 * N));
    const simt::buffer<float> out(2 * N);
    simt::launch({ 2 }, N, [&] { rotate(in.data(), out.data(), true); });
    check_silent("rotation");
    const std::vector<float> result = out.copy();
    for (int i = 0; i < 2 * N; i++) {
        CHECK(result[(size_t) i] == (float) (i / N * N + (i + 1) % N), "%d: %g", i, result[(size_t) i]);
    }
    simt::launch({ 2 }, N, [&] { rotate(in.data(), out.data(), false); });
    CHECK(!simt::errors().empty(), "a missing barrier was not found");
    bool race = false;
    for (const std::string & error : simt::errors()) {
        race = race || error.find("race") != std::string::npos;
        CHECK(error.find("out of bounds") == std::string::npos, "%s", error.c_str());
    }
    CHECK(race, "a missing barrier was not called a race");
    simt::clear_errors();
}

// A second missing barrier: memory that is used again before everyone has read it.
static void test_reuse() {
    const simt::buffer<float> out(N);
    for (const bool with_barrier : { true, false }) {
        simt::launch({ 1 }, N, [&] {
            KVQ_SHARED(values, s);
            const int t = thread_x();
            store(&s.x[t], 1.0f);
            barrier();
            const float before = load(&s.x[(t + 1) % N]);
            if (with_barrier) {
                barrier();
            }
            store(&s.x[t], 2.0f);
            store(out.data() + t, before);
        });
        with_barrier ? check_silent("reuse") : check_found("reuse", "race");
    }
}

static void test_bounds() {
    const simt::buffer<float> in(ramp(N), 4);
    const simt::buffer<float> out(N);
    for (const int shift : { 0, 1, -1 }) {
        simt::launch({ 1 }, N, [&] { store(out.data() + thread_x(), load(in.data() + thread_x() + shift)); });
        shift == 0 ? check_silent("copy") : check_found("a read past the end", "read out of bounds");
    }
    simt::launch({ 1 }, N, [&] { store(out.data() + thread_x() + 1, 0.0f); });
    check_found("a write past the end", "write out of bounds");
    simt::launch({ 1 }, N, [&] {
        KVQ_SHARED(values, s);
        store(&s.x[thread_x() + 1], 0.0f);
    });
    check_found("a write past shared memory", "write out of bounds");
    simt::launch({ 1 }, 1,
                 [&] { store(out.data(), bits_to_float(load((const uint32_t *) ((char *) in.data() + 2)))); });
    check_found("a word at an odd address", "not aligned");
}

static void test_unwritten() {
    const simt::buffer<float> out(N);
    simt::launch({ 1 }, N, [&] {
        KVQ_SHARED(values, s);
        store(out.data() + thread_x(), load(&s.x[thread_x()]));
    });
    check_found("memory that nobody wrote", "nobody wrote");
}

// Blocks of a grid are not ordered.
static void test_blocks() {
    const simt::buffer<float> out(N);
    simt::launch({ 2 }, N, [&] { store(out.data() + thread_x(), 1.0f); });
    check_found("two blocks write the same", "race");
    simt::launch({ 1 }, N, [&] { store(out.data() + thread_x(), 2.0f); });
    check_silent("a later launch");
}

// A sum that takes every wave for 32 lanes: right on CUDA and RDNA, wrong where waves have 64.
static void sum_of_32(const float * in, float * out) {
    KVQ_SHARED(values, s);
    float x = load(in + thread_x());
    for (int step = 16; step > 0; step /= 2) {
        x += shuffle_xor(x, step);
    }
    if (thread_x() % KVQ_WAVE == 0) {
        store(&s.x[thread_x() / KVQ_WAVE], x);
    }
    barrier();
    if (thread_x() == 0) {
        float sum = 0.0f;
        for (int w = 0; w < N / KVQ_WAVE; w++) {
            sum += load(&s.x[w]);
        }
        store(out, sum);
    }
}

static void sum_of_wave(const float * in, float * out) {
    const float x = sum_of_lanes(load(in + thread_x()), KVQ_WAVE);
    if (thread_x() % KVQ_WAVE == 0) {
        store(out + thread_x() / KVQ_WAVE, x);
    }
}

static void test_wave() {
    const float all = (float) (N * (N - 1) / 2);
    const simt::buffer<float> in(ramp(N));
    const simt::buffer<float> out(N / KVQ_WAVE);
    simt::launch({ 1 }, N, [&] { sum_of_32(in.data(), out.data()); });
    const bool right = out.copy()[0] == all;
    CHECK(right == (KVQ_WAVE == 32), "waves of %d: a sum of 32 lanes gave %g of %g", KVQ_WAVE, out.copy()[0], all);
    simt::launch({ 1 }, N, [&] { sum_of_wave(in.data(), out.data()); });
    float sum = 0.0f;
    for (const float x : out.copy()) {
        sum += x;
    }
    CHECK(sum == all, "%g of %g", sum, all);
    check_silent("sums");
}

// Lanes that leave while others of their wave exchange values, and threads that miss a barrier.
static void test_divergence() {
    const simt::buffer<float> out(N);
    simt::launch({ 1 }, N, [&] {
        if (thread_x() != 5) {
            store(out.data() + thread_x(), shuffle_xor(1.0f, 1));
        }
    });
    check_found("a lane that leaves", "lanes that never come");
    simt::launch({ 1 }, N, [&] {
        if (thread_x() < KVQ_WAVE) {
            barrier();
        }
    });
    check_found("a barrier for some", "barrier that others never reach");
}

int main() {
    test_barrier();
    test_reuse();
    test_bounds();
    test_unwritten();
    test_blocks();
    test_wave();
    test_divergence();
    return check_result("test-simt");
}
