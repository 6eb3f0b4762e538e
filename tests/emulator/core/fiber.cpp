#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if !defined(__x86_64__)
#include <ucontext.h>

#include <vector>
#endif

namespace deep_kernels::emulator {

namespace {
constexpr int kMaxStacks = 2049;
constexpr std::size_t kGuard = 64 * 1024;  // more than a frame is likely to skip
constexpr std::size_t kPitch = kStackBytes + kGuard;
}  // namespace

char* Stacks::stack(int index) {
  if (base_ == nullptr) {
    void* mapped = mmap(nullptr, kMaxStacks * kPitch, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
      std::perror("emulator: mapping stacks");
      std::abort();
    }
    base_ = static_cast<char*>(mapped);
    for (int i = 0; i < kMaxStacks; ++i) mprotect(base_ + i * kPitch, kGuard, PROT_NONE);
  }
  return base_ + index * kPitch + kGuard;
}

int Stacks::guard_of(const void* address) const {
  const auto offset = static_cast<const char*>(address) - base_;
  if (base_ == nullptr || offset < 0 || offset >= static_cast<std::ptrdiff_t>(kMaxStacks * kPitch))
    return -1;
  return offset % kPitch < kGuard ? static_cast<int>(offset / kPitch) : -1;
}

#if defined(__x86_64__)

// Callee-saved registers go onto the stack that stops; the rest is dead across a call anyway.
asm(R"(
.text
.globl dk_emulator_switch
.type dk_emulator_switch, @function
dk_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size dk_emulator_switch, .-dk_emulator_switch
)");
extern "C" void dk_emulator_switch(void** from, void* to);

Stopped make_fiber(char* stack, void (*run)()) {
  // As if `run` had been called, from nowhere: 8 below a multiple of 16, a null frame above.
  auto* top = reinterpret_cast<std::uint64_t*>(stack + kStackBytes);
  *--top = 0;
  *--top = reinterpret_cast<std::uint64_t>(run);
  for (int i = 0; i < 6; ++i) *--top = 0;
  return top;
}
void switch_fiber(Stopped* from, Stopped to) { dk_emulator_switch(from, to); }

#else

// Elsewhere by ucontext, slower: it saves the signal mask with a system call.
Stopped make_fiber(char* stack, void (*run)()) {
  auto* context = new (stack) ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = stack + sizeof(ucontext_t);
  context->uc_stack.ss_size = kStackBytes - sizeof(ucontext_t);
  context->uc_link = nullptr;
  makecontext(context, run, 0);
  return context;
}
void switch_fiber(Stopped* from, Stopped to) {
  ucontext_t here;
  *from = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}

#endif

}  // namespace deep_kernels::emulator
