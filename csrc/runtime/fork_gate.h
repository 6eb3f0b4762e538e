// A child of fork inherits every lock as it stands, but not the threads that would release it.
#pragma once

namespace deep_kernels {

// For its lifetime a fork in another thread waits: around NVRTC, the loader and first uses, whose
// locks the child could not take again. May be nested; the owner must not wait for Python's lock,
// which the forking thread holds.
class ForkGate {
 public:
  ForkGate();
  ~ForkGate();
  ForkGate(const ForkGate&) = delete;
  ForkGate& operator=(const ForkGate&) = delete;
};

}  // namespace deep_kernels
