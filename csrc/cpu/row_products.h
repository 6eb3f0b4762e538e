// Matrix products whose every element is one chain of fused multiply-adds in order: its bits depend
// on its own row, column and depth, and not on how many others are computed with it. ATen's GEMM
// promises no such thing.
#pragma once

#include "deep_kernels/contract/types.h"

namespace deep_kernels::cpu {

inline constexpr i32 kRowProductColumns = 32;  // columns come in multiples of it

struct MatrixView {
  const float* data;
  i64 stride;  // of rows, elements
};

// sums[r][c] = fma(left[r][d], right[d][c], sums[r][c]) for d = 0 .. depth - 1.
void add_row_products(MatrixView left, i32 num_rows, MatrixView right, i32 depth, i32 num_columns,
                      float* sums, i64 sums_stride);

// Rows of bfloat16 or float16 as floats.
void widen_rows(DType dtype, const u16* rows, i64 stride, i32 num_rows, i32 row_length, float* out,
                i64 out_stride);
// out[d][r] = rows[r][d]
void widen_transposed(DType dtype, const u16* rows, i64 stride, i32 num_rows, i32 row_length,
                      float* out, i64 out_stride);
void round_row(DType dtype, const float* values, i32 count, u16* out);

}  // namespace deep_kernels::cpu
