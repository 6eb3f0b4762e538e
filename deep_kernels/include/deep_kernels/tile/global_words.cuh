// Elements between global memory and registers: neighbours in one piece where the address allows,
// single ones whose type is known at run time only.
#pragma once

#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::tile {

// Element is u8, u16 or i32: what the address is a multiple of in any case.
template <class Element, i32 kWords>
DK_DEVICE void store_words(Element* to, const u32 (&words)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords % 4 == 0);
  constexpr i32 kPerWord = 4 / sizeof(Element);
  if (ptx::bytes_to_aligned(to, 4 * min_of(kWords, 4)) != 0) {
    DK_UNROLL
    for (i32 i = 0; i < kPerWord * kWords; ++i)
      ptx::store_global(to + i, static_cast<Element>(words[i / kPerWord] >>
                                                     8 * sizeof(Element) * (i % kPerWord)));
  } else if constexpr (kWords == 1) {
    ptx::store_global_x1(to, words[0]);
  } else if constexpr (kWords == 2) {
    ptx::store_global_x2(to, words[0], words[1]);
  } else {
    DK_UNROLL
    for (i32 i = 0; i < kWords; i += 4)
      ptx::store_global_x4(to + kPerWord * i, words[i], words[i + 1], words[i + 2], words[i + 3]);
  }
}

// 8 elements of 16 bits.
DK_DEVICE void load_words(u32 (&words)[4], const u16* from) {
  if (ptx::bytes_to_aligned(from, 16) == 0) return ptx::load_global_x4(words, from);
  DK_UNROLL
  for (i32 i = 0; i < 4; ++i)
    words[i] = ptx::load_global(from + 2 * i) | ptx::load_global(from + 2 * i + 1) << 16;
}

// Of float32 or bfloat16.
DK_DEVICE float load_float(const void* base, i64 index, DType dtype) {
  if (dtype == DType::float32) return ptx::load_global(static_cast<const float*>(base) + index);
  return ptx::float_of_bf16(ptx::load_global(static_cast<const u16*>(base) + index));
}

}  // namespace deep_kernels::tile
