#include "cpu/mqa_inputs.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

namespace deep_kernels::cpu {
namespace {

const u8* bytes_of(const at::Tensor& tensor) {
  return static_cast<const u8*>(tensor.const_data_ptr());
}

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kHalf:
      return DType::float16;
    default:
      return DType::float32;
  }
}

}  // namespace

CodeRows::CodeRows(const at::Tensor& rows, const std::optional<at::Tensor>& scale)
    : values(bytes_of(rows)) {
  const i64 num_indices = rows.dim() - 1;
  for (i64 i = 0; i < num_indices; ++i) value_strides[i] = rows.stride(i) * rows.element_size();
  if (!scale) return;
  exponents = bytes_of(*scale);
  for (i64 i = 0; i < num_indices; ++i)
    exponent_strides[i] = scale->stride(i) * scale->element_size();
  // An int32 holds the exponents of a row in its bytes, the lowest block first.
  block_stride = scale->dim() > num_indices ? scale->stride(num_indices) : 1;
}

MqaInputs::MqaInputs(Format format, const at::Tensor& q, const std::optional<at::Tensor>& q_scale,
                     const at::Tensor& kv, const at::Tensor& kv_scale, const at::Tensor& weights,
                     const at::Tensor& kv_start, const at::Tensor& kv_end, i32 width,
                     bool compressed)
    : format(format),
      head_dim(static_cast<i32>(q.size(2)) * (format == Format::mxfp4 ? 2 : 1)),
      num_heads(static_cast<i32>(q.size(1))),
      num_q(static_cast<i32>(q.size(0))),
      num_kv(static_cast<i32>(kv.size(0))),
      width(width),
      compressed(compressed),
      q(q, q_scale),
      kv(kv, is_mx() ? std::optional(kv_scale) : std::nullopt),
      kv_scale(is_mx() ? nullptr : static_cast<const float*>(kv_scale.const_data_ptr())),
      kv_scale_stride(kv_scale.stride(0)),
      weights(weights.const_data_ptr()),
      weights_dtype(dtype_of(weights)),
      weights_stride(weights.stride(0)),
      kv_start(static_cast<const i32*>(kv_start.const_data_ptr())),
      kv_end(static_cast<const i32*>(kv_end.const_data_ptr())),
      kv_start_stride(kv_start.stride(0)),
      kv_end_stride(kv_end.stride(0)) {}

void MqaInputs::load_weights(i64 token, float* out) const {
  const i64 first = token * weights_stride;
  switch (weights_dtype) {
    case DType::float32:
      std::copy_n(static_cast<const float*>(weights) + first, num_heads, out);
      return;
    case DType::bfloat16:
      std::copy_n(static_cast<const c10::BFloat16*>(weights) + first, num_heads, out);
      return;
    case DType::float16:
      std::copy_n(static_cast<const c10::Half*>(weights) + first, num_heads, out);
      return;
  }
}

}  // namespace deep_kernels::cpu
