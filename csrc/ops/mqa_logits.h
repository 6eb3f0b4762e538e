// The MQA logits op: tensors -> Args -> Spec -> kernel -> launch, or the CPU backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "deep_kernels/contract/mqa_logits.h"
#include "ops/case.h"
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
  int64_t max_seqlen_k;
  at::ScalarType logits_dtype;
  const std::optional<at::Tensor>& schedule;
  std::string_view reduction;
  std::optional<std::string> arch;
};
// Allocates the result, or writes into `out` and returns it.
at::Tensor mqa_logits(const MqaLogitsCall& call, const std::optional<at::Tensor>& out);

at::Tensor mqa_logits_metadata(const at::Tensor& kv_start, const at::Tensor& kv_end, int64_t num_kv,
                               int64_t num_heads, const std::optional<std::string>& arch);

// A case as supported() and prepare() see it.
struct MqaLogitsCase {
  Format format = Format::fp8;
  int num_heads = 64;
  int head_dim = 128;
  DType weights_dtype = DType::float32;
  DType logits_dtype = DType::float32;
  bool clean = true;
  bool metadata = false;
  std::optional<Clean> placement;  // nothing: the measured table decides
};
MqaLogitsCase read_mqa_logits_case(CaseReader& reader);
// The placement that DEEP_KERNELS_MQA_CLEAN asks for, if any.
std::optional<Clean> mqa_clean_setting();

// Why the case cannot run on the backend, or nothing. The sentence without the op's name.
std::optional<std::string> mqa_logits_refusal(const MqaLogitsCase& wanted, Backend backend);
// The Spec for a case that is not refused.
MqaLogitsSpec choose_mqa_logits_spec(const MqaLogitsCase& wanted, const Arch& arch);

// What was measured, for the inspector: the card behind each choice that is not arithmetic.
std::vector<TuningRow> mqa_logits_tuning();

KernelText kernel_text(const MqaLogitsSpec& spec);
KernelText kernel_text(const MqaScheduleSpec& spec);

}  // namespace deep_kernels
