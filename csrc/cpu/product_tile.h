// A block of dot products: ATen's matrix product on scratch memory that one thread reuses.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <c10/util/TypeTraits.h>

#include "deep_kernels/contract/types.h"

namespace deep_kernels::cpu {

// dots[r][c] = sum_d left[r][d] * right[c][d], Real is float or double.
template <class Real>
class ProductTile {
 public:
  ProductTile(i32 max_rows, i32 max_columns, i32 depth)
      : depth_(depth),
        stride_(max_columns),
        memory_(at::detail::empty_cpu(
            {i64{max_rows} * depth + i64{max_columns} * depth + i64{max_rows} * max_columns},
            kType)),
        left_(memory_.mutable_data_ptr<Real>()),
        right_(left_ + i64{max_rows} * depth),
        dots_(right_ + i64{max_columns} * depth) {}

  Real* left(i64 row) { return left_ + row * depth_; }
  Real* right(i64 column) { return right_ + column * depth_; }
  Real* dots(i64 row) { return dots_ + row * stride_; }
  i64 stride() const { return stride_; }  // of dots, elements

  void multiply(i32 num_rows, i32 num_columns) {
    if (num_rows != num_rows_ || num_columns != num_columns_) shape(num_rows, num_columns);
    // Past the dispatcher: what a thread of the pool calls must not depend on modes, autocast or
    // inference mode, none of which it inherits.
    at::cpu::mm_out(dots_view_, left_view_, right_view_);
  }

 private:
  static constexpr at::ScalarType kType = c10::CppTypeToScalarType<Real>::value;

  void shape(i32 num_rows, i32 num_columns) {
    num_rows_ = num_rows;
    num_columns_ = num_columns;
    left_view_ = at::from_blob(left(0), {num_rows, depth_}, {depth_, 1}, kType);
    right_view_ = at::from_blob(right(0), {depth_, num_columns}, {1, depth_}, kType);
    dots_view_ = at::from_blob(dots(0), {num_rows, num_columns}, {stride_, 1}, kType);
  }

  i64 depth_;
  i64 stride_;
  at::TensorBase memory_;
  Real* left_;   // [max_rows, depth]
  Real* right_;  // [max_columns, depth]
  Real* dots_;   // [max_rows, max_columns]
  i32 num_rows_ = -1;
  i32 num_columns_ = -1;
  at::Tensor left_view_, right_view_, dots_view_;
};

}  // namespace deep_kernels::cpu
