// What calls of flash attention must look like, whether they run or are being traced.
#pragma once

#include "ops/attention.h"
#include "ops/named_tensor.h"

namespace deep_kernels {

// Sizes of a call; checks::kUnknown where one is being traced and may vary.
struct AttentionProblem {
  int64_t batch;
  int64_t num_q;  // of a member, or of all with cu_seqlens
  int64_t num_kv;
  int64_t num_q_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
};

AttentionProblem check_attention_inputs(const AttentionCall& call);
NamedTensors inputs_of(const AttentionCall& call);

// What is given to be written: dtype, shape, device, and that nothing overlaps.
void check_attention_out(const at::Tensor& out, const AttentionCall& call);

// What only a call that runs can be asked: the content of cu_seqlens on the CPU.
void check_cu_seqlens(const AttentionCall& call, const AttentionProblem& p);
// What copies of 16 bytes need.
void check_card_strides(const AttentionCall& call, const at::Tensor& out);

}  // namespace deep_kernels
