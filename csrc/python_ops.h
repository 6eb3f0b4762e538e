// The eager entry points of the ops. NotImplemented sends the caller to torch.ops.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace deep_kernels {

enum class Purpose {
  run,    // plain tensors alone
  check,  // a call that is being traced
};
pybind11::object not_plain();
pybind11::object wrapped(at::Tensor tensor);

void add_ops(pybind11::module_& m);
void add_silu_ops(pybind11::module_& m);
void add_attention_ops(pybind11::module_& m);

}  // namespace deep_kernels
