// Attention alone: time and bandwidth of GGML_OP_FLASH_ATTN_EXT by depth and cache type, llama.cpp's F16 kernel first,
// all kinds in turn in one process, medians.
//
//   bench-attention [--heads 9] [--kv-heads 3] [--dim 64] [--tokens 1] [--threads 2] [--repeat 7] [--depth 4096,...]
//                   [--kind q4_ve]   only the kinds whose name holds this, and llama.cpp's F16
//                   [--device gpu]   the first GPU; its measured copy speed is the measure then

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

struct options {
    int64_t heads    = 9;
    int64_t kv_heads = 3;
    int64_t dim      = 64;
    int64_t tokens   = 1;
    int threads      = 2;
    int repeat       = 7;
    std::vector<int64_t> depths{ 4096, 16384 };
    std::string kind;
    bool gpu = false;
};

struct tier {
    ggml_type type_k, type_v;
    int64_t rows;  // 0: what the other tiers leave
};

struct kind {
    const char * name;
    bool ggml_kernel;
    std::vector<tier> tiers;
};

// Enough layers that K and V do not stay in a cache, as in a model.
constexpr int64_t MIN_BYTES     = 64 << 20;
constexpr int64_t MIN_BYTES_GPU = 512 << 20;
constexpr int64_t MAX_LAYERS    = 64;
constexpr int64_t COPY_BYTES    = 1024 << 20;

static ggml_backend_t new_backend(const options & o) {
    if (!o.gpu) {
        ggml_backend_t backend = ggml_backend_cpu_init();
        ggml_backend_cpu_set_n_threads(backend, o.threads);
        return backend;
    }
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
    if (!device) {
        std::fprintf(stderr, "no GPU: build with -DPYKVQ_CUDA=ON or -DPYKVQ_HIP=ON, and see docs/gpu.md\n");
        std::exit(77);
    }
    return ggml_backend_dev_init(device, nullptr);
}

static double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

static const std::vector<kind> KINDS = {
    { "f16 (llama.cpp)", true, { { GGML_TYPE_F16, GGML_TYPE_F16, 0 } } },
    { "q8_0 (llama.cpp)", true, { { GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, 0 } } },
    { "f16", false, { { GGML_TYPE_F16, GGML_TYPE_F16, 0 } } },
    { "q8_0", false, { { GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, 0 } } },
    { "q4_0", false, { { GGML_TYPE_Q4_0, GGML_TYPE_Q4_0, 0 } } },
    { "q4_ve", false, { { GGML_TYPE_Q4_VE, GGML_TYPE_Q4_VE, 0 } } },
    { "q2_t", false, { { GGML_TYPE_Q2_T, GGML_TYPE_Q2_T, 0 } } },
    { "f16:128+q4_ve", false, { { GGML_TYPE_F16, GGML_TYPE_F16, 192 }, { GGML_TYPE_Q4_VE, GGML_TYPE_Q4_VE, 0 } } },
    { "f16:128+q4_ves/q4_ve",
      false,
      { { GGML_TYPE_F16, GGML_TYPE_F16, 192 }, { GGML_TYPE_Q4_VES, GGML_TYPE_Q4_VE, 0 } } },
    { "f16:128+q2_ts/q2_t", false, { { GGML_TYPE_F16, GGML_TYPE_F16, 192 }, { GGML_TYPE_Q2_TS, GGML_TYPE_Q2_T, 0 } } },
};

// One kind at one depth: a graph with as many attention ops as it takes to leave the caches.
class attention_graph {
public:
    attention_graph(const options & o, const kind & k, int64_t depth) : is_ggml(k.ggml_kernel) {
        n_layers = 1;
        kv_bytes = 0;
        for (const tier & t : k.tiers) {
            const size_t row =
                ggml_row_size(t.type_k, o.dim * o.kv_heads) + ggml_row_size(t.type_v, o.dim * o.kv_heads);
            kv_bytes += rows_of(k, t, depth) * (int64_t) row;
        }
        n_layers = std::clamp<int64_t>((o.gpu ? MIN_BYTES_GPU : MIN_BYTES) / kv_bytes, 1, MAX_LAYERS);
        ctx =
            ggml_init({ (size_t) (n_layers + 1) * 16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
        backend = new_backend(o);
        q       = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, o.dim, o.tokens, o.heads);
        mask    = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, depth, o.tokens);
        graph   = ggml_new_graph(ctx);
        for (int64_t l = 0; l < n_layers; l++) {
            add_layer(o, k, depth);
        }
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        fill(o, depth);
    }

