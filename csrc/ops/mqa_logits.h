// The MQA logits op: tensors -> Args -> Spec -> kernel -> launch, or the CPU backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "deep_kernels/contract/mqa_logits.h"
#include "ops/mqa_shared.h"
#include "ops/tuning.h"
#include "runtime/arch.h"
#include "runtime/source.h"

namespace deep_kernels {

inline constexpr const char* kMqaLogitsOp = "fp8_fp4_mqa_logits";

// The call as the user made it; shapes and dtypes in deep_kernels/ops.py.
struct MqaLogitsCall {
  const at::Tensor& q;
  const std::optional<at::Tensor>& q_scale;
  const at::Tensor& kv;
  const at::Tensor& kv_scale;
  const at::Tensor& weights;
  const at::Tensor& kv_start;
  const at::Tensor& kv_end;
  bool clean;
  std::optional<int64_t> max_seqlen_k;  // nothing: it is being traced and may vary
  at::ScalarType logits_dtype;
  const std::optional<at::Tensor>& schedule;
  std::string_view reduction;
  std::optional<std::string> arch;
};
// Allocates the result, or writes into `out` and returns it.
at::Tensor mqa_logits(const MqaLogitsCall& call, const std::optional<at::Tensor>& out);
// Refuses, in the same words, what no device would run, of a call that is being traced.
void check_mqa_logits(const MqaLogitsCall& call, const std::optional<at::Tensor>& out);

struct MqaMetadataCall {
  const at::Tensor& kv_start;
  const at::Tensor& kv_end;
  // Nothing: it is being traced and may vary.
  std::optional<int64_t> num_kv;
  std::optional<int64_t> num_heads;
  // Nothing too: as many as the device and set_num_sms() say.
  std::optional<int64_t> num_sms;
  std::optional<std::string> arch;
};
at::Tensor mqa_logits_metadata(const MqaMetadataCall& call);
void check_mqa_logits_metadata(const MqaMetadataCall& call);

// A case as supported() and prepare() see it.
struct MqaLogitsCase : mqa::CaseBase {
  bool folded = false;             // where a kernel can
  std::optional<Clean> placement;  // nothing: DEEP_KERNELS_MQA_CLEAN or the measured table decides
};
MqaLogitsCase read_mqa_logits_case(CaseReader& reader);

// Why the case cannot run on the backend, or nothing. The sentence without the op's name.
std::optional<std::string> mqa_logits_refusal(const MqaLogitsCase& wanted, Backend backend);
// Where the -inf fill of a case happens on a backend with kernels.
Clean choose_mqa_clean(const MqaLogitsCase& wanted, Backend backend);
// The Spec for a case that is not refused.
MqaLogitsSpec choose_mqa_logits_spec(const MqaLogitsCase& wanted, const Arch& arch);

// What was measured, for the inspector: the card behind each choice that is not arithmetic.
std::vector<TuningRow> mqa_logits_tuning();

KernelText kernel_text(const MqaLogitsSpec& spec);
KernelText kernel_text(const MqaScheduleSpec& spec);

}  // namespace deep_kernels
