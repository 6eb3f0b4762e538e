// Where a call runs: on the CPU backend, or on a card or the emulator that stands in for one.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <vector>

#include "ops/emulator.h"
#include "ops/named_tensor.h"
#include "runtime/arch.h"

namespace deep_kernels {

struct Place {
  c10::Device device;
  std::optional<Arch> arch;  // nothing: the CPU backend

  Backend backend() const { return arch ? arch->backend : Backend::cpu; }
};
// By the device of the call's first tensor.
Place place_of(const char* op, const NamedTensor& first, const std::optional<std::string>& arch);

// What an emulated launch may touch.
std::vector<emulator::Buffer> buffers_of(const NamedTensors& inputs, const NamedTensors& outs);

}  // namespace deep_kernels