    ~attention_graph() {
        ggml_backend_buffer_free(buffer);
        ggml_backend_free(backend);
        ggml_free(ctx);
    }

    // seconds a layer
    double run() {
        setenv("PYKVQ_FLASH_ATTN", is_ggml ? "ggml" : "pykvq", 1);
        const auto start = std::chrono::steady_clock::now();
        ggml_backend_graph_compute(backend, graph);
        return seconds_since(start) / (double) n_layers;
    }

    bool is_supported() const {
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            if (!ggml_backend_supports_op(backend, ggml_graph_node(graph, i))) {
                return false;
            }
        }
        return true;
    }

    int64_t kv_bytes;  // of a layer

private:
    static int64_t rows_of(const kind & k, const tier & t, int64_t depth) {
        int64_t rest = depth;
        for (const tier & other : k.tiers) {
            rest -= other.rows;
        }
        return t.rows > 0 ? t.rows : rest;
    }

    ggml_tensor * view(const options & o, ggml_tensor * data) {
        return ggml_view_3d(ctx, data, o.dim, data->ne[1], o.kv_heads, data->nb[1], data->nb[1] / o.kv_heads, 0);
    }

    void add_layer(const options & o, const kind & k, int64_t depth) {
        ggml_tensor * op = nullptr;
        for (size_t t = 0; t < k.tiers.size(); t++) {
            const int64_t rows = rows_of(k, k.tiers[t], depth);
            ggml_tensor * keys = ggml_new_tensor_2d(ctx, k.tiers[t].type_k, o.dim * o.kv_heads, rows);
            ggml_tensor * vals = ggml_new_tensor_2d(ctx, k.tiers[t].type_v, o.dim * o.kv_heads, rows);
            caches.push_back(keys);
            caches.push_back(vals);
            if (t == 0) {
                op = ggml_flash_attn_ext(ctx, q, view(o, keys), view(o, vals), mask, 1.0f / std::sqrt((float) o.dim),
                                         0.0f, 0.0f);
                continue;
            }
            op->src[3 + 2 * t] = view(o, keys);
            op->src[4 + 2 * t] = view(o, vals);
        }
        ggml_build_forward_expand(graph, op);
    }

    void fill(const options & o, int64_t depth) {
        std::mt19937 rng(1);
        std::normal_distribution<float> normal;
        std::vector<float> values(4096 * 16);
        for (float & x : values) {
            x = normal(rng);
        }
        for (ggml_tensor * cache : caches) {
            const size_t row = cache->nb[1];
            const int64_t n  = std::min<int64_t>(cache->ne[1], (int64_t) values.size() / cache->ne[0]);
            std::vector<char> bytes(ggml_nbytes(cache));
            ggml_get_type_traits(cache->type)->from_float_ref(values.data(), bytes.data(), n * cache->ne[0]);
            for (int64_t i = n; i < cache->ne[1]; i++) {
                std::memcpy(bytes.data() + i * row, bytes.data() + i % n * row, row);
            }
            ggml_backend_tensor_set(cache, bytes.data(), 0, bytes.size());
        }
        ggml_backend_tensor_set(q, values.data(), 0, std::min(ggml_nbytes(q), values.size() * sizeof(float)));
        std::vector<ggml_fp16_t> m;
        for (int64_t t = 0; t < o.tokens; t++) {
            for (int64_t i = 0; i < depth; i++) {
                m.push_back(ggml_fp32_to_fp16(i <= depth - o.tokens + t ? 0.0f : -INFINITY));
            }
        }
        ggml_backend_tensor_set(mask, m.data(), 0, ggml_nbytes(mask));
    }

    bool is_ggml;
    int64_t n_layers;
    ggml_context * ctx;
    ggml_backend_t backend;
    ggml_backend_buffer_t buffer;
    ggml_tensor * q;
    ggml_tensor * mask;
    ggml_cgraph * graph;
    std::vector<ggml_tensor *> caches;
};

