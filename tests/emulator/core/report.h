// Faults: what went wrong, where in the kernel's text, and who did it.
#pragma once

#include <string>

#include "machine.h"

namespace deep_kernels::emulator {

struct Fault {
  std::string kind;
  std::string text;
  std::vector<u64> calls;  // offsets into the kernel's library, innermost first
};
// Thrown in the scheduler alone; threads leave by switching to it.
struct Stop {};

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

Place place_of(At at);
// "kernels/mqa_logits_sm90.cuh:281".
std::string place_name(Place place);
// The line of the text itself, trimmed.
std::string place_line(Place place);
void forget_places();

// "block 2", in a cluster "block 2 (rank 0)".
std::string block_name(i32 rank);
// "block 2, warp 17 (scheduler), lane 0".
std::string thread_name(i32 thread);
// A thread, or what works for one.
std::string agent_name(Agent agent);
// "smem+0x1840", in a cluster "smem+0x1840 of rank 0".
std::string smem_name(u32 addr);
// "  <what>: <place>" and the line under it.
std::string cite(const char* what, Place place);

// Ends the launch. `kind` is one word for tests; the text says what is wrong. `thread` is who did
// it: the current thread if -1.
[[noreturn]] void fail(const char* kind, const std::string& what, Place at, i32 thread = -1);

// Where the kernel was when a signal stopped it, for the fault that follows.
void note_signal(const void* instruction, const void* frame);

bool failed();
Fault take_fault();

}  // namespace deep_kernels::emulator
