// Ageing: which tokens move down, and the graph that moves them; and the graph that turns keys for a context shift.

#include "kvq-tiers.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <climits>
#include <stdexcept>

std::vector<uint32_t> kvq_tiers::free_cells(const llama_kv_cache & cache, uint32_t stream, size_t t,
                                            uint32_t n_max) const {
    const llama_kv_cells & cells = cache.v_cells[stream];
    std::vector<uint32_t> result;
    for (uint32_t i = tiers[t].start; i < tiers[t].start + tiers[t].n_rows && result.size() < n_max; i++) {
        if (cells.is_empty(i)) {
            result.push_back(i);
        }
    }
    return result;
}

// The cells that are to leave a tier, oldest first: up to n_max of those that may go, and if they are not enough, window and
// sinks until n_needed. A cell that several sequences share is as old as for the one in which it is youngest.
std::vector<uint32_t> kvq_tiers::oldest_cells(const llama_kv_cache & cache, uint32_t stream, size_t t,
                                              uint32_t n_needed, uint32_t n_max) const {
    struct candidate {
        bool sink;
        llama_pos age;
        uint32_t cell;
    };
    const llama_kv_cells & cells = cache.v_cells[stream];
    const auto n_sink            = t == 0 ? (llama_pos) config.n_sink : 0;
    const auto window            = t == 0 ? (llama_pos) config.tiers[0].n_tokens : 0;
    std::vector<candidate> candidates;
    for (uint32_t i = tiers[t].start; i < tiers[t].start + tiers[t].n_rows; i++) {
        if (cells.is_empty(i)) {
            continue;
        }
        llama_pos age = INT_MAX;
        for (uint32_t s = 0; s < cache.n_seq_max; s++) {
            if (cells.seq_has(i, s)) {
                age = std::min(age, cells.seq_pos_max(s) - cells.pos_get(i));
            }
        }
        candidates.push_back({ cells.pos_get(i) < n_sink, age, i });
    }
    std::sort(candidates.begin(), candidates.end(), [](const candidate & a, const candidate & b) {
        return a.sink != b.sink ? b.sink : a.age != b.age ? a.age > b.age : a.cell < b.cell;
    });
    std::vector<uint32_t> result;
    for (const candidate & candidate : candidates) {
        const bool may_go = !candidate.sink && candidate.age >= window;
        if (result.size() < (may_go ? n_max : n_needed)) {
            result.push_back(candidate.cell);
        }
    }
    return result;
}

// Frees up to n_wanted cells of a tier by moving its oldest down, and the next tier's before them. Returns how many are free.
uint32_t kvq_tiers::make_room(llama_kv_cache & cache, uint32_t stream, size_t t, uint32_t n_wanted,
                              std::vector<move> & moves) {
    const uint32_t n_free = (uint32_t) free_cells(cache, stream, t, tiers[t].n_rows).size();
    if (n_free >= n_wanted || t + 1 == tiers.size()) {
        return std::min(n_free, n_wanted);
    }
    const uint32_t n_missing = n_wanted - n_free;
    const uint32_t n_blocks  = GGML_PAD(n_missing, config.n_block);
    const uint32_t n_room    = make_room(cache, stream, t + 1, std::min(n_blocks, tiers[t + 1].n_rows), moves);

    // whole blocks if they may go, else only what is needed
    std::vector<uint32_t> src = oldest_cells(cache, stream, t, std::min(n_missing, n_room), n_room);
    if (src.empty()) {
        return std::min(n_free, n_wanted);
    }
    llama_kv_cells & cells = cache.v_cells[stream];
    move move              = { stream, t, src, free_cells(cache, stream, t + 1, (uint32_t) src.size()) };
    cells.set(move.dst, cells.cp(move.src));
    for (const uint32_t cell : move.src) {
        cells.rm(cell);
    }
    tiers[t + 1].n_arrived += (int64_t) move.src.size();
    moves.push_back(std::move(move));
    return std::min(n_free + (uint32_t) src.size(), n_wanted);
}

