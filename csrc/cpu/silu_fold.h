// The FP8 prefill MLP on the host's threads.
#pragma once

#include "deep_kernels/contract/silu_fold.h"

namespace deep_kernels::cpu {

void block_gemm(const BlockGemmArgs& args, DType out_dtype);
void silu_mul(const SiluMulArgs& args, Activation activation, ScaleFormat scale_format);
void silu_fold(const SiluFoldArgs& args, Activation activation, Rounding rounding,
               ScaleFormat scale_format);

}  // namespace deep_kernels::cpu
