// The FP8 prefill MLP: the fold, and the block GEMM and the activation that do the same in two
// launches. Tensors -> Args -> Spec -> kernel -> launch, or the CPU backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "deep_kernels/contract/silu_fold.h"
#include "ops/case.h"
#include "ops/tuning.h"
#include "runtime/arch.h"
#include "runtime/source.h"

namespace deep_kernels {

inline constexpr const char* kSiluFoldOp = "fp8_silu_fold_prefill";
inline constexpr const char* kBlockGemmOp = "fp8_block_gemm_nt";
inline constexpr const char* kSiluMulOp = "silu_mul_to_fp8_block128";

// Codes and scales.
using QuantizedPair = std::pair<at::Tensor, at::Tensor>;
using OptionalPair = std::optional<QuantizedPair>;

// How the activation was asked for.
struct ActivationCall {
  std::string_view activation;
  std::optional<double> clamp;
  std::optional<double> alpha;
  double up_offset;
  std::string_view scale_fmt;
};

struct SiluFoldCall {
  const at::Tensor& x;
  const at::Tensor& x_scale;
  const at::Tensor& w_gate_up;
  const at::Tensor& w_scale;
  ActivationCall activation;
  bool round_bf16;
  std::optional<bool> fused;
  std::optional<std::string> arch;
};
// Allocates the result, or writes into `out` and returns it.
QuantizedPair silu_fold(const SiluFoldCall& call, const OptionalPair& out);
// Refuses, in the same words, what no device would run, of a call that is being traced.
void check_silu_fold(const SiluFoldCall& call, const OptionalPair& out);

struct BlockGemmCall {
  const at::Tensor& x;
  const at::Tensor& x_scale;
  const at::Tensor& w;
  const at::Tensor& w_scale;
  at::ScalarType out_dtype;
  const std::optional<at::Tensor>& residual;
  std::optional<std::string> arch;
};
at::Tensor block_gemm(const BlockGemmCall& call, const std::optional<at::Tensor>& out);
void check_block_gemm(const BlockGemmCall& call, const std::optional<at::Tensor>& out);

struct SiluMulCall {
  const at::Tensor& gate_up;
  ActivationCall activation;
  std::optional<std::string> arch;
};
QuantizedPair silu_mul(const SiluMulCall& call, const OptionalPair& out);
void check_silu_mul(const SiluMulCall& call, const OptionalPair& out);

// A case as supported() and prepare() see it.
struct SiluCase {
  Activation activation = Activation::silu;
  Rounding rounding = Rounding::bfloat16;
  ScaleFormat scale_format = ScaleFormat::float32;
  std::optional<bool> fused;
  DType out_dtype = DType::bfloat16;
};
SiluCase read_silu_fold_case(CaseReader& reader);
SiluCase read_block_gemm_case(CaseReader& reader);
SiluCase read_silu_mul_case(CaseReader& reader);
std::optional<std::string> silu_refusal(const SiluCase& wanted, Backend backend);

// Sizes that the choice of a kernel looks at.
struct GemmSizes {
  i64 num_tokens;
  i64 num_columns;
  i64 num_sms;
};
// Whether the fold or the two launches serve a call that does not say.
bool choose_fused(const Arch& arch, const GemmSizes& sizes);
SiluFoldSpec choose_silu_fold_spec(const SiluCase& wanted, const Arch& arch,
                                   const GemmSizes& sizes);
BlockGemmSpec choose_block_gemm_spec(const SiluCase& wanted, const Arch& arch,
                                     const GemmSizes& sizes);
SiluMulSpec choose_silu_mul_spec(const SiluCase& wanted);
// Every Spec that calls of a case may choose.
std::vector<SiluFoldSpec> silu_fold_specs(const SiluCase& wanted, const Arch& arch);
std::vector<BlockGemmSpec> block_gemm_specs(const SiluCase& wanted, const Arch& arch);

// What calls of these sizes take, in words, for the tuner.
struct FoldChoice {
  std::vector<std::pair<std::string, i64>> rounds;  // over the card, by every tile that may be
  std::string tile;
  bool fused;
};
FoldChoice describe_fold_choice(const Arch& arch, const GemmSizes& sizes);

// What was measured, for the inspector.
std::vector<TuningRow> silu_tuning();

KernelText kernel_text(const SiluFoldSpec& spec);
KernelText kernel_text(const BlockGemmSpec& spec);
KernelText kernel_text(const SiluMulSpec& spec);

}  // namespace deep_kernels
