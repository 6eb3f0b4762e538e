#include "cpu/row_products.h"

#include <cmath>

#include "cpu/bfloat16.h"
#include "cpu/float16.h"
#include "cpu/vectorize.h"

namespace deep_kernels::cpu {
namespace {

// kRows x kColumns sums in registers.
template <i32 kRows, i32 kColumns>
DK_INLINE void add_block(MatrixView left, MatrixView right, i32 depth, float* sums,
                         i64 sums_stride) {
  float block[kRows][kColumns];
  for (i32 r = 0; r < kRows; ++r)
    for (i32 c = 0; c < kColumns; ++c) block[r][c] = sums[r * sums_stride + c];
  for (i32 d = 0; d < depth; ++d) {
    const float* row = right.data + d * right.stride;
    for (i32 r = 0; r < kRows; ++r) {
      const float factor = left.data[r * left.stride + d];
      for (i32 c = 0; c < kColumns; ++c) block[r][c] = std::fma(factor, row[c], block[r][c]);
    }
  }
  for (i32 r = 0; r < kRows; ++r)
    for (i32 c = 0; c < kColumns; ++c) sums[r * sums_stride + c] = block[r][c];
}

constexpr i32 kBlockRows = 4;

struct Widen {
  DType dtype;
  DK_INLINE float operator()(u16 value) const {
    return dtype == DType::float16 ? from_float16(value) : from_bfloat16(value);
  }
};

// Squares are turned in registers or at least in the nearest cache.
constexpr i32 kSquare = 16;

template <DType kDtype>
DK_INLINE void widen_square(const u16* rows, i64 stride, float* out, i64 out_stride) {
  float square[kSquare][kSquare];
  for (i32 r = 0; r < kSquare; ++r)
    for (i32 d = 0; d < kSquare; ++d) square[r][d] = Widen{kDtype}(rows[r * stride + d]);
  for (i32 d = 0; d < kSquare; ++d)
    for (i32 r = 0; r < kSquare; ++r) out[d * out_stride + r] = square[r][d];
}

template <DType kDtype>
DK_INLINE void widen_transposed_of(const u16* rows, i64 stride, i32 num_rows, i32 row_length,
                                   float* out, i64 out_stride) {
  const i32 whole = num_rows - num_rows % kSquare;
  for (i32 r = 0; r < whole; r += kSquare)
    for (i32 d = 0; d < row_length; d += kSquare)
      widen_square<kDtype>(rows + r * stride + d, stride, out + d * out_stride + r, out_stride);
  for (i32 r = whole; r < num_rows; ++r)
    for (i32 d = 0; d < row_length; ++d)
      out[d * out_stride + r] = Widen{kDtype}(rows[r * stride + d]);
}

}  // namespace

DK_VECTORIZED_FMA void add_row_products(MatrixView left, i32 num_rows, MatrixView right, i32 depth,
                                        i32 num_columns, float* sums, i64 sums_stride) {
  for (i32 c = 0; c < num_columns; c += kRowProductColumns) {
    const MatrixView columns{right.data + c, right.stride};
    i32 r = 0;
    for (; r + kBlockRows <= num_rows; r += kBlockRows)
      add_block<kBlockRows, kRowProductColumns>({left.data + r * left.stride, left.stride}, columns,
                                                depth, sums + r * sums_stride + c, sums_stride);
    for (; r < num_rows; ++r)
      add_block<1, kRowProductColumns>({left.data + r * left.stride, left.stride}, columns, depth,
                                       sums + r * sums_stride + c, sums_stride);
  }
}

DK_VECTORIZED_FMA void widen_rows(DType dtype, const u16* rows, i64 stride, i32 num_rows,
                                  i32 row_length, float* out, i64 out_stride) {
  for (i32 r = 0; r < num_rows; ++r) {
    const u16* from = rows + r * stride;
    float* to = out + r * out_stride;
    if (dtype == DType::float16)
      for (i32 d = 0; d < row_length; ++d) to[d] = from_float16(from[d]);
    else
      for (i32 d = 0; d < row_length; ++d) to[d] = from_bfloat16(from[d]);
  }
}

DK_VECTORIZED_FMA void widen_transposed(DType dtype, const u16* rows, i64 stride, i32 num_rows,
                                        i32 row_length, float* out, i64 out_stride) {
  if (dtype == DType::float16)
    widen_transposed_of<DType::float16>(rows, stride, num_rows, row_length, out, out_stride);
  else
    widen_transposed_of<DType::bfloat16>(rows, stride, num_rows, row_length, out, out_stride);
}

DK_VECTORIZED_FMA void round_row(DType dtype, const float* values, i32 count, u16* out) {
  if (dtype == DType::float16)
    for (i32 i = 0; i < count; ++i) out[i] = to_float16(values[i]);
  else
    for (i32 i = 0; i < count; ++i) out[i] = to_bfloat16(values[i]);
}

}  // namespace deep_kernels::cpu
