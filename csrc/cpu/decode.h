// Rows of quantized codes -> floats: e4m3, e2m1 pairs, and the UE8M0 factors of their blocks.
#pragma once

#include "deep_kernels/contract/types.h"

namespace deep_kernels::cpu {

inline constexpr i32 kMxBlock = 32;        // elements that share one exponent
inline constexpr i32 kMaxHeadDim = 128;    // hence at most four of them in a row
inline constexpr i32 kExponentBias = 127;  // UE8M0: 2^(byte - 127)
inline constexpr i32 kExponentNan = 0xff;

struct CodeRow {
  const u8* values;     // [head_dim] e4m3 | [head_dim / 2] e2m1 pairs, low nibble first
  const u8* exponents;  // [head_dim / 32] UE8M0; null where the scale stays outside (fp8)
  i64 exponent_stride;  // bytes
};

// out[d] = values[d] * 2^(exponents[d / 32] - 127). Factors beyond the normal float32 numbers come
// out wrong in the float form (see ExponentRange) and are exact in the double form; NaN is NaN.
void decode_row(Format format, i32 head_dim, const CodeRow& row, float* out);
void decode_row(Format format, i32 head_dim, const CodeRow& row, double* out);

// The block exponents of a row, bias removed; low > high when none counts.
struct ExponentRange {
  i32 low = 256;
  i32 high = -256;

  void add(i32 exponent) {
    low = min_of(low, exponent);
    high = max_of(high, exponent);
  }
  bool is_empty() const { return low > high; }
  bool within(i32 lowest, i32 highest) const { return low >= lowest && high <= highest; }
};
// Widens `range` by the row. NaN blocks do not count, nor blocks of zeros: some quantizers give
// those the smallest exponent there is.
void add_exponents(Format format, i32 head_dim, const CodeRow& row, ExponentRange& range);

}  // namespace deep_kernels::cpu
