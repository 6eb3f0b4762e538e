// What follows the dot products of MQA logits: the weighted sum over heads and the stores.
#pragma once

#include "deep_kernels/contract/types.h"

namespace deep_kernels::cpu {

// Columns are summed in groups of this many: begin and end of a range are rounded outwards.
inline constexpr i32 kSumColumns = 64;

// sums[c] = sum_h weights[h] * relu(dots[h * stride + c]) for begin <= c < end, heads in ascending
// order, NaN staying NaN. `stride` is a multiple of kSumColumns; columns up to the rounded end are
// read and written.
void sum_heads(const float* dots, i64 stride, const float* weights, i32 num_heads, i32 begin,
               i32 end, float* sums);
void sum_heads(const double* dots, i64 stride, const double* weights, i32 num_heads, i32 begin,
               i32 end, double* sums);

// logits[c] = values[c], rounded to nearest even where logits are bfloat16.
void store_logits(const float* values, i64 count, float* logits);
void store_logits(const float* values, i64 count, u16* logits);

}  // namespace deep_kernels::cpu
