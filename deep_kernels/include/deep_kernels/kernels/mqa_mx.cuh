// Rows of MX codes become rows of e4m3 codes with one exponent: what both MQA logits kernels do
// with query rows, and the pre-pass with kv rows. Elements stand in one order in both, not the
// order they came in: a block's dot product does not mind.
#pragma once

#include "deep_kernels/contract/mqa_logits.h"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels {

inline constexpr u32 kNotANumber = 0x7fc00000u;
inline constexpr i32 kMxBlockWords = kMxBlock / 4;  // of e4m3 codes

// Bytes that a block of 32 elements has in memory.
constexpr i32 mx_block_bytes(Format format) {
  return format == Format::mxfp4 ? kMxBlock / 2 : kMxBlock;
}

// Exponent of block `block` among the four bytes of a row.
DK_DEVICE i32 mx_exponent(i32 exponents, i32 block) {
  return static_cast<i32>(static_cast<u32>(exponents) >> (8 * block) & 0xffu);
}
// The four bytes of a row whose blocks share one exponent.
DK_DEVICE i32 mx_shared_exponent(i32 exponent) {
  return static_cast<i32>(static_cast<u32>(exponent) * 0x01010101u);
}

// Eight e2m1 codes of a word as two words of e4m3 codes, in order, that are 2^-6 times their value:
// sign, two bits of exponent and one of mantissa keep their meaning at these places, subnormals
// too.
DK_DEVICE void expand_e2m1(u32 (&code)[2], u32 packed) {
  const u32 low = packed << 4;  // elements 0, 2, 4, 6
  const u32 even = (low & 0x80808080u) | (low >> 2 & 0x1c1c1c1cu);
  const u32 odd = (packed & 0x80808080u) | (packed >> 2 & 0x1c1c1c1cu);
  code[0] = ptx::byte_permute(even, odd, 0x5140);
  code[1] = ptx::byte_permute(even, odd, 0x7362);
}

// One block of 32 elements as e4m3 codes, before it is rebased: e4m3 as they came, e2m1 expanded.
template <Format kFormat>
struct MxCodes {
  u32 word[kMxBlockWords];

  // `load` fills 16 bytes from byte `offset` of the block on.
  template <class Load>
  DK_DEVICE void load(Load&& load) {
    if constexpr (kFormat == Format::mxfp4) {
      u32 packed[4];
      load(packed, 0);
      DK_UNROLL
      for (i32 i = 0; i < 4; ++i) {
        u32 pair[2];
        expand_e2m1(pair, packed[i]);
        word[i] = pair[0];
        word[4 + i] = pair[1];
      }
    } else {
      DK_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        u32 four[4];
        load(four, 16 * half);
        DK_UNROLL
        for (i32 i = 0; i < 4; ++i) word[4 * half + i] = four[i];
      }
    }
  }
  DK_DEVICE bool is_zero() const {
    u32 any = 0;
    DK_UNROLL
    for (i32 i = 0; i < kMxBlockWords; ++i) any |= word[i];
    return (any & 0x7f7f7f7fu) == 0;
  }
  // Times 2^-shift, rounded to nearest even where that leaves e4m3; e2m1 ends at 2^6 of its value.
  DK_DEVICE void rebase(i32 shift) {
    // Both factors in float16, where every product is exact: codes are at least 2^-9.
    constexpr i32 kUp = kFormat == Format::mxfp4 ? 12 : 0;
    const u32 factor = static_cast<u32>(15 + kUp - shift) << 10;
    const u32 both = factor << 16 | factor;
    if (kUp == 0 && shift == 0) return;
    DK_UNROLL
    for (i32 i = 0; i < kMxBlockWords; ++i) {
      const u32 low = ptx::mul_f16x2(ptx::f16x2_of_e4m3x2(static_cast<u16>(word[i])), both);
      const u32 high = ptx::mul_f16x2(ptx::f16x2_of_e4m3x2(static_cast<u16>(word[i] >> 16)), both);
      word[i] = ptx::e4m3x2_of_f16x2(low) | static_cast<u32>(ptx::e4m3x2_of_f16x2(high)) << 16;
    }
  }
};

// What a row's exponents come to. Blocks of zeros have no say: quantizers give them exponents of
// their own. NaN is a property of the row.
template <Format kFormat>
struct MxRow {
  i32 low = kMxNan;
  i32 high = -1;  // of the blocks that count; -1 when none does
  bool is_nan = false;

  DK_DEVICE void add(i32 exponent, bool is_zero) {
    is_nan = is_nan || exponent == kMxNan;
    if (is_zero) return;
    low = min_of(low, exponent);
    high = max_of(high, exponent);
  }
  // Joins what the lanes of a row have added, kLanes of them side by side. Converged.
  template <i32 kLanes>
  DK_DEVICE void join() {
    DK_UNROLL
    for (i32 other = 1; other < kLanes; other *= 2) {
      low = min_of(low, ptx::shuffle_xor(low, other));
      high = max_of(high, ptx::shuffle_xor(high, other));
      is_nan = ptx::shuffle_xor(static_cast<i32>(is_nan), other) != 0 || is_nan;
    }
  }
  DK_DEVICE bool is_narrow() const { return high - low <= mx_narrow_spread(kFormat); }
  // How far the codes of a block go down: not at all in a wide row.
  DK_DEVICE i32 shift(i32 exponent) const {
    return is_narrow() ? clamp_to(high - exponent, 0, mx_narrow_spread(kFormat)) : 0;
  }
  // The exponents of the codes' blocks, `given` when they stay as they are.
  DK_DEVICE i32 exponents(i32 given) const {
    if (is_nan) return mx_shared_exponent(kMxNan);
    if (!is_narrow()) return given;
    return mx_shared_exponent(high < 0 ? kMxBias : high);
  }
  // The power of two that the codes of a narrow row stand for; NaN asks for the exact way.
  DK_DEVICE float power() const {
    if (is_nan || !is_narrow()) return ptx::float_of(kNotANumber);
    const i32 exponent = (high < 0 ? kMxBias : high) - kMxBias - mx_code_exponent(kFormat);
    // Below 2^-126 float32 has one bit left at a place of its own.
    return ptx::float_of(exponent < -126 ? 1u << (149 + exponent)
                                         : static_cast<u32>(exponent + 127) << 23);
  }
};

// 2^(a + b) for two UE8M0 exponents of codes whose product is 2^kCodeExponents times that of their
// values; NaN if one of them is. In float64 nothing leaves the normal numbers.
template <i32 kCodeExponents>
DK_DEVICE double mx_factor(i32 a, i32 b) {
  constexpr i32 kBias = 1023 - 2 * kMxBias - kCodeExponents;
  if (a == kMxNan || b == kMxNan) return ptx::double_of(u64{0x7ff8} << 48);
  return ptx::double_of(static_cast<u64>(a + b + kBias) << 52);
}

}  // namespace deep_kernels
