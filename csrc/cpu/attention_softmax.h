// A row of scores on its way through tiles of keys.
#pragma once

#include "deep_kernels/contract/attention.h"

namespace deep_kernels::cpu {

// Which powers are emulated: the same columns of every tile.
struct Ex2Rule {
  i32 degree = 0;  // of the polynomial; 0: none is
  u32 emulated[kCpuTileKeys] = {};

  Ex2Rule(Ex2Emulation ex2, DType dtype);
};

struct RowState {
  float reference;  // m; -inf until a score is greater
  float sum;        // of powers, less any that has become NaN
};
inline constexpr RowState kEmptyRow = {-__builtin_inff(), 0.0f};

// scores[0 .. count), dot products of one tile, become powers. Returns what the sums of earlier
// tiles have to be multiplied by; of state.sum it is done.
float softmax_tile(const Ex2Rule& rule, float scale_log2, i32 count, float* scores,
                   RowState& state);

// out[i] = values[i] / divisor, and zeros where it is 0.
void divide_row(const float* values, float divisor, i32 count, float* out);
void scale_row(float factor, i32 count, float* values);
// out[i] += factor * values[i]
void add_scaled_row(const float* values, float factor, i32 count, float* out);

// Base-2 logarithm of all powers.
float log_sum(const RowState& state);
// 2^x, as in softmax_tile where nothing is emulated.
float power_of_two(float x);

}  // namespace deep_kernels::cpu
