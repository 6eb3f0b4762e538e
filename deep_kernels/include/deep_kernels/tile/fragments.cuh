// Operands of mma.sync m16n8k32 of bytes, or m16n8k16, out of swizzled rows in shared memory. Rows
// are read 8 at a time from a multiple of 8 rows on, so that the swizzle of a lane's address
// depends on the lane and the k-step alone.
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
// 16 rows as the second operand of two octets of columns, one k-step.
template <i32 kRowBytes>
DK_DEVICE void load_b_fragments(u32 (&b)[2][2], u32 rows, i32 step) {
  const i32 lane = ptx::lane_index();
  u32 both[4];
  ptx::ldmatrix_x4(
      both, rows + swizzled_offset<kRowBytes>(lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
  b[0][0] = both[0], b[0][1] = both[1];
  b[1][0] = both[2], b[1][1] = both[3];
}

// 16 rows of 16-bit elements as the second operand whose k they are: columns [16 step, 16 step +
// 16), two octets.
template <i32 kRowBytes>
DK_DEVICE void load_transposed_b_fragments(u32 (&b)[2][2], u32 rows, i32 step) {
  const i32 lane = ptx::lane_index();
  u32 both[4];
  ptx::ldmatrix_x4_trans(both, rows + swizzled_offset<kRowBytes>(lane % 16, 2 * step + lane / 16));
  b[0][0] = both[0], b[0][1] = both[1];
  b[1][0] = both[2], b[1][1] = both[3];
}

// As load_b_fragment, with all k-steps of 8 rows at once: what depends on the lane alone is
// computed once.
template <i32 kRowBytes>
struct RowsAsB {
  static constexpr i32 kSteps = kRowBytes / 32;
  static constexpr i32 kPairs = max_of(1, kSteps / 2);

  u32 address[kPairs];  // of the lane's row, for k-steps 2i and 2i + 1

  DK_DEVICE explicit RowsAsB(u32 rows) {
    constexpr i32 kChunks = min_of(4, 2 * kSteps);  // of one ldmatrix
    const i32 lane = ptx::lane_index();
    DK_UNROLL
    for (i32 i = 0; i < kPairs; ++i)
      address[i] = rows + swizzled_offset<kRowBytes>(lane % 8, kChunks * i + lane / 8 % kChunks);
  }
  // Of the 8 rows that lie `offset` bytes further, whole groups of 8: b[step] holds 32 elements.
  DK_DEVICE void load(u32 (&b)[kSteps][2], u32 offset) const {
    if constexpr (kSteps == 1) {
      ptx::ldmatrix_x2(b[0], address[0] + offset);
    } else {
      DK_UNROLL
      for (i32 i = 0; i < kPairs; ++i) {
        u32 both[4];
        ptx::ldmatrix_x4(both, address[i] + offset);
        b[2 * i][0] = both[0], b[2 * i][1] = both[1];
        b[2 * i + 1][0] = both[2], b[2 * i + 1][1] = both[3];
      }
    }
  }
};

}  // namespace deep_kernels::tile
