#include "ops/place.h"

#include <fmt/format.h>

#include "ops/device.h"
#include "runtime/errors.h"

namespace deep_kernels {

Place place_of(const char* op, const NamedTensor& first, const std::optional<std::string>& arch) {
  const c10::Device device = first.tensor().device();
  if (device.is_cpu()) return {device, emulator::arch_of(op, arch)};
  if (!device.is_cuda())
    throw ValueError(fmt::format("{}: {} must be on a CPU or CUDA device, got {}", op, first.name,
                                 device.str()));
  return {device, arch_of_call(op, arch, device)};
}

std::vector<emulator::Buffer> buffers_of(const NamedTensors& inputs, const NamedTensors& outs) {
  std::vector<emulator::Buffer> all;
  for (const NamedTensor& out : outs)
    all.push_back(emulator::buffer(out.name, out.tensor(), /*writable=*/true));
  for (const NamedTensor& input : inputs)
    all.push_back(emulator::buffer(input.name, input.tensor()));
  return all;
}

}  // namespace deep_kernels
