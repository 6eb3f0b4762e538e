// The state of one launch: threads, warps, memories and what is on its way between them. The blocks
// of a cluster run together: threads and warps are numbered through all of them, block by block.
#pragma once

#include <bit>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "device.h"
#include "fiber.h"
#include "launch.h"

namespace deep_kernels::emulator {

inline constexpr i32 kWarp = 32;
inline constexpr i32 kMaxThreads = 1024;         // of a block
inline constexpr i32 kMaxClusterThreads = 2048;  // one bit per warp in 64
inline constexpr i32 kMaxMbarriers = 64;         // of a block
inline constexpr i32 kWarpgroupWarps = 4;

// A place in the kernel's text, interned per launch; 0 is nowhere.
using Place = u16;

// Who did something to memory: a thread, or something asynchronous that acts for one. The wgmma
// of a warp and the copies that an mbarrier counts are agents of their own, because a thread knows
// of their work only after it has waited for it.
using Agent = u16;
inline constexpr Agent kNobody = 0xffff;

// What a thread waits for, as the report of a deadlock words it.
enum class Wait : u8 { nothing, meeting, barrier, mbarrier, wgmma, registers, cluster };

struct CopyAsync {
  u32 smem;
  const u8* global;
  u32 size;
  u32 bytes;
  Place place;
  i64 end;
};

struct Thread {
  Stopped stopped = nullptr;
  i32 index = 0;
  i32 rank = 0;  // of its block
  const char* role = "";
  bool exited = false;
  Wait waits = Wait::nothing;
  Place waits_at = 0;
  u32 wait_barrier = 0;  // the address of an mbarrier, or the number of a named barrier
  u32 wait_parity = 0;
  u64 result = 0;  // of the last meeting
  bool touched_global = false;
  bool waited_dependency = false;
  i64 time = 0;                        // while it does not run; else identity.time
  std::vector<CopyAsync> open_copies;  // cp.async not yet in a group
  std::deque<std::vector<CopyAsync>> committed_copies;
  std::vector<u32> uninitialized_barriers_to_fence;

  i32 lane() const { return index % kWarp; }
  i32 warp() const { return index / kWarp; }
};

struct Warp {
  u32 ready = 0;    // lanes that can run
  u32 arrived = 0;  // lanes in the meeting
  Meeting meeting = Meeting::sync_warp;
  Place place = 0;
  u64 value[kWarp];
  i64 parameter[kWarp];
  bool in_barrier = false;  // waits at a named one
  bool needs_registers = false;
  // wgmma: how many of the warpgroup's operations this warp has issued, closed into groups, and
  // seen complete.
  i64 issued = 0;
  std::vector<i64> group_ends;
  i64 completed = 0;
  bool fenced = false;
  i32 registers = 0;
  Place registers_at = 0;
  u32 cluster_arrivals = 0;  // at the cluster's barrier
  u32 cluster_waits = 0;
  Place cluster_at = 0;
};

// What warps bring to a barrier and take from it: clocks, and when the last of them came.
struct Knowledge {
  std::vector<u32> clocks, proxy;
  i64 time = 0;

  void clear();
  // What the warp, whose lanes meet, has done so far and knows; its clocks tick.
  void gather(i32 warp);
  void tell(i32 warp) const;
  // Whether the lanes of the warp together know all of it.
  bool known_to(i32 warp) const;
};

struct NamedBarrier {
  struct Comer {
    i32 warp;
    bool waits;
    Place place;
  };
  i32 expected = 0;
  std::vector<Comer> comers;  // in this phase
  Knowledge pending, done;    // of this phase and of the one before
  Place done_at = 0;          // where the last one came

  i32 arrived() const { return static_cast<i32>(comers.size()) * kWarp; }
};

// The barrier of all threads of a cluster. What arrives relaxed brings no knowledge along.
struct ClusterBarrier {
  u32 phase = 0;
  std::vector<u32> pending_clocks, done_clocks, pending_proxy, done_proxy;
  i64 pending_time = 0, done_time = 0;
};

struct Mbarrier {
  u32 addr = 0;
  u32 arrivals = 0;
  u32 pending = 0;
  i64 bytes = 0;  // expected and not yet arrived
  u64 phase = 0;
  Place init_at = 0;
  std::string name;
  i32 init_thread = 0;
  u32 init_clock = 0;
  bool async_visible = false;
  bool released = false;  // to the cluster, by fence.mbarrier_init
  u32 cluster_phase = 0;  // the cluster barrier's from which on all blocks know of it; 0: none
  u32 peer_clock = 0;     // the agent's at the end of the last copy from another block
  i32 copies = 0;         // in flight
  Agent agent = 0;
  u32 agent_clock = 0;
  std::vector<u32> pending_clocks, done_clocks, pending_proxy, done_proxy;
  std::vector<i32> waiters;
  std::vector<std::pair<i32, Place>> arrived;  // in this phase
  i64 pending_time = 0, done_time = 0;
};

// By TMA into one block, or by st.async.
struct TmaCopy {
  u32 smem;
  u32 bytes;
  u32 words[4];  // of st.async, which has no map: its rank is 0
  MapDescription map;
  i32 coordinates[MapDescription::kMaxRank];
  i32 barrier;  // index
  u64 phase;
  i32 thread;
  Place place;
  i64 end;  // when it lands, in cycles of the timeline
};

struct Wgmma {
  WgmmaOperands operands;  // d is not used
  Place place = 0;
  i64 previous = -1;  // the operation whose result this one starts from
  bool executed = false;
  i32 warps = 0;              // that have issued it
  std::vector<float> values;  // [64][n]: c before, the result after
  std::vector<u8> a;          // [64][32] out of registers; empty: a is in shared memory
  const u32* fragment[kWarpgroupWarps * kWarp] = {};  // the registers that it came out of
  float* d[kWarpgroupWarps * kWarp] = {};
  i64 ready_time = 0;  // cycles of the timeline: when the last warp has issued it,
  i64 done_time = 0;   // and when the tensor cores are through
};
struct Warpgroup {
  std::deque<Wgmma> operations;
  i64 first = 0;  // index of operations.front()

