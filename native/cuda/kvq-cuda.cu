// The ops of the CUDA and HIP backends that touch the KV types, but for attention.

#include "kvq-cuda-launch.h"
#include "kvq-gpu-decode.h"
#include "kvq-gpu-encode.h"
#include "kvq-gpu-mul-heads.h"

#include <climits>
#include <set>

namespace kvq {
namespace gpu {

int32_t kv_type_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F16:
            return KV_F16;
        case GGML_TYPE_BF16:
            return KV_BF16;
        case GGML_TYPE_Q8_0:
            return KV_Q8_0;
        case GGML_TYPE_Q4_0:
            return KV_Q4_0;
        case GGML_TYPE_Q4_VE:
            return KV_Q4_VE;
        case GGML_TYPE_Q2_T:
            return KV_Q2_T;
        case GGML_TYPE_Q4_VES:
            return KV_Q4_VES;
        case GGML_TYPE_Q2_TS:
            return KV_Q2_TS;
        default:
            return KV_TYPES;
    }
}

bool is_own_type(ggml_type type) {
    return type == GGML_TYPE_Q4_VE || type == GGML_TYPE_Q2_T || type == GGML_TYPE_Q4_VES || type == GGML_TYPE_Q2_TS;
}

namespace {

constexpr int64_t MIN_TOKENS_OF_MUL_HEADS = 8;  // below, a token at a time loses nothing

int blocks_for(int64_t n, int64_t per_block) {
    const int64_t blocks = (n + per_block - 1) / per_block;
    GGML_ASSERT(blocks <= INT_MAX);
    return (int) blocks;
}

bool is_copy(const ggml_tensor * op) {
    return op->op == GGML_OP_CPY || op->op == GGML_OP_DUP || op->op == GGML_OP_CONT;
}

const ggml_tensor * copy_target(const ggml_tensor * op) {
    return op->op == GGML_OP_CPY ? op->src[1] : op;
}

void encode(ggml_backend_cuda_context & ctx, const ggml_tensor * src, const ggml_tensor * rows,
            const ggml_tensor * dst) {
    encode_args a  = {};
    a.src          = (const uint8_t *) src->data;
    a.dst          = (uint8_t *) dst->data;
    a.n_blocks_row = src->ne[0] / KVQ_BLOCK;
    a.n1           = src->ne[1];
    a.n2           = src->ne[2];
    a.n3           = src->ne[3];
    set_strides(a.src_stride, src);
    set_strides(a.dst_stride, dst);
    if (rows) {
        a.rows      = (const uint8_t *) rows->data;
        a.rows_wide = rows->type == GGML_TYPE_I64;
        a.rows_n2   = rows->ne[1];
        a.rows_n3   = rows->ne[2];
        set_strides(a.rows_stride, rows, 0);
    }
    const int64_t n = a.n_blocks_row * a.n1 * a.n2 * a.n3;
    if (n == 0) {
        return;
    }
    const int blocks          = blocks_for(n, ENCODE_TEAMS);
    const cudaStream_t stream = ctx.stream();
    switch (kv_type_of(dst->type)) {
        case KV_Q4_VE:
            encode_rows<KV_Q4_VE><<<blocks, ENCODE_THREADS, 0, stream>>>(a);
            break;
        case KV_Q2_T:
            encode_rows<KV_Q2_T><<<blocks, ENCODE_THREADS, 0, stream>>>(a);
            break;
        case KV_Q4_VES:
            encode_rows<KV_Q4_VES><<<blocks, ENCODE_THREADS, 0, stream>>>(a);
            break;
        default:
            encode_rows<KV_Q2_TS><<<blocks, ENCODE_THREADS, 0, stream>>>(a);
            break;
    }
    CUDA_CHECK(cudaGetLastError());
}

void launch_decode(ggml_backend_cuda_context & ctx, const decode_args & a) {
    const int64_t n = 2 * ((a.n0 + 63) / 64) * a.n1 * a.n2 * a.n3;
    if (n == 0) {
        return;
    }
    decode_rows<<<blocks_for(n, DECODE_THREADS), DECODE_THREADS, 0, ctx.stream()>>>(a);
    CUDA_CHECK(cudaGetLastError());
}

void decode(ggml_backend_cuda_context & ctx, const ggml_tensor * src, const ggml_tensor * rows,
            const ggml_tensor * dst) {
    decode_args a = {};
    a.src         = (const uint8_t *) src->data;
    a.dst         = (uint8_t *) dst->data;
    a.type        = kv_type_of(src->type);
    a.n0          = dst->ne[0];
    a.n1          = dst->ne[1];
    a.n2          = dst->ne[2];
    a.n3          = dst->ne[3];
    set_strides(a.src_stride, src);
    set_strides(a.dst_stride, dst);
    if (rows) {
        a.rows = (const uint8_t *) rows->data;
        set_strides(a.rows_stride, rows, 0);
    }
    launch_decode(ctx, a);
}

// A product with F16 weights of a model is ggml's: one matrix, not one a head.
bool is_mul_heads(const ggml_tensor * op) {
    if (op->op != GGML_OP_MUL_MAT) {
        return false;
    }
    const ggml_tensor * m = op->src[0];
    const ggml_tensor * x = op->src[1];
    const bool type_ok    = m->type == GGML_TYPE_F32 || (m->type == GGML_TYPE_F16 && m->ne[2] > 1);
    return type_ok && x->type == GGML_TYPE_F32 && x->ne[1] == 1 && x->ne[3] >= MIN_TOKENS_OF_MUL_HEADS &&
           m->ne[3] == 1 && m->ne[0] % HEADS_TILE == 0 && m->ne[1] % HEADS_TILE == 0 &&
           m->nb[0] == ggml_type_size(m->type) && x->nb[0] == sizeof(float) && x->ne[2] % m->ne[2] == 0 &&
           x->ne[2] <= 65535;
}

void multiply_heads(ggml_backend_cuda_context & ctx, const ggml_tensor * dst) {
    const ggml_tensor * m = dst->src[0];
    const ggml_tensor * x = dst->src[1];
    const auto stride     = [](const ggml_tensor * t, int i) { return (int64_t) (t->nb[i] / t->nb[0]); };
    mul_heads_args a      = {};
    a.matrix              = m->data;
    a.x                   = (const float *) x->data;
    a.y                   = (float *) dst->data;
    a.n_in                = (int32_t) m->ne[0];
    a.n_out               = (int32_t) m->ne[1];
    a.n_tokens            = (int32_t) x->ne[3];
    a.group               = (int32_t) (x->ne[2] / m->ne[2]);
    a.half_matrix         = m->type == GGML_TYPE_F16;
    a.matrix_row          = stride(m, 1);
    a.matrix_head         = stride(m, 2);
    a.x_head              = stride(x, 2);
    a.x_token             = stride(x, 3);
    a.y_head              = stride(dst, 2);
    a.y_token             = stride(dst, 3);
    const dim3 grid(blocks_for(a.n_tokens, HEADS_TILE), a.n_out / HEADS_TILE, (unsigned) x->ne[2]);
    mul_heads<<<grid, HEADS_THREADS, 0, ctx.stream()>>>(a);
    CUDA_CHECK(cudaGetLastError());
}

// Why an op that is ours cannot be computed, or null.
const char * obstacle(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_FLASH_ATTN_EXT:
            return attention_obstacle(op);
        case GGML_OP_SET_ROWS:
            return op->src[0]->type != GGML_TYPE_F32 || op->src[0]->nb[0] != sizeof(float) ?
                       "rows that are not F32" :
                   op->src[1]->type != GGML_TYPE_I64 && op->src[1]->type != GGML_TYPE_I32 ?
                       "row numbers of another type" :
                       nullptr;
        case GGML_OP_GET_ROWS:
            return op->type != GGML_TYPE_F32         ? "a result that is not F32" :
                   op->src[1]->type != GGML_TYPE_I32 ? "row numbers of another type" :
                   op->src[1]->ne[3] != 1            ? "row numbers of four dimensions" :
                                                       nullptr;
        default:
            break;
    }
    const ggml_tensor * src = op->src[0];
    const ggml_tensor * dst = copy_target(op);
    if (!ggml_are_same_shape(src, dst)) {
        return "a copy to another shape";
    }
    const ggml_tensor * floats = is_own_type(src->type) ? dst : src;
    return floats->type != GGML_TYPE_F32 || floats->nb[0] != sizeof(float) ? "a copy that is not from or to F32 rows" :
                                                                             nullptr;
}

}  // namespace

