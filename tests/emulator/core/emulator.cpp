// One launch from the outside: sets the machine up, runs the clusters of blocks one after another,
// turns faults of the host program into faults of the kernel.
#include <signal.h>
#include <ucontext.h>

#include <csetjmp>
#include <cstdio>
#include <cstdlib>

#include "global.h"
#include "numeric.h"
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
  const auto* view = static_cast<const u8*>(SharedMemory::view());
  const i64 offset = static_cast<const u8*>(fault_address) - view;
  const i32 thread = machine.current->index;
  const i32 rank = machine.current->rank;
  machine.current = nullptr;
  if (fault_signal == SIGILL || fault_signal == SIGFPE)
    fail("trap", "undefined behaviour: the program was stopped by a trap", 0, thread);
  if (machine.stacks.guard_of(fault_address) >= 0)
    fail("stack", "the thread's stack overflows: raise kStackBytes of the emulator", 0, thread);
  if (offset >= 0 && offset < SharedMemory::view_bytes())
    fail("direct-access",
         format("touches shared memory at %s through a plain pointer instead of the functions of "
                "ptx/",
                smem_name(smem_base(rank) + static_cast<u32>(offset)).c_str()),
         0, thread);
  fail("bounds", format("touches %p through a plain pointer", fault_address), 0, thread);
}

void run_launch(const DkLaunch& launch) {
  machine.launch = &launch;
  machine.cluster = launch.cluster;
  machine.block_threads = launch.block;
  machine.block_warps = launch.block / kWarp;
  machine.num_threads = launch.cluster * machine.block_threads;
  machine.num_warps = launch.cluster * machine.block_warps;
  machine.num_agents =
      align_up(machine.num_threads + machine.num_warps + launch.cluster * kMaxMbarriers + 1, 16);
  machine.random.state = launch.seed * 0x9e3779b97f4a7c15ull + 1;
  identity.num_blocks = launch.grid;
  forget_places();
  global.begin_launch(launch);
  if (launch.block % kWarp != 0 || launch.block < kWarp || launch.block > kMaxThreads)
    fail("launch", format("%d threads: must be a multiple of 32, at most 1024", launch.block), 0);
  if (launch.cluster < 1 || machine.num_threads > kMaxClusterThreads ||
      launch.grid % launch.cluster != 0)
    fail("launch",
         format("%d blocks of %d threads in clusters of %d: whole clusters are needed, of at most "
                "%d threads",
                launch.grid, launch.block, launch.cluster, kMaxClusterThreads),
         0);
  for (i32 block = 0; block < launch.grid; block += launch.cluster) {
    if (sigsetjmp(on_signal, 1) != 0) report_signal();
    run_cluster(block);
  }
}

}  // namespace

void* dynamic_smem(u32 bytes, At at) {
  const u32 room = own_memory().bytes();
  if (bytes > room)
    fail("bounds", format("a struct of %u bytes in shared memory of %u", bytes, room),
         place_of(at));
  return SharedMemory::view();
}

u32 smem_addr(const void* pointer, At at) {
  const i64 offset = static_cast<const u8*>(pointer) - static_cast<const u8*>(SharedMemory::view());
  if (offset < 0 || offset > SharedMemory::view_bytes())
    fail("bounds", format("%p does not point into shared memory", pointer), place_of(at));
  return smem_base(self().rank) + static_cast<u32>(offset);
}

void load_shared(void* to, u32 addr, u32 bytes, At at) {
  maybe_yield();
  const Place place = place_of(at);
  SharedMemory& memory = own_memory();
  memory.check_range(addr, bytes, bytes, "load", place);
  memory.read(addr, bytes, self().index, place);
  spend(cycles::kShared);
  std::memcpy(to, memory.data(addr), bytes);
}

void store_shared(u32 addr, const void* from, u32 bytes, At at) {
  maybe_yield();
  const Place place = place_of(at);
  for (u32 i = 0; i + 4 <= bytes; i += 4) {
    u32 word;
    std::memcpy(&word, static_cast<const u8*>(from) + i, 4);
    if (word == kPoison) meet_poison(at);
  }
  SharedMemory& memory = own_memory();
  memory.check_range(addr, bytes, bytes, "store", place);
  memory.write(addr, bytes, self().index, place);
  spend(cycles::kShared);
  std::memcpy(memory.data(addr), from, bytes);
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

void dk_emulator_k16(int is_f16, int m, int n, const unsigned short* a, const unsigned short* b,
                     const float* c, float* d) {
  std::memcpy(d, c, sizeof(float) * m * n);
  tensor_core::step_k16(is_f16 != 0 ? tensor_core::Half::f16 : tensor_core::Half::bf16, m, n, a, b,
                        d);
}

void dk_emulator_e4m3_of(int count, const float* from, unsigned char* to) {
  for (int i = 0; i < count; ++i) to[i] = numeric::e4m3_of(from[i]);
}
void dk_emulator_f16_of_e4m3(int count, const unsigned char* from, unsigned short* to) {
  for (int i = 0; i < count; ++i) to[i] = numeric::f16_of_e4m3(from[i]);
}
void dk_emulator_ex2(int count, const float* from, float* to) {
  for (int i = 0; i < count; ++i) to[i] = numeric::ex2_approx_ftz(from[i]);
}

void dk_emulator_mma_e4m3(const unsigned char* a, const unsigned char* b, const float* c,
                          float* d) {
  std::memcpy(d, c, sizeof(float) * 16 * 8);
  tensor_core::mma_m16n8k32_e4m3(a, b, d);
}
