// Clusters: blocks that run together and reach each other's shared memory, from the moment on when
// all of them have started until the other one ends.
#include "report.h"
#include "shared.h"
#include "trace.h"

namespace deep_kernels::emulator {

namespace {

bool has_arrived(const Warp& warp) { return warp.cluster_arrivals > machine.cluster_barrier.phase; }

bool has_ended(i32 warp) {
  for (i32 lane = 0; lane < kWarp; ++lane)
    if (!machine.threads[warp * kWarp + lane].exited) return false;
  return true;
}

// What has ended counts as arrived.
void try_complete() {
  ClusterBarrier& barrier = machine.cluster_barrier;
  bool anybody = false;
  for (i32 w = 0; w < machine.num_warps; ++w) {
    const bool arrived = has_arrived(machine.warps[w]);
    if (!arrived && !has_ended(w)) return;
    anybody |= arrived;
  }
  if (!anybody) return;
  barrier.pending_clocks[machine.cluster_agent()] = ++barrier.phase;
  barrier.done_clocks = barrier.pending_clocks;
  barrier.done_proxy = barrier.pending_proxy;
  barrier.done_time = barrier.pending_time;
  for (const Thread& thread : machine.threads)
    if (thread.waits == Wait::cluster) wake(thread.index);
}

// Whether some thread of the block knows of what another thread has done to the block's memory.
bool knows_touch(i32 rank, i32 other, const Touch& touch) {
  const i32 first = rank * machine.block_threads;
  for (i32 thread = first; thread < first + machine.block_threads; ++thread) {
    const u32* clocks = machine.clocks_of(thread);
    if (clocks[other] >= touch.clock || clocks[machine.cluster_agent()] > touch.cluster_arrivals)
      return true;
  }
  return false;
}

bool knows_copies(i32 rank, const Mbarrier& barrier) {
  const i32 first = rank * machine.block_threads;
  for (i32 thread = first; thread < first + machine.block_threads; ++thread)
    if (machine.clocks_of(thread)[barrier.agent] >= barrier.peer_clock) return true;
  return false;
}

// The last thread of the block has ended. Nothing that others do to its memory may be able to come
// later, whatever the order of threads in this run.
void check_end_of_block(i32 rank) {
  const Block& block = machine.blocks[rank];
  const std::string name = block_name(rank);
  for (const TmaCopy& copy : machine.copies)
    if (static_cast<i32>(copy.smem >> kRankShift) == rank &&
        machine.threads[copy.thread].rank != rank)
      fail("cluster",
           format("%s ends while %u bytes to %s, sent by %s, are on their way", name.c_str(),
                  copy.bytes, smem_name(copy.smem).c_str(), thread_name(copy.thread).c_str()) +
               cite("sent at", copy.place),
           0);
  for (const Mbarrier& barrier : machine.mbarriers)
    if (static_cast<i32>(barrier.addr >> kRankShift) == rank && !knows_copies(rank, barrier))
      fail("cluster",
           format("%s ends and has not waited for all that other blocks have sent it, counted by "
                  "mbarrier %s",
                  name.c_str(), barrier.name.c_str()) +
               cite("initialised at", barrier.init_at),
           0);
  for (i32 other = 0; other < machine.num_threads; ++other)
    if (const Touch& touch = block.touches[other]; !knows_touch(rank, other, touch))
      fail("cluster",
           format("%s may end before %s has arrived at an mbarrier of it: nothing orders the two",
                  name.c_str(), thread_name(other).c_str()) +
               cite("the arrival is at", touch.place),
           0);
}

}  // namespace

void require_peer(i32 rank, const char* use, Place at) {
  const Thread& thread = self();
  if (rank == thread.rank) return;
  if (machine.clocks_of(thread.index)[machine.cluster_agent()] == 0)
    fail("cluster",
         format("%s in the shared memory of %s, which may not have started: a cluster barrier must "
                "come before",
                use, block_name(rank).c_str()),
         at);
  if (machine.blocks[rank].running == 0)
    fail("cluster",
         format("%s in the shared memory of %s, which has ended", use, block_name(rank).c_str()),
         at);
}

void enter_cluster_barrier(i32 index, bool relaxed, Place at) {
  Warp& warp = machine.warps[index];
  ClusterBarrier& barrier = machine.cluster_barrier;
  if (warp.cluster_arrivals != warp.cluster_waits)
    fail("barrier",
         "arrives at the cluster's barrier again and has not waited for it" +
             cite("the last arrival is at", warp.cluster_at),
         at);
  ++warp.cluster_arrivals;
  warp.cluster_at = at;
  barrier.pending_time = max_of(barrier.pending_time, identity.time);
  for (Mbarrier& mbarrier : machine.mbarriers)
    if (mbarrier.released && mbarrier.cluster_phase == 0 && mbarrier.init_thread / kWarp == index)
      mbarrier.cluster_phase = barrier.phase + 1;
  for (i32 thread = index * kWarp; !relaxed && thread < (index + 1) * kWarp; ++thread) {
    join(barrier.pending_clocks.data(), machine.clocks_of(thread), machine.num_agents);
    join(barrier.pending_proxy.data(), machine.proxy_of(thread), machine.num_agents);
    tick(thread);
  }
  try_complete();
}

void leave_cluster_barrier(i32 index, Place at) {
  Warp& warp = machine.warps[index];
  if (warp.cluster_arrivals == warp.cluster_waits)
    fail("barrier", "waits for the cluster's barrier and has not arrived at it", at);
  ++warp.cluster_waits;
}

void leave_cluster(i32 index) {
  const Thread& thread = machine.threads[index];
  if (has_ended(thread.warp())) try_complete();
  if (--machine.blocks[thread.rank].running == 0 && machine.cluster > 1)
    check_end_of_block(thread.rank);
}

std::string describe_cluster_barrier() {
  i32 arrived = 0;
  for (const Warp& warp : machine.warps) arrived += has_arrived(warp);
  return format("for the cluster's barrier, phase %u: %d of %d warps are there",
                machine.cluster_barrier.phase, arrived, machine.num_warps);
}

// --- what ptx/ calls

u32 peer_smem(u32 smem, i32 rank, At at) {
  if (rank < 0 || rank >= machine.cluster)
    fail("bounds", format("rank %d in a cluster of %d blocks", rank, machine.cluster),
         place_of(at));
  own_memory().check_range(smem, 1, 1, "mapa", place_of(at));
  return smem_of_rank(smem, rank);
}

void cluster_arrive(bool relaxed, At at) { meet(Meeting::cluster_arrive, relaxed ? 1 : 0, 0, at); }

void cluster_wait(At at) {
  const Place place = place_of(at);
  meet(Meeting::cluster_wait, 0, 0, at);
  const Thread& thread = self();
  const ClusterBarrier& barrier = machine.cluster_barrier;
  while (barrier.phase < machine.warps[thread.warp()].cluster_waits) wait_for(Wait::cluster, place);
  join(machine.clocks_of(thread.index), barrier.done_clocks.data(), machine.num_agents);
  join(machine.proxy_of(thread.index), barrier.done_proxy.data(), machine.num_agents);
  trace::wait("the cluster's barrier", static_cast<i64>(barrier.phase) - 1, barrier.done_time,
              place);
  wait_until(barrier.done_time);
  spend(cycles::kBarrier);
}

}  // namespace deep_kernels::emulator
