// Saving and restoring a tiered cache. llama.cpp's own format knows one tensor a layer; here rows are written tier by tier.
//
//   n_stream, n_tiers, n_layers, then for each tier: type_k, type_v
//   for each stream, for each tier: n_cells
//   for each stream, for each tier:
//     for each cell: pos, n_seq, seq ids, [ext]
//     for each layer: K rows, V rows

#include "kvq-tiers.h"
#include "llama-hparams.h"
#include "llama-io.h"
#include "llama-kv-cache.h"

#include <stdexcept>

namespace {

template <typename T> void put(llama_io_write_i & io, T value) {
    io.write(&value, sizeof(value));
}

template <typename T> T take(llama_io_read_i & io) {
    T value;
    io.read(&value, sizeof(value));
    return value;
}

void require_equal(llama_io_read_i & io, uint32_t expected, const char * what) {
    const uint32_t found = take<uint32_t>(io);
    if (found != expected) {
        throw std::runtime_error(std::string("the saved cache differs in its ") + what + ": " + std::to_string(found) +
                                 ", here " + std::to_string(expected));
    }
}

// Runs of neighbouring cells: [first, last]
template <typename F> void for_runs(const std::vector<uint32_t> & cells, F && function) {
    for (size_t i = 0; i < cells.size();) {
        size_t j = i + 1;
        while (j < cells.size() && cells[j] == cells[j - 1] + 1) {
            j++;
        }
        function(cells[i], (uint32_t) (j - i));
        i = j;
    }
}

}  // namespace

void kvq_tiers::state_write(const llama_kv_cache & cache, llama_io_write_i & io, llama_seq_id seq_id) const {
    put(io, (uint32_t) n_stream);
    put(io, (uint32_t) tiers.size());
    put(io, (uint32_t) layers.size());
    for (const tier & tier : tiers) {
        put(io, (uint32_t) tier.type_k);
        put(io, (uint32_t) tier.type_v);
    }
    // cells to save, a stream and tier each
    std::vector<std::vector<uint32_t>> saved;
    for (uint32_t s = 0; s < n_stream; s++) {
        const llama_kv_cells & cells = cache.v_cells[s];
        for (const tier & tier : tiers) {
            saved.emplace_back();
            for (uint32_t i = tier.start; i < tier.start + tier.n_rows; i++) {
                if (!cells.is_empty(i) && (seq_id < 0 || cells.seq_has(i, seq_id))) {
                    saved.back().push_back(i);
                }
            }
            put(io, (uint32_t) saved.back().size());
        }
    }
    for (uint32_t s = 0; s < n_stream; s++) {
        for (size_t t = 0; t < tiers.size(); t++) {
            write_cells(cache, io, seq_id, s, t, saved[s * tiers.size() + t]);
        }
    }
}

void kvq_tiers::write_cells(const llama_kv_cache & cache, llama_io_write_i & io, llama_seq_id seq_id, uint32_t stream,
                            size_t t, const std::vector<uint32_t> & saved) const {
    const llama_kv_cells & cells = cache.v_cells[stream];
    for (const uint32_t i : saved) {
        put(io, cells.pos_get(i));
        std::vector<llama_seq_id> ids;
        for (llama_seq_id id = 0; id < (llama_seq_id) cache.n_seq_max; id++) {
            if ((seq_id < 0 || id == seq_id) && cells.seq_has(i, id)) {
                ids.push_back(id);
            }
        }
        put(io, (uint32_t) ids.size());
        io.write(ids.data(), ids.size() * sizeof(ids[0]));
        if (cache.has_cell_ext()) {
            put(io, cells.ext_get(i));
        }
    }
    for (const layer & layer : layers) {
        for (ggml_tensor * tensor : { layer.k[t], layer.v[t] }) {
            for_runs(saved, [&](uint32_t first, uint32_t n) {
                io.write_tensor(tensor, stream * tensor->nb[2] + (first - tiers[t].start) * tensor->nb[1],
                                n * tensor->nb[1]);
            });
        }
    }
}

void kvq_tiers::state_read(llama_kv_cache & cache, llama_io_read_i & io, llama_seq_id seq_id) {
    require_equal(io, n_stream, "number of streams");
    require_equal(io, (uint32_t) tiers.size(), "number of tiers");
    require_equal(io, (uint32_t) layers.size(), "number of layers");
    for (const tier & tier : tiers) {
        require_equal(io, (uint32_t) tier.type_k, "K type");
        require_equal(io, (uint32_t) tier.type_v, "V type");
    }
    std::vector<uint32_t> n_saved;
    for (size_t i = 0; i < n_stream * tiers.size(); i++) {
        n_saved.push_back(take<uint32_t>(io));
    }
    if (seq_id < 0) {
        cache.clear(true);
    } else {
        cache.seq_rm(seq_id, -1, -1);
    }
    for (uint32_t s = 0; s < n_stream; s++) {
        // a single sequence may go to another stream than it came from; the other streams of its state are empty
        const uint32_t stream = seq_id < 0 ? s : cache.get_stream(seq_id);
        std::vector<move> moves;
        for (size_t t = 0; t < tiers.size(); t++) {
            free_rows(cache, stream, t, n_saved[s * tiers.size() + t], moves);
        }
        apply_moves(cache, moves);
        for (size_t t = 0; t < tiers.size(); t++) {
            read_cells(cache, io, seq_id, stream, t, n_saved[s * tiers.size() + t]);
        }
    }
}

void kvq_tiers::read_cells(llama_kv_cache & cache, llama_io_read_i & io, llama_seq_id seq_id, uint32_t stream, size_t t,
                           uint32_t n) const {
    llama_kv_cells & cells            = cache.v_cells[stream];
    const std::vector<uint32_t> place = free_cells(cache, stream, t, n);
    if (place.size() < n) {
        throw std::runtime_error("tier " + std::to_string(t) + " has room for " + std::to_string(place.size()) +
                                 " tokens and the saved cache holds " + std::to_string(n));
    }
    for (const uint32_t i : place) {
        const llama_pos pos = take<llama_pos>(io);
        const uint32_t n_id = take<uint32_t>(io);
        if (pos < 0 || n_id == 0 || n_id > cache.n_seq_max) {
            throw std::runtime_error("a cell of the saved cache is damaged");
        }
        cells.pos_set(i, pos);
        for (uint32_t j = 0; j < n_id; j++) {
            const llama_seq_id id = take<llama_seq_id>(io);
            if (id < 0 || id >= (llama_seq_id) cache.n_seq_max || cells.seq_has(i, id)) {
                throw std::runtime_error("a cell of the saved cache belongs to no valid sequence");
            }
            if (seq_id < 0) {
                cells.seq_add(i, id);
            }
        }
        if (seq_id >= 0) {
            cells.seq_add(i, seq_id);
        }
        if (cache.has_cell_ext()) {
            cells.ext_set(i, take<llama_kv_cell_ext>(io));
        }
    }
    for (const layer & layer : layers) {
        for (ggml_tensor * tensor : { layer.k[t], layer.v[t] }) {
            for_runs(place, [&](uint32_t first, uint32_t n_run) {
                io.read_tensor(tensor, stream * tensor->nb[2] + (first - tiers[t].start) * tensor->nb[1],
                               n_run * tensor->nb[1]);
            });
        }
    }
}
