// A block of dot products: ATen's matrix product on scratch memory that one thread reuses.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <algorithm>

#include "deep_kernels/contract/types.h"

namespace deep_kernels::cpu {

// A BLAS may add up in another order for single rows and columns, and for what is left over beside
// its whole micro-tiles. So that a product has the same bits however many others are computed with
// it, rows and columns are filled up with zeros to these multiples.
inline constexpr i32 kProductRows = 8;
inline constexpr i32 kProductColumns = 16;

// dots[r][c] = sum_d left[r][d] * right[c][d]; Real is float or double.
template <class Real>
class ProductTile {
 public:
  ProductTile(i32 max_rows, i32 max_columns, i32 depth)
      : depth_(depth), stride_(align_up(max_columns, kProductColumns)) {
    const i64 rows = align_up(max_rows, kProductRows);
    memory_ = at::detail::empty_cpu({(rows + stride_) * depth_ + rows * stride_}, kType);
    left_ = static_cast<Real*>(memory_.mutable_data_ptr());
    right_ = left_ + rows * depth_;
    dots_ = right_ + stride_ * depth_;
  }

  Real* left(i64 row) { return left_ + row * depth_; }
  Real* right(i64 column) { return right_ + column * depth_; }
  Real* dots(i64 row) { return dots_ + row * stride_; }
  i64 stride() const { return stride_; }  // of dots, elements

  void multiply(i32 num_rows, i32 num_columns) {
    const i32 rows = align_up(num_rows, kProductRows);
    const i32 columns = align_up(num_columns, kProductColumns);
    std::fill(left(num_rows), left(rows), Real{0});
    std::fill(right(num_columns), right(columns), Real{0});
    if (rows != num_rows_ || columns != num_columns_) shape(rows, columns);
    // Past the dispatcher: what a thread of the pool calls must not depend on modes, autocast or
    // inference mode, none of which it inherits.
    at::cpu::mm_out(dots_view_, left_view_, right_view_);
  }

 private:
  static constexpr at::ScalarType kType = sizeof(Real) == 4 ? at::kFloat : at::kDouble;

  void shape(i32 num_rows, i32 num_columns) {
    num_rows_ = num_rows;
    num_columns_ = num_columns;
    left_view_ = at::from_blob(left_, {num_rows, depth_}, {depth_, 1}, kType);
    right_view_ = at::from_blob(right_, {depth_, num_columns}, {1, depth_}, kType);
    dots_view_ = at::from_blob(dots_, {num_rows, num_columns}, {stride_, 1}, kType);
  }

  i64 depth_;
  i64 stride_;
  at::TensorBase memory_;
  Real* left_;        // [rows, depth]
  Real* right_;       // [columns, depth]
  Real* dots_;        // [rows, columns]
  i32 num_rows_ = 0;  // of the views
  i32 num_columns_ = 0;
  at::Tensor left_view_, right_view_, dots_view_;
};

}  // namespace deep_kernels::cpu
