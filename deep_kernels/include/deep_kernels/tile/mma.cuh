// wgmma chosen by the size of its accumulators: 64 rows against two columns for each.
#pragma once

#include "deep_kernels/ptx/sm90.cuh"

namespace deep_kernels::tile {

// d = a * b + (accumulate ? d : 0) for 32 e4m3 elements of k, both in shared memory.
template <i32 kCount>
DK_DEVICE void wgmma_k32_e4m3(float (&d)[kCount], u64 a, u64 b, bool accumulate) {
  static_assert(kCount == 16 || kCount == 32 || kCount == 64);
  if constexpr (kCount == 16)
    ptx::wgmma_m64n32k32_e4m3(d, a, b, accumulate);
  else if constexpr (kCount == 32)
    ptx::wgmma_m64n64k32_e4m3(d, a, b, accumulate);
  else
    ptx::wgmma_m64n128k32_e4m3(d, a, b, accumulate);
}
// d = kSign * a * b + (accumulate ? d : 0) with a in registers.
template <i32 kSign, i32 kCount>
DK_DEVICE void wgmma_k32_e4m3(float (&d)[kCount], const u32 (&a)[4], u64 b, bool accumulate) {
  static_assert(kCount == 16 || kCount == 32 || kCount == 64);
  if constexpr (kCount == 16)
    ptx::wgmma_m64n32k32_e4m3<kSign>(d, a, b, accumulate);
  else if constexpr (kCount == 32)
    ptx::wgmma_m64n64k32_e4m3<kSign>(d, a, b, accumulate);
  else
    ptx::wgmma_m64n128k32_e4m3<kSign>(d, a, b, accumulate);
}

// d = a * b + (accumulate ? d : 0) for 16 elements of k, both K-major in shared memory.
template <DType kType, i32 kCount>
DK_DEVICE void wgmma_k16(float (&d)[kCount], u64 a, u64 b, bool accumulate) {
  static_assert(kType == DType::bfloat16 || kType == DType::float16);
  static_assert(kCount == 32 || kCount == 40 || kCount == 64);
  constexpr bool kBf16 = kType == DType::bfloat16;
  if constexpr (kCount == 32)
    kBf16 ? ptx::wgmma_m64n64k16_bf16(d, a, b, accumulate)
          : ptx::wgmma_m64n64k16_f16(d, a, b, accumulate);
  else if constexpr (kCount == 40)
    kBf16 ? ptx::wgmma_m64n80k16_bf16(d, a, b, accumulate)
          : ptx::wgmma_m64n80k16_f16(d, a, b, accumulate);
  else
    kBf16 ? ptx::wgmma_m64n128k16_bf16(d, a, b, accumulate)
          : ptx::wgmma_m64n128k16_f16(d, a, b, accumulate);
}
// The same with a in registers and b MN-major.
template <DType kType, i32 kCount>
DK_DEVICE void wgmma_k16(float (&d)[kCount], const u32 (&a)[4], u64 b, bool accumulate) {
  static_assert(kType == DType::bfloat16 || kType == DType::float16);
  static_assert(kCount == 32 || kCount == 64 || kCount == 128);
  constexpr bool kBf16 = kType == DType::bfloat16;
  if constexpr (kCount == 32)
    kBf16 ? ptx::wgmma_m64n64k16_bf16(d, a, b, accumulate)
          : ptx::wgmma_m64n64k16_f16(d, a, b, accumulate);
  else if constexpr (kCount == 64)
    kBf16 ? ptx::wgmma_m64n128k16_bf16(d, a, b, accumulate)
          : ptx::wgmma_m64n128k16_f16(d, a, b, accumulate);
  else
    kBf16 ? ptx::wgmma_m64n256k16_bf16(d, a, b, accumulate)
          : ptx::wgmma_m64n256k16_f16(d, a, b, accumulate);
}

}  // namespace deep_kernels::tile
