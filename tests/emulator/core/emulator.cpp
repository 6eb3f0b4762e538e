// One launch from the outside: sets the machine up, runs the blocks one after another, turns faults
// of the host program into faults of the kernel.
#include <signal.h>
#include <ucontext.h>

#include <csetjmp>
#include <cstdio>
#include <cstdlib>

#include "global.h"
#include "report.h"
#include "shared.h"
#include "tensor_core.h"
#include "trace.h"

namespace deep_kernels::emulator {

namespace {

sigjmp_buf on_signal;
const void* fault_address = nullptr;
int fault_signal = 0;

void handle_signal(int signal, siginfo_t* info, [[maybe_unused]] void* context) {
  if (machine.current == nullptr) {  // the emulator itself: not a kernel's fault
    ::signal(signal, SIG_DFL);
    raise(signal);
    return;
  }
  fault_signal = signal;
  fault_address = info->si_addr;
#if defined(__x86_64__)
  const auto& registers = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs;
  note_signal(reinterpret_cast<const void*>(registers[REG_RIP]),
              reinterpret_cast<const void*>(registers[REG_RBP]));
#endif
  siglongjmp(on_signal, 1);
}

// Bad accesses of the kernel end the launch; handlers of the host program are put back afterwards.
class Signals {
 public:
  Signals() {
    static char stack[64 * 1024];
    const stack_t alternative{.ss_sp = stack, .ss_flags = 0, .ss_size = sizeof(stack)};
    sigaltstack(&alternative, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = handle_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &old_[i]);
  }
  ~Signals() {
    for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  static constexpr int kCount = 4;
  struct sigaction old_[kCount];
  stack_t old_stack_;
};

void report_signal() {
  const auto* view = static_cast<const u8*>(shared.view());
  const i64 offset = static_cast<const u8*>(fault_address) - view;
  const i32 thread = machine.current->index;
  machine.current = nullptr;
  if (fault_signal == SIGILL || fault_signal == SIGFPE)
    fail("trap", "undefined behaviour: the program was stopped by a trap", 0, thread);
  if (machine.stacks.guard_of(fault_address) >= 0)
    fail("stack", "the thread's stack overflows: raise kStackBytes of the emulator", 0, thread);
  if (offset >= 0 && offset < shared.view_bytes())
    fail("direct-access",
         format("touches shared memory at %s through a plain pointer instead of the functions of "
                "ptx/",
                smem_name(kSmemBase + static_cast<u32>(offset)).c_str()),
         0, thread);
  fail("bounds", format("touches %p through a plain pointer", fault_address), 0, thread);
}

void run_launch(const DkLaunch& launch) {
  machine.launch = &launch;
  machine.num_threads = launch.block;
  machine.num_warps = launch.block / kWarp;
  machine.num_agents = align_up(machine.num_threads + machine.num_warps + kMaxMbarriers, 16);
  machine.random.state = launch.seed * 0x9e3779b97f4a7c15ull + 1;
  identity.num_blocks = launch.grid;
  forget_places();
  global.begin_launch(launch);
  if (launch.block % kWarp != 0 || launch.block < kWarp || launch.block > kMaxThreads)
    fail("launch", format("%d threads: must be a multiple of 32, at most 1024", launch.block), 0);
  for (i32 block = 0; block < launch.grid; ++block) {
    if (sigsetjmp(on_signal, 1) != 0) report_signal();
    run_block(block);
  }
}

}  // namespace

void* dynamic_smem(u32 bytes, At at) {
  if (bytes > shared.bytes())
    fail("bounds", format("a struct of %u bytes in shared memory of %u", bytes, shared.bytes()),
         place_of(at));
  return shared.view();
}

u32 smem_addr(const void* pointer, At at) {
  const i64 offset = static_cast<const u8*>(pointer) - static_cast<const u8*>(shared.view());
  if (offset < 0 || offset > shared.view_bytes())
    fail("bounds", format("%p does not point into shared memory", pointer), place_of(at));
  return kSmemBase + static_cast<u32>(offset);
}

void load_shared(void* to, u32 addr, u32 bytes, At at) {
  maybe_yield();
  const Place place = place_of(at);
  shared.check_range(addr, bytes, bytes, "load", place);
  shared.read(addr, bytes, self().index, place);
  spend(cycles::kShared);
  std::memcpy(to, shared.data(addr), bytes);
}

void store_shared(u32 addr, const void* from, u32 bytes, At at) {
  maybe_yield();
  const Place place = place_of(at);
  for (u32 i = 0; i + 4 <= bytes; i += 4) {
    u32 word;
    std::memcpy(&word, static_cast<const u8*>(from) + i, 4);
    if (word == kPoison) meet_poison(at);
  }
  shared.check_range(addr, bytes, bytes, "store", place);
  shared.write(addr, bytes, self().index, place);
  spend(cycles::kShared);
  std::memcpy(shared.data(addr), from, bytes);
}

}  // namespace deep_kernels::emulator

using namespace deep_kernels::emulator;

int dk_emulator_run(const DkLaunch* launch, char* text, int text_bytes, unsigned long long* calls,
                    int max_calls) {
  const Signals signals;
  if (launch->trace_file != nullptr) trace::open(launch->trace_file);
  int result = 0;
  try {
    run_launch(*launch);
  } catch (const Stop&) {
    const Fault fault = take_fault();
    std::snprintf(text, text_bytes, "%s\n%s", fault.kind.c_str(), fault.text.c_str());
    const auto count = static_cast<std::size_t>(max_calls - 1);
    for (std::size_t i = 0; i < fault.calls.size() && i < count; ++i) *calls++ = fault.calls[i];
    *calls = 0;
    result = 1;
  }
  machine.current = nullptr;
  trace::close();
  return result;
}

void dk_emulator_wgmma_e4m3(int m, int n, int k, const unsigned char* a, const unsigned char* b,
                            const float* c, float* d) {
  std::memcpy(d, c, sizeof(float) * m * n);
  std::vector<unsigned char> left(static_cast<std::size_t>(m) * 32);
  std::vector<unsigned char> right(static_cast<std::size_t>(n) * 32);
  for (int step = 0; step < k; step += 32) {
    for (int i = 0; i < m; ++i) std::memcpy(&left[i * 32], a + i * k + step, 32);
    for (int i = 0; i < n; ++i) std::memcpy(&right[i * 32], b + i * k + step, 32);
    tensor_core::wgmma_k32_e4m3(m, n, left.data(), right.data(), d);
  }
}

void dk_emulator_mma_e4m3(const unsigned char* a, const unsigned char* b, const float* c,
                          float* d) {
  std::memcpy(d, c, sizeof(float) * 16 * 8);
  tensor_core::mma_m16n8k32_e4m3(a, b, d);
}
