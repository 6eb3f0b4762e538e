// The tensors of a call with the names that refusals give them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "ops/checks.h"

namespace deep_kernels {

class NamedTensor {
 public:
  NamedTensor(const char* name, const at::Tensor& tensor) : name(name), tensor_(&tensor) {}
  const at::Tensor& tensor() const { return *tensor_; }

  const char* name;

 private:
  const at::Tensor* tensor_;
};
using NamedTensors = c10::SmallVector<NamedTensor, 5>;  // all of a call, without an allocation

// All on the device of the first one.
inline void require_one_device(const char* op, const NamedTensors& inputs) {
  for (const NamedTensor& input : inputs)
    checks::require_device(op, input.name, input.tensor(), inputs[0].tensor().device(),
                           inputs[0].name);
}

}  // namespace deep_kernels