namespace {

constexpr size_t MAX_NODES_A_TENSOR = 16;  // to move a part of it: see fit_heads

thread_local int moving_depth = 0;

struct moving_scope {
    moving_scope() { moving_depth++; }
    ~moving_scope() { moving_depth--; }
};

ggml_tensor * join_streams(ggml_context * ctx, ggml_tensor * tensor) {
    return ggml_reshape_2d(ctx, tensor, tensor->ne[0], tensor->ne[1] * tensor->ne[2]);
}

// values [n, n_head, head_dim or more] -> [n, n_head, want]: what stood behind head_dim goes, and the head is repeated up to
// the new width. Zeros there would cost precision: a codec that fits its scale to a block would fit it to them too.
ggml_tensor * fit_heads(ggml_context * ctx, ggml_tensor * heads, int64_t head_dim, int64_t want) {
    if (heads->ne[0] != head_dim) {
        heads = ggml_cont(ctx, ggml_view_3d(ctx, heads, head_dim, heads->ne[1], heads->ne[2], heads->nb[1],
                                            heads->nb[2], 0));
    }
    while (heads->ne[0] < want) {
        const int64_t n = std::min(heads->ne[0], want - heads->ne[0]);
        heads           = ggml_concat(ctx, heads,
                                      ggml_view_3d(ctx, heads, n, heads->ne[1], heads->ne[2], heads->nb[1], heads->nb[2], 0), 0);
    }
    return heads;
}

// As llama_context does before each graph of its own.
void set_threads(ggml_backend_sched_t sched, int n_threads) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
        const auto set =
            (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
        if (set) {
            set(backend, n_threads);
        }
    }
}

}  // namespace

bool kvq_tiers_moving() {
    return moving_depth > 0;
}

// A scheduler of their own, so that the context's goes on holding the graph and the memory of the next decode.
void kvq_tiers::init_sched() {
    ggml_backend_sched_t of_context = lctx->get_sched();
    std::vector<ggml_backend_t> backends;
    std::vector<ggml_backend_buffer_type_t> bufts;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(of_context); i++) {
        backends.push_back(ggml_backend_sched_get_backend(of_context, i));
        bufts.push_back(ggml_backend_sched_get_buffer_type(of_context, backends.back()));
    }
    sched.reset(
        ggml_backend_sched_new(backends.data(), bufts.data(), (int) backends.size(), n_graph_nodes(), false, false));
}

size_t kvq_tiers::n_graph_nodes() const {
    return 2 * layers.size() * MAX_NODES_A_TENSOR;
}

// One graph over all layers.
void kvq_tiers::compute_move(const move & move) const {
    const size_t n_nodes = n_graph_nodes();
    const size_t n_bytes = 2 * n_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false);
    const ggml_context_ptr holder(ggml_init({ n_bytes, nullptr, true }));
    ggml_context * ctx = holder.get();
    ggml_cgraph * gf   = ggml_new_graph_custom(ctx, n_nodes, false);

    const tier & from = tiers[move.tier];
    const tier & to   = tiers[move.tier + 1];
    const int64_t n   = (int64_t) move.src.size();
    ggml_tensor * src = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n);
    ggml_tensor * dst = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n);
    ggml_set_input(src);
    ggml_set_input(dst);
    const auto add = [&](const layer & layer, const std::vector<ggml_tensor *> & tensors, int64_t head_dim) {
        ggml_tensor * source = tensors[move.tier];
        ggml_tensor * target = tensors[move.tier + 1];
        ggml_tensor * rows   = ggml_get_rows(ctx, join_streams(ctx, source), src);
        if (target->ne[0] != layer.n_head * head_dim || source->ne[0] != target->ne[0]) {
            ggml_tensor * heads = ggml_reshape_3d(ctx, rows, source->ne[0] / layer.n_head, layer.n_head, n);
            heads               = fit_heads(ctx, heads, head_dim, target->ne[0] / layer.n_head);
            rows                = ggml_reshape_2d(ctx, heads, target->ne[0], n);
        }
        ggml_build_forward_expand(gf, ggml_set_rows(ctx, join_streams(ctx, target), rows, dst));
    };
    for (const layer & layer : layers) {
        add(layer, layer.k, layer.head_dim_k);
        add(layer, layer.v, layer.head_dim_v);
    }

    // Plan the memory anew: the allocator keeps a plan whose node sizes fit, also that of another move, whose nodes are
    // used in another order.
    ggml_backend_sched_reset(sched.get());
    if (!ggml_backend_sched_reserve(sched.get(), gf) || !ggml_backend_sched_alloc_graph(sched.get(), gf)) {
        throw std::runtime_error("no memory for the graph that moves tokens");
    }
    // row numbers in the tensors with all streams joined
    std::vector<int32_t> src_rows;
    std::vector<int64_t> dst_rows;
    for (int64_t i = 0; i < n; i++) {
        src_rows.push_back((int32_t) (move.stream * from.n_rows + move.src[i] - from.start));
        dst_rows.push_back((int64_t) move.stream * to.n_rows + move.dst[i] - to.start);
    }
    ggml_backend_tensor_set(src, src_rows.data(), 0, ggml_nbytes(src));
    ggml_backend_tensor_set(dst, dst_rows.data(), 0, ggml_nbytes(dst));
    if (ggml_backend_sched_graph_compute(sched.get(), gf) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("computing the graph that moves tokens failed");
    }
}

