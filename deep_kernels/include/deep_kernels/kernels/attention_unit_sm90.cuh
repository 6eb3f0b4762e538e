// What the warps of a block of flash attention on Hopper share, and how units of work reach them:
// one warp finds out which rows and keys come next, and the others read it.
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/kernels/attention_queue.cuh"
#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/cluster.cuh"
#include "deep_kernels/tile/pipeline.cuh"
#include "deep_kernels/tile/shared_object.cuh"

namespace deep_kernels::flash {

template <AttentionSpec S>
struct Smem {
  static constexpr i32 kGroups = S.tile_rows / kAttentionGroupRows;
  static constexpr i32 kMathWarps = 4 * kGroups;
  // What has been dealt out: of the loading warps one may be at the next unit but one while the
  // math warps still store the last.
  static constexpr i32 kUnits = 4;
  alignas(1024) u16 q[S.q_stages()][kGroups][S.head_panels][kAttentionGroupRows][kHeadPanel];
  alignas(1024) u16 k[S.k_stages][S.head_panels][S.tile_keys][kHeadPanel];
  alignas(1024) u16 v[S.v_stages][S.head_panels][S.tile_keys][kHeadPanel];
  RowTile unit[kUnits];  // the last one has no rows
  i32 work[kMaxQueueClusters];
  // Each pair: who arrives, who waits.
  alignas(8) u64 unit_filled[kUnits];    // schedule warp -> loading and math warps
  u64 unit_drained[kUnits];              // and back
  u64 q_filled[S.q_stages()][kGroups];   // query warp, and TMA bytes -> warps of the group
  u64 q_drained[S.q_stages()][kGroups];  // and back
  u64 k_filled[S.k_stages];              // kv warp, and TMA bytes -> math warps
  u64 k_drained[S.k_stages];             // math warps of the cluster -> kv warp
  u64 v_landed[S.v_stages];              // with cu_seqlens: kv warp, and TMA bytes -> tail warp
  u64 v_filled[S.v_stages];              // tail warp, or kv warp and TMA bytes -> math warps
  u64 v_drained[S.v_stages];             // math warps of the cluster -> kv warp
};

template <AttentionSpec S>
DK_DEVICE void init_barriers(Smem<S>& smem) {
  if (ptx::thread_index() != 0) return;
  constexpr i32 kMathWarps = Smem<S>::kMathWarps;
  constexpr u32 kReaders = kMathWarps + (S.varlen ? 3 : 2);
  DK_UNROLL
  for (i32 i = 0; i < Smem<S>::kUnits; ++i) {
    ptx::mbarrier_init(ptx::smem_addr(&smem.unit_filled[i]), 1);
    ptx::mbarrier_init(ptx::smem_addr(&smem.unit_drained[i]), kReaders);
  }
  DK_UNROLL
  for (i32 stage = 0; stage < S.q_stages(); ++stage) {
    DK_UNROLL
    for (i32 i = 0; i < Smem<S>::kGroups; ++i) {
      ptx::mbarrier_init(ptx::smem_addr(&smem.q_filled[stage][i]), 1);
      ptx::mbarrier_init(ptx::smem_addr(&smem.q_drained[stage][i]), 4);
    }
  }
  DK_UNROLL
  for (i32 i = 0; i < S.k_stages; ++i) {
    ptx::mbarrier_init(ptx::smem_addr(&smem.k_filled[i]), 1);
    ptx::mbarrier_init(ptx::smem_addr(&smem.k_drained[i]), kMathWarps * S.cluster);
  }
  DK_UNROLL
  for (i32 i = 0; i < S.v_stages; ++i) {
    ptx::mbarrier_init(ptx::smem_addr(&smem.v_landed[i]), 1);
    ptx::mbarrier_init(ptx::smem_addr(&smem.v_filled[i]), 1);
    ptx::mbarrier_init(ptx::smem_addr(&smem.v_drained[i]), kMathWarps * S.cluster);
  }
  ptx::fence_mbarrier_init();
}

// The first of a unit's queries that a math warpgroup has. The blocks of a cluster share the keys,
// and with a causal mask the later queries see more of them: the first and the last quarter go to
// one block.
template <AttentionSpec S>
DK_DEVICE i32 first_query_of(const AttentionArgs& args, i32 group) {
  const i32 rank = tile::block_rank<S.cluster>();
  if constexpr (S.cluster > 1) group = group == 0 ? rank : 3 - rank;
  return group * group_queries<S>(args);
}

// One warp, which finds out in what order the block's units come.
template <AttentionSpec S>
DK_DEVICE void deal_out_units(const AttentionArgs& args, Smem<S>& smem) {
  auto slots = tile::Ring<Smem<S>::kUnits>::filler();
  const auto deal = [&](const RowTile& unit) {
    if (ptx::lane_index() == 0) {
      ptx::mbarrier_wait(ptx::smem_addr(&smem.unit_drained[slots.slot]), slots.parity);
      tile::store_shared(smem.unit[slots.slot], unit);
      ptx::mbarrier_arrive(ptx::smem_addr(&smem.unit_filled[slots.slot]));
    }
    ptx::sync_warp();
    slots.next();
  };
  TileQueue<S>(args, ptx::smem_addr(&smem.work)).each([&](const RowTile& unit) {
    if (unit.exists()) deal(unit);
  });
  deal(RowTile{});
}

// A warp that gets them.
template <AttentionSpec S>
struct Units {
  Smem<S>& smem;
  tile::Ring<Smem<S>::kUnits> slots = tile::Ring<Smem<S>::kUnits>::drainer();

  // The next one, which stays in its slot until it is given back; one without rows is the last.
  DK_DEVICE RowTile look() const {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.unit_filled[slots.slot]), slots.parity);
    return tile::load_shared(smem.unit[slots.slot]);
  }
  DK_DEVICE void give_back(i32 slot) const {
    tile::arrive_in_blocks<1>(ptx::smem_addr(&smem.unit_drained[slot]));
  }
  template <class Work>
  DK_DEVICE void each(Work&& work) {
    for (;;) {
      const RowTile unit = look();
      give_back(slots.slot);
      slots.next();
      if (!unit.exists()) return;
      work(unit);
    }
  }
};

}  // namespace deep_kernels::flash
