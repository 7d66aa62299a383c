// kvq-cpu.h: what the CPU backend calls for the KV types.

#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// *s = <x, y> over n values, x in a KV type, y in q8_0 (two of its blocks a KV block). The signature is ggml_vec_dot_t;
// the strides and nrc are unused, nrc must be 1.
void kvq_vec_dot_q4_ve_q8_0(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc);
void kvq_vec_dot_q2_t_q8_0(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc);

#ifdef __cplusplus
}
#endif
