// kvq-traits.h: the entries of ggml's type tables for the KV types, one macro a table, so that the patched files hold
// one line each. Included by ggml.c only.

#pragma once

#include "kvq-quants.h"

#define KVQ_TYPE_TRAITS \
    [GGML_TYPE_Q4_VE] = { \
        .type_name      = "q4_ve", \
        .blck_size      = KVQ_BLOCK, \
        .type_size      = sizeof(block_q4_ve), \
        .is_quantized   = true, \
        .to_float       = (ggml_to_float_t) kvq_dequantize_row_q4_ve, \
        .from_float_ref = (ggml_from_float_t) kvq_quantize_row_q4_ve_ref, \
    }, \
    [GGML_TYPE_Q2_T] = { \
        .type_name      = "q2_t", \
        .blck_size      = KVQ_BLOCK, \
        .type_size      = sizeof(block_q2_t), \
        .is_quantized   = true, \
        .to_float       = (ggml_to_float_t) kvq_dequantize_row_q2_t, \
        .from_float_ref = (ggml_from_float_t) kvq_quantize_row_q2_t_ref, \
    }, \
    [GGML_TYPE_Q4_VES] = { \
        .type_name      = "q4_ves", \
        .blck_size      = KVQ_BLOCK, \
        .type_size      = sizeof(block_q4_ves), \
        .is_quantized   = true, \
        .to_float       = (ggml_to_float_t) kvq_dequantize_row_q4_ves, \
        .from_float_ref = (ggml_from_float_t) kvq_quantize_row_q4_ves_ref, \
    }, \
    [GGML_TYPE_Q2_TS] = { \
        .type_name      = "q2_ts", \
        .blck_size      = KVQ_BLOCK, \
        .type_size      = sizeof(block_q2_ts), \
        .is_quantized   = true, \
        .to_float       = (ggml_to_float_t) kvq_dequantize_row_q2_ts, \
        .from_float_ref = (ggml_from_float_t) kvq_quantize_row_q2_ts_ref, \
    },
