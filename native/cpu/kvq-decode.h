// kvq-decode.h: rows of any cache type to float, for the attention kernels.

#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace kvq {

// Decodes n_rows rows of n_values values, stride bytes apart, to out[n_rows][width]; values from n_values up to the next
// multiple of 16 are set to 0. width is at least that.
typedef void (*decode_rows_t)(const char * rows, size_t stride, int64_t n_rows, int64_t n_values, float * out,
                              int64_t width, const ggml_type_traits * traits);

void decode_halves(const uint16_t * x, int64_t n, float * out);

// The decoder of a type: vectorised for the types a cache usually has, else the type's own to_float.
decode_rows_t decoder_of(ggml_type type);

}  // namespace kvq
