#include <algorithm>
#include <map>

#include "report.h"
#include "shared.h"
#include "trace.h"

namespace deep_kernels::emulator {

Machine machine;
Identity identity;

namespace {

// Warps of which some lane can run.
u64 ready_warps = 0;
i32 last_warp = 0;

void thread_main() {
  machine.launch->entry(machine.launch->params);
  Thread& thread = self();
  const Warp& warp = machine.warps[thread.warp()];
  if (warp.arrived != 0)
    fail("divergence",
         format("the thread ends while the lanes %08x of its warp wait for it in a converged "
                "operation",
                warp.arrived) +
             cite("they wait at", warp.place),
         0);
  thread.committed_copies.push_back(std::move(thread.open_copies));
  for (const std::vector<CopyAsync>& group : thread.committed_copies)  // groups may be empty
    if (!group.empty())
      fail("exit",
           "the thread ends and has not waited for its cp.async" +
               cite("issued at", group.front().place),
           0);
  if (machine.launch->programmatic != 0 && thread.touched_global && !thread.waited_dependency)
    fail("grid-dependency",
         "the thread has touched global memory and ends without griddepcontrol.wait", 0);
  thread.exited = true;
  trace::exit(thread);
  machine.warps[thread.warp()].ready &= ~(1u << thread.lane());
  leave_cluster(thread.index);
  switch_fiber(&thread.stopped, machine.scheduler);
  __builtin_unreachable();
}

void run_thread(Thread& thread) {
  machine.current = &thread;
  identity.thread = thread.index - thread.rank * machine.block_threads;
  identity.block = machine.first_block + thread.rank;
  identity.rank = thread.rank;
  identity.time = thread.time;
  switch_fiber(&machine.scheduler, thread.stopped);
  machine.current = nullptr;
  if (failed()) throw Stop{};
}

i32 lowest_bit(u64 mask) { return std::countr_zero(mask); }

// Lanes that can run, each until it stops; in the lanes' order, or from a random lane on.
void run_warp(i32 index) {
  Warp& warp = machine.warps[index];
  const i32 first = machine.launch->seed != 0 ? static_cast<i32>(machine.random.below(kWarp)) : 0;
  u32 lanes = std::rotr(warp.ready, first);
  while (lanes != 0) {
    const i32 lane = (lowest_bit(lanes) + first) % kWarp;
    lanes &= lanes - 1;
    run_thread(machine.threads[index * kWarp + lane]);
  }
  if (warp.ready == 0) ready_warps &= ~(u64{1} << index);
}

i32 choose_warp() {
  if (machine.launch->seed == 0) {
    const u64 behind = last_warp == 63 ? 0 : ready_warps & (~u64{0} << (last_warp + 1));
    return last_warp = lowest_bit(behind != 0 ? behind : ready_warps);
  }
  u32 skip = machine.random.below(static_cast<u32>(std::popcount(ready_warps)));
  u64 mask = ready_warps;
  for (; skip > 0; --skip) mask &= mask - 1;
  return lowest_bit(mask);
}

std::string lane_mask_text(u32 mask) {
  if (mask == ~0u) return "all lanes";
  if (std::popcount(mask) == 1) return format("lane %d", lowest_bit(mask));
  return format("lanes %08x", mask);
}

std::string describe_wait(const Thread& thread) {
  const Warp& warp = machine.warps[thread.warp()];
  switch (thread.waits) {
    case Wait::meeting:
      return format("in a converged operation, for the lanes %08x of its warp", ~warp.arrived);
    case Wait::barrier: {
      const NamedBarrier& barrier = machine.block_of(thread.warp()).barriers[thread.wait_barrier];
      return format("at barrier %u: %d of %d threads are there", thread.wait_barrier,
                    barrier.arrived(), barrier.expected);
    }
    case Wait::mbarrier: {
      const Mbarrier& barrier = find_mbarrier(thread.wait_barrier, "", 0);
      std::string text =
          format("for mbarrier %s, parity %u; it is in phase %llu with %u of %u arrivals",
                 barrier.name.c_str(), thread.wait_parity, barrier.phase,
                 barrier.arrivals - barrier.pending, barrier.arrivals);
      if (barrier.bytes < 0)
        text += format(", %lld bytes more have come than are expected", -barrier.bytes);
      if (barrier.bytes > 0)
        text += format(", %lld bytes are expected and no copy is on its way", barrier.bytes);
      return text;
    }
    case Wait::wgmma:
      return "for wgmma that other warps of its warpgroup have not issued";
    case Wait::registers:
      return format("for registers: the block has %d free",
                    machine.block_of(thread.warp()).free_registers);
    case Wait::cluster:
      return describe_cluster_barrier();
    case Wait::nothing:
      break;
  }
  return "for nothing";
}

// Who waits for what; warps that wait alike share a line, and so do the lanes of a warp.
[[noreturn]] void report_deadlock() {
  struct Row {
    i32 rank;
    std::string text;
    std::vector<i32> warps;  // of the block
  };
  std::vector<Row> rows;
  const auto add = [&](i32 warp, const std::string& text) {
    const i32 rank = machine.rank_of(warp);
    const i32 in_block = warp - rank * machine.block_warps;
    for (Row& row : rows) {
      if (row.rank != rank || row.text != text) continue;
      row.warps.push_back(in_block);
      return;
    }
    rows.push_back({rank, text, {in_block}});
  };
  for (i32 w = 0; w < machine.num_warps; ++w) {
    std::map<std::pair<Place, i32>, u32> groups;
    u32 exited = 0;
    for (i32 lane = 0; lane < kWarp; ++lane) {
      const Thread& thread = machine.threads[w * kWarp + lane];
      if (thread.exited)
        exited |= 1u << lane;
      else
        groups[{thread.waits_at, static_cast<i32>(thread.waits)}] |= 1u << lane;
    }
    for (const auto& [key, mask] : groups) {
      const Thread& thread = machine.threads[w * kWarp + lowest_bit(mask)];
      add(w, format("%-10s %-14s waits at %s %s", thread.role, lane_mask_text(mask).c_str(),
                    place_name(thread.waits_at).c_str(), describe_wait(thread).c_str()));
    }
    if (exited != 0)
      add(w, format("%-10s %-14s ended", machine.threads[w * kWarp].role,
                    lane_mask_text(exited).c_str()));
  }
  std::string table;
  for (const auto& [rank, text, warps] : rows) {
    std::string names;
    for (std::size_t i = 0; i < warps.size(); ++i) {
      std::size_t last = i;
      while (last + 1 < warps.size() && warps[last + 1] == warps[last] + 1) ++last;
      names += format(i == 0 ? "%d" : ",%d", warps[i]);
      if (last > i) names += format("-%d", warps[last]);
      i = last;
    }
    if (machine.cluster > 1) table += format("\n  %s,", block_name(rank).c_str());
    table += format(machine.cluster > 1 ? " %s %-8s %s" : "\n  %-6s %-8s %s",
                    warps.size() > 1 ? "warps" : "warp", names.c_str(), text.c_str());
  }
  fail("deadlock",
       (machine.cluster == 1 ? block_name(0)
                             : format("blocks %d to %d, a cluster", machine.first_block,
                                      machine.first_block + machine.cluster - 1)) +
           ": all threads wait and nothing is on its way" + table,
       0);
}

void check_end_of_cluster() {
  for (const Mbarrier& barrier : machine.mbarriers)
    if (barrier.bytes != 0)
      fail("exit",
           format("the block ends while mbarrier %s, in phase %llu, expects %lld more bytes",
                  barrier.name.c_str(), barrier.phase, barrier.bytes) +
               cite("initialised at", barrier.init_at),
           0);
  for (i32 w = 0; w < machine.num_warps; ++w) {
    const Warp& warp = machine.warps[w];
    if (warp.completed < warp.issued)
      fail("exit",
           "the warp ends and has not waited for its wgmma" +
               cite("issued at", machine.warpgroup_of(w).operation(warp.completed).place),
           0, w * kWarp);
    const Warp& first = machine.warps[machine.warpgroup_begin(w)];
    if (warp.registers_at != first.registers_at)
      fail("registers",
           "setmaxnreg was not executed by all warps of a warpgroup" +
               cite("the first warp's at", first.registers_at) +
               cite("this warp's at", warp.registers_at),
           0, w * kWarp);
  }
}

// All blocks of the cluster as they are before their first thread runs.
void begin_blocks() {
  memories.resize(machine.cluster);
  machine.blocks.assign(machine.cluster, Block{});
  machine.cluster_barrier = {};
  for (auto* clocks :
       {&machine.cluster_barrier.pending_clocks, &machine.cluster_barrier.done_clocks,
        &machine.cluster_barrier.pending_proxy, &machine.cluster_barrier.done_proxy})
    clocks->assign(machine.num_agents, 0);
  for (i32 rank = 0; rank < machine.cluster; ++rank) {
    memories[rank].begin_block(rank, static_cast<u32>(machine.launch->smem_bytes));
    machine.blocks[rank].running = machine.block_threads;
    if (machine.cluster > 1) machine.blocks[rank].touches.resize(machine.num_threads);
  }
}

}  // namespace

void join(u32* into, const u32* from, i32 count) {
  for (i32 i = 0; i < count; ++i) into[i] = std::max(into[i], from[i]);
}

void tick(i32 thread) { ++machine.clocks_of(thread)[thread]; }

void Knowledge::clear() {
  clocks.assign(machine.num_agents, 0);
  proxy.assign(machine.num_agents, 0);
  time = 0;
}

void Knowledge::gather(i32 warp) {
  for (i32 thread = warp * kWarp; thread < (warp + 1) * kWarp; ++thread) {
    join(clocks.data(), machine.clocks_of(thread), machine.num_agents);
    if (machine.proxy_used) join(proxy.data(), machine.proxy_of(thread), machine.num_agents);
    time = std::max(time, machine.threads[thread].time);
    tick(thread);
  }
}

void Knowledge::tell(i32 warp) const {
  for (i32 thread = warp * kWarp; thread < (warp + 1) * kWarp; ++thread) {
    join(machine.clocks_of(thread), clocks.data(), machine.num_agents);
    if (machine.proxy_used) join(machine.proxy_of(thread), proxy.data(), machine.num_agents);
    machine.threads[thread].time = time;
    if (&machine.threads[thread] == machine.current) identity.time = time;
  }
}

bool Knowledge::known_to(i32 warp) const {
  for (std::size_t agent = 0; agent < clocks.size(); ++agent) {
    u32 known = 0;
    for (i32 lane = 0; lane < kWarp && known < clocks[agent]; ++lane)
      known = max_of(known, machine.clocks_of(warp * kWarp + lane)[agent]);
    if (known < clocks[agent]) return false;
  }
  return true;
}

void wait_for(Wait what, Place at) {
  Thread& thread = self();
  thread.waits = what;
  thread.waits_at = at;
  thread.time = identity.time;
  machine.warps[thread.warp()].ready &= ~(1u << thread.lane());
  switch_fiber(&thread.stopped, machine.scheduler);
  thread.waits = Wait::nothing;
}

void wake(i32 thread) {
  machine.warps[thread / kWarp].ready |= 1u << (thread % kWarp);
  ready_warps |= u64{1} << (thread / kWarp);
}

void maybe_yield() {
  if (machine.launch->seed == 0 || machine.random.below(64) != 0) return;
  self().time = identity.time;
  switch_fiber(&self().stopped, machine.scheduler);
}

void run_cluster(i32 first_block) {
  machine.first_block = first_block;
  const std::size_t clocks = static_cast<std::size_t>(machine.num_threads) * machine.num_agents;
  machine.clocks.assign(clocks, 0);
  machine.proxy_clocks.assign(clocks, 0);
  machine.proxy_used = false;
  machine.warps.assign(machine.num_warps, Warp{});
  machine.warpgroups.assign(machine.num_warps, Warpgroup{});
  machine.threads.assign(machine.num_threads, Thread{});
  machine.mbarriers.clear();
  machine.mbarriers.reserve(machine.cluster * kMaxMbarriers);
  machine.copies.clear();
  begin_blocks();
  // What __launch_bounds__(threads, 1) leaves each thread, in units of 8.
  const i32 registers = min_of(255, 65536 / machine.block_threads) / 8 * 8;
  ready_warps = 0;
  last_warp = 63;
  for (i32 i = 0; i < machine.num_threads; ++i) {
    machine.threads[i].index = i;
    machine.threads[i].rank = i / machine.block_threads;
    machine.threads[i].stopped = make_fiber(machine.stacks.stack(i), thread_main);
    machine.clocks_of(i)[i] = 1;
    wake(i);
  }
  for (Warp& warp : machine.warps) warp.registers = registers;
  trace::begin_cluster();
  for (;;) {
    const bool seeded = machine.launch->seed != 0;
    const auto copies = static_cast<u32>(machine.copies.size());
    if (copies > 0 && (ready_warps == 0 || (seeded && machine.random.below(16) == 0))) {
      finish_copy(seeded ? machine.random.below(copies) : 0);
    } else if (ready_warps != 0) {
      run_warp(choose_warp());
    } else {
      break;
    }
  }
  for (const Thread& thread : machine.threads)
    if (!thread.exited) report_deadlock();
  check_end_of_cluster();
}

// --- what ptx/ calls

void set_role(const char* name) {
  self().role = name;
  trace::role(self());
}

void meet_poison(At at) {
  fail("accumulator",
       "uses an accumulator while the wgmma that writes it is in flight (or what was made of one)",
       place_of(at));
}

namespace {

const char* meeting_name(Meeting what) {
  constexpr const char* names[] = {"sync_warp",
                                   "shuffle",
                                   "shuffle_xor",
                                   "shuffle_up",
                                   "any",
                                   "reduce_add",
                                   "reduce_min",
                                   "reduce_max",
                                   "ldmatrix",
                                   "ldmatrix.trans",
                                   "mma",
                                   "barrier_sync",
                                   "barrier_arrive",
                                   "set_max_registers",
                                   "wgmma_fence",
                                   "wgmma",
                                   "wgmma_commit_group",
                                   "wgmma_wait_group",
                                   "cluster_arrive",
                                   "cluster_wait"};
  return names[static_cast<u8>(what)];
}

i32 i32_of(u64 value) { return static_cast<i32>(value); }

void require_uniform(const auto (&of_lane)[kWarp], const char* what, Place at) {
  for (i32 lane = 1; lane < kWarp; ++lane)
    if (of_lane[lane] != of_lane[0])
      fail("divergence",
           format("%s differs between lanes 0 and %d of a warp: %lld and %lld", what, lane,
                  static_cast<i64>(of_lane[0]), static_cast<i64>(of_lane[lane])),
           at);
}

// All lanes know what each of them knew.
void sync_warp(i32 index) {
  static Knowledge all;
  all.clear();
  all.gather(index);
  all.tell(index);
}

// The last lane has come: does the operation for all.
void hold_meeting(i32 index, Place at) {
  Warp& warp = machine.warps[index];
  Thread* threads = &machine.threads[index * kWarp];
  // All go on when the last has come.
  i64 time = identity.time;
  for (i32 lane = 0; lane < kWarp; ++lane) time = max_of(time, threads[lane].time);
  time += warp.meeting == Meeting::mma ? cycles::kMma : cycles::kMeeting;
  for (i32 lane = 0; lane < kWarp; ++lane) threads[lane].time = time;
  identity.time = time;
  const auto give_all = [&](u64 value) {
    for (i32 lane = 0; lane < kWarp; ++lane) threads[lane].result = value;
  };
  switch (warp.meeting) {
    case Meeting::sync_warp:
      sync_warp(index);
      break;
    case Meeting::shuffle:
    case Meeting::shuffle_xor:
    case Meeting::shuffle_up:
      for (i32 lane = 0; lane < kWarp; ++lane) {
        const i64 parameter = warp.parameter[lane];
        i64 source = parameter;
        if (warp.meeting == Meeting::shuffle_xor) source = lane ^ parameter;
        if (warp.meeting == Meeting::shuffle_up)
          source = lane >= parameter ? lane - parameter : lane;
        if (source < 0 || source >= kWarp)
          fail("divergence", format("lane %d asks for lane %lld", lane, source), at);
        threads[lane].result = warp.value[source];
      }
      break;
    case Meeting::any: {
      u64 found = 0;
      for (const u64 value : warp.value) found |= value;
      give_all(found);
      break;
    }
    case Meeting::reduce_add: {
      u64 sum = 0;
      for (const u64 value : warp.value) sum += value;
      give_all(static_cast<u32>(sum));
      break;
    }
    case Meeting::reduce_min:
    case Meeting::reduce_max: {
      i32 best = i32_of(warp.value[0]);
      for (const u64 value : warp.value)
        best = warp.meeting == Meeting::reduce_min ? min_of(best, i32_of(value))
                                                   : max_of(best, i32_of(value));
      give_all(static_cast<u32>(best));
      break;
    }
    case Meeting::ldmatrix:
    case Meeting::ldmatrix_trans:
      run_ldmatrix(warp, index * kWarp, static_cast<i32>(warp.parameter[0]), at);
      break;
    case Meeting::mma:
      run_mma(warp, at);
      break;
    case Meeting::barrier_sync:
    case Meeting::barrier_arrive:
      require_uniform(warp.value, "the barrier", at);
      require_uniform(warp.parameter, "the number of participants", at);
      enter_barrier(index, static_cast<u32>(warp.value[0]), static_cast<u32>(warp.parameter[0]),
                    warp.meeting == Meeting::barrier_sync, at);
      break;
    case Meeting::registers:
      set_registers(index, static_cast<i32>(warp.parameter[0]), warp.value[0] != 0, at);
      break;
    case Meeting::wgmma_fence:
      warp.fenced = true;
      break;
    case Meeting::wgmma:
      issue_wgmma(index, at);
      break;
    case Meeting::wgmma_commit:
      commit_wgmma(index);
      break;
    case Meeting::wgmma_wait: {
      const i64 keep = warp.parameter[0];
      const auto groups = static_cast<i64>(warp.group_ends.size());
      give_all(static_cast<u64>(groups > keep ? warp.group_ends[groups - 1 - keep] : 0));
      break;
    }
    case Meeting::cluster_arrive:
      enter_cluster_barrier(index, warp.value[0] != 0, at);
      break;
    case Meeting::cluster_wait:
      leave_cluster_barrier(index, at);
      break;
  }
}

}  // namespace

u64 meet(Meeting what, u64 value, i64 parameter, At at) {
  maybe_yield();
  Thread& thread = self();
  Warp& warp = machine.warps[thread.warp()];
  const Place place = place_of(at);
  if (warp.arrived == 0) {
    warp.meeting = what;
    warp.place = place;
    for (i32 lane = 0; lane < kWarp; ++lane)
      if (machine.threads[thread.warp() * kWarp + lane].exited)
        fail("divergence",
             format("%s needs all lanes of the warp, but lane %d has ended", meeting_name(what),
                    lane),
             place);
  } else if (warp.meeting != what || warp.place != place) {
    fail("divergence",
         format("%s, while the lanes %08x of its warp are in %s elsewhere: converged operations "
                "need all lanes at one place",
                meeting_name(what), warp.arrived, meeting_name(warp.meeting)) +
             cite("they are at", warp.place),
         place);
  }
  warp.value[thread.lane()] = value;
  warp.parameter[thread.lane()] = parameter;
  warp.arrived |= 1u << thread.lane();
  if (warp.arrived != ~0u) {
    wait_for(Wait::meeting, place);
    return thread.result;
  }
  warp.arrived = 0;
  hold_meeting(thread.warp(), place);
  for (i32 lane = 0; lane < kWarp; ++lane)
    if (lane != thread.lane()) wake(thread.warp() * kWarp + lane);
  return thread.result;
}

}  // namespace deep_kernels::emulator
