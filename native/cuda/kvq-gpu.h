// kvq-gpu.h: what differs between the compilers that build the kernels: nvcc, clang for amdgcn, and the host compiler with
// the SIMT emulator of the tests. Kernels reach memory through load() and store() only, so that the emulator sees every
// access.

#pragma once

#include "kvq-blocks.h"

#include <stddef.h>
#include <stdint.h>

#if defined(KVQ_SIMT)
#    include "simt.h"
#    define KVQ_DEVICE inline
#    define KVQ_BOTH inline
#    define KVQ_KERNEL(threads) inline void
#    define KVQ_SHARED(type, name) type & name = *(type *) simt::shared(sizeof(type))
#    define KVQ_WAVE simt::WAVE
#elif defined(__HIP__)
#    ifndef __global__  // without HIP's own headers
#        define __global__ __attribute__((global))
#        define __device__ __attribute__((device))
#        define __host__ __attribute__((host))
#        define __shared__ __attribute__((shared))
#    endif
#    define KVQ_DEVICE static inline __device__ __attribute__((always_inline))
#    define KVQ_BOTH static inline __host__ __device__
#    define KVQ_KERNEL(threads) __global__ __attribute__((amdgpu_flat_work_group_size(threads, threads))) void
#    define KVQ_SHARED(type, name) __shared__ type name
#    ifdef __AMDGCN_WAVEFRONT_SIZE__
#        define KVQ_WAVE __AMDGCN_WAVEFRONT_SIZE__
#    else
#        define KVQ_WAVE 64  // the host pass: never run
#    endif
#    define KVQ_AMD_PERM
#else
#    include <cuda_fp16.h>
#    define KVQ_DEVICE static __device__ __forceinline__
#    define KVQ_BOTH static inline __host__ __device__
#    define KVQ_KERNEL(threads) __global__ void __launch_bounds__(threads)
#    define KVQ_SHARED(type, name) __shared__ type name
#    define KVQ_WAVE 32
#endif

#if defined(KVQ_SIMT)
#    define KVQ_UNROLL
#    define KVQ_UNROLL_BY(n)
#else
#    define KVQ_PRAGMA(text) _Pragma(#text)
#    define KVQ_UNROLL KVQ_PRAGMA(unroll)
#    define KVQ_UNROLL_BY(n) KVQ_PRAGMA(unroll n)
#endif

