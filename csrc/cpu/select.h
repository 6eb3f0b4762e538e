// A choice between computed values that leaves a loop on vectors: a conditional would keep it
// scalar.
#pragma once

#include <bit>

#include "cpu/vectorize.h"
#include "deep_kernels/contract/types.h"

namespace deep_kernels::cpu {

DK_INLINE u32 select(bool condition, u32 yes, u32 no) {
  const u32 mask = 0u - static_cast<u32>(condition);
  return (yes & mask) | (no & ~mask);
}
DK_INLINE float select(bool condition, float yes, float no) {
  return std::bit_cast<float>(select(condition, std::bit_cast<u32>(yes), std::bit_cast<u32>(no)));
}

}  // namespace deep_kernels::cpu
