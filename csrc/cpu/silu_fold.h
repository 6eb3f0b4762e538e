// The FP8 prefill MLP on the CPU: the fold, and the two calls that it replaces. Shapes, strides and
// dtypes are the contract's; nothing is checked here.
#pragma once

#include "deep_kernels/contract/silu_fold.h"

namespace deep_kernels::cpu {

// out = x w^T. bfloat16: rounded before the residual is added, and after. float32: not rounded, the
// residual of either dtype.
void block_gemm(const BlockGemmArgs& args, DType out_dtype);

void silu_mul(const SiluMulArgs& args, Activation activation, ScaleFormat scale_format);

// As block_gemm and silu_mul, but that gate and up stay in float32.
void silu_fold(const SiluFoldArgs& args, Activation activation, Rounding rounding,
               ScaleFormat scale_format);

}  // namespace deep_kernels::cpu
