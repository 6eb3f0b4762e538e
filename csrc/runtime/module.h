// A compiled kernel: machine code in, launches out. Loaded at the first launch, not before, so that
// a process without a GPU can hold it.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "runtime/driver.h"

namespace deep_kernels {

struct LaunchShape {
  int grid;
  int block;
  int smem_bytes;
  bool programmatic;  // may start before the kernel ahead of it in the stream has ended (PDL)
  int cluster = 1;    // blocks that run together; the grid is a multiple of it
};

class Module {
 public:
  Module(std::string entry, std::string cubin)
      : entry_(std::move(entry)), cubin_(std::move(cubin)) {}
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  const std::string& entry() const { return entry_; }

  // Launches on the stream of the device; `params` are pointers to the kernel's parameters.
  void launch(int device, driver::Stream stream, const LaunchShape& shape, void** params);

 private:
  driver::Kernel handle(int device, int smem_bytes);

  std::string entry_;
  std::string cubin_;
  std::mutex loading_;
  driver::Library library_ = nullptr;
  std::atomic<driver::Kernel> kernel_ = nullptr;  // context-free: one handle serves every device
  std::array<std::atomic<bool>, 64> ready_{};     // per device: shared memory was opted in
};

}  // namespace deep_kernels
