// What the dispatcher would do with tensors that ops do not serve, done right: gradients are
// refused above every backend (also under fake tensors and function transforms), and so is an `out`
// that is a conjugated or negated view, for which the dispatcher's fallback expects a returned
// output.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <fmt/format.h>
#include <torch/library.h>

#include "ops/checks.h"
#include "runtime/errors.h"

namespace deep_kernels {

namespace {

template <class Visit>
void for_each_tensor(const c10::OperatorHandle& op, const torch::jit::Stack& stack, Visit&& visit) {
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack.size() - arguments.size();
  for (std::size_t i = 0; i < arguments.size(); ++i)
    if (stack[first + i].isTensor()) visit(arguments[i].name(), stack[first + i].toTensor());
}

// "fp8_fp4_mqa_logits" of "deep_kernels::fp8_fp4_mqa_logits_out".
std::string public_name(const c10::OperatorHandle& op) {
  std::string name = op.schema().name();
  name = name.substr(name.rfind(':') + 1);
  return name.ends_with("_out") ? name.substr(0, name.size() - 4) : name;
}

void refuse_grad(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  for_each_tensor(op, *stack, [&](const std::string& name, const at::Tensor& tensor) {
    if (tensor.defined()) checks::require_no_grad(public_name(op).c_str(), name.c_str(), tensor);
  });
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

void refuse_lazy_out(const c10::OperatorHandle& op, torch::jit::Stack*) {
  throw ValueError(fmt::format(
      "{}: out must be plain memory, got a view that is conjugated or negated", public_name(op)));
}

}  // namespace

TORCH_LIBRARY_IMPL(deep_kernels, Autograd, m) {
  for (const char* name :
       {"fp8_fp4_mqa_logits", "fp8_fp4_mqa_logits_out", "get_mqa_logits_metadata"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_grad>());
}
TORCH_LIBRARY_IMPL(deep_kernels, Negative, m) {
  m.impl("fp8_fp4_mqa_logits_out", torch::CppFunction::makeFromBoxedFunction<&refuse_lazy_out>());
}
TORCH_LIBRARY_IMPL(deep_kernels, Conjugate, m) {
  m.impl("fp8_fp4_mqa_logits_out", torch::CppFunction::makeFromBoxedFunction<&refuse_lazy_out>());
}

}  // namespace deep_kernels
