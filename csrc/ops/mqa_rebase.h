// The pre-pass of MX formats on backends without block scales: kv rows become e4m3 rows with one
// exponent each, see contract/mqa_logits.h.
#pragma once

#include "deep_kernels/contract/mqa_logits.h"
#include "ops/mqa_logits.h"
#include "runtime/arch.h"

namespace deep_kernels {

// Scales of MX rows as int32, one per row: float8_e8m0fnu [.., head_dim / 32] is repacked, without
// a copy where its rows are four bytes at multiples of four.
at::Tensor packed_exponents(const at::Tensor& scale);

// What the main kernel reads in the place of kv; all of it lies in the workspace.
struct RebasedKv {
  at::Tensor workspace;  // uint8
  const u8* codes;
  const float* scale;
  const i32* exponents;
  const i32* wide;
};
// Launches the pre-pass on the caller's stream, or on the emulator.
RebasedKv rebase_kv(const Arch& arch, Format format, i32 head_dim, const at::Tensor& kv,
                    const at::Tensor& kv_scale);

KernelText kernel_text(const MqaRebaseSpec& spec);

}  // namespace deep_kernels
