// The paged MQA logits op: tensors -> Args -> Spec -> kernel -> launch, or the CPU backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "deep_kernels/contract/paged_mqa_logits.h"
#include "ops/mqa_shared.h"
#include "runtime/arch.h"
#include "runtime/source.h"

namespace deep_kernels {

inline constexpr const char* kPagedMqaLogitsOp = "fp8_fp4_paged_mqa_logits";
inline constexpr const char* kPagedMqaMetadataOp = "get_paged_mqa_logits_metadata";

// The call as the user made it; shapes and dtypes in deep_kernels/ops.py.
struct PagedMqaLogitsCall {
  const at::Tensor& q;
  const std::optional<at::Tensor>& q_scale;
  const at::Tensor& kv_cache;
  const at::Tensor& weights;
  const at::Tensor& context_lens;
  const at::Tensor& block_table;
  const std::optional<at::Tensor>& schedule;
  std::optional<int64_t> max_context_len;  // nothing: it is being traced and may vary
  bool clean;
  at::ScalarType logits_dtype;
  const std::optional<at::Tensor>& indices;
  std::optional<std::string> arch;
};
// Allocates the result, or writes into `out` and returns it.
at::Tensor paged_mqa_logits(const PagedMqaLogitsCall& call, const std::optional<at::Tensor>& out);
// Refuses, in the same words, what no device would run, of a call that is being traced.
void check_paged_mqa_logits(const PagedMqaLogitsCall& call, const std::optional<at::Tensor>& out);

struct PagedMqaMetadataCall {
  const at::Tensor& context_lens;
  // Nothing: it is being traced and may vary.
  std::optional<int64_t> block_kv;
  std::optional<int64_t> num_sms;
  const std::optional<at::Tensor>& indices;
  std::optional<std::string> arch;
};
at::Tensor paged_mqa_logits_metadata(const PagedMqaMetadataCall& call);
void check_paged_mqa_logits_metadata(const PagedMqaMetadataCall& call);

// A case as supported() and prepare() see it.
struct PagedMqaLogitsCase : mqa::CaseBase {
  int64_t block_kv = 64;
  int64_t next_n = 1;
  bool indices = false;
};
PagedMqaLogitsCase read_paged_mqa_logits_case(CaseReader& reader);

// Why the case cannot run on the backend, or nothing. The sentence without the op's name.
std::optional<std::string> paged_mqa_logits_refusal(const PagedMqaLogitsCase& wanted,
                                                    Backend backend);
// Why a cache of such pages cannot be read, or nothing; likewise.
std::optional<std::string> page_refusal(int64_t block_kv);
// The Spec for a case that is not refused.
PagedMqaLogitsSpec choose_paged_mqa_logits_spec(const PagedMqaLogitsCase& wanted, const Arch& arch);

KernelText kernel_text(const PagedMqaLogitsSpec& spec);
KernelText kernel_text(const PagedMqaScheduleSpec& spec);

}  // namespace deep_kernels
