// simt.h: runs GPU kernels on the host. A thread of a block is a fiber; the blocks of a grid run one after another. All
// memory that a kernel reaches through load() and store() is checked: bounds, alignment, reads of what nobody wrote, and
// races, two threads that touch the same byte with nothing between them that orders the two. What is found is kept as
// text in errors(); a bad read gives zeros, a bad write is dropped, and the kernel goes on.

#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#ifndef KVQ_SIMT_WAVE
#    define KVQ_SIMT_WAVE 32
#endif

namespace simt {

constexpr int WAVE = KVQ_SIMT_WAVE;

struct grid {
    int x = 1;
    int y = 1;
    int z = 1;
};

void launch(const grid & blocks, int n_threads, const std::function<void()> & kernel);

// First few findings since the last clear.
const std::vector<std::string> & errors();
void clear_errors();

// Inside a kernel.
int thread_x();
int block_x();
int block_y();
int block_z();
void barrier();
float shuffle_xor(float x, int mask);
bool wave_any(bool x);

// The block's shared memory; a kernel asks once.
void * shared(size_t n_bytes);

float half_value(uint16_t h);
uint16_t half_bits(float x);

// True if the access may be carried out.
bool check_access(const void * p, size_t n_bytes, size_t alignment, bool is_write);

template <typename T> T load(const T * p) {
    T value;
    std::memset(&value, 0, sizeof(value));
    if (check_access(p, sizeof(T), alignof(T), false)) {
        std::memcpy(&value, p, sizeof(T));
    }
    return value;
}

template <typename T> void store(T * p, T value) {
    if (check_access(p, sizeof(T), alignof(T), true)) {
        std::memcpy(p, &value, sizeof(T));
    }
}

// Device memory: exactly n values that kernels may reach, at an address that is a multiple of 256 plus offset bytes.
void * allocate(size_t n_bytes, size_t offset, bool is_written);
void release(void * p);

template <typename T> class buffer {
public:
    explicit buffer(size_t n, size_t offset = 0) : n(n), p((T *) allocate(n * sizeof(T), offset, false)) {}

    explicit buffer(const std::vector<T> & values, size_t offset = 0)
        : n(values.size()), p((T *) allocate(n * sizeof(T), offset, true)) {
        std::memcpy(p, values.data(), n * sizeof(T));
    }

    buffer(const buffer &)             = delete;
    buffer & operator=(const buffer &) = delete;

    ~buffer() { release(p); }

    T * data() const { return p; }

    std::vector<T> copy() const { return std::vector<T>(p, p + n); }

private:
    size_t n;
    T * p;
};

}  // namespace simt
