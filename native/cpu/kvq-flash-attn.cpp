#include "kvq-flash-attn.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "kvq-cpu.h"
#include "kvq-simd.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace kvq {

namespace {

int64_t round_up(int64_t n, int64_t step) {
    return (n + step - 1) / step * step;
}

void add_tiers(attention & a) {
    a.n_tiers    = 0;
    a.n_blocks   = 0;
    int64_t cell = 0;
    for (int64_t t = 0; t < MAX_TIERS; t++) {
        const ggml_tensor * k = a.dst->src[t == 0 ? 1 : 3 + 2 * t];
        const ggml_tensor * v = a.dst->src[t == 0 ? 2 : 4 + 2 * t];
        if (!k) {
            break;
        }
        a.tiers[a.n_tiers++] = { k, v, cell, k->ne[1], a.n_blocks, decoder_of(k->type), decoder_of(v->type) };
        a.width_k            = std::max(a.width_k, round_up(k->ne[0], 16));
        a.width_v            = std::max(a.width_v, round_up(v->ne[0], 16));
        a.n_blocks += (k->ne[1] + BLOCK - 1) / BLOCK;
        cell += k->ne[1];
    }
    GGML_ASSERT(!a.mask || a.mask->ne[0] >= cell);
}

attention read_op(ggml_tensor * dst) {
    attention a;
    a.q         = dst->src[0];
    a.mask      = dst->src[3];
    a.sinks     = dst->src[4];
    a.dst       = dst;
    a.n_tokens  = a.q->ne[1];
    a.n_streams = a.q->ne[3];
    a.n_head    = a.q->ne[2];
    a.n_head_kv = dst->src[1]->ne[2];
    a.group     = a.n_head / a.n_head_kv;
    a.dk        = a.q->ne[0];
    a.dv        = dst->ne[0];
    a.dk_pad    = round_up(a.dk, 16);
    a.dv_pad    = round_up(a.dv, 16);
    a.width_k   = a.dk_pad;
    a.width_v   = a.dv_pad;
    add_tiers(a);
    const float * op_params = (const float *) dst->op_params;
    a.max_bias              = op_params[1];
    a.logit_softcap         = op_params[2];
    a.scale                 = a.logit_softcap == 0.0f ? op_params[0] : op_params[0] / a.logit_softcap;
    const char * skip       = std::getenv("PYKVQ_ATTENTION_SKIP");
    a.skip_negligible       = !skip || std::strcmp(skip, "0") != 0;
    return a;
}

// Below this the vectors of the prefill kernel, whose lanes are query rows, would be half empty.
bool is_decode(const attention & a) {
    return a.n_tokens == 1 || a.n_tokens * a.group < LANES;
}

size_t work_size(const attention & a, int nth) {
    return is_decode(a) ? decode_work_size(a, nth) : prefill_work_size(a, nth);
}

void decode_block(const ggml_tensor * tensor, decode_rows_t decode, const cell_block & block, int64_t head_kv,
                  int64_t stream, float * out, int64_t width) {
    const char * rows =
        (const char *) tensor->data + block.row * tensor->nb[1] + head_kv * tensor->nb[2] + stream * tensor->nb[3];
    decode(rows, tensor->nb[1], block.n, tensor->ne[0], out, width, ggml_get_type_traits(tensor->type));
    std::fill(out + block.n * width, out + round_up(block.n, 8) * width, 0.0f);
}

}  // namespace

cell_block block_at(const attention & a, int64_t index) {
    int64_t t = 0;
    while (t + 1 < a.n_tiers && index >= a.tiers[t + 1].first_block) {
        t++;
    }
    const tier & in   = a.tiers[t];
    const int64_t row = (index - in.first_block) * BLOCK;
    return { &in, row, in.start + row, std::min(BLOCK, in.n_rows - row) };
}

