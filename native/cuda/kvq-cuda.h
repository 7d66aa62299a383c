// kvq-cuda.h: what the CUDA backend, and the HIP backend built from the same sources, calls for the KV types and tiers.

#pragma once

struct ggml_backend_cuda_context;
struct ggml_tensor;

// Whether an op needs our kernels: one side is a KV type, or it is attention over tiers. ggml's own must not see it.
bool kvq_cuda_takes_op(const ggml_tensor * op);

// Whether our kernels compute such an op. False is warned about once for each reason, since the op then runs on the CPU.
bool kvq_cuda_supports_op(const ggml_tensor * op);

// Computes an op that is ours, and products of a matrix a head over many tokens, faster than ggml's; returns false for all
// others.
bool kvq_cuda_compute_forward(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
