// Threads of the emulated blocks as fibers of one host thread: stacks and the switch between them.
#pragma once

#include <cstddef>

namespace deep_kernels::emulator {

// A stack that is not running: where it stopped.
using Stopped = void*;

inline constexpr std::size_t kStackBytes = 256 * 1024;

// A pool of stacks, each with a page below it that faults.
class Stacks {
 public:
  // The lowest address of stack `index`; mapped on first use.
  char* stack(int index);
  // Which stack's guard page holds the address, or -1.
  int guard_of(const void* address) const;

 private:
  char* base_ = nullptr;
};

// A fiber on this stack that will call `run` when first switched to; `run` never returns.
Stopped make_fiber(char* stack, void (*run)());
// Stops here and goes on at `to`; returns when someone switches back to `*from`.
void switch_fiber(Stopped* from, Stopped to);

}  // namespace deep_kernels::emulator
