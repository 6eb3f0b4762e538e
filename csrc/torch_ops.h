// What the registrations of torch.ops.deep_kernels share.
#pragma once

#include <torch/library.h>

#include <optional>
#include <string>

#include "ops/guards.h"
#include "python_errors.h"

namespace deep_kernels {

inline std::optional<std::string> owned(std::optional<std::string_view> text) {
  return text ? std::optional<std::string>(*text) : std::nullopt;
}

// Of every op, above its kernels.
inline void guard_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  raising_in_python([&] { refuse_what_no_backend_serves(op, *stack); });
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Of every op that writes into what it is given.
inline void refuse_lazy_out_op(const c10::OperatorHandle& op, torch::jit::Stack*) {
  raising_in_python([&] { refuse_lazy_out(op); });
}

}  // namespace deep_kernels
