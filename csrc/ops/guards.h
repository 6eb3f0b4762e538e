// What the dispatcher would do with tensors that ops do not serve, done right.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace deep_kernels {

// Refuses gradients and tensors that are not dense above every backend: also under fake tensors and
// function transforms, and before the dispatcher answers with a list of its kernels.
void refuse_what_no_backend_serves(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Refuses an `out` that is a conjugated or negated view, for which the dispatcher's fallback
// expects a returned output.
[[noreturn]] void refuse_lazy_out(const c10::OperatorHandle& op);

}  // namespace deep_kernels
