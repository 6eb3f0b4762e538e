// Named barriers, mbarriers, fences.
#include <algorithm>

#include "report.h"
#include "shared.h"
#include "trace.h"

namespace deep_kernels::emulator {

// --- named barriers
// ------------------------------------------------------------------------------------

namespace {

void check_comer(const NamedBarrier& barrier, i32 warp, u32 id, i32 wanted, Place at) {
  for (const NamedBarrier::Comer& comer : barrier.comers)
    if (comer.warp == warp)
      fail("barrier",
           format("comes to barrier %u twice in one phase, of which %d of %d threads are there", id,
                  barrier.arrived(), barrier.expected) +
               cite("it arrived at", comer.place),
           at);
  if (!barrier.done.known_to(warp))
    fail("barrier",
         format("comes to barrier %u and may be counted in the phase before: nothing tells the "
                "warp that all threads of that one have come",
                id) +
             cite("the last of them came at", barrier.done_at),
         at);
  if (!barrier.comers.empty() && barrier.expected != wanted) {
    const NamedBarrier::Comer& first = barrier.comers.front();
    fail("barrier",
         format("barrier %u for %d threads, but warp %d has come to it for %d", id, wanted,
                first.warp % machine.block_warps, barrier.expected) +
             cite("that is at", first.place),
         at);
  }
}

// All have come, the last of them this warp: who waits goes on.
void complete_barrier(NamedBarrier& barrier, i32 last) {
  for (const NamedBarrier::Comer& comer : barrier.comers) {
    if (!comer.waits) continue;
    barrier.pending.tell(comer.warp);
    machine.warps[comer.warp].in_barrier = false;
    if (comer.warp == last) continue;
    for (i32 lane = 0; lane < kWarp; ++lane) wake(comer.warp * kWarp + lane);
  }
  barrier.done_at = barrier.comers.back().place;
  std::swap(barrier.done, barrier.pending);
  barrier.comers.clear();
}

}  // namespace

void enter_barrier(i32 warp, u32 id, u32 num_threads, bool waits, Place at) {
  const auto wanted = static_cast<i32>(num_threads);
  if (id > 15) fail("barrier", format("barrier %u: there are 16, from 0 to 15", id), at);
  if (wanted % kWarp != 0 || wanted < kWarp || wanted > machine.block_threads)
    fail("barrier",
         format("barrier %u for %d threads: must be a multiple of 32, at most the block's %d", id,
                wanted, machine.block_threads),
         at);
  NamedBarrier& barrier = machine.block_of(warp).barriers[id];
  check_comer(barrier, warp, id, wanted, at);
  if (barrier.comers.empty()) {
    barrier.expected = wanted;
    barrier.pending.clear();
  }
  barrier.comers.push_back({.warp = warp, .waits = waits, .place = at});
  barrier.pending.gather(warp);
  machine.warps[warp].in_barrier = waits;
  if (barrier.arrived() == barrier.expected) complete_barrier(barrier, warp);
}

void barrier_sync(u32 id, u32 num_threads, At at) {
  const Place place = place_of(at);
  meet(Meeting::barrier_sync, id, num_threads, at);
  Thread& thread = self();
  thread.wait_barrier = id;
  const i64 begin = identity.time;
  while (machine.warps[thread.warp()].in_barrier) wait_for(Wait::barrier, place);
  const i64 end = identity.time;
  identity.time = begin;
  trace::wait(format("barrier %u", id), -1, end, place);
  identity.time = end + cycles::kBarrier;
}

void barrier_arrive(u32 id, u32 num_threads, At at) {
  meet(Meeting::barrier_arrive, id, num_threads, at);
  trace::mark(format("arrives at barrier %u", id), -1, place_of(at));
}

void sync_threads(At at) { barrier_sync(0, static_cast<u32>(machine.block_threads), at); }

// --- mbarriers
// -----------------------------------------------------------------------------------------

namespace {

constexpr i64 kMaxBytes = (i64{1} << 20) - 1;  // what the transaction count of an mbarrier holds

// "smem.kv_filled[1]" out of "ptx::mbarrier_init(ptx::smem_addr(&smem.kv_filled[i]), 1);", or the
// address.
std::string name_mbarrier(u32 addr, Place at) {
  const std::string line = place_line(at);
  const std::size_t begin = line.find('&');
  const std::size_t end = begin == std::string::npos ? begin : line.find(')', begin);
  if (end == std::string::npos) return smem_name(addr);
  std::string name = line.substr(begin + 1, end - begin - 1);
  int earlier = 0;
  for (const Mbarrier& other : machine.mbarriers)
    earlier += other.init_at == at && other.addr >> kRankShift == addr >> kRankShift;
  if (const std::size_t bracket = name.rfind('['); bracket != std::string::npos)
    name = name.substr(0, bracket) + format("[%d]", earlier);
  return name + " at " + smem_name(addr);
}

void try_complete(Mbarrier& barrier, Place at) {
  if (barrier.pending != 0 || barrier.bytes > 0) return;
  if (barrier.bytes < 0)
    fail("mbarrier",
         format("mbarrier %s: all arrivals of phase %llu are there, and %lld bytes more than they "
                "expected have been copied",
                barrier.name.c_str(), barrier.phase, -barrier.bytes),
         at);
  if (barrier.copies > 0)
    fail("mbarrier",
         format("mbarrier %s completes phase %llu while %d copies that it counts are in flight: "
                "fewer bytes are expected than copied",
                barrier.name.c_str(), barrier.phase, barrier.copies),
         at);
  barrier.done_clocks = barrier.pending_clocks;
  barrier.done_proxy = barrier.pending_proxy;
  barrier.done_time = barrier.pending_time;
  ++barrier.phase;
  barrier.pending = barrier.arrivals;
  barrier.arrived.clear();
  std::erase_if(barrier.waiters, [&](i32 thread) {
    if (!phase_done(barrier, machine.threads[thread].wait_parity)) return false;
    wake(thread);
    return true;
  });
}

}  // namespace

bool phase_done(const Mbarrier& barrier, u32 parity) { return (barrier.phase & 1) != parity; }

namespace {

// Whether the thread knows that the mbarrier was initialised.
bool knows_of(i32 thread, const Mbarrier& barrier) {
  const u32* clocks = machine.clocks_of(thread);
  return clocks[barrier.init_thread] >= barrier.init_clock ||
         (barrier.cluster_phase != 0 && clocks[machine.cluster_agent()] >= barrier.cluster_phase);
}

}  // namespace

Mbarrier& find_mbarrier(u32 addr, const char* use, Place at) {
  const SharedMemory& memory = memory_of(addr);
  const i32 index = memory.mbarrier_at(addr);
  if (index < 0)
    fail("mbarrier",
         format("%s at %s, where no mbarrier was initialised", use, smem_name(addr).c_str()), at);
  Mbarrier& barrier = machine.mbarriers[index];
  if (machine.current != nullptr && !knows_of(self().index, barrier))
    fail("race",
         format("%s of mbarrier %s, which %s initialised: nothing orders the two", use,
                barrier.name.c_str(), thread_name(barrier.init_thread).c_str()) +
             cite("initialised at", barrier.init_at),
         at);
  return barrier;
}

void mbarrier_init(u32 addr, u32 arrivals, At at) {
  const Place place = place_of(at);
  SharedMemory& memory = own_memory();
  memory.check_range(addr, 8, 8, "mbarrier.init", place);
  if (memory.mbarrier_at(addr) >= 0)
    fail("mbarrier",
         format("initialises mbarrier %s again",
                machine.mbarriers[memory.mbarrier_at(addr)].name.c_str()),
         place);
  if (arrivals == 0 || arrivals > kMaxBytes)
    fail("mbarrier", format("%u arrivals: must be from 1 to %lld", arrivals, kMaxBytes), place);
  const auto of_block = [&](const Mbarrier& other) {
    return other.addr >> kRankShift == addr >> kRankShift;
  };
  if (std::count_if(machine.mbarriers.begin(), machine.mbarriers.end(), of_block) == kMaxMbarriers)
    fail("mbarrier",
         format("more than %d mbarriers: raise kMaxMbarriers of the emulator", kMaxMbarriers),
         place);
  Thread& thread = self();
  memory.write(addr, 8, thread.index, place);
  const auto index = static_cast<i32>(machine.mbarriers.size());
  Mbarrier barrier;
  barrier.addr = addr;
  barrier.arrivals = barrier.pending = arrivals;
  barrier.init_at = place;
  barrier.name = name_mbarrier(addr, place);
  barrier.init_thread = thread.index;
  barrier.init_clock = machine.clock_of(thread.index);
  barrier.agent = static_cast<Agent>(machine.num_threads + machine.num_warps + index);
  for (auto* clocks :
       {&barrier.pending_clocks, &barrier.done_clocks, &barrier.pending_proxy, &barrier.done_proxy})
    clocks->assign(machine.num_agents, 0);
  machine.mbarriers.push_back(std::move(barrier));
  memory.mark_mbarrier(addr, index);
}

namespace {

void arrive(Mbarrier& barrier, u32 expected_bytes, Place place) {
  const Thread& thread = self();
  if (barrier.pending == 0) {
    std::string who;
    for (const auto& [other, where] : barrier.arrived)
      who += format("\n  arrived: %s at %s", thread_name(other).c_str(), place_name(where).c_str());
    fail("mbarrier",
         format("one arrival too many on mbarrier %s: phase %llu has its %u and waits for %lld "
                "bytes",
                barrier.name.c_str(), barrier.phase, barrier.arrivals, barrier.bytes) +
             who,
         place);
  }
  barrier.bytes += expected_bytes;
  if (barrier.bytes > kMaxBytes)
    fail("mbarrier",
         format("mbarrier %s expects %lld bytes in one phase: it counts up to %lld",
                barrier.name.c_str(), barrier.bytes, kMaxBytes),
         place);
  --barrier.pending;
  barrier.arrived.emplace_back(thread.index, place);
  join(barrier.pending_clocks.data(), machine.clocks_of(thread.index), machine.num_agents);
  if (machine.proxy_used)
    join(barrier.pending_proxy.data(), machine.proxy_of(thread.index), machine.num_agents);
  trace::mark("arrives at " + barrier.name, static_cast<i64>(barrier.phase), place);
  spend(cycles::kShared);
  barrier.pending_time = std::max(barrier.pending_time, identity.time);
  tick(thread.index);
  try_complete(barrier, place);
}

}  // namespace

void mbarrier_arrive(u32 addr, u32 expected_bytes, At at) {
  maybe_yield();
  const Place place = place_of(at);
  own_memory().check_range(addr, 8, 8, "mbarrier.arrive", place);
  arrive(find_mbarrier(addr, "mbarrier.arrive", place), expected_bytes, place);
}

void mbarrier_arrive_peer(u32 addr, At at) {
  maybe_yield();
  const Place place = place_of(at);
  Thread& thread = self();
  peer_memory(addr, 8, 8, "mbarrier.arrive", place);
  Mbarrier& barrier = find_mbarrier(addr, "mbarrier.arrive", place);
  if (const i32 rank = static_cast<i32>(addr >> kRankShift); rank != thread.rank)
    machine.blocks[rank].touches[thread.index] = {
        .clock = machine.clock_of(thread.index),
        .cluster_arrivals = machine.warps[thread.warp()].cluster_arrivals,
        .place = place};
  arrive(barrier, 0, place);
}

void mbarrier_wait(u32 addr, u32 parity, At at) {
  maybe_yield();
  const Place place = place_of(at);
  Thread& thread = self();
  own_memory().check_range(addr, 8, 8, "mbarrier.wait", place);
  Mbarrier& barrier = find_mbarrier(addr, "mbarrier.wait", place);
  if (parity > 1) fail("mbarrier", format("parity %u: must be 0 or 1", parity), place);
  while (!phase_done(barrier, parity)) {
    thread.wait_barrier = addr;
    thread.wait_parity = parity;
    barrier.waiters.push_back(thread.index);
    wait_for(Wait::mbarrier, place);
  }
  join(machine.clocks_of(thread.index), barrier.done_clocks.data(), machine.num_agents);
  if (machine.proxy_used)
    join(machine.proxy_of(thread.index), barrier.done_proxy.data(), machine.num_agents);
  // The phase that has just let the thread through: the last one of this parity.
  trace::wait(barrier.name, static_cast<i64>(barrier.phase) - 1, barrier.done_time, place);
  wait_until(barrier.done_time);
  spend(cycles::kShared);
}

void complete_bytes(const TmaCopy& copy) {
  Mbarrier& barrier = machine.mbarriers[copy.barrier];
  if (barrier.phase != copy.phase)
    fail(
        "mbarrier",
        format("a copy counted by mbarrier %s was issued in phase %llu and ends in phase %llu: the "
               "expected bytes do not add up",
               barrier.name.c_str(), copy.phase, barrier.phase),
        copy.place, copy.thread);
  --barrier.copies;
  barrier.bytes -= copy.bytes;
  barrier.pending_clocks[barrier.agent] = ++barrier.agent_clock;
  if (machine.threads[copy.thread].rank != static_cast<i32>(barrier.addr >> kRankShift))
    barrier.peer_clock = barrier.agent_clock;
  barrier.pending_time = std::max(barrier.pending_time, copy.end);
  try_complete(barrier, copy.place);
}

// --- fences
// --------------------------------------------------------------------------------------------

void fence_mbarrier_init(At) {
  for (Mbarrier& barrier : machine.mbarriers)
    if (barrier.init_thread == self().index) barrier.async_visible = barrier.released = true;
}

void fence_proxy_async(At) {
  machine.proxy_used = true;
  const i32 thread = self().index;
  join(machine.proxy_of(thread), machine.clocks_of(thread), machine.num_agents);
  for (Mbarrier& barrier : machine.mbarriers)
    if (knows_of(thread, barrier)) barrier.async_visible = true;
  tick(thread);  // what it does from here on is not covered
}

}  // namespace deep_kernels::emulator
