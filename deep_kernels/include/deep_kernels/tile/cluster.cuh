// What blocks of a cluster do together, or a block alone (kBlocks 1) without the price of it.
#pragma once

#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::tile {

template <i32 kBlocks>
DK_DEVICE i32 block_rank() {
  if constexpr (kBlocks == 1) return 0;
  return ptx::cluster_rank();
}

// All threads. Behind it the barriers that each block has initialised may be reached by the others.
template <i32 kBlocks>
DK_DEVICE void sync_blocks() {
  if constexpr (kBlocks == 1) {
    ptx::sync_threads();
  } else {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
}

// An arrival of the warp at this mbarrier of every block.
template <i32 kBlocks>
DK_DEVICE void arrive_in_blocks(u32 barrier) {
  ptx::sync_warp();
  const i32 lane = ptx::lane_index();
  if constexpr (kBlocks == 1) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  } else {
    if (lane < kBlocks) ptx::mbarrier_arrive_peer(ptx::peer_smem(barrier, lane));
  }
}

// A block may not end while others will still arrive at its barriers, as they do for what they
// drain: whoever fills the ring waits until all of it is drained.
template <i32 kBlocks, i32 kSlots>
DK_DEVICE void drain_ring(const u64 (&drained)[kSlots], Ring<kSlots> ring) {
  if constexpr (kBlocks > 1) {
    DK_NO_UNROLL
    for (i32 i = 0; i < kSlots; ++i, ring.next())
      ptx::mbarrier_wait(ptx::smem_addr(&drained[ring.slot]), ring.parity);
  }
}

}  // namespace deep_kernels::tile
