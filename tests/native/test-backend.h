// test-backend.h: the backend that op tests compute on: the CPU's, or with PYKVQ_TEST_DEVICE=gpu in the environment the first
// GPU's, where ops that it does not claim are counted and left out.

#pragma once

#include "check.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <cstdlib>
#include <cstring>

inline int ops_left_out = 0;
inline int ops_computed = 0;

inline bool on_gpu() {
    const char * device = std::getenv("PYKVQ_TEST_DEVICE");
    return device && std::strcmp(device, "gpu") == 0;
}

// Exits with 77, which ctest and scripts take for skipped, if there is no GPU.
inline ggml_backend_t new_test_backend(int n_threads) {
    if (!on_gpu()) {
        ggml_backend_t backend = ggml_backend_cpu_init();
        ggml_backend_cpu_set_n_threads(backend, n_threads);
        return backend;
    }
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
    if (!device) {
        std::printf("no GPU\n");
        std::exit(77);
    }
    return ggml_backend_dev_init(device, nullptr);
}

// False, with nothing computed, if the backend is a GPU's and does not claim an op of the graph.
inline bool compute_graph(ggml_backend_t backend, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        if (!ggml_backend_supports_op(backend, ggml_graph_node(graph, i))) {
            CHECK(on_gpu(), "%s is not supported", ggml_op_name(ggml_graph_node(graph, i)->op));
            ops_left_out++;
            return false;
        }
    }
    ops_computed++;
    CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS, "a graph was not computed");
    return true;
}

inline int test_backend_result(const char * name) {
    if (on_gpu()) {
        std::printf("on the GPU: %d graphs computed, %d left out, as it does not claim them\n", ops_computed,
                    ops_left_out);
        CHECK(ops_computed > ops_left_out, "the GPU computed too little");
    }
    return check_result(name);
}
