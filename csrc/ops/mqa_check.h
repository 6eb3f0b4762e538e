// What a call of MQA logits must look like, whether it runs or is being traced.
#pragma once

#include "ops/mqa_logits.h"

namespace deep_kernels {

// Sizes that are being traced and may vary are checks::kUnknown.
struct MqaProblem {
  Format format;
  int64_t num_q, num_kv, num_heads, head_dim, width;
  bool compressed;
};

// Shapes, dtypes, strides, devices and options; throws ValueError.
MqaProblem check_mqa_inputs(const MqaLogitsCall& call);
void check_mqa_out(const MqaLogitsCall& call, const MqaProblem& p, const at::Tensor& out);

template <class Visit>
void for_each_mqa_input(const MqaLogitsCall& call, Visit&& visit) {
  visit("q", call.q);
  if (call.q_scale) visit("q scale", *call.q_scale);
  visit("kv", call.kv);
  visit("kv scale", call.kv_scale);
  visit("weights", call.weights);
  visit("cu_seq_len_k_start", call.kv_start);
  visit("cu_seq_len_k_end", call.kv_end);
  if (call.schedule) visit("schedule_meta", *call.schedule);
}

}  // namespace deep_kernels
