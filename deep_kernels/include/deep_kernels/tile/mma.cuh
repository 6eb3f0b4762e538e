// wgmma chosen by the size of its accumulators: 64 rows against 32, 64 or 128 columns.
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

}  // namespace deep_kernels::tile
