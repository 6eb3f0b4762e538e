// What a call of paged MQA logits must look like, whether it runs or is being traced.
#pragma once

#include "ops/paged_mqa_logits.h"

namespace deep_kernels {

// Sizes that are being traced and may vary are checks::kUnknown.
struct PagedMqaProblem {
  Format format;
  int64_t batch, next_n, num_heads, head_dim;
  int64_t num_q;  // rows of the result, batch * next_n
  int64_t num_blocks, block_kv, max_blocks;
  int64_t width;  // max_context_len
};

// Shapes, dtypes, strides, devices and options; throws ValueError.
PagedMqaProblem check_paged_mqa_inputs(const PagedMqaLogitsCall& call);
void check_paged_mqa_out(const PagedMqaLogitsCall& call, const PagedMqaProblem& p,
                         const at::Tensor& out);

// int32 [batch] or [batch, next_n]; kUnknown fits anything.
void check_context_lens(const char* op, const at::Tensor& context_lens, int64_t batch,
                        int64_t next_n);

template <class Visit>
void for_each_paged_mqa_input(const PagedMqaLogitsCall& call, Visit&& visit) {
  visit("q", call.q);
  if (call.q_scale) visit("q scale", *call.q_scale);
  visit("kv_cache", call.kv_cache);
  visit("weights", call.weights);
  visit("context_lens", call.context_lens);
  visit("block_table", call.block_table);
  if (call.schedule) visit("schedule_meta", *call.schedule);
  if (call.indices) visit("indices", *call.indices);
}

}  // namespace deep_kernels
