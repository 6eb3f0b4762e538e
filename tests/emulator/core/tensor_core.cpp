#include "tensor_core.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "numeric.h"

namespace deep_kernels::emulator::tensor_core {

namespace {

constexpr u32 kNan = 0x7fffffff;
// Stands for the exponent of 0: low enough that no sum with it wins against a product.
constexpr signed char kZeroExponent = -40;
constexpr i32 kNoProduct = -30;  // tops below are sums with kZeroExponent; products begin at -12

struct Tables {
  float value[256];
  signed char exponent[256];
  bool nan[256];
};
constexpr Tables make_tables() {
  Tables tables{};
  for (i32 code = 0; code < 256; ++code) {
    const i32 field = code >> 3 & 15;
    const i32 mantissa = code & 7;
    tables.nan[code] = field == 15 && mantissa == 7;
    const i32 significand = field != 0 ? 8 + mantissa : mantissa;  // in eighths
    const i32 exponent = (field != 0 ? field : 1) - 7;  // subnormals keep the smallest exponent
    float value = static_cast<float>(significand) / 8.0f;
    for (i32 i = 0; i < exponent; ++i) value *= 2.0f;
    for (i32 i = 0; i > exponent; --i) value /= 2.0f;
    if (tables.nan[code]) value = 0.0f;  // the flag speaks for it
    tables.value[code] = code >= 128 ? -value : value;
    tables.exponent[code] = value == 0.0f ? kZeroExponent : static_cast<signed char>(exponent);
  }
  return tables;
}
constexpr Tables kTables = make_tables();

u32 bits_of(float value) { return std::bit_cast<u32>(value); }
float float_of(u32 bits) { return std::bit_cast<float>(bits); }
float power_of_two(i32 exponent) { return float_of(static_cast<u32>(exponent + 127) << 23); }

// Exponent as the adder sees it: subnormals keep the smallest normal one.
i32 exponent_of(u32 bits) { return std::max<i32>(1, static_cast<i32>(bits >> 23 & 255)) - 127; }

// Cuts the magnitude to `fraction` bits behind the leading one; exact where nothing is lost.
// Subnormals are cut at the absolute place that the smallest normal numbers have.
float cut_fraction(float value, i32 fraction) {
  return float_of(bits_of(value) & ~((1u << (23 - fraction)) - 1));
}
// An integer of up to 31 bits as a float, cut toward zero to 23 fraction bits.
float cut_to_float(i32 value) {
  const double exact = value;
  const u64 bits = std::bit_cast<u64>(exact) & ~((u64{1} << 29) - 1);
  return static_cast<float>(std::bit_cast<double>(bits));
}

bool is_special(float value) { return (bits_of(value) & 0x7f800000u) == 0x7f800000u; }

constexpr i32 kF8 = 13;   // of wgmma e4m3; also the fraction bits of its result
constexpr i32 kF16 = 25;  // of a step on f16 operands

}  // namespace

void decode(i32 n, const u8* b, Decoded& decoded) {
  for (i32 j = 0; j < n; ++j) {
    decoded.nan[j] = false;
    for (i32 k = 0; k < 32; ++k) {
      const u8 code = b[j * 32 + k];
      decoded.value[k][j] = kTables.value[code];
      decoded.exponent[k][j] = kTables.exponent[code];
      decoded.nan[j] |= kTables.nan[code];
    }
  }
}

void wgmma_k32_e4m3(i32 m, i32 n, const u8* a, const Decoded& b, float* d) {
  alignas(64) signed char top[256];
  alignas(64) float scale[256];
  alignas(64) float unit[256];
  alignas(64) i32 sum[256];
  bool any_nan = false;
  for (i32 j = 0; j < n; ++j) any_nan |= b.nan[j];
  for (i32 i = 0; i < m; ++i) {
    const u8* row = a + i * 32;
    float* c = d + i * n;
    bool row_nan = false;
    std::memset(top, 2 * kZeroExponent, sizeof(top));
    for (i32 k = 0; k < 32; ++k) {
      row_nan |= kTables.nan[row[k]];
      const signed char exponent = kTables.exponent[row[k]];
      if (exponent == kZeroExponent) continue;
      for (i32 j = 0; j < n; ++j) {
        const auto both = static_cast<signed char>(exponent + b.exponent[k][j]);
        top[j] = std::max(top[j], both);
      }
    }
    // Where neither a product nor c reaches -100 the grid at -100 cuts nothing that is not c alone,
    // and c alone is dealt with below.
    for (i32 j = 0; j < n; ++j) {
      const u32 bits = bits_of(c[j]);
      const i32 of_c = (bits & 0x7fffffffu) == 0 ? -100 : static_cast<i32>(bits >> 23 & 255) - 127;
      const i32 highest = std::max({static_cast<i32>(top[j]), of_c, -100});
      scale[j] = float_of(static_cast<u32>(127 + kF8 - highest) << 23);
      unit[j] = float_of(static_cast<u32>(127 - kF8 + highest) << 23);
      sum[j] = static_cast<i32>(c[j] * scale[j]);
    }
    for (i32 k = 0; k < 32; ++k) {
      const float factor = kTables.value[row[k]];
      if (factor == 0.0f) continue;
      const float* values = b.value[k];
      for (i32 j = 0; j < n; ++j) sum[j] += static_cast<i32>(factor * values[j] * scale[j]);
    }
    bool special = row_nan || any_nan;
    for (i32 j = 0; j < n; ++j)
      special |= (bits_of(c[j]) & 0x7f800000u) == 0x7f800000u ||
                 (top[j] < kNoProduct && (bits_of(c[j]) & 0x7fffffffu) != 0);
    if (!special) {
      for (i32 j = 0; j < n; ++j)
        c[j] = float_of(bits_of(static_cast<float>(sum[j])) & ~0x3ffu) * unit[j];
      continue;
    }
    for (i32 j = 0; j < n; ++j) {
      if (row_nan || b.nan[j] || std::isnan(c[j]))
        c[j] = float_of(kNan);
      else if (is_special(c[j]))
        continue;
      else if (top[j] < kNoProduct)  // c alone; cut at most to +-0, which is +0
        c[j] = cut_fraction(c[j], kF8) + 0.0f;
      else
        c[j] = float_of(bits_of(static_cast<float>(sum[j])) & ~0x3ffu) * unit[j];
    }
  }
}

void wgmma_k32_e4m3(i32 m, i32 n, const u8* a, const u8* b, float* d) {
  static Decoded decoded;
  decode(n, b, decoded);
  wgmma_k32_e4m3(m, n, a, decoded, d);
}

namespace {

constexpr i32 kLowestTop = -133;    // felt by products of tiny bfloat16 numbers alone
constexpr i32 kNoExponent = -1000;  // of 0: no sum with it reaches kLowestTop

// An operand of 16 bits: its value, and its exponent as the adder sees it.
struct Number {
  double value;
  i32 exponent;
};
Number decode_half(Half type, u16 bits) {
  const bool is_bf16 = type == Half::bf16;
  const i32 mantissa_bits = is_bf16 ? 7 : 10;
  const i32 field = (bits & 0x7fff) >> mantissa_bits;
  const i32 bias = is_bf16 ? 127 : 15;
  const float value =
      is_bf16 ? float_of(static_cast<u32>(bits) << 16) : numeric::float_of_f16(bits);
  return {value, value != 0.0f ? std::max(field, 1) - bias : kNoExponent};
}

// The second operand, k by k.
struct DecodedHalves {
  double value[16][256];  // 0 for what is not finite
  i32 exponent[16][256];
  bool special[256];  // something in the column is not finite
};
void decode_halves(Half type, i32 n, const u16* b, DecodedHalves& decoded) {
  for (i32 j = 0; j < n; ++j) {
    decoded.special[j] = false;
    for (i32 k = 0; k < 16; ++k) {
      const Number number = decode_half(type, b[j * 16 + k]);
      const bool finite = std::isfinite(number.value);
      decoded.value[k][j] = finite ? number.value : 0.0;
      decoded.exponent[k][j] = finite ? number.exponent : kNoExponent;
      decoded.special[j] |= !finite;
    }
  }
}

// Sum of c and of the products where they are not finite; 0 if all are.
double sum_of_specials(Half type, const u16* a, const u16* b, float c) {
  double sum = std::isfinite(c) ? 0.0 : c;
  for (i32 k = 0; k < 16; ++k) {
    const double product = decode_half(type, a[k]).value * decode_half(type, b[k]).value;
    if (!std::isfinite(product)) sum += product;
  }
  return sum;
}

// A finite sum as float32, cut toward zero.
float cut_to_float(double value) {
  const double magnitude = std::fabs(value);
  if (magnitude >= 0x1p128) return static_cast<float>(std::copysign(HUGE_VAL, value));
  double cut;
  if (magnitude < 0x1p-126)
    cut = std::trunc(value * 0x1p149) * 0x1p-149;
  else
    cut = std::bit_cast<double>(std::bit_cast<u64>(value) & ~((u64{1} << 29) - 1));
  return static_cast<float>(cut) + 0.0f;  // underflow gives +0
}

}  // namespace

void step_k16(Half type, i32 m, i32 n, const u16* a, const u16* b, float* d) {
  static DecodedHalves columns;
  decode_halves(type, n, b, columns);
  alignas(64) i32 top[256];
  alignas(64) double scale[256];
  alignas(64) double sum[256];
  for (i32 i = 0; i < m; ++i) {
    float* c = d + i * n;
    Number row[16];
    bool row_special = false;
    for (i32 k = 0; k < 16; ++k) {
      row[k] = decode_half(type, a[i * 16 + k]);
      row_special |= !std::isfinite(row[k].value);
      if (!std::isfinite(row[k].value)) row[k] = {0.0, kNoExponent};
    }
    for (i32 j = 0; j < n; ++j)
      top[j] = c[j] != 0.0f ? std::max(kLowestTop, exponent_of(bits_of(c[j]))) : kLowestTop;
    for (i32 k = 0; k < 16; ++k)
      for (i32 j = 0; j < n; ++j)
        top[j] = std::max(top[j], row[k].exponent + columns.exponent[k][j]);
    for (i32 j = 0; j < n; ++j) {
      scale[j] = std::bit_cast<double>(static_cast<u64>(1023 + kF16 - top[j]) << 52);
      sum[j] = std::trunc(c[j] * scale[j]);
    }
    for (i32 k = 0; k < 16; ++k)
      for (i32 j = 0; j < n; ++j)
        sum[j] += std::trunc(row[k].value * columns.value[k][j] * scale[j]);
    for (i32 j = 0; j < n; ++j) {
      double specials = 0.0;
      if (row_special || columns.special[j] || !std::isfinite(c[j]))
        specials = sum_of_specials(type, a + i * 16, b + j * 16, c[j]);
      if (specials == 0.0)
        c[j] = cut_to_float(sum[j] / scale[j]);
      else
        c[j] = std::isnan(specials) ? float_of(kNan) : static_cast<float>(specials);
    }
  }
}

void mma_m16n8k32_e4m3(const u8* a, const u8* b, float* c) {
  constexpr i32 kRows = 16;
  constexpr i32 kColumns = 8;
  // All rows at once against one column after the other.
  alignas(64) float values[32][kRows];
  alignas(64) i32 exponents[32][kRows];
  bool row_nan[kRows] = {};
  for (i32 i = 0; i < kRows; ++i) {
    for (i32 k = 0; k < 32; ++k) {
      const u8 code = a[i * 32 + k];
      values[k][i] = kTables.value[code];
      exponents[k][i] = kTables.exponent[code];
      row_nan[i] |= kTables.nan[code];
    }
  }
  for (i32 j = 0; j < kColumns; ++j) {
    const u8* column = b + j * 32;
    bool nan = false;
    for (i32 k = 0; k < 32; ++k) nan |= kTables.nan[column[k]];
    alignas(64) float step[kRows] = {};
    for (i32 half = 0; half < 2; ++half) {
      alignas(64) i32 top[kRows];
      alignas(64) float scale[kRows];
      alignas(64) i32 sum[kRows];
      // The first step's result takes part in the second like a product.
      for (i32 i = 0; i < kRows; ++i)
        top[i] = step[i] == 0.0f ? kZeroExponent : exponent_of(bits_of(step[i]));
      for (i32 quad = 2 * half; quad < 32; quad += 4) {
        for (i32 k = quad; k < quad + 2; ++k) {
          const i32 exponent = kTables.exponent[column[k]];
          for (i32 i = 0; i < kRows; ++i) top[i] = std::max(top[i], exponent + exponents[k][i]);
        }
      }
      for (i32 i = 0; i < kRows; ++i) {
        scale[i] = power_of_two(kF16 - std::max<i32>(top[i], kZeroExponent));
        sum[i] = static_cast<i32>(step[i] * scale[i]);
      }
      for (i32 quad = 2 * half; quad < 32; quad += 4) {
        for (i32 k = quad; k < quad + 2; ++k) {
          const float factor = kTables.value[column[k]];
          for (i32 i = 0; i < kRows; ++i)
            sum[i] += static_cast<i32>(factor * values[k][i] * scale[i]);
        }
      }
      for (i32 i = 0; i < kRows; ++i) step[i] = cut_to_float(sum[i]) / scale[i];
    }
    for (i32 i = 0; i < kRows; ++i) {
      float& total = c[i * kColumns + j];
      total = row_nan[i] || nan ? float_of(kNan) : total + step[i];
      if (std::isnan(total)) total = float_of(kNan);
    }
  }
}

}  // namespace deep_kernels::emulator::tensor_core
