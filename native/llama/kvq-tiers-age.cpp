// Ageing: which tokens move down, and the graph that moves them; and the graph that turns keys for a context shift.

#include "kvq-tiers.h"
#include "llama-context.h"
#include "llama-graph.h"
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

void kvq_tiers::request(const llama_kv_cache & cache, const std::vector<llama_ubatch> & ubatches) {
    n_requested.assign(n_stream, 0);
    for (const llama_ubatch & ubatch : ubatches) {
        for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
            n_requested[cache.get_stream(ubatch.seq_id[i][0])]++;
        }
    }
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

constexpr size_t MAX_NODES_A_MOVE = 16;  // of one layer's K or V: see fit_heads

thread_local int moving_depth = 0;

struct moving_scope {
    moving_scope() { moving_depth++; }
    ~moving_scope() { moving_depth--; }
};

// The row numbers of the moves; [n] each, into the tensors with all streams joined.
struct graph_input_moves : public llm_graph_input_i {
    void set_input(const llama_ubatch *) override {
        for (const auto & entry : src) {
            ggml_backend_tensor_set(entry.first, entry.second.data(), 0, ggml_nbytes(entry.first));
        }
        for (const auto & entry : dst) {
            ggml_backend_tensor_set(entry.first, entry.second.data(), 0, ggml_nbytes(entry.first));
        }
    }

    std::vector<std::pair<ggml_tensor *, std::vector<int32_t>>> src;
    std::vector<std::pair<ggml_tensor *, std::vector<int64_t>>> dst;
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

}  // namespace

bool kvq_tiers_moving() {
    return moving_depth > 0;
}

bool kvq_tiers::compute_moves(const move * moves, size_t n_moves) const {
    ggml_backend_sched_t sched = lctx->get_sched();
    ggml_backend_sched_reset(sched);
    auto * res = lctx->get_gf_res_reserve();
    res->reset();
    ggml_context * ctx = res->get_ctx();
    ggml_cgraph * gf   = res->get_gf();

    auto input = std::make_unique<graph_input_moves>();
    for (size_t m = 0; m < n_moves; m++) {
        const move & move = moves[m];
        const tier & from = tiers[move.tier];
        const tier & to   = tiers[move.tier + 1];
        const int64_t n   = (int64_t) move.src.size();
        ggml_tensor * src = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n);
        ggml_tensor * dst = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n);
        ggml_set_input(src);
        ggml_set_input(dst);
        std::vector<int32_t> src_rows;
        std::vector<int64_t> dst_rows;
        for (int64_t i = 0; i < n; i++) {
            src_rows.push_back((int32_t) (move.stream * from.n_rows + move.src[i] - from.start));
            dst_rows.push_back((int64_t) move.stream * to.n_rows + move.dst[i] - to.start);
        }
        input->src.emplace_back(src, std::move(src_rows));
        input->dst.emplace_back(dst, std::move(dst_rows));

        for (const layer & layer : layers) {
            const auto add = [&](const std::vector<ggml_tensor *> & tensors, int64_t head_dim) {
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
            add(layer.k, layer.head_dim_k);
            add(layer.v, layer.head_dim_v);
        }
    }
    res->add_input(std::move(input));

    if (!ggml_backend_sched_alloc_graph(sched, gf)) {
        LLAMA_LOG_ERROR("%s: failed to allocate the graph that moves %zu blocks\n", __func__, n_moves);
        return false;
    }
    res->set_inputs(nullptr);
    return lctx->graph_compute(gf, true) == GGML_STATUS_SUCCESS;
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

// Graphs of as many moves as fit, in order. On failure the cache is cleared: the book says that tokens moved and the rows may
// say that they did not.
bool kvq_tiers::apply_moves(llama_kv_cache & cache, const std::vector<move> & moves) const {
    if (moves.empty()) {
        return true;
    }
    const moving_scope scope;
    const size_t n_nodes  = (size_t) ggml_graph_size(lctx->get_gf_res_reserve()->get_gf());
    const size_t per_move = 2 * layers.size() * MAX_NODES_A_MOVE;
    const size_t n_graph  = std::max<size_t>(1, n_nodes / per_move);
    try {
        for (size_t i = 0; i < moves.size(); i += n_graph) {
            if (!compute_moves(&moves[i], std::min(n_graph, moves.size() - i))) {
                throw std::runtime_error("computing the moves failed");
            }
        }
    } catch (const std::exception & error) {
        LLAMA_LOG_ERROR("%s: %s, the KV cache is cleared\n", __func__, error.what());
        cache.clear(true);
        return false;
    }
    return true;
}

bool kvq_tiers::age(llama_kv_cache & cache) {
    std::vector<move> moves;
    for (uint32_t s = 0; s < n_stream; s++) {
        free_rows(cache, s, 0, n_requested[s], moves);
    }
    n_requested.clear();
    apply_moves(cache, moves);
    return !moves.empty();
}

void kvq_tiers::begin_update(llama_context * context, bool optimize) {
    lctx = context;
    if (!optimize) {
        n_requested.clear();
    }
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
        // keys are stored rotated, also in tiers that are not quantized
        cur = rot ? llama_mul_mat_hadamard(ctx, cur, rot) : cur;
        cur = cache.build_rope_shift(cparams, ctx, cur, amount, nullptr, factors, freq_base, freq_scale, il);
        cur = rot ? llama_mul_mat_hadamard(ctx, cur, rot) : cur;
        cur = fit_heads(ctx, cur, layer.head_dim_k, padded);
        ggml_build_forward_expand(gf, ggml_cpy(ctx, cur, rows));
    }
}
