// The tensors of one MQA logits call as pointers and strides, row by row.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cpu/decode.h"
#include "deep_kernels/contract/mqa_logits.h"

namespace deep_kernels::cpu {

// Codes and their block exponents, addressed by up to two indices. All strides in bytes.
struct CodeRows {
  const u8* values = nullptr;
  const u8* exponents = nullptr;  // null for fp8
  i64 value_strides[2] = {};
  i64 exponent_strides[2] = {};
  i64 block_stride = 0;  // from one block's exponent to the next

  // `rows` is [.., head_dim]; `scale` absent, int32 [..] or e8m0 [.., head_dim / 32].
  CodeRows(const at::Tensor& rows, const std::optional<at::Tensor>& scale);

  CodeRow at(i64 first, i64 second = 0) const {
    CodeRow row{values + first * value_strides[0] + second * value_strides[1], nullptr,
                block_stride};
    if (exponents != nullptr)
      row.exponents = exponents + first * exponent_strides[0] + second * exponent_strides[1];
    return row;
  }
};

struct MqaInputs {
  Format format;
  i32 head_dim;
  i32 num_heads;
  i32 num_q;
  i32 num_kv;
  i32 width;  // columns of logits
  bool compressed;

  CodeRows q;             // [num_q, num_heads]
  CodeRows kv;            // [num_kv]
  const float* kv_scale;  // [num_kv] float32; null unless fp8
  i64 kv_scale_stride;    // elements
  const void* weights;    // [num_q, num_heads] weights_dtype
  DType weights_dtype;
  i64 weights_stride;   // elements
  const i32* kv_start;  // [num_q]
  const i32* kv_end;    // [num_q]
  i64 kv_start_stride;  // elements
  i64 kv_end_stride;    // elements

  MqaInputs(Format format, const at::Tensor& q, const std::optional<at::Tensor>& q_scale,
            const at::Tensor& kv, const at::Tensor& kv_scale, const at::Tensor& weights,
            const at::Tensor& kv_start, const at::Tensor& kv_end, i32 width, bool compressed);

  bool is_mx() const { return format != Format::fp8; }
  MqaWindow window(i64 token) const {
    return mqa_window(kv_start[token * kv_start_stride], kv_end[token * kv_end_stride], num_kv,
                      compressed ? width : num_kv);
  }
  // The column of logits that kv token 0 has or would have.
  i64 column_of_zero(MqaWindow window) const { return compressed ? -i64{window.begin} : 0; }
  // Copies the weights of a token, exact in float32.
  void load_weights(i64 token, float* out) const;
};

}  // namespace deep_kernels::cpu
