// What an op needs to know of the device and stream it is called on.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>

#include "ops/emulator.h"
#include "ops/knobs.h"
#include "runtime/arch.h"
#include "runtime/driver.h"
#include "runtime/module.h"
#include "runtime/store.h"
#include "runtime/tensor_map.h"

namespace deep_kernels {

// What a call on a card runs: see resolve_arch.
inline Arch arch_of_call(const char* op, const std::optional<std::string>& arch,
                         c10::Device device) {
  return resolve_arch(op, arch, driver::device_facts(device.index()).capability);
}

// SMs of the card, or of the emulator that stands in for one, that a launch may use.
inline int usable_sms(c10::Device device) {
  if (device.is_cpu()) return emulator::usable_sms();
  const int all = driver::device_facts(device.index()).num_sms;
  return std::min(knobs::num_sms().value_or(all), all);
}

// The caller's current stream of the device, as the driver knows it.
inline driver::Stream current_stream(c10::Device device) {
  const c10::Stream stream = c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
  return reinterpret_cast<driver::Stream>(stream.native_handle());
}

// Whether a kernel's launch may overlap with the kernel ahead in the stream: where the caller has
// asked for it, or that is one of the same call.
template <class Spec>
bool overlaps_kernel_ahead(const Spec& spec) {
  if constexpr (requires { spec.follows_own_kernel(); })
    if (spec.follows_own_kernel()) return true;
  return knobs::pdl() && spec.backend != Backend::sm89;
}

// Launches `module` on the caller's stream with the given parameters.
template <class Spec, class... Params>
void launch(Module& module, c10::Device device, const Spec& spec, int grid, Params&... params) {
  void* addresses[] = {const_cast<void*>(static_cast<const void*>(&params))...};
  const LaunchShape shape{.grid = grid,
                          .block = spec.num_threads(),
                          .smem_bytes = spec.smem_bytes(),
                          .programmatic = overlaps_kernel_ahead(spec),
                          .cluster = cluster_size_of(spec)};
  module.launch(device.index(), current_stream(device), shape, addresses);
}

// Runs the kernel of `spec` on the caller's stream, or on the emulator that stands in for a card.
// buffers() lists what an emulated launch may touch; `maps` are those of the contract in its order,
// of which only sm90 makes use.
template <class Spec, class Args, class Buffers, class... Maps>
void run_kernel(const Arch& arch, c10::Device device, const Spec& spec, int grid, const Args& args,
                Buffers&& buffers, const Maps&... maps) {
  constexpr std::size_t kNumMaps = sizeof...(Maps);
  const bool mapped = kNumMaps > 0 && spec.backend == Backend::sm90;
  if (device.is_cpu()) {
    const std::array<MapDescription, kNumMaps> plain{maps...};
    const std::span<const MapDescription> all(plain);
    return emulator::launch(arch, spec, kernel_text(spec), grid, args, mapped ? all : all.first(0),
                            buffers());
  }
  Module& module = get_kernel(arch.target, spec, kernel_text(spec));
  if (!mapped) return launch(module, device, spec, grid, args);
  const std::array<EncodedMap, kNumMaps> encoded{maps.rank > 0 ? encode(maps) : EncodedMap{}...};
  launch(module, device, spec, grid, args, encoded);
}

}  // namespace deep_kernels
