// 16 x 8 products of e4m3 rows by mma.sync, 32 of k a step, the way that suits the card.
#pragma once

#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::tile {

// Operands as ldmatrix brings them, ready to be multiplied.
template <bool kHasE4m3Mma = ptx::kHasE4m3Mma>
struct E4m3Mma {
  struct A {
    u32 bytes[4];
  };
  struct B {
    u32 bytes[2];
  };

  static DK_DEVICE A first(const u32 (&a)[4]) { return {{a[0], a[1], a[2], a[3]}}; }
  static DK_DEVICE B second(const u32 (&b)[2]) { return {{b[0], b[1]}}; }
  static DK_DEVICE void add(float (&d)[4], const A& a, const B& b) {
    ptx::mma_m16n8k32_e4m3(d, a.bytes, b.bytes);
  }
};

// Without that instruction: float16 pairs, converted once for all products of an operand. Which of
// the 32 elements meet in a multiplication does not matter as long as both operands agree: the
// first takes elements 0 and 1 of every four, the second elements 2 and 3.
template <>
struct E4m3Mma<false> {
  struct A {
    u32 pairs[2][4];
  };
  struct B {
    u32 pairs[2][2];
  };

  static DK_DEVICE A first(const u32 (&a)[4]) {
    A wide;
    DK_UNROLL
    for (i32 i = 0; i < 4; ++i) {
      wide.pairs[0][i] = ptx::f16x2_of_e4m3x4<0>(a[i]);
      wide.pairs[1][i] = ptx::f16x2_of_e4m3x4<1>(a[i]);
    }
    return wide;
  }
  static DK_DEVICE B second(const u32 (&b)[2]) {
    return {{{ptx::f16x2_of_e4m3x4<0>(b[0]), ptx::f16x2_of_e4m3x4<0>(b[1])},
             {ptx::f16x2_of_e4m3x4<1>(b[0]), ptx::f16x2_of_e4m3x4<1>(b[1])}}};
  }
  static DK_DEVICE void add(float (&d)[4], const A& a, const B& b) {
    DK_UNROLL
    for (i32 pair = 0; pair < 2; ++pair) ptx::mma_m16n8k16_f16(d, a.pairs[pair], b.pairs[pair]);
  }
};

}  // namespace deep_kernels::tile