// A tier that is smaller than what passes through it is emptied several times.
void kvq_tiers::free_rows(llama_kv_cache & cache, uint32_t stream, size_t t, uint32_t n_wanted,
                          std::vector<move> & moves) {
    n_wanted         = std::min(n_wanted, tiers[t].n_rows);
    uint32_t n_found = 0;
    size_t n_moves   = 0;
    do {
        n_moves = moves.size();
        n_found = make_room(cache, stream, t, n_wanted, moves);
    } while (n_found < n_wanted && moves.size() > n_moves);
}

// If that fails the cache is cleared, since the book says that tokens moved and the rows may say that they did not.
void kvq_tiers::apply_moves(llama_kv_cache & cache, const std::vector<move> & moves) {
    if (moves.empty()) {
        return;
    }
    const moving_scope scope;
    try {
        if (!sched) {
            init_sched();
        }
        lctx->synchronize();
        set_threads(sched.get(), (int) lctx->get_cparams().n_threads_batch);
        for (const move & move : moves) {
            compute_move(move);
        }
    } catch (...) {
        cache.clear(true);
        throw;
    }
}

bool kvq_tiers::age(llama_kv_cache & cache, const std::vector<llama_ubatch> & ubatches) {
    std::vector<uint32_t> n_new(n_stream, 0);
    for (const llama_ubatch & ubatch : ubatches) {
        for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
            n_new[cache.get_stream(ubatch.seq_id[i][0])]++;
        }
    }
    std::vector<move> moves;
    for (uint32_t s = 0; s < n_stream; s++) {
        free_rows(cache, s, 0, n_new[s], moves);
    }
    apply_moves(cache, moves);
    return !moves.empty();
}

void kvq_tiers::build_shift(const llama_kv_cache & cache, const llama_cparams & cparams, ggml_context * ctx,
                            ggml_cgraph * gf, ggml_tensor * shift, ggml_tensor * rot, ggml_tensor * factors,
                            float freq_base, float freq_scale, int32_t il) const {
    const layer & layer    = get_layer(il);
    const uint32_t n_cells = tiers.back().start + tiers.back().n_rows;
    for (size_t t = 0; t < tiers.size(); t++) {
        // all streams at once: the amounts of this tier's cells, gathered from those of all cells
        const int64_t n_rows = (int64_t) tiers[t].n_rows * n_stream;
        ggml_tensor * amount = ggml_view_2d(ctx, shift, tiers[t].n_rows, n_stream, n_cells * sizeof(int32_t),
                                            tiers[t].start * sizeof(int32_t));
        amount               = ggml_reshape_1d(ctx, ggml_cont(ctx, amount), n_rows);

        ggml_tensor * k      = layer.k[t];
        const int64_t padded = k->ne[0] / layer.n_head;
        ggml_tensor * rows   = ggml_reshape_3d(ctx, k, padded, layer.n_head, n_rows);
        ggml_tensor * cur    = ggml_cast(ctx, rows, GGML_TYPE_F32);
        cur                  = fit_heads(ctx, cur, layer.head_dim_k, layer.head_dim_k);
        // keys are stored rotated or transformed, also in tiers that are not quantized
        const kvq_transform * transform = cache.transform.get();
        cur                             = transform ? transform->restore_keys(ctx, cache, il, cur) :
                                          rot       ? llama_mul_mat_hadamard(ctx, cur, rot) :
                                                      cur;
        cur = cache.build_rope_shift(cparams, ctx, cur, amount, nullptr, factors, freq_base, freq_scale, il);
        cur = transform ? transform->store_keys(ctx, cache, il, cur) :
              rot       ? llama_mul_mat_hadamard(ctx, cur, rot) :
                          cur;
        cur = fit_heads(ctx, cur, layer.head_dim_k, padded);
        ggml_build_forward_expand(gf, ggml_cpy(ctx, cur, rows));
    }
}