// Bytes a second that a device reads and writes in a copy of its own memory.
static double copy_speed(const options & o) {
    ggml_backend_t backend       = new_backend(o);
    ggml_context * ctx           = ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true });
    ggml_tensor * from           = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, COPY_BYTES);
    ggml_tensor * to             = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, COPY_BYTES);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    double best                  = INFINITY;
    for (int i = 0; i < 5; i++) {
        const auto start = std::chrono::steady_clock::now();
        ggml_backend_tensor_copy(from, to);
        ggml_backend_synchronize(backend);
        best = std::min(best, seconds_since(start));
    }
    ggml_backend_buffer_free(buffer);
    ggml_backend_free(backend);
    ggml_free(ctx);
    return 2.0 * COPY_BYTES / best;
}

static std::vector<kind> chosen_kinds(const options & o) {
    std::vector<kind> kinds;
    for (const kind & k : KINDS) {
        if (kinds.empty() || std::strstr(k.name, o.kind.c_str())) {
            kinds.push_back(k);
        }
    }
    return kinds;
}

static double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

static options parse(int argc, char ** argv) {
    options o;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string name = argv[i];
        const int64_t value    = std::atoll(argv[i + 1]);
        if (name == "--heads") {
            o.heads = value;
        } else if (name == "--kv-heads") {
            o.kv_heads = value;
        } else if (name == "--dim") {
            o.dim = value;
        } else if (name == "--tokens") {
            o.tokens = value;
        } else if (name == "--threads") {
            o.threads = (int) value;
        } else if (name == "--repeat") {
            o.repeat = (int) value;
        } else if (name == "--device") {
            o.gpu = std::strcmp(argv[i + 1], "gpu") == 0;
        } else if (name == "--kind") {
            o.kind = argv[i + 1];
        } else if (name == "--depth") {
            o.depths.clear();
            std::stringstream list(argv[i + 1]);
            for (std::string item; std::getline(list, item, ',');) {
                o.depths.push_back(std::max<int64_t>(256, std::atoll(item.c_str())));
            }
        } else {
            std::fprintf(stderr, "unknown option %s\n", name.c_str());
            std::exit(2);
        }
    }
    return o;
}

int main(int argc, char ** argv) {
    const options o               = parse(argc, argv);
    const std::vector<kind> kinds = chosen_kinds(o);
    std::printf("heads %d, KV heads %d, head dim %d, tokens %d, threads %d; medians of %d\n", (int) o.heads,
                (int) o.kv_heads, (int) o.dim, (int) o.tokens, o.threads, o.repeat);
    if (o.gpu) {
        std::printf("a copy of %d MiB reads and writes %.0f GB/s\n", (int) (COPY_BYTES >> 20), 1e-9 * copy_speed(o));
    }
    std::printf("%8s  %-18s %12s %8s %8s\n", "depth", "cache", "us a layer", "ratio", "GB/s");
    for (const int64_t depth : o.depths) {
        std::vector<std::unique_ptr<attention_graph>> graphs;
        std::vector<std::vector<double>> times(kinds.size());
        for (size_t i = 0; i < kinds.size(); i++) {
            graphs.push_back(std::make_unique<attention_graph>(o, kinds[i], depth));
            if (!graphs.back()->is_supported()) {
                std::printf("%8d  %-18s not computed by this device\n", (int) depth, kinds[i].name);
                graphs.back().reset();
                continue;
            }
            graphs.back()->run();  // warm-up
        }
        for (int r = 0; r < o.repeat; r++) {
            for (size_t i = 0; i < kinds.size(); i++) {
                if (graphs[i]) {
                    times[i].push_back(graphs[i]->run());
                }
            }
        }
        const double base = median(times[0]);
        for (size_t i = 0; i < kinds.size(); i++) {
            if (!graphs[i]) {
                continue;
            }
            const double t = median(times[i]);
            std::printf("%8d  %-18s %12.1f %8.2f %8.2f\n", (int) depth, kinds[i].name, 1e6 * t, base / t,
                        (double) graphs[i]->kv_bytes / t * 1e-9);
        }
    }
    return 0;
}
