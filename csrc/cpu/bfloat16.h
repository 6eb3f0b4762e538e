// bfloat16 in integers: what a loop of the CPU backend can do on vectors.
#pragma once

#include <bit>

#include "deep_kernels/contract/types.h"

namespace deep_kernels::cpu {

inline float from_bfloat16(u16 value) { return std::bit_cast<float>(u32{value} << 16); }

// Nearest even; NaN of any payload becomes 0x7fc0.
inline u16 to_bfloat16(float value) {
  const u32 bits = std::bit_cast<u32>(value);
  const u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<u16>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
inline float round_to_bfloat16(float value) { return from_bfloat16(to_bfloat16(value)); }

}  // namespace deep_kernels::cpu
