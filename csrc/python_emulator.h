// The emulator's entry into the module: a Python callable that gets every launch in plain words.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "ops/emulator.h"

namespace deep_kernels {

namespace py = pybind11;

inline py::dict to_python(const emulator::Launch& launch) {
  py::list buffers;
  for (const emulator::Buffer& buffer : launch.buffers)
    buffers.append(py::make_tuple(buffer.name, reinterpret_cast<std::uintptr_t>(buffer.data),
                                  buffer.sizes, buffer.strides, buffer.element_bytes,
                                  buffer.writable));
  py::dict words;
  words["op"] = launch.op;
  words["spec"] = launch.spec;
  words["source"] = launch.source;
  words["entry"] = launch.entry;
  words["target"] = launch.target;
  words["grid"] = launch.grid;
  words["block"] = launch.block;
  words["smem_bytes"] = launch.smem_bytes;
  words["cluster"] = launch.cluster;
  words["args"] = py::bytes(launch.args.data(), launch.args.size());
  words["maps"] =
      py::bytes(reinterpret_cast<const char*>(launch.maps.data()), launch.maps.size_bytes());
  words["buffers"] = buffers;
  return words;
}

// None takes the emulator away.
inline void set_emulator(const py::object& run, int num_sms) {
  if (run.is_none()) return emulator::install({}, 0);
  // Never freed: the last launch may end in a thread that does not hold the interpreter's lock.
  auto* callable = new py::object(run);
  emulator::install(
      [callable](const emulator::Launch& launch) {
        const py::gil_scoped_acquire locked;
        (*callable)(to_python(launch));
      },
      num_sms);
}

}  // namespace deep_kernels
