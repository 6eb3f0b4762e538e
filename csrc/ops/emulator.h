// Launches that go to an emulator, a program of the host that runs kernels in place of a card: see
// docs/emulator.md. CPU tensors with arch="emulator:sm90" lead here and nothing else does; the
// emulator itself is no part of the package and has to be installed first.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "deep_kernels/contract/types.h"
#include "runtime/arch.h"
#include "runtime/source.h"

namespace deep_kernels::emulator {

// Memory that a launch may touch: the elements of one tensor and no byte between or beside them.
struct Buffer {
  std::string name;
  const void* data;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // bytes
  int64_t element_bytes;
  bool writable;
};
Buffer buffer(std::string name, const at::Tensor& tensor, bool writable = false);

// What a card would get, in plain words.
struct Launch {
  std::string op;
  std::string spec;    // JSON
  std::string source;  // as NVRTC would get it
  std::string entry;
  std::string target;
  int grid;
  int block;
  int smem_bytes;
  int cluster;
  std::string_view args;  // bytes of the contract's Args
  std::span<const MapDescription> maps;
  std::vector<Buffer> buffers;
};
using Run = std::function<void(const Launch&)>;

// The emulator from now on, and how many SMs it has; an empty `run` takes it away.
void install(Run run, int num_sms);

// What "emulator:sm90" or "emulator:sm89:sm_90a" names, or nothing if `arch` asks for no emulator.
// Throws ValueError where none is installed.
std::optional<Arch> arch_of(const std::string& op, const std::optional<std::string>& arch);
// SMs that a launch may use.
int usable_sms();
// SMs that it has, or nothing if `arch` asks for no emulator or none is installed.
std::optional<int> num_sms(const std::optional<std::string>& arch);

void run(const Launch& launch);

template <class Spec, class Args>
void launch(const Arch& arch, const Spec& spec, const KernelText& text, int grid, const Args& args,
            std::span<const MapDescription> maps, std::vector<Buffer> buffers) {
  const std::string entry = "dk_" + std::string(Spec::op()) + "_" + arch.target.name();
  run({.op = Spec::op(),
       .spec = spec_json(spec),
       .source = generate_source(spec, text, entry),
       .entry = entry,
       .target = arch.target.name(),
       .grid = grid,
       .block = spec.num_threads(),
       .smem_bytes = spec.smem_bytes(),
       .cluster = cluster_size_of(spec),
       .args = {reinterpret_cast<const char*>(&args), sizeof(args)},
       .maps = maps,
       .buffers = std::move(buffers)});
}

}  // namespace deep_kernels::emulator
