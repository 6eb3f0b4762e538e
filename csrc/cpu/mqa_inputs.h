// The tensors of one call of dense or paged MQA logits as pointers and strides, row by row.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "cpu/decode.h"
#include "deep_kernels/contract/mqa_logits.h"

namespace deep_kernels::cpu {

// Codes and their block exponents, addressed by up to three indices. All strides in bytes.
struct CodeRows {
  const u8* values = nullptr;
  const u8* exponents = nullptr;  // null for fp8
  i64 value_strides[3] = {};
  i64 exponent_strides[3] = {};
  i64 block_stride = 0;  // from one block's exponent to the next

  CodeRow at(i64 first, i64 second = 0, i64 third = 0) const {
    const auto offset = [&](const i64(&strides)[3]) {
      return first * strides[0] + second * strides[1] + third * strides[2];
    };
    return {values + offset(value_strides),
            exponents == nullptr ? nullptr : exponents + offset(exponent_strides), block_stride};
  }
};

// `rows` is [.., head_dim]; `scale` absent, int32 [..] or e8m0 [.., head_dim / 32].
CodeRows code_rows(const at::Tensor& rows, const std::optional<at::Tensor>& scale);

// The side of the queries, the same for both ops. A **sequence** is what shares its kv tokens: all
// query tokens of a dense call, or those of one request.
struct MqaQueries {
  Format format;
  i32 head_dim;
  i32 num_heads;
  i32 num_q;             // query tokens of all sequences
  i32 num_per_sequence;  // of one
  i32 width;             // columns of logits
  const void* weights;   // [num_q, num_heads] weights_dtype
  DType weights_dtype;
  i64 weights_stride;  // elements

  bool is_mx() const { return format != Format::fp8; }
  // Copies the weights of a token, exact in float32.
  void load_weights(i64 token, float* out) const;
};

struct MqaInputs : MqaQueries {
  i32 num_kv;
  bool compressed;

  CodeRows q;             // [num_q, num_heads]
  CodeRows kv;            // [num_kv]
  const float* kv_scale;  // [num_kv] float32; null unless fp8
  i64 kv_scale_stride;    // elements
  const i32* kv_start;    // [num_q]
  const i32* kv_end;      // [num_q]
  i64 kv_start_stride;    // elements
  i64 kv_end_stride;      // elements

  MqaInputs(Format format, const at::Tensor& q, const std::optional<at::Tensor>& q_scale,
            const at::Tensor& kv, const at::Tensor& kv_scale, const at::Tensor& weights,
            const at::Tensor& kv_start, const at::Tensor& kv_end, i32 width, bool compressed);

  MqaWindow window(i64 token) const {
    return mqa_window(kv_start[token * kv_start_stride], kv_end[token * kv_end_stride], num_kv,
                      compressed ? width : num_kv);
  }
  // The column of logits that kv token 0 has or would have.
  i64 column_of_zero(MqaWindow window) const { return compressed ? -i64{window.begin} : 0; }
  CodeRow query(i64 token, i64 head) const { return q.at(token, head); }
  CodeRow kv_row(i64 /*sequence*/, i64 j) const { return kv.at(j); }
  float scale_of(i64 /*sequence*/, i64 j) const { return kv_scale[j * kv_scale_stride]; }
  // One past the last kv token that may be looked at for windows that end at `end`.
  i64 readable_end(i64 end, i64 unit) const { return std::min<i64>(align_up(end, unit), num_kv); }
};

}  // namespace deep_kernels::cpu
