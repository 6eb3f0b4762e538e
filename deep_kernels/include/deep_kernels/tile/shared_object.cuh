// Plain objects in shared memory, moved 16 bytes at a time.
#pragma once

#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::tile {

template <class T>
struct Words {
  static_assert(sizeof(T) % 16 == 0, "whole copies");
  u32 word[sizeof(T) / 4];
};

template <class T>
DK_DEVICE void store_shared(T& to, const T& value) {
  const auto words = __builtin_bit_cast(Words<T>, value);
  DK_UNROLL
  for (u32 i = 0; i < sizeof(T) / 4; i += 4)
    ptx::store_shared_x4(ptx::smem_addr(&to) + 4 * i, words.word[i], words.word[i + 1],
                         words.word[i + 2], words.word[i + 3]);
}
template <class T>
DK_DEVICE T load_shared(const T& from) {
  Words<T> words;
  DK_UNROLL
  for (u32 i = 0; i < sizeof(T) / 4; i += 4) {
    u32 four[4];
    ptx::load_shared_x4(four, ptx::smem_addr(&from) + 4 * i);
    DK_UNROLL
    for (u32 j = 0; j < 4; ++j) words.word[i + j] = four[j];
  }
  return __builtin_bit_cast(T, words);
}

}  // namespace deep_kernels::tile
