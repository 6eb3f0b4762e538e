// Conversions and the like, bit by bit as the card does them.
#pragma once

#include <bit>
#include <cmath>

#include "deep_kernels/contract/types.h"

namespace deep_kernels::emulator::numeric {

inline constexpr u32 kNan = 0x7fffffff;  // what arithmetic on a card makes

// fma.rn
inline float fma(float a, float b, float c) {
  const float value = std::fma(a, b, c);
  return std::isnan(value) ? std::bit_cast<float>(kNan) : value;
}

// add.rm: toward minus infinity; an exact 0 is -0 unless both are +0.
inline float add_rm(float a, float b) {
  const double x = a;
  const double y = b;
  const double sum = x + y;
  if (std::isnan(sum)) return std::bit_cast<float>(kNan);
  if (std::isinf(sum)) return static_cast<float>(sum);
  if (sum == 0.0) return std::signbit(a) || std::signbit(b) || a != 0.0f ? -0.0f : 0.0f;
  const double seen = sum - x;
  const double lost = (x - (sum - seen)) + (y - seen);  // sum + lost is exact
  const auto nearest = static_cast<float>(sum);
  const bool above = nearest > sum || (nearest == sum && lost < 0.0);
  return above ? std::nextafterf(nearest, -HUGE_VALF) : nearest;
}

// fmaxf: a NaN loses against a number, -0 against +0.
inline float max(float a, float b) {
  if (std::isnan(a)) return std::isnan(b) ? std::bit_cast<float>(kNan) : b;
  if (std::isnan(b)) return a;
  if (a == b) return std::bit_cast<float>(std::bit_cast<u32>(a) & std::bit_cast<u32>(b));
  return a < b ? b : a;
}

// max.NaN: a NaN wins, and comes out as the card's.
inline float max_nan(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? std::bit_cast<float>(kNan) : max(a, b);
}
// max.NaN.xorsign.abs: of magnitudes, the sign is the product's.
inline u16 max_nan_abs_bf16(u16 a, u16 b) {
  const u16 magnitudes[] = {static_cast<u16>(a & 0x7fffu), static_cast<u16>(b & 0x7fffu)};
  const u16 greatest = max_of(magnitudes[0], magnitudes[1]);  // NaN lies above infinity
  return greatest > 0x7f80u ? u16{0x7fff} : static_cast<u16>(greatest | ((a ^ b) & 0x8000u));
}
// .ftz: subnormal numbers are zeros.
inline float flushed(float value) {
  return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value;
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

// cvt.rn.f16.f32: nearest even; NaN becomes 0x7fff.
inline u16 f16_of(float value) {
  return std::isnan(value) ? u16{0x7fff} : std::bit_cast<u16>(static_cast<_Float16>(value));
}

// cvt.rn.bf16.f32: nearest even; NaN becomes 0x7fff.
inline u16 bf16_of(float value) {
  if (std::isnan(value)) return 0x7fff;
  const u32 bits = std::bit_cast<u32>(value);
  return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// cvt.rn.satfinite.e4m3x2.f32, one half: nearest even; what is too large gives +-448, NaN 0x7f.
inline u8 e4m3_of(float value) {
  const u32 bits = std::bit_cast<u32>(value);
  const u8 sign = static_cast<u8>(bits >> 24 & 0x80u);
  if (std::isnan(value)) return 0x7f;
  const float magnitude = std::fabs(value);
  if (magnitude >= 448.0f) return sign | 0x7e;
  // Adding a power of two whose ulp is the grid of the result rounds to that grid, nearest even.
  const i32 exponent = max_of(static_cast<i32>(bits >> 23 & 255u) - 127, -6);
  const float grid = std::bit_cast<float>(static_cast<u32>(exponent - 3 + 127) << 23);
  const float shift = grid * 0x1p23f;
  const auto steps = static_cast<i32>((magnitude + shift - shift) / grid);  // 8 to 16, or subnormal
  return static_cast<u8>(sign | (steps + (exponent + 6) * 8));
}

// cvt.rn.f16x2.e4m3x2, one half: exact; NaN of either sign gives 0x7fff.
inline u16 f16_of_e4m3(u8 code) {
  const u32 magnitude = code & 0x7fu;
  const u16 sign = static_cast<u16>((code & 0x80u) << 8);
  if (magnitude == 0x7f) return 0x7fff;
  if (magnitude >= 8) return static_cast<u16>(sign | (magnitude + 64) << 7);
  if (magnitude == 0) return sign;
  const i32 top = 31 - std::countl_zero(magnitude);  // value: magnitude * 2^-9
  return static_cast<u16>(sign | static_cast<u32>(top + 6) << 10 |
                          (magnitude << (10 - top) & 1023u));
}

// ex2.approx.ftz.f32. The argument is cut to 23 fraction bits; six of them choose a row, the other
// 17 enter a quadratic whose square lacks the partial products below 2^19; a negative argument
// takes the one's complement of its fraction. Source: measured on an H200, all fractions equal.
// Not measured: NaN and infinities.
inline float ex2_approx_ftz(float x) {
  // C0 (quarter ulps above 2^25) << 26 | C1 (2^-15) << 10 | C2 (2^-11)
  constexpr u64 kRows[64] = {
      0xd62e5ee,       0x164d2966c1f5,  0x2cd8796aa9fa,  0x43a2956e9dff,  0x5aac49729a06,
      0x71f62576a609,  0x8980f17aba0f,  0xa14d657eda14,  0xb95c3183021d,  0xd1ae05873a22,
      0xea43a18b7e27,  0x1031dd58fca2f, 0x11c3d45942634, 0x135a2c1988e38, 0x14f4f0d9cfe41,
      0x16942e5a17e47, 0x1837f15a60a4d, 0x19e0469aaa254, 0x1b8d3a5af4a58, 0x1d3eda9b3fa61,
      0x1ef5331b8ba67, 0x20b0521bd866e, 0x2270439c26273, 0x2435165c74a79, 0x25fed75cc3e81,
      0x27cd945d14287, 0x29a15b5d6528f, 0x2b7a3a9db7295, 0x2d583f9e09e9e, 0x2f3b795e5daa5,
      0x3123f69eb22ae, 0x3311c4df07eb3, 0x3504f3df5e6bb, 0x36fd92dfb5ec1, 0x38fbb0600e2cb,
      0x3aff5b6067ad1, 0x3d08a460c1eda, 0x3f179aa11d2e3, 0x412c4de1796ec, 0x4346cda1d6ef1,
      0x45672ae2352fb, 0x478d75a294705, 0x49b9bea2f4f0b, 0x4bec15e356713, 0x4e248ce3b8f1c,
      0x506334a41c726, 0x52a81e648132d, 0x54f35b64e6f36, 0x5744fde54db41, 0x599d16a5b5b4a,
      0x5bfbb8661ef51, 0x5e60f5a68935a, 0x60cce026f4766, 0x633f8aa76136d, 0x65b907e7cef77,
      0x68396b683df80, 0x6ac0c828adf8d, 0x6d4f31291f795, 0x6fe4baa99239d, 0x7281782a05faa,
      0x75257e2a7b3b2, 0x77d0e0aaf17bf, 0x7a83b3eb693c9, 0x7d3e0d2be23d4,
  };
  if (std::isnan(x)) return std::bit_cast<float>(kNan);
  if (x < -126.0f) return 0.0f;
  if (x >= 128.0f) return std::bit_cast<float>(0x7f800000u);
  const float magnitude = std::fabs(x);
  const auto fixed = static_cast<u32>(magnitude * 0x1p23f);  // below 2^30
  i32 whole = static_cast<i32>(fixed >> 23);
  u32 fraction = fixed & 0x7fffffu;
  if (x < 0.0f) {
    whole = -whole;
    if (fraction != 0) {
      --whole;
      fraction = ~fraction & 0x7fffffu;
    }
  }
  const u64 row = kRows[fraction >> 17];
  const u32 low = fraction & 0x1ffffu;
  u64 square = 0;
  for (i32 i = 0; i < 17; ++i) {
    for (i32 j = i; j < 17; ++j) {
      const i32 weight = i + j + (i == j ? 0 : 1);  // of low's bits i and j, once or twice
      if (weight >= 19 && (low >> i & 1u) != 0 && (low >> j & 1u) != 0) square += u64{1} << weight;
    }
  }
  const u64 value = (((row >> 26) + (u64{1} << 25)) << 14) + (row >> 10 & 0xffffu) * 2 * low +
                    (row & 1023u) * (square >> 18) + 12228;
  return std::bit_cast<float>(static_cast<u32>(whole + 127) << 23 |
                              (static_cast<u32>(value >> 16) & 0x7fffffu));
}

// prmt.b32 in its default mode.
inline u32 byte_permute(u32 a, u32 b, u32 selector) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 result = 0;
  for (i32 i = 0; i < 4; ++i) {
    const u32 nibble = selector >> (4 * i) & 15u;
    const auto byte = static_cast<u8>(bytes >> (8 * (nibble & 7u)));
    const u8 signs = byte >> 7 != 0 ? 0xff : 0;
    result |= static_cast<u32>((nibble & 8u) != 0 ? signs : byte) << (8 * i);
  }
  return result;
}

}  // namespace deep_kernels::emulator::numeric
