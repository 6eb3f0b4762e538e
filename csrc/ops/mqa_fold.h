// The pre-pass of the folded reduction, see Reduction in contract/mqa_logits.h.
#pragma once

#include "deep_kernels/contract/mqa_logits.h"
#include "ops/mqa_logits.h"
#include "runtime/arch.h"

namespace deep_kernels {

// Launches the pre-pass on the caller's stream, or on the emulator, and enters its results into
// `args`; they lie in the uint8 tensor that is returned.
at::Tensor fold_queries(const Arch& arch, const MqaLogitsSpec& spec, const MqaLogitsCall& call,
                        MqaLogitsArgs& args);

KernelText kernel_text(const MqaFoldSpec& spec);

}  // namespace deep_kernels
