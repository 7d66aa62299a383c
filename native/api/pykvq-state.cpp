// A saved state is a header and llama.cpp's own state behind it. The header is checked in full, and the cache as it was
// is kept until the new one is in.

#include "kvq-llama.h"
#include "pykvq-guard.h"

#include "hash/hash.h"

#include <cstring>

namespace {

constexpr char MAGIC[8]     = { 'P', 'Y', 'K', 'V', 'Q', 'S', 'T', '\n' };
constexpr uint32_t VERSION  = 1;
constexpr size_t NAME_BYTES = 192;
constexpr size_t HASH_BYTES = 64;  // SHA-256 in hex

// Little-endian on every machine we build for.
struct state_header {
    char magic[8];
    uint32_t version;
    int32_t whole;            // 1 for all sequences, 0 for one
    char layout[NAME_BYTES];  // KV types, tiers and calibration in words, NUL-terminated
    char model[HASH_BYTES];
    uint64_t payload_bytes;
    char checksum[HASH_BYTES];  // of the header, with this field zero, and of the payload's SHA-256
};
static_assert(sizeof(state_header) == 344, "the header has no padding");

// Tells models apart by what their KV cache depends on, without reading the weights.
std::string model_fingerprint(const pykvq_model * model) {
    const kvq_model_shape shape = kvq_model_get_shape(model->model);
    char desc[256];
    char name[256];
    llama_model_desc(model->model, desc, sizeof(desc));
    llama_model_meta_val_str(model->model, "general.name", name, sizeof(name));
    const std::string text = pykvq_format("%s|%s|%llu|%llu|%d|%d|%d|%d|%d", desc, name,
                                          (unsigned long long) llama_model_n_params(model->model),
                                          (unsigned long long) llama_model_size(model->model),
                                          llama_vocab_n_tokens(model->vocab), llama_model_n_layer(model->model),
                                          llama_model_n_head_kv(model->model), shape.head_dim_k, shape.head_dim_v);
    return hash_sha256_hex(text.data(), text.size());
}

// What does not fit, as the types of many single layers, is told apart by a hash at the end.
std::string layout_name(const std::string & layout) {
    if (layout.size() < NAME_BYTES) {
        return layout;
    }
    const std::string end = "... " + hash_sha256_hex(layout.data(), layout.size());
    return layout.substr(0, NAME_BYTES - 1 - end.size()) + end;
}

void set_checksum(state_header & header, const uint8_t * payload, size_t n_bytes) {
    std::memset(header.checksum, 0, HASH_BYTES);
    const std::string text = std::string((const char *) &header, sizeof(header)) + hash_sha256_hex(payload, n_bytes);
    std::memcpy(header.checksum, hash_sha256_hex(text.data(), text.size()).data(), HASH_BYTES);
}

state_header make_header(const pykvq_context * context, bool whole, const uint8_t * payload, size_t n_bytes) {
    state_header header = {};
    std::memcpy(header.magic, MAGIC, sizeof(MAGIC));
    header.version = VERSION;
    header.whole   = whole;
    std::strncpy(header.layout, layout_name(context->layout).c_str(), NAME_BYTES - 1);
    std::memcpy(header.model, model_fingerprint(context->model).data(), HASH_BYTES);
    header.payload_bytes = n_bytes;
    set_checksum(header, payload, n_bytes);
    return header;
}

[[noreturn]] void refuse(const char * reason) {
    pykvq_throw(PYKVQ_STATUS_FORMAT, "cannot load the state: %s; nothing was changed", reason);
}

void check_header(const pykvq_context * context, bool whole, const uint8_t * data, size_t n_bytes) {
    state_header found;
    if (n_bytes < sizeof(found) || std::memcmp(data, MAGIC, sizeof(MAGIC)) != 0) {
        refuse("this is no state saved by pykvq");
    }
    std::memcpy(&found, data, sizeof(found));
    if (found.version != VERSION) {
        refuse(pykvq_format("it has format %u and this version reads format %u", found.version, VERSION).c_str());
    }
    const uint8_t * payload   = data + sizeof(found);
    const size_t payload_size = n_bytes - sizeof(found);
    if (found.payload_bytes != payload_size) {
        refuse(pykvq_format("it should hold %llu bytes and holds %llu", (unsigned long long) found.payload_bytes,
                            (unsigned long long) payload_size)
                   .c_str());
    }
    state_header again = found;
    set_checksum(again, payload, payload_size);
    if (std::memcmp(found.checksum, again.checksum, HASH_BYTES) != 0) {
        refuse("its checksum is wrong, the data is damaged");
    }
    const state_header expected = make_header(context, whole, payload, payload_size);
    if (std::memcmp(found.model, expected.model, HASH_BYTES) != 0) {
        refuse("it was saved with another model");
    }
    if (std::memcmp(found.layout, expected.layout, NAME_BYTES) != 0) {
        refuse(pykvq_format("it holds a KV cache of %.191s, this context one of %s", found.layout, expected.layout)
                   .c_str());
    }
    if (found.whole != expected.whole) {
        refuse(whole ? "it holds one sequence, not a whole context" : "it holds a whole context, not one sequence");
    }
}

size_t payload_size(pykvq_context * context, int32_t seq_id) {
    return seq_id < 0 ? llama_state_get_size(context->ctx) : llama_state_seq_get_size(context->ctx, seq_id);
}

size_t payload_get(pykvq_context * context, int32_t seq_id, uint8_t * data, size_t n_bytes) {
    return seq_id < 0 ? llama_state_get_data(context->ctx, data, n_bytes) :
                        llama_state_seq_get_data(context->ctx, data, n_bytes, seq_id);
}

size_t payload_set(pykvq_context * context, int32_t seq_id, const uint8_t * data, size_t n_bytes) {
    return seq_id < 0 ? llama_state_set_data(context->ctx, data, n_bytes) :
                        llama_state_seq_set_data(context->ctx, data, n_bytes, seq_id);
}

void require_seq(const pykvq_context * context, int32_t seq_id) {
    pykvq_require(context, "context");
    if (seq_id < -1 || seq_id >= (int32_t) llama_n_seq_max(context->ctx)) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "seq_id is %d: it must be -1 (everything) or 0 to %d", seq_id,
                    (int) llama_n_seq_max(context->ctx) - 1);
    }
}

}  // namespace

