// All kernels with their template arguments, compiled alone: for the register and spill report that compile_kernels.py makes
// for each GPU. The library builds them in native/cuda/kvq-cuda.cu and kvq-cuda-attention.cu.

#include "kvq-gpu-attention.h"
#include "kvq-gpu-decode.h"
#include "kvq-gpu-encode.h"
#include "kvq-gpu-mul-heads.h"

namespace kvq {
namespace gpu {

template __global__ void encode_rows<KV_Q4_VE>(const encode_args);
template __global__ void encode_rows<KV_Q2_T>(const encode_args);
template __global__ void encode_rows<KV_Q4_VES>(const encode_args);
template __global__ void encode_rows<KV_Q2_TS>(const encode_args);

template __global__ void attend_span<1, 1, 1>(const attention_args);
template __global__ void attend_span<1, 1, 2>(const attention_args);
template __global__ void attend_span<1, 1, 4>(const attention_args);
template __global__ void attend_span<1, 1, 8>(const attention_args);
template __global__ void attend_span<2, 1, 1>(const attention_args);
template __global__ void attend_span<2, 1, 2>(const attention_args);
template __global__ void attend_span<2, 1, 4>(const attention_args);
template __global__ void attend_span<2, 1, 8>(const attention_args);
template __global__ void attend_span<2, 2, 1>(const attention_args);
template __global__ void attend_span<2, 2, 2>(const attention_args);

}  // namespace gpu
}  // namespace kvq