  Wgmma& operation(i64 index) { return operations[static_cast<std::size_t>(index - first)]; }
  i64 end() const { return first + static_cast<i64>(operations.size()); }
};

// The last arrival of a thread at an mbarrier of another block.
struct Touch {
  u32 clock = 0;  // of the thread; 0: none
  u32 cluster_arrivals = 0;
  Place place = 0;
};

struct Block {
  NamedBarrier barriers[16];
  i32 free_registers = 0;
  i32 running = 0;                             // threads that have not ended
  i64 copies_busy = 0, tensor_cores_busy = 0;  // until when, in cycles of the timeline
  std::vector<Touch> touches;                  // by thread of the cluster; empty without peers
};

struct Random {
  u64 state = 1;
  u32 next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<u32>(state >> 32);
  }
  u32 below(u32 limit) { return next() % limit; }
};

struct Machine {
  const DkLaunch* launch = nullptr;
  i32 cluster = 1;  // blocks that run together
  i32 first_block = 0;
  i32 block_threads = 0, block_warps = 0;
  i32 num_threads = 0, num_warps = 0;  // of all blocks
  std::vector<Block> blocks;
  ClusterBarrier cluster_barrier;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;  // at the index of the first warp
  std::vector<Mbarrier> mbarriers;
  std::deque<TmaCopy> copies;
  bool proxy_used = false;  // a proxy fence was met: its clocks are kept from now on
  Random random;
  Stacks stacks;
  Stopped scheduler = nullptr;
  Thread* current = nullptr;  // null: the scheduler itself

  // Vector clocks: what a thread knows of every agent, [thread][agent]; the second kind counts
  // only what a proxy fence has made visible to the async proxy.
  i32 num_agents = 0;
  std::vector<u32> clocks, proxy_clocks;
  u32* clocks_of(i32 thread) {
    return clocks.data() + static_cast<std::size_t>(thread) * num_agents;
  }
  u32* proxy_of(i32 thread) {
    return proxy_clocks.data() + static_cast<std::size_t>(thread) * num_agents;
  }
  u32 clock_of(i32 thread) { return clocks_of(thread)[thread]; }
  Agent wgmma_agent(i32 warp) const { return static_cast<Agent>(num_threads + warp); }
  // Its clock counts the phases of the cluster's barrier.
  Agent cluster_agent() const { return static_cast<Agent>(num_agents - 1); }

  i32 rank_of(i32 warp) const { return cluster == 1 ? 0 : warp / block_warps; }
  Block& block_of(i32 warp) { return blocks[rank_of(warp)]; }
  // The warps [begin, end) of a warp's warpgroup; the last one of a block may lack some.
  i32 warpgroup_begin(i32 warp) const {
    const i32 first = rank_of(warp) * block_warps;
    return first + (warp - first) / kWarpgroupWarps * kWarpgroupWarps;
  }
  i32 warpgroup_end(i32 warp) const {
    return min_of(warpgroup_begin(warp) + kWarpgroupWarps, (rank_of(warp) + 1) * block_warps);
  }
  Warpgroup& warpgroup_of(i32 warp) { return warpgroups[warpgroup_begin(warp)]; }
};
extern Machine machine;

inline Thread& self() { return *machine.current; }
inline Block& own_block() { return machine.blocks[self().rank]; }

void join(u32* into, const u32* from, i32 count);
// This thread's work so far becomes something that others can come to know.
void tick(i32 thread);

// --- scheduler.cpp

// Runs the blocks of one cluster, from this one on, to their end.
void run_cluster(i32 first_block);
// Stops the current thread until it is woken; the caller tests its condition again.
void wait_for(Wait what, Place at);
void wake(i32 thread);
// A chance for another warp where the seed asks for variety.
void maybe_yield();

// --- barriers.cpp

// A warp, whose lanes meet, comes to a named barrier; one that waits is let go when all have come.
void enter_barrier(i32 warp, u32 id, u32 num_threads, bool waits, Place at);
// At an address of the cluster's shared memory that was checked.
Mbarrier& find_mbarrier(u32 addr, const char* use, Place at);
void complete_bytes(const TmaCopy& copy);
bool phase_done(const Mbarrier& barrier, u32 parity);

// --- cluster.cpp

// Before the current thread does something to the shared memory of the block of this rank: refuses
// what may come before the block has started or after it has ended.
void require_peer(i32 rank, const char* use, Place at);
// A warp, whose lanes meet, arrives at the cluster's barrier, or may wait for it.
void enter_cluster_barrier(i32 warp, bool relaxed, Place at);
void leave_cluster_barrier(i32 warp, Place at);
// A thread has ended: it counts as arrived, and its block may have ended with it.
void leave_cluster(i32 thread);
std::string describe_cluster_barrier();

// --- copies.cpp

void finish_copy(std::size_t index);

// --- wgmma.cpp, fragments.cpp: the last lane of a warp's meeting has arrived

void issue_wgmma(i32 warp, Place at);
void commit_wgmma(i32 warp);
void retire_wgmma(i32 warp, i64 target, Place at);
bool wgmma_may_finish(i32 warp, i64 target);
void run_ldmatrix(Warp& warp, i32 first_thread, i32 count, Place at);
void run_mma(Warp& warp, Place at);
void set_registers(i32 warp, i32 registers, bool up, Place at);

}  // namespace deep_kernels::emulator
