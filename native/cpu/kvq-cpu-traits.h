// kvq-cpu-traits.h: the entries of the CPU backend's type table for the KV types. Included by ggml-cpu.c only.

#pragma once

#include "kvq-cpu.h"
#include "kvq-quants.h"

#define KVQ_TYPE_TRAITS_CPU \
    [GGML_TYPE_Q4_VE] = { \
        .from_float   = kvq_quantize_row_q4_ve, \
        .vec_dot      = kvq_vec_dot_q4_ve_q8_0, \
        .vec_dot_type = GGML_TYPE_Q8_0, \
        .nrows        = 1, \
    }, \
    [GGML_TYPE_Q2_T] = { \
        .from_float   = kvq_quantize_row_q2_t, \
        .vec_dot      = kvq_vec_dot_q2_t_q8_0, \
        .vec_dot_type = GGML_TYPE_Q8_0, \
        .nrows        = 1, \
    }, \
    [GGML_TYPE_Q4_VES] = { \
        .from_float   = kvq_quantize_row_q4_ves, \
        .vec_dot      = kvq_vec_dot_q4_ves_q8_0, \
        .vec_dot_type = GGML_TYPE_Q8_0, \
        .nrows        = 1, \
    }, \
    [GGML_TYPE_Q2_TS] = { \
        .from_float   = kvq_quantize_row_q2_ts, \
        .vec_dot      = kvq_vec_dot_q2_ts_q8_0, \
        .vec_dot_type = GGML_TYPE_Q8_0, \
        .nrows        = 1, \
    },
