// float16 in integers: what a loop of the CPU backend can do on vectors.
#pragma once

#include <bit>

#include "cpu/select.h"

namespace deep_kernels::cpu {

// Without a subnormal float on the way, which torch.set_flush_denormal would make 0.
DK_INLINE float from_float16(u16 value) {
  constexpr u32 kRebias = 112u << 23;  // exponent biases 127 - 15
  constexpr u32 kInfinity = 0x7c00;
  const u32 magnitude = value & 0x7fffu;
  const u32 normal = (magnitude << 13) + kRebias;
  const float subnormal = std::bit_cast<float>(normal + (1u << 23)) - 0x1p-14f;
  const u32 special = normal + kRebias;
  const u32 finite = select(magnitude < 0x400u, std::bit_cast<u32>(subnormal), normal);
  return std::bit_cast<float>(select(magnitude >= kInfinity, special, finite) |
                              (u32{value} & 0x8000u) << 16);
}

// Nearest even; NaN of any payload becomes 0x7e00.
DK_INLINE u16 to_float16(float value) {
  const u32 bits = std::bit_cast<u32>(value);
  const u32 magnitude = bits & 0x7fffffffu;
  const u32 normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112u << 10);
  // Below 2^-14 codes are multiples of 2^-24, and so are the floats from 0.5 on.
  const u32 subnormal =
      std::bit_cast<u32>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<u32>(0.5f);
  u32 code = select(magnitude < std::bit_cast<u32>(0x1p-14f), subnormal, normal);
  code = select(magnitude >= std::bit_cast<u32>(65520.0f), u32{0x7c00}, code);
  code = select(magnitude > 0x7f800000u, u32{0x7e00}, code);
  return static_cast<u16>(code | (bits >> 16 & 0x8000u));
}

}  // namespace deep_kernels::cpu