float alibi_slope(const attention & a, int64_t head) {  // as in ggml_soft_max_ext
    if (a.max_bias <= 0.0f) {
        return 1.0f;
    }
    const int64_t n_log2 = (int64_t) 1 << (int64_t) std::floor(std::log2((double) a.n_head));
    const float m0       = std::pow(2.0f, -a.max_bias / (float) n_log2);
    const float m1       = std::pow(2.0f, -a.max_bias / 2.0f / (float) n_log2);
    return head < n_log2 ? std::pow(m0, (float) (head + 1)) : std::pow(m1, (float) (2 * (head - n_log2) + 1));
}

const uint16_t * mask_row(const attention & a, int64_t stream, int64_t token) {
    const ggml_tensor * m = a.mask;
    return m ? (const uint16_t *) ((const char *) m->data + token * m->nb[1] + stream % m->ne[3] * m->nb[3]) : nullptr;
}

visibility classify(const uint16_t * mask, int64_t n) {
    if (!mask) {
        return visibility::open;
    }
    uint16_t any_bit     = 0;
    uint16_t any_visible = 0;
    for (int64_t i = 0; i < n; i++) {
        any_bit |= mask[i];
        any_visible |= mask[i] ^ MASK_HIDDEN;
    }
    return any_visible == 0 ? visibility::hidden : (any_bit & 0x7fff) == 0 ? visibility::open : visibility::mixed;
}

void decode_keys(const attention & a, const cell_block & block, int64_t head_kv, int64_t stream, float * out) {
    decode_block(block.in->k, block.in->decode_k, block, head_kv, stream, out, a.width_k);
}

void decode_values(const attention & a, const cell_block & block, int64_t head_kv, int64_t stream, float * out) {
    decode_block(block.in->v, block.in->decode_v, block, head_kv, stream, out, a.width_v);
}

void write_row(const attention & a, int64_t stream, int64_t token, int64_t head, float max, float sum,
               const float * acc) {
    float factor = 1.0f;
    if (a.sinks) {
        const float sink    = ((const float *) a.sinks->data)[head];
        const float new_max = std::max(max, sink);
        factor              = std::exp(max - new_max);
        sum                 = sum * factor + std::exp(sink - new_max);
    }
    factor      = sum == 0.0f ? 0.0f : factor / sum;
    float * out = (float *) ((char *) a.dst->data + head * a.dst->nb[1] + token * a.dst->nb[2] + stream * a.dst->nb[3]);
    for (int64_t d = 0; d < a.dv; d++) {
        out[d] = acc[d] * factor;
    }
}

}  // namespace kvq

bool kvq_flash_attn_ext_supported(const struct ggml_tensor * dst) {
    if (dst->src[5]) {
        return true;
    }
    const char * choice = std::getenv("PYKVQ_FLASH_ATTN");
    if (choice && std::strcmp(choice, "ggml") == 0) {
        return false;
    }
    const ggml_tensor * q    = dst->src[0];
    const ggml_tensor * k    = dst->src[1];
    const ggml_tensor * v    = dst->src[2];
    const ggml_tensor * mask = dst->src[3];
    return q->type == GGML_TYPE_F32 && (!mask || (mask->type == GGML_TYPE_F16 && mask->ne[2] == 1)) &&
           q->ne[2] % k->ne[2] == 0 && k->ne[2] == v->ne[2] && q->ne[3] == k->ne[3] && k->ne[3] == v->ne[3];
}

size_t kvq_flash_attn_ext_work_size(struct ggml_tensor * dst, int n_threads) {
    return kvq::work_size(kvq::read_op(dst), n_threads);
}

void kvq_compute_forward_flash_attn_ext(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    const kvq::attention a = kvq::read_op(dst);
    GGML_ASSERT(kvq::work_size(a, params->nth) <= params->wsize);
    if (kvq::is_decode(a)) {
        kvq::attend_decode(params, a);
    } else {
        kvq::attend_prefill(params, a);
    }
}