namespace kvq {
namespace gpu {

struct alignas(16) word4 {
    uint32_t w[4];
};

struct alignas(16) float4v {
    float f[4];
};

// What the host and clang spell alike; nvcc has intrinsics that -use_fast_math leaves alone.
#if defined(KVQ_SIMT) || defined(__HIP__)

KVQ_DEVICE float divide(float a, float b) {
    return a / b;
}

KVQ_DEVICE float square_root(float a) {
    return __builtin_sqrtf(a);
}

KVQ_DEVICE float round_even(float x) {
    return __builtin_rintf(x);
}

KVQ_DEVICE int dot4_by_bytes(uint32_t a, uint32_t b, int sum) {
    for (int i = 0; i < 32; i += 8) {
        sum += (int) (int8_t) (a >> i) * (int) (int8_t) (b >> i);
    }
    return sum;
}

#endif

#if defined(KVQ_SIMT)

using simt::barrier;
using simt::block_x;
using simt::block_y;
using simt::block_z;
using simt::half_bits;
using simt::half_value;
using simt::load;
using simt::shuffle_xor;
using simt::store;
using simt::thread_x;
using simt::wave_any;

// One rounding an operation: the emulator is built without contraction.
KVQ_DEVICE float multiply(float a, float b) {
    return a * b;
}

KVQ_DEVICE float add(float a, float b) {
    return a + b;
}

KVQ_DEVICE float exp2_fast(float x) {
    return __builtin_exp2f(x);
}

KVQ_DEVICE float bits_to_float(uint32_t x) {
    float f;
    __builtin_memcpy(&f, &x, sizeof(f));
    return f;
}

KVQ_DEVICE uint32_t float_to_bits(float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, sizeof(u));
    return u;
}

KVQ_DEVICE int dot4(uint32_t a, uint32_t b, int sum) {
    return dot4_by_bytes(a, b, sum);
}

#elif defined(__HIP__)

// clang gives the ids as builtins, so that kernels need no header of HIP
KVQ_DEVICE int thread_x() {
    return (int) __builtin_amdgcn_workitem_id_x();
}

KVQ_DEVICE int block_x() {
    return (int) __builtin_amdgcn_workgroup_id_x();
}

KVQ_DEVICE int block_y() {
    return (int) __builtin_amdgcn_workgroup_id_y();
}

KVQ_DEVICE int block_z() {
    return (int) __builtin_amdgcn_workgroup_id_z();
}

KVQ_DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

template <typename T> KVQ_DEVICE T load(const T * p) {
    return *p;
}

template <typename T> KVQ_DEVICE void store(T * p, T value) {
    *p = value;
}

KVQ_DEVICE float bits_to_float(uint32_t x) {
    return __builtin_bit_cast(float, x);
}

KVQ_DEVICE uint32_t float_to_bits(float x) {
    return __builtin_bit_cast(uint32_t, x);
}

KVQ_DEVICE float shuffle_xor(float x, int mask) {
    const int lane = (int) __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
    return bits_to_float((uint32_t) __builtin_amdgcn_ds_bpermute(4 * (lane ^ mask), (int) float_to_bits(x)));
}

KVQ_DEVICE bool wave_any(bool x) {
#    if KVQ_WAVE == 32
    return __builtin_amdgcn_ballot_w32(x) != 0;
#    else
    return __builtin_amdgcn_ballot_w64(x) != 0;
#    endif
}

KVQ_DEVICE float half_value(uint16_t h) {
    return (float) __builtin_bit_cast(_Float16, h);
}

KVQ_DEVICE uint16_t half_bits(float x) {
    return __builtin_bit_cast(uint16_t, (_Float16) x);
}

KVQ_DEVICE float multiply(float a, float b) {
#    pragma clang fp contract(off) reassociate(off)
    return a * b;
}

KVQ_DEVICE float add(float a, float b) {
#    pragma clang fp contract(off) reassociate(off)
    return a + b;
}

KVQ_DEVICE float exp2_fast(float x) {
    return __builtin_amdgcn_exp2f(x);
}

// products of four signed bytes, summed
KVQ_DEVICE int dot4(uint32_t a, uint32_t b, int sum) {
#    if __has_builtin(__builtin_amdgcn_sudot4) && (defined(__GFX11__) || defined(__GFX12__))
    return __builtin_amdgcn_sudot4(true, (int) a, true, (int) b, sum, false);
#    elif defined(__gfx906__) || defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx940__) ||   \
        defined(__gfx941__) || defined(__gfx942__) || defined(__gfx1011__) || defined(__gfx1012__) ||   \
        defined(__gfx1030__) || defined(__gfx1031__) || defined(__gfx1032__) || defined(__gfx1034__) || \
        defined(__gfx1035__) || defined(__gfx1036__)
    return __builtin_amdgcn_sdot4((int) a, (int) b, sum, false);
#    else
    return dot4_by_bytes(a, b, sum);
#    endif
}

#else

KVQ_DEVICE int thread_x() {
    return threadIdx.x;
}

KVQ_DEVICE int block_x() {
    return blockIdx.x;
}

KVQ_DEVICE int block_y() {
    return blockIdx.y;
}

KVQ_DEVICE int block_z() {
    return blockIdx.z;
}

KVQ_DEVICE void barrier() {
    __syncthreads();
}

template <typename T> KVQ_DEVICE T load(const T * p) {
    return *p;
}

template <typename T> KVQ_DEVICE void store(T * p, T value) {
    *p = value;
}

KVQ_DEVICE float bits_to_float(uint32_t x) {
    return __uint_as_float(x);
}

KVQ_DEVICE uint32_t float_to_bits(float x) {
    return __float_as_uint(x);
}

KVQ_DEVICE float shuffle_xor(float x, int mask) {
    return __shfl_xor_sync(0xffffffffu, x, mask);
}

KVQ_DEVICE bool wave_any(bool x) {
    return __any_sync(0xffffffffu, x);
}

KVQ_DEVICE float half_value(uint16_t h) {
    return __half2float(__ushort_as_half(h));
}

KVQ_DEVICE uint16_t half_bits(float x) {
    return __half_as_ushort(__float2half_rn(x));
}

// not contracted, and exact under -use_fast_math
KVQ_DEVICE float multiply(float a, float b) {
    return __fmul_rn(a, b);
}

KVQ_DEVICE float add(float a, float b) {
    return __fadd_rn(a, b);
}

KVQ_DEVICE float divide(float a, float b) {
    return __fdiv_rn(a, b);
}

KVQ_DEVICE float square_root(float a) {
    return __fsqrt_rn(a);
}

KVQ_DEVICE float exp2_fast(float x) {
    return exp2f(x);
}

KVQ_DEVICE float round_even(float x) {
    return rintf(x);
}

KVQ_DEVICE int dot4(uint32_t a, uint32_t b, int sum) {
    return __dp4a((int) a, (int) b, sum);
}

#endif

constexpr float MINUS_INFINITY = -__builtin_huge_valf();
constexpr float LOG2_E         = 1.44269504f;

KVQ_DEVICE float larger(float a, float b) {
    return __builtin_fmaxf(a, b);
}

KVQ_DEVICE float smaller(float a, float b) {
    return __builtin_fminf(a, b);
}

KVQ_DEVICE float magnitude(float a) {
    return __builtin_fabsf(a);
}

// not isfinite(): -use_fast_math may take that for true
KVQ_DEVICE bool is_finite(float x) {
    return (float_to_bits(x) & 0x7f800000u) != 0x7f800000u;
}

// Over the n lanes, a power of two, whose number differs in the lowest bits only; every lane gets the result.
KVQ_DEVICE float sum_of_lanes(float x, int n) {
    for (int step = n / 2; step > 0; step /= 2) {
        x = add(x, shuffle_xor(x, step));
    }
    return x;
}

KVQ_DEVICE float max_of_lanes(float x, int n) {
    for (int step = n / 2; step > 0; step /= 2) {
        x = larger(x, shuffle_xor(x, step));
    }
    return x;
}

// Byte i of the result is byte (selector's nibble i) of the eight bytes low, high; nibbles are 0 to 7.
KVQ_DEVICE uint32_t pick_by_nibbles(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(KVQ_SIMT) || defined(__HIP__)
    const uint64_t bytes = (uint64_t) high << 32 | low;
    uint32_t result      = 0;
    for (int i = 0; i < 4; i++) {
        result |= (uint32_t) (bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return result;
#else
    return __byte_perm(low, high, selector);
#endif
}

// The same with a byte for each selector.
KVQ_DEVICE uint32_t pick_by_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(__HIP__) && !defined(KVQ_SIMT)
    return __builtin_amdgcn_perm(high, low, selector);
#else
    const uint64_t bytes = (uint64_t) high << 32 | low;
    uint32_t result      = 0;
    for (int i = 0; i < 4; i++) {
        result |= (uint32_t) (bytes >> 8 * (selector >> 8 * i & 7) & 0xff) << 8 * i;
    }
    return result;
#endif
}

// Signed byte i of a word times scale, by way of the byte + 128, which no sign extension holds up.
KVQ_DEVICE float scaled_level(uint32_t levels, int i, float scale) {
    const uint32_t biased = levels ^ 0x80808080u;
#if defined(KVQ_AMD_PERM)
    return __builtin_fmaf((float) (biased >> 8 * i & 0xff), scale,
                          -128.0f * scale);  // v_cvt_f32_ubyte; exact but for one rounding
#else
    return (bits_to_float(pick_by_nibbles(biased, 0x4b000000u, 0x7440u + (uint32_t) i)) - 8388736.0f) *
           scale;  // 2^23 + 128
#endif
}

}  // namespace gpu
}  // namespace kvq