pykvq_status pykvq_state_size(pykvq_context * context, int32_t seq_id, size_t * n_bytes) {
    return pykvq_guard([&] {
        require_seq(context, seq_id);
        kvq_context_apply_pending(context->ctx);
        pykvq_require(n_bytes, "n_bytes");
        *n_bytes = sizeof(state_header) + payload_size(context, seq_id);
    });
}

pykvq_status pykvq_state_save(pykvq_context * context, int32_t seq_id, uint8_t * data, size_t n_bytes,
                              size_t * n_written) {
    return pykvq_guard([&] {
        require_seq(context, seq_id);
        kvq_context_apply_pending(context->ctx);
        pykvq_require(data, "data");
        pykvq_require(n_written, "n_written");
        const size_t needed = sizeof(state_header) + payload_size(context, seq_id);
        if (n_bytes < needed) {
            pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "the state takes %zu bytes and the buffer has %zu", needed,
                        n_bytes);
        }
        uint8_t * payload    = data + sizeof(state_header);
        const size_t written = payload_get(context, seq_id, payload, n_bytes - sizeof(state_header));
        if (written == 0) {
            pykvq_throw(PYKVQ_STATUS_INTERNAL, "the state could not be saved: %s", pykvq_logged_errors().c_str());
        }
        const state_header header = make_header(context, seq_id < 0, payload, written);
        std::memcpy(data, &header, sizeof(header));
        *n_written = sizeof(header) + written;
    });
}

pykvq_status pykvq_state_load(pykvq_context * context, int32_t seq_id, const uint8_t * data, size_t n_bytes) {
    return pykvq_guard([&] {
        require_seq(context, seq_id);
        kvq_context_apply_pending(context->ctx);
        pykvq_require(data, "data");
        check_header(context, seq_id < 0, data, n_bytes);

        // of everything: other sequences may have been aged to make room
        std::vector<uint8_t> backup(payload_size(context, -1));
        backup.resize(payload_get(context, -1, backup.data(), backup.size()));
        if (payload_set(context, seq_id, data + sizeof(state_header), n_bytes - sizeof(state_header)) == 0) {
            const std::string reason = pykvq_logged_errors();
            if (payload_set(context, -1, backup.data(), backup.size()) == 0) {
                llama_memory_clear(llama_get_memory(context->ctx), false);
                pykvq_throw(PYKVQ_STATUS_INTERNAL, "cannot load the state (%s), and the cache had to be cleared",
                            reason.c_str());
            }
            refuse(reason.empty() ? "it does not fit this context (is n_ctx smaller?)" : reason.c_str());
        }
    });
}
