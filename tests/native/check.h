// check.h: the little that the native tests need: checks that count and go on, a seeded generator, error measures.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

inline int check_failures = 0;

#define CHECK(condition, ...)                                                    \
    do {                                                                         \
        if (!(condition)) {                                                      \
            check_failures++;                                                    \
            std::printf("%s:%d: %s is false: ", __FILE__, __LINE__, #condition); \
            std::printf(__VA_ARGS__);                                            \
            std::printf("\n");                                                   \
        }                                                                        \
    } while (0)

inline int check_result(const char * name) {
    std::printf("%s: %s, %d failed checks\n", name, check_failures == 0 ? "ok" : "FAILED", check_failures);
    return check_failures == 0 ? 0 : 1;
}

// Fixed seed: a failure can be repeated.
inline std::mt19937 & check_rng() {
    static std::mt19937 rng(20261129);
    return rng;
}

inline std::vector<float> random_normal(size_t n, float sigma = 1.0f) {
    std::normal_distribution<float> normal(0.0f, sigma);
    std::vector<float> x(n);
    for (float & value : x) {
        value = normal(check_rng());
    }
    return x;
}

// |a - b|^2 / |b|^2; NaN if anything is, so compare it as !(error < limit)
inline double nmse(const std::vector<float> & a, const std::vector<float> & b) {
    double error = 0.0;
    double norm  = 0.0;
    for (size_t i = 0; i < b.size(); i++) {
        error += std::pow((double) a[i] - b[i], 2);
        norm += std::pow((double) b[i], 2);
    }
    return error / norm;
}
