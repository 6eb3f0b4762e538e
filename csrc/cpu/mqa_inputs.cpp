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

// All query tokens share their kv tokens.
MqaQueries queries_of(Format format, const at::Tensor& q, const at::Tensor& weights, i32 width) {
  return {.format = format,
          .head_dim = static_cast<i32>(q.size(2)) * (format == Format::mxfp4 ? 2 : 1),
          .num_heads = static_cast<i32>(q.size(1)),
          .num_q = static_cast<i32>(q.size(0)),
          .num_per_sequence = static_cast<i32>(q.size(0)),
          .width = width,
          .weights = weights.const_data_ptr(),
          .weights_dtype = dtype_of(weights),
          .weights_stride = weights.stride(0)};
}

}  // namespace

CodeRows code_rows(const at::Tensor& rows, const std::optional<at::Tensor>& scale) {
  CodeRows result{.values = bytes_of(rows)};
  const i64 num_indices = rows.dim() - 1;
  for (i64 i = 0; i < num_indices; ++i)
    result.value_strides[i] = rows.stride(i) * rows.element_size();
  if (!scale) return result;
  result.exponents = bytes_of(*scale);
  for (i64 i = 0; i < num_indices; ++i)
    result.exponent_strides[i] = scale->stride(i) * scale->element_size();
  // An int32 holds the exponents of a row in its bytes, the lowest block first.
  result.block_stride = scale->dim() > num_indices ? scale->stride(num_indices) : 1;
  return result;
}

MqaInputs::MqaInputs(Format format, const at::Tensor& q, const std::optional<at::Tensor>& q_scale,
                     const at::Tensor& kv, const at::Tensor& kv_scale, const at::Tensor& weights,
                     const at::Tensor& kv_start, const at::Tensor& kv_end, i32 width,
                     bool compressed)
    : MqaQueries(queries_of(format, q, weights, width)),
      num_kv(static_cast<i32>(kv.size(0))),
      compressed(compressed),
      q(code_rows(q, q_scale)),
      kv(code_rows(kv, is_mx() ? std::optional(kv_scale) : std::nullopt)),
      kv_scale(is_mx() ? nullptr : static_cast<const float*>(kv_scale.const_data_ptr())),
      kv_scale_stride(kv_scale.stride(0)),
      kv_start(static_cast<const i32*>(kv_start.const_data_ptr())),
      kv_end(static_cast<const i32*>(kv_end.const_data_ptr())),
      kv_start_stride(kv_start.stride(0)),
      kv_end_stride(kv_end.stride(0)) {}

void MqaQueries::load_weights(i64 token, float* out) const {
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
