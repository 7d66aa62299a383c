// awkward-blocks.h: what encoders of the KV types are compared on.

#pragma once

#include "check.h"
#include "kvq-blocks.h"

#include <cfloat>

// Blocks that a scale search or a vector's lanes could get wrong.
inline std::vector<std::vector<float>> awkward_blocks() {
    std::vector<std::vector<float>> blocks;
    const float odd[] = {
        0.0f, -0.0f, 1e-38f, 1e-40f, 3e-6f, 1.0f, -65504.0f, 1e30f, FLT_MAX, INFINITY, -INFINITY, NAN
    };
    for (const float value : odd) {
        blocks.emplace_back(KVQ_BLOCK, value);
        for (const size_t place : { 0, 15, 16, 37, 63 }) {
            blocks.push_back(random_normal(KVQ_BLOCK));
            blocks.back()[place] = value;
        }
    }
    for (int i = 0; i < 2000; i++) {
        blocks.push_back(random_normal(KVQ_BLOCK, std::pow(10.0f, (float) (i % 12) - 7.0f)));
        for (size_t j = 0; j < KVQ_BLOCK; j += (size_t) (1 + i % 7)) {
            blocks.back()[j] *= (float) (i % 5);
        }
    }
    return blocks;
}
