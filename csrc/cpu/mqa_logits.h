// CPU backend of the MQA logits op: the contract's windows and cuts, ATen's matrix product for the
// dot products, threads over tiles of (query tokens, kv tokens).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "deep_kernels/contract/mqa_logits.h"

namespace deep_kernels::cpu {

// Writes logits in place; columns outside the windows only where `clean`. The caller has checked
// every shape, dtype and stride.
//   q         [num_q, num_heads, head_dim] e4m3 | [num_q, num_heads, head_dim / 2] e2m1 pairs
//   q_scale   absent for fp8, else int32 [num_q, num_heads] | e8m0 [num_q, num_heads, head_dim /
//   32] kv        [num_kv, head_dim] e4m3 | [num_kv, head_dim / 2] e2m1 pairs kv_scale  float32
//   [num_kv] for fp8, else int32 [num_kv] | e8m0 [num_kv, head_dim / 32] weights   [num_q,
//   num_heads] float32 | bfloat16 | float16 kv_start, kv_end  int32 [num_q] logits    [num_q,
//   width] float32 | bfloat16; width is num_kv, or max_seqlen_k if `compressed`
void mqa_logits(Format format, const at::Tensor& q, const std::optional<at::Tensor>& q_scale,
                const at::Tensor& kv, const at::Tensor& kv_scale, const at::Tensor& weights,
                const at::Tensor& kv_start, const at::Tensor& kv_end, at::Tensor& logits,
                bool clean, bool compressed);

// Writes the contract's cuts of num_sms equal runs into schedule, int32 [2 * (num_sms + 1)],
// contiguous.
void mqa_schedule(const at::Tensor& kv_start, const at::Tensor& kv_end, i64 num_kv, i64 num_heads,
                  i32 num_sms, at::Tensor& schedule);

}  // namespace deep_kernels::cpu
