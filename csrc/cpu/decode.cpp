#include "cpu/decode.h"

#include <bit>
#include <cmath>
#include <limits>

#include "cpu/vectorize.h"

namespace deep_kernels::cpu {
namespace {

// Where an exponent is unremarkable, whether its block is all zero is not looked up.
constexpr i32 kPlainExponent = 32;

constexpr u32 kNanBits = 0x7fc00000u;

float factor_of(i32 exponent) {
  if (exponent == kExponentNan) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(static_cast<u32>(exponent) << 23);
}

// Integers and selects alone, no table and no denormal operand: as fast as the stores on vectors,
// and right when the process flushes denormals.
// Indices of the inner loops are their counters alone: a sum of 32-bit ones may wrap under
// -fno-strict-overflow, which Python's build flags have, and would keep the loops scalar.
DK_VECTORIZED void decode_e4m3(const u8* codes, const float* factors, i32 num_blocks, float* out) {
  for (i32 block = 0; block < num_blocks; ++block, codes += kMxBlock, out += kMxBlock) {
    const float factor = factors[block];
    for (i32 i = 0; i < kMxBlock; ++i) {
      const u32 code = codes[i];
      const u32 magnitude = code & 0x7f;
      // Rebiased from 7 to 127. A subnormal code is read as 2^-6 more than it is, and that is
      // taken off again; both steps are exact. No conditional: it would keep the loop scalar.
      const u32 is_subnormal = magnitude < 8;
      const u32 is_nan = magnitude == 0x7f;
      const u32 raised = (magnitude << 20) + ((120 + is_subnormal) << 23);
      const float excess = std::bit_cast<float>(is_subnormal * (121u << 23));
      const u32 bits =
          std::bit_cast<u32>(std::bit_cast<float>(raised) - excess) | is_nan * kNanBits;
      out[i] = std::bit_cast<float>(bits | (code & 0x80) << 24) * factor;
    }
  }
}

DK_VECTORIZED void decode_e2m1(const u8* codes, const float* factors, i32 num_blocks, float* out) {
  u8 nibbles[kMaxHeadDim];
  for (i32 i = 0; i < num_blocks * kMxBlock / 2; ++i) {
    nibbles[2 * i] = codes[i] & 0xf;
    nibbles[2 * i + 1] = codes[i] >> 4;
  }
  const u8* nibble = nibbles;
  for (i32 block = 0; block < num_blocks; ++block, nibble += kMxBlock, out += kMxBlock) {
    const float factor = factors[block];
    for (i32 i = 0; i < kMxBlock; ++i) {
      const u32 code = nibble[i];
      const u32 magnitude = code & 7;
      const u32 normal = (magnitude << 22) + (126u << 23);  // rebiased from 1 to 127
      const u32 bits = magnitude == 0 ? 0 : magnitude == 1 ? 126u << 23 : normal;
      out[i] = std::bit_cast<float>(bits | (code & 8) << 28) * factor;
    }
  }
}

void decode_codes(Format format, i32 head_dim, const u8* codes, const float* factors, float* out) {
  const auto decode = format == Format::mxfp4 ? decode_e2m1 : decode_e4m3;
  decode(codes, factors, head_dim / kMxBlock, out);
}

bool is_zero_block(Format format, const CodeRow& row, i32 block) {
  const bool is_e2m1 = format == Format::mxfp4;
  const i32 num_bytes = is_e2m1 ? kMxBlock / 2 : kMxBlock;
  const u8 magnitude = is_e2m1 ? 0x77 : 0x7f;
  u8 any = 0;
  for (i32 i = 0; i < num_bytes; ++i) any |= row.values[block * num_bytes + i] & magnitude;
  return any == 0;
}

}  // namespace

void decode_row(Format format, i32 head_dim, const CodeRow& row, float* out) {
  float factors[kMaxHeadDim / kMxBlock] = {1, 1, 1, 1};
  if (row.exponents != nullptr) {
    for (i32 block = 0; block < head_dim / kMxBlock; ++block)
      factors[block] = factor_of(row.exponents[block * row.exponent_stride]);
  }
  decode_codes(format, head_dim, row.values, factors, out);
}

void decode_row(Format format, i32 head_dim, const CodeRow& row, double* out) {
  const float ones[kMaxHeadDim / kMxBlock] = {1, 1, 1, 1};
  float values[kMaxHeadDim];
  decode_codes(format, head_dim, row.values, ones, values);
  for (i32 block = 0; block < head_dim / kMxBlock; ++block) {
    double factor = 1.0;
    if (row.exponents != nullptr) {
      const i32 exponent = row.exponents[block * row.exponent_stride];
      factor = exponent == kExponentNan ? std::numeric_limits<double>::quiet_NaN()
                                        : std::ldexp(1.0, exponent - kExponentBias);
    }
    for (i32 i = block * kMxBlock; i < (block + 1) * kMxBlock; ++i) out[i] = values[i] * factor;
  }
}

void add_exponents(Format format, i32 head_dim, const CodeRow& row, ExponentRange& range) {
  for (i32 block = 0; block < head_dim / kMxBlock; ++block) {
    const i32 byte = row.exponents[block * row.exponent_stride];
    const i32 exponent = byte - kExponentBias;
    if (byte == kExponentNan) continue;
    const bool is_plain = exponent >= -kPlainExponent && exponent <= kPlainExponent;
    if (is_plain || !is_zero_block(format, row, block)) range.add(exponent);
  }
}

}  // namespace deep_kernels::cpu