void decode_to_half(ggml_backend_cuda_context & ctx, const ggml_tensor * tier, int64_t dim, int64_t first_head,
                    int64_t n_heads, uint8_t * dst, int64_t head_stride, int64_t stream_stride) {
    decode_args a   = {};
    a.src           = (const uint8_t *) tier->data + first_head * (int64_t) tier->nb[2];
    a.dst           = dst;
    a.type          = kv_type_of(tier->type);
    a.to_half       = 1;
    a.n0            = dim;
    a.n1            = tier->ne[1];
    a.n2            = n_heads;
    a.n3            = tier->ne[3];
    a.dst_stride[0] = dim * (int64_t) sizeof(uint16_t);
    a.dst_stride[1] = head_stride;
    a.dst_stride[2] = stream_stride;
    set_strides(a.src_stride, tier);
    launch_decode(ctx, a);
}

}  // namespace gpu
}  // namespace kvq

using namespace kvq::gpu;

bool kvq_cuda_takes_op(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_FLASH_ATTN_EXT:
            return op->src[5] || is_own_type(op->src[1]->type) || is_own_type(op->src[2]->type);
        case GGML_OP_SET_ROWS:
            return is_own_type(op->type);
        case GGML_OP_GET_ROWS:
            return is_own_type(op->src[0]->type);
        default:
            return is_copy(op) && op->src[0]->type != copy_target(op)->type &&
                   (is_own_type(op->src[0]->type) || is_own_type(copy_target(op)->type));
    }
}

bool kvq_cuda_supports_op(const ggml_tensor * op) {
    const char * reason = obstacle(op);
    if (!reason) {
        return true;
    }
    static std::mutex mutex;
    static std::set<std::string> warned;
    const std::lock_guard<std::mutex> lock(mutex);
    if (warned.insert(std::string(ggml_op_name(op->op)) + reason).second) {
        GGML_LOG_WARN("%s: %s runs on the CPU: %s\n", __func__, ggml_op_name(op->op), reason);
    }
    return false;
}

bool kvq_cuda_compute_forward(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    if (is_mul_heads(dst)) {
        multiply_heads(ctx, dst);
        return true;
    }
    if (!kvq_cuda_takes_op(dst)) {
        return false;
    }
    switch (dst->op) {
        case GGML_OP_FLASH_ATTN_EXT:
            attend(ctx, dst);
            return true;
        case GGML_OP_SET_ROWS:
            encode(ctx, dst->src[0], dst->src[1], dst);
            return true;
        case GGML_OP_GET_ROWS:
            decode(ctx, dst->src[0], dst->src[1], dst);
            return true;
        default:
            break;
    }
    if (is_own_type(dst->src[0]->type)) {
        decode(ctx, dst->src[0], nullptr, copy_target(dst));
    } else {
        encode(ctx, dst->src[0], nullptr, copy_target(dst));
    }
    return true;
}
