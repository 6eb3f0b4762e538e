// What calls of the FP8 prefill MLP must look like, whether they run or are being traced.
#pragma once

#include "ops/named_tensor.h"
#include "ops/silu_fold.h"

namespace deep_kernels {

// Sizes of a call; checks::kUnknown where one is being traced and may vary.
struct GemmProblem {
  int64_t num_tokens;
  int64_t k;
  int64_t num_columns;  // of the result
  SiluCase wanted;      // the call's words, as far as the op has them
};

GemmProblem check_silu_fold_inputs(const SiluFoldCall& call);
GemmProblem check_block_gemm_inputs(const BlockGemmCall& call);
GemmProblem check_silu_mul_inputs(const SiluMulCall& call);

// The words of a call as Specs and Args have them; other words are refused.
SiluCase activation_case(const char* op, const ActivationCall& call);
ActivationArgs activation_args(const ActivationCall& call);
at::ScalarType scale_dtype(ScaleFormat format);

// Refusals of calls and of cases alike.
inline constexpr const char* kUnroundedSplit =
    "round_bf16 must be True with fused=False, whose two launches meet in bfloat16, got False";
inline constexpr const char* kGemmDtypes = "out_dtype must be bfloat16 or float32";

NamedTensors inputs_of(const SiluFoldCall& call);
NamedTensors inputs_of(const BlockGemmCall& call);
NamedTensors inputs_of(const SiluMulCall& call);

// What is given to be written: dtypes, shapes, device, and that nothing overlaps.
void check_quantized_out(const char* op, const QuantizedPair& out, const GemmProblem& p,
                         const NamedTensors& inputs);
void check_gemm_out(const at::Tensor& out, const BlockGemmCall& call, const GemmProblem& p);

}  // namespace deep_kernels
