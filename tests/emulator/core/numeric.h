// Conversions and the like, bit by bit as the card does them.
#pragma once

#include <bit>
#include <cmath>

#include "deep_kernels/contract/types.h"

namespace deep_kernels::emulator::numeric {

inline constexpr u32 kNan = 0x7fffffff;  // what arithmetic on a card makes

// fmaxf: a NaN loses against a number, -0 against +0.
inline float max(float a, float b) {
  if (std::isnan(a)) return std::isnan(b) ? std::bit_cast<float>(kNan) : b;
  if (std::isnan(b)) return a;
  if (a == b) return std::bit_cast<float>(std::bit_cast<u32>(a) & std::bit_cast<u32>(b));
  return a < b ? b : a;
}

// .sat: into [0, 1], NaN and -0 to +0.
inline float saturate(float value) {
  if (!(value > 0.0f)) return 0.0f;
  return value < 1.0f ? value : 1.0f;
}

inline float float_of_f16(u16 bits) {
  const u32 sign = static_cast<u32>(bits & 0x8000u) << 16;
  const u32 exponent = bits >> 10 & 31u;
  const u32 mantissa = bits & 1023u;
  if (exponent == 31) return std::bit_cast<float>(mantissa != 0 ? kNan : sign | 0x7f800000u);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<u32>(magnitude));
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

// cvt.rn.bf16.f32: nearest even; NaN becomes 0x7fff.
inline u16 bf16_of(float value) {
  if (std::isnan(value)) return 0x7fff;
  const u32 bits = std::bit_cast<u32>(value);
  return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace deep_kernels::emulator::numeric
