// GGML_OP_FLASH_ATTN_EXT over KV types and tiers. Few tokens: our kernel over the cache as it is. Many: the cache is decoded
// to F16, as many KV heads at a time as a bounded scratch holds, for ggml's matrix-core kernels.

#include "fattn.cuh"
#include "kvq-cuda-launch.h"
#include "kvq-gpu-attention.h"

#include <algorithm>
#include <cmath>

namespace kvq {
namespace gpu {

namespace {

constexpr int64_t MAX_TOKENS_OF_DECODE = 8;
constexpr int64_t SCRATCH_BYTES        = 128 * 1024 * 1024;  // of decoded F16; one KV head of K and V is the least
constexpr int64_t MAX_GRID             = 65535;
constexpr int BLOCKS_A_PROCESSOR       = 6;

const ggml_tensor * tier_k(const ggml_tensor * op, int t) {
    return op->src[t == 0 ? 1 : 3 + 2 * t];
}

const ggml_tensor * tier_v(const ggml_tensor * op, int t) {
    return op->src[t == 0 ? 2 : 4 + 2 * t];
}

int count_tiers(const ggml_tensor * op) {
    int n = 1;
    while (n < MAX_TIERS && tier_k(op, n)) {
        n++;
    }
    return n;
}

int64_t count_cells(const ggml_tensor * op) {
    int64_t n = 0;
    for (int t = 0; t < count_tiers(op); t++) {
        n += tier_k(op, t)->ne[1];
    }
    return n;
}

float float_param(const ggml_tensor * op, int i) {
    return ((const float *) op->op_params)[i];
}

// --- few tokens ---

void add_tiers(attention_args & a, const ggml_tensor * op) {
    a.n_tiers    = count_tiers(op);
    int32_t cell = 0;
    for (int t = 0; t < a.n_tiers; t++) {
        const ggml_tensor * k = tier_k(op, t);
        const ggml_tensor * v = tier_v(op, t);
        attention_tier & tier = a.tiers[t];
        tier.k                = (const uint8_t *) k->data;
        tier.v                = (const uint8_t *) v->data;
        tier.type_k           = kv_type_of(k->type);
        tier.type_v           = kv_type_of(v->type);
        tier.k_values         = (int32_t) k->ne[0];
        tier.v_values         = (int32_t) v->ne[0];
        tier.n_rows           = (int32_t) k->ne[1];
        tier.start            = cell;
        tier.first_tile       = a.n_tiles;
        set_strides(tier.k_stride, k);
        set_strides(tier.v_stride, v);
        cell += tier.n_rows;
        a.n_tiles += (tier.n_rows + TILE - 1) / TILE;
    }
}

attention_args read_op(const ggml_tensor * op) {
    const ggml_tensor * q    = op->src[0];
    const ggml_tensor * mask = op->src[3];
    attention_args a         = {};
    a.q                      = (const uint8_t *) q->data;
    a.mask                   = mask ? (const uint8_t *) mask->data : nullptr;
    a.sinks                  = op->src[4] ? (const float *) op->src[4]->data : nullptr;
    a.dst                    = (uint8_t *) op->data;
    set_strides(a.q_stride, q);
    set_strides(a.dst_stride, op);
    if (mask) {
        a.mask_stride[0] = (int64_t) mask->nb[1];
        a.mask_stride[1] = (int64_t) mask->nb[3];
        a.mask_streams   = (int32_t) mask->ne[3];
    }
    a.n_tokens  = (int32_t) q->ne[1];
    a.n_head    = (int32_t) q->ne[2];
    a.n_head_kv = (int32_t) op->src[1]->ne[2];
    a.group     = a.n_head / a.n_head_kv;
    a.dk        = (int32_t) q->ne[0];
    a.dv        = (int32_t) op->ne[0];
    a.softcap   = float_param(op, 2);
    a.scale     = a.softcap == 0.0f ? float_param(op, 0) : float_param(op, 0) / a.softcap;
    if (float_param(op, 1) > 0.0f) {  // as in ggml_soft_max_ext
        a.heads_log2  = 1 << (int) std::floor(std::log2((double) a.n_head));
        a.slope_log2a = -float_param(op, 1) / (float) a.heads_log2;
        a.slope_log2b = a.slope_log2a / 2.0f;
    }
    add_tiers(a, op);
    return a;
}

template <int BLOCKS, int TEAMS, int COLUMNS>
void launch(ggml_backend_cuda_context & ctx, attention_args & a, int64_t n_queries) {
    const int n_sets     = (a.group + COLUMNS - 1) / COLUMNS;
    const int64_t blocks = n_queries * a.n_head_kv * n_sets;
    const int64_t wanted = (int64_t) ggml_cuda_info().devices[ctx.device].nsm * BLOCKS_A_PROCESSOR;
    a.n_spans            = (int32_t) std::max<int64_t>(1, std::min<int64_t>(a.n_tiles, (wanted + blocks - 1) / blocks));
    a.tiles_a_span       = (a.n_tiles + a.n_spans - 1) / a.n_spans;
    a.n_spans            = (a.n_tiles + a.tiles_a_span - 1) / a.tiles_a_span;
    const size_t n       = (size_t) (n_queries * a.n_head * a.n_spans);
    ggml_cuda_pool_alloc<float> spans(ctx.pool(), n * (size_t) (2 + a.dv));
    a.span_max = spans.get();
    a.span_sum = a.span_max + n;
    a.span_acc = a.span_sum + n;
    const dim3 grid(a.n_spans, a.n_head_kv * n_sets, (unsigned) n_queries);
    attend_span<BLOCKS, TEAMS, COLUMNS><<<grid, TEAM * TEAMS, 0, ctx.stream()>>>(a);
    CUDA_CHECK(cudaGetLastError());
    merge_spans<<<dim3(a.n_head, (unsigned) n_queries), MERGE_THREADS, 0, ctx.stream()>>>(a);
    CUDA_CHECK(cudaGetLastError());
}

template <int BLOCKS> void launch_columns(ggml_backend_cuda_context & ctx, attention_args & a, int64_t n_queries) {
    if (a.group == 1) {
        launch<BLOCKS, 1, 1>(ctx, a, n_queries);
    } else if (a.group == 2) {
        launch<BLOCKS, 1, 2>(ctx, a, n_queries);
    } else if (a.group <= 4) {
        launch<BLOCKS, 1, 4>(ctx, a, n_queries);
    } else {
        launch<BLOCKS, 1, 8>(ctx, a, n_queries);
    }
}

void attend_few(ggml_backend_cuda_context & ctx, const ggml_tensor * op) {
    attention_args a        = read_op(op);
    const int64_t n_queries = a.n_tokens * op->src[0]->ne[3];
    const int dim           = std::max(a.dk, a.dv);
    if (dim <= 64) {
        launch_columns<1>(ctx, a, n_queries);
    } else if (dim <= 128) {
        launch_columns<2>(ctx, a, n_queries);
    } else if (a.group == 1) {
        launch<2, 2, 1>(ctx, a, n_queries);
    } else {
        launch<2, 2, 2>(ctx, a, n_queries);
    }
}

// --- many tokens ---

void set_layout(ggml_tensor & t, ggml_type type, void * data, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    t       = {};
    t.type  = type;
    t.data  = data;
    t.ne[0] = ne0;
    t.ne[1] = ne1;
    t.ne[2] = ne2;
    t.ne[3] = ne3;
    t.nb[0] = ggml_type_size(type);
    for (int i = 1; i < 4; i++) {
        t.nb[i] = t.nb[i - 1] * (size_t) t.ne[i - 1];
    }
}

// Attention of the query heads of KV heads [first, first + n) over F16 copies of K and V, as ggml's kernels take it.
struct plain_attention {
    ggml_tensor q;
    ggml_tensor k;
    ggml_tensor v;
    ggml_tensor sinks;
    ggml_tensor op;
};

void set_plain(plain_attention & p, const ggml_tensor * op, int64_t first, int64_t n, void * k, void * v, void * out) {
    const ggml_tensor * q = op->src[0];
    const int64_t group   = q->ne[2] / op->src[1]->ne[2];
    const int64_t n_kv    = count_cells(op);
    p.q                   = *q;
    p.q.ne[2]             = n * group;
    p.q.data              = (char *) q->data + first * group * (int64_t) q->nb[2];
    set_layout(p.k, GGML_TYPE_F16, k, q->ne[0], n_kv, n, q->ne[3]);
    set_layout(p.v, GGML_TYPE_F16, v, op->ne[0], n_kv, n, q->ne[3]);
    set_layout(p.op, GGML_TYPE_F32, out, op->ne[0], n * group, op->ne[2], op->ne[3]);
    p.op.op = GGML_OP_FLASH_ATTN_EXT;
    std::copy(op->op_params, op->op_params + GGML_MAX_OP_PARAMS / sizeof(int32_t), p.op.op_params);
    p.op.op_params[4] = 0;  // the mask's rows are dense
    p.op.src[0]       = &p.q;
    p.op.src[1]       = &p.k;
    p.op.src[2]       = &p.v;
    p.op.src[3]       = op->src[3];
    if (op->src[4]) {
        p.sinks       = *op->src[4];
        p.sinks.ne[0] = n * group;
        p.sinks.data  = (float *) op->src[4]->data + first * group;
        p.op.src[4]   = &p.sinks;
    }
}

// KV heads decoded at once. ALiBi's slopes go by the number of a head among all.
int64_t heads_at_once(const ggml_tensor * op) {
    const int64_t n_head_kv = op->src[1]->ne[2];
    const int64_t bytes     = count_cells(op) * (op->src[0]->ne[0] + op->ne[0]) * 2 * op->src[0]->ne[3];
    return float_param(op, 1) > 0.0f ? n_head_kv : std::max<int64_t>(1, std::min(n_head_kv, SCRATCH_BYTES / bytes));
}

bool can_attend_plain(const ggml_tensor * op, int device) {
    plain_attention p;
    set_plain(p, op, 0, heads_at_once(op), nullptr, nullptr, op->data);
    return ggml_cuda_flash_attn_ext_supported(device, &p.op);
}

void decode_tiers(ggml_backend_cuda_context & ctx, const ggml_tensor * op, const plain_attention & p, int64_t first) {
    int64_t cell = 0;
    for (int t = 0; t < count_tiers(op); t++) {
        for (const bool keys : { true, false }) {
            const ggml_tensor & to = keys ? p.k : p.v;
            decode_to_half(ctx, keys ? tier_k(op, t) : tier_v(op, t), to.ne[0], first, to.ne[2],
                           (uint8_t *) to.data + cell * (int64_t) to.nb[1], (int64_t) to.nb[2], (int64_t) to.nb[3]);
        }
        cell += tier_k(op, t)->ne[1];
    }
}

void attend_many(ggml_backend_cuda_context & ctx, ggml_tensor * op) {
    const int64_t n_head_kv = op->src[1]->ne[2];
    const int64_t n_streams = op->src[0]->ne[3];
    const int64_t n_rows    = op->ne[2] * n_streams;
    const int64_t step      = heads_at_once(op);
    const bool all          = step == n_head_kv;
    const size_t n_cells    = (size_t) (count_cells(op) * step * n_streams);
    const size_t row_bytes  = (size_t) (op->ne[0] * op->ne[1]) * sizeof(float);
    const size_t head_bytes = row_bytes / (size_t) n_head_kv;  // of one KV head's query heads
    ggml_cuda_pool_alloc<half> k(ctx.pool(), n_cells * (size_t) op->src[0]->ne[0]);
    ggml_cuda_pool_alloc<half> v(ctx.pool(), n_cells * (size_t) op->ne[0]);
    ggml_cuda_pool_alloc<char> out(ctx.pool(), all ? 1 : head_bytes * (size_t) (step * n_rows));
    for (int64_t first = 0; first < n_head_kv; first += step) {
        const int64_t n = std::min(step, n_head_kv - first);
        plain_attention p;
        set_plain(p, op, first, n, k.get(), v.get(), all ? op->data : out.get());
        decode_tiers(ctx, op, p, first);
        ggml_cuda_flash_attn_ext(ctx, &p.op);
        if (!all) {
            const size_t width = head_bytes * (size_t) n;
            CUDA_CHECK(cudaMemcpy2DAsync((char *) op->data + head_bytes * (size_t) first, row_bytes, out.get(), width,
                                         width, (size_t) n_rows, cudaMemcpyDeviceToDevice, ctx.stream()));
        }
    }
}

}  // namespace

const char * attention_obstacle(const ggml_tensor * op) {
    const ggml_tensor * q    = op->src[0];
    const ggml_tensor * mask = op->src[3];
    const int n_tiers        = count_tiers(op);
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float) || !ggml_is_contiguous(op)) {
        return "queries that are not F32 rows";
    }
    if (mask && (mask->type != GGML_TYPE_F16 || mask->ne[2] != 1 || mask->nb[0] != sizeof(uint16_t))) {
        return "a mask that is not F16, or one a head";
    }
    if (std::max(q->ne[0], op->ne[0]) > MAX_HEAD_DIM) {
        return "a head dim above 256";
    }
    if (q->ne[1] * q->ne[3] > MAX_GRID || op->src[1]->ne[2] > MAX_GRID) {
        return "more tokens or heads than a grid holds";
    }
    for (int t = 0; t < n_tiers; t++) {
        for (const ggml_tensor * x : { tier_k(op, t), tier_v(op, t) }) {
            if (kv_type_of(x->type) == KV_TYPES) {
                return "a K or V type other than f16, bf16, q8_0, q4_0 and the KV types";
            }
            if (x->ne[3] != q->ne[3] || q->ne[2] % x->ne[2] != 0 || x->ne[2] != op->src[1]->ne[2]) {
                return "streams or heads that do not fit";
            }
            if (x->nb[0] != ggml_type_size(x->type) || x->nb[1] % 2 != 0) {
                return "rows that are not contiguous";
            }
        }
    }
    return nullptr;
}

void attend(ggml_backend_cuda_context & ctx, ggml_tensor * op) {
    if (op->src[0]->ne[1] > MAX_TOKENS_OF_DECODE && can_attend_plain(op, ctx.device)) {
        attend_many(ctx, op);
    } else {
        attend_few(ctx, op);
    }
}

}  // namespace gpu
}  // namespace kvq
