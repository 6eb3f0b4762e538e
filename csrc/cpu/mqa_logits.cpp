#include "cpu/mqa_logits.h"

#include "cpu/mqa_tiles.h"

namespace deep_kernels::cpu {

void mqa_logits(Format format, const at::Tensor& q, const std::optional<at::Tensor>& q_scale,
                const at::Tensor& kv, const at::Tensor& kv_scale, const at::Tensor& weights,
                const at::Tensor& kv_start, const at::Tensor& kv_end, at::Tensor& logits,
                bool clean, bool compressed) {
  const MqaInputs in(format, q, q_scale, kv, kv_scale, weights, kv_start, kv_end,
                     static_cast<i32>(logits.size(1)), compressed);
  const bool is_float = logits.scalar_type() == at::kFloat;
  score(in, is_float ? DType::float32 : DType::bfloat16, logits.mutable_data_ptr(),
        logits.stride(0), clean);
}

}  // namespace deep_kernels::cpu
