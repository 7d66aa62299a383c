// kvq-tiers.h: a KV cache whose tokens are requantized as they age.
//
// The cells of a llama_kv_cache are one index space, cut into ranges. A range is a tier: it has its own K and V tensor a
// layer, of its own type, and cell i of the tier that starts at s is row i - s of them. llama_kv_cells goes on being the
// only book of which token is where, so masks, sequences and positions need no change. New tokens go to the first tier;
// when a batch finds no room there, the oldest are moved down.

#pragma once

#include "ggml-cpp.h"
#include "llama.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

class llama_io_read_i;
class llama_io_write_i;
class llama_kv_cache;
struct llama_cparams;
struct llama_hparams;
struct llama_ubatch;

constexpr size_t KVQ_MAX_TIERS = 4;

struct kvq_layer_types {
    int32_t il;
    ggml_type type_k;
    ggml_type type_v;
};

struct kvq_tier_spec {
    ggml_type type_k;
    ggml_type type_v;
    uint32_t n_tokens;                         // a sequence's tokens of this age; of the last tier: what is left
    std::vector<kvq_layer_types> layers = {};  // those of other types

    kvq_layer_types types_of(int32_t il) const;
};

struct kvq_tier_config {
    std::vector<kvq_tier_spec> tiers;  // the first one's n_tokens is the window
    uint32_t n_sink   = 4;             // first tokens of a sequence, which stay in the first tier
    uint32_t n_block  = 64;            // tokens moved at once
    uint32_t n_ubatch = 512;           // room for new tokens in the first tier
};

// Rows of each tier for a cache of n_cells tokens of n_seq sequences. A tier with 0 rows does not exist.
LLAMA_API std::vector<uint32_t> kvq_tier_rows(const kvq_tier_config & config, uint32_t n_cells, uint32_t n_seq);

// While it lives, contexts created on this thread get tiers. llama_kv_cache's constructor has no parameter for them, and
// every model architecture calls it, so that the way around is shorter than the way through.
struct LLAMA_API kvq_tier_scope {
    explicit kvq_tier_scope(const kvq_tier_config * config);
    ~kvq_tier_scope();
};

// Whether tokens are being moved on this thread: a graph that an abort must not stop half-way.
LLAMA_API bool kvq_tiers_moving();

struct kvq_tier_use {
    ggml_type type_k;
    ggml_type type_v;  // of the layers that have none of their own
    uint32_t n_rows;   // over all streams
    uint32_t n_used;
    int64_t n_bytes;    // K and V of all layers
    int64_t n_arrived;  // tokens requantized into this tier so far
};

class kvq_tiers {
public:
    // NULL when no scope is open, or for a cache that stays as it is (sliding window, shared, smaller than a first tier).
    // n_cells becomes the size of the index space.
    static std::unique_ptr<kvq_tiers> create(const llama_hparams & hparams, bool windowed, bool shared,
                                             uint32_t n_stream, uint32_t n_seq, uint32_t & n_cells);
    ~kvq_tiers();

    uint32_t first_rows() const { return tiers[0].n_rows; }

    bool any_quantized_k() const;
    bool any_quantized_v() const;

    // Creates the tensors of the tiers below the first, whose own are k and v, [n_head * head_dim, rows, streams].
    void add_layer(ggml_context * ctx, int32_t il, ggml_tensor * k, ggml_tensor * v);
    size_t n_tensors() const { return 2 * (tiers.size() - 1); }  // of one layer

    // Whose cache this is; called before every decode.
    void set_context(llama_context * lctx) { this->lctx = lctx; }
    // These micro-batches found no room: moves tokens down until they fit the first tier. False if nothing was moved.
    bool age(llama_kv_cache & cache, const std::vector<llama_ubatch> & ubatches);

    void build_shift(const llama_kv_cache & cache, const llama_cparams & cparams, ggml_context * ctx, ggml_cgraph * gf,
                     ggml_tensor * shift, ggml_tensor * rot, ggml_tensor * factors, float freq_base, float freq_scale,
                     int32_t il) const;
    void copy_stream(uint32_t src, uint32_t dst) const;

    void state_write(const llama_kv_cache & cache, llama_io_write_i & io, llama_seq_id seq_id) const;
    // Throws when it does not fit. Other sequences' tokens are aged if they are in the way.
    void state_read(llama_kv_cache & cache, llama_io_read_i & io, llama_seq_id seq_id);

    // Cells that the cache would have without tiers.
    static uint32_t n_tokens(const llama_kv_cache & cache);
    // Empty for a cache without tiers.
    static std::vector<kvq_tier_use> get_use_of(const llama_kv_cache & cache);
    // A layer's types by tier; the cache's own for one without tiers.
    static std::vector<kvq_layer_types> get_types_of(const llama_kv_cache & cache, int32_t il);
    // Scratch of the graphs that move tokens.
    static size_t compute_bytes(const llama_kv_cache & cache);

    // Adds the lower tiers to a flash attention over the first, k its view of it: src[5], src[6] are K and V of the second
    // tier, and so forth. The mask spans them all.
    static void attach(ggml_context * ctx, ggml_tensor * attention, const ggml_tensor * k);

private:
    struct tier {
        ggml_type type_k;
        ggml_type type_v;
        uint32_t start;
        uint32_t n_rows;
        int64_t n_arrived = 0;
    };

    struct layer {
        int32_t il;
        int64_t n_head;
        int64_t head_dim_k;
        int64_t head_dim_v;
        std::vector<ggml_tensor *> k;  // a tier each
        std::vector<ggml_tensor *> v;
    };

    // Cells of one stream that go from a tier to the next.
    struct move {
        uint32_t stream;
        size_t tier;
        std::vector<uint32_t> src;
        std::vector<uint32_t> dst;
    };

    const layer & get_layer(int32_t il) const;
    std::vector<uint32_t> free_cells(const llama_kv_cache & cache, uint32_t stream, size_t t, uint32_t n_max) const;
    std::vector<uint32_t> oldest_cells(const llama_kv_cache & cache, uint32_t stream, size_t t, uint32_t n_needed,
                                       uint32_t n_max) const;
    uint32_t make_room(llama_kv_cache & cache, uint32_t stream, size_t t, uint32_t n_wanted, std::vector<move> & moves);
    void write_cells(const llama_kv_cache & cache, llama_io_write_i & io, llama_seq_id seq_id, uint32_t stream,
                     size_t t, const std::vector<uint32_t> & saved) const;
    void read_cells(llama_kv_cache & cache, llama_io_read_i & io, llama_seq_id seq_id, uint32_t stream, size_t t,
                    uint32_t n) const;
    void free_rows(llama_kv_cache & cache, uint32_t stream, size_t t, uint32_t n_wanted, std::vector<move> & moves);
    void apply_moves(llama_kv_cache & cache, const std::vector<move> & moves);
    void init_sched();
    size_t n_graph_nodes() const;
    void compute_move(const move & move) const;

    const llama_hparams & hparams;
    kvq_tier_config config;
    uint32_t n_stream;
    uint32_t n_asked = 0;  // cells without tiers
    std::vector<tier> tiers;
    std::vector<layer> layers;
    llama_context * lctx = nullptr;
    ggml_backend_sched_ptr sched;  // of the graphs that move tokens; NULL before the first one

    kvq_tiers(const llama_hparams & hparams, const kvq_tier_config & config, uint32_t n_stream)
        : hparams(hparams), config(config), n_stream(n_stream) {}
};
