#include "ops/guards.h"

#include "ops/checks.h"

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

}  // namespace

void refuse_what_no_backend_serves(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::string op_name = public_name(op);
  for_each_tensor(op, stack, [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    checks::require_dense(op_name.c_str(), name.c_str(), tensor);
    checks::require_no_grad(op_name.c_str(), name.c_str(), tensor);
  });
}

void refuse_lazy_out(const c10::OperatorHandle& op) {
  checks::refuse_lazy_view(public_name(op).c_str(), "out");
}

}  // namespace deep_kernels
