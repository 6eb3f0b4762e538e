// Operands of mma.sync m16n8k32 out of swizzled rows in shared memory. Rows are read 8 at a time
// from a multiple of 8 rows on, so that the swizzle of a lane's address depends on the lane and the
// k-step alone.
#pragma once

#include "deep_kernels/ptx/base.cuh"
#include "deep_kernels/tile/layout.cuh"

namespace deep_kernels::tile {

// 16 rows of kRowBytes bytes as the first operand, one k-step.
template <i32 kRowBytes>
DK_DEVICE void load_a_fragment(u32 (&a)[4], u32 rows, i32 step) {
  const i32 lane = ptx::lane_index();
  ptx::ldmatrix_x4(a, rows + swizzled_offset<kRowBytes>(lane % 16, 2 * step + lane / 16));
}
// 8 rows as the second operand, one k-step.
template <i32 kRowBytes>
DK_DEVICE void load_b_fragment(u32 (&b)[2], u32 rows, i32 step) {
  const i32 lane = ptx::lane_index();
  ptx::ldmatrix_x2(b, rows + swizzled_offset<kRowBytes>(lane % 8, 2 * step + lane / 8 % 2));
}

}  // namespace deep_kernels::tile
