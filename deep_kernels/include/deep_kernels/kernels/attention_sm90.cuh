// Flash attention forward on Hopper. Persistent blocks, or clusters of two:
//
//   schedule warp     which rows and keys come next
//   kv warp           streams tiles of keys and values through two rings, right to left
//   query warp        loads the queries of every math warpgroup
//   tail warp         with cu_seqlens: clears the values behind a member's last one
//   math warpgroups   64 rows each
//
// Rows are queries of one head, or with S.packs_heads of all heads of a kv head.
//
// The blocks of a cluster (S.cluster) have rows of one head: each loads half of the panels of every
// tile of keys and values for both, by multicast. A stage is then filled by two kv warps, which
// both wait until both blocks have drained it.
//
// Source of the design: the feasibility study for this op on an H200 (order of the products, one
// tensor map of five dimensions for all panels of a tile, lazy rescale, clusters, tiles).
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/kernels/attention_math_sm90.cuh"
#include "deep_kernels/kernels/attention_unit_sm90.cuh"
#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/cluster.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::flash {

// Three or four warpgroups start with 168 or 128 registers each; what the loading warps give up the
// math warpgroups take. Two have as many as a thread may.
template <AttentionSpec S>
struct RoleRegisters {
  static constexpr bool kMove = Smem<S>::kGroups > 1;
  static constexpr bool kThree = Smem<S>::kGroups == 3;
  static constexpr i32 kMath = !kThree ? 232 : S.head_dim() == 64 ? 160 : 152;
  static constexpr i32 kLoads = !kThree ? 40 : S.head_dim() == 64 ? 32 : 56;
};

// One warp that loads for the block's units; a lane issues, all of them find out what.
template <AttentionSpec S, class Maps>
struct Loader {
  static constexpr i32 kTileBytes = S.tile_keys * S.head_dim() * 2;
  static constexpr i32 kPanels = S.head_panels / S.cluster;  // of a tile, loaded by this block

  const AttentionArgs& args;
  const Maps& maps;
  Smem<S>& smem;

  template <class Load>
  DK_DEVICE void each_unit(Load&& load) const {
    Units<S>{smem}.each([&](const RowTile& unit) {
      if (unit.keys.end > unit.keys.begin) load(unit);
    });
  }

  DK_DEVICE void load_keys_and_values() const {
    auto ks = tile::Ring<S.k_stages>::filler();
    auto vs = tile::Ring<S.v_stages>::filler();
    each_unit([&](const RowTile& unit) {
      if (ptx::lane_index() == 0) {
        i32 tile = unit.keys.end - 1;
        load_keys(unit, tile, ks);
        DK_NO_UNROLL
        for (; tile > unit.keys.begin; --tile) {
          load_keys(unit, tile - 1, ks);
          load_values(unit, tile, vs);
        }
        load_values(unit, tile, vs);
      }
      ptx::sync_warp();
    });
    if (ptx::lane_index() == 0) {
      tile::drain_ring<S.cluster>(smem.k_drained, ks);
      tile::drain_ring<S.cluster>(smem.v_drained, vs);
    }
  }
  DK_DEVICE void load_keys(const RowTile& unit, i32 tile, tile::Ring<S.k_stages>& stages) const {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.k_drained[stages.slot]), stages.parity);
    load_tile(unit, maps.k, smem.k[stages.slot], smem.k_filled[stages.slot], tile);
    stages.next();
  }
  DK_DEVICE void load_values(const RowTile& unit, i32 tile, tile::Ring<S.v_stages>& stages) const {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.v_drained[stages.slot]), stages.parity);
    load_tile(unit, maps.v, smem.v[stages.slot],
              S.varlen ? smem.v_landed[stages.slot] : smem.v_filled[stages.slot], tile);
    stages.next();
  }
  template <class Map, class Tile>
  DK_DEVICE void load_tile(const RowTile& unit, const Map& map, Tile& to, u64& barrier,
                           i32 tile) const {
    const i32 panel = tile::block_rank<S.cluster>() * kPanels;
    const i32 token = static_cast<i32>(unit.member.first_kv) + tile * S.tile_keys;
    const i32 batch = static_cast<i32>(unit.member.batch);
    const u32 filled = ptx::smem_addr(&barrier);
    const u32 address = ptx::smem_addr(&to[panel]);
    ptx::mbarrier_arrive_expect_tx(filled, kTileBytes);
    if constexpr (S.cluster == 1)
      ptx::tma_load_5d(address, map, filled, 0, token, panel, unit.kv_head, batch);
    else
      ptx::tma_load_5d_multicast(address, map, filled, 0, token, panel, unit.kv_head, batch,
                                 (1u << S.cluster) - 1);
  }

  DK_DEVICE void load_queries() const {
    if constexpr (S.packs_heads) clear_rows_without_query();
    auto stages = tile::Ring<S.q_stages()>::filler();
    each_unit([&](const RowTile& unit) {
      if (ptx::lane_index() == 0) {
        DK_NO_UNROLL
        for (i32 group = 0; group < Smem<S>::kGroups; ++group) {
          ptx::mbarrier_wait(ptx::smem_addr(&smem.q_drained[stages.slot][group]), stages.parity);
          load_group(unit, stages.slot, group);
        }
      }
      ptx::sync_warp();
      stages.next();
    });
  }
  DK_DEVICE i32 group_rows() const { return group_queries<S>(args) * heads_per_unit<S>(args); }
  DK_DEVICE void load_group(const RowTile& unit, i32 stage, i32 group) const {
    const u32 filled = ptx::smem_addr(&smem.q_filled[stage][group]);
    const i32 token =
        static_cast<i32>(unit.member.first_q) + unit.first_query + first_query_of<S>(args, group);
    const i32 batch = static_cast<i32>(unit.member.batch);
    if constexpr (S.packs_heads) {
      constexpr u32 kRowBytes = S.head_dim() * 2;
      ptx::mbarrier_arrive_expect_tx(filled, static_cast<u32>(group_rows()) * kRowBytes);
      DK_NO_UNROLL
      for (i32 panel = 0; panel < S.head_panels; ++panel)
        ptx::tma_load_5d(ptx::smem_addr(&smem.q[stage][group][panel]), maps.q, filled, 0, unit.head,
                         token, panel, batch);
    } else {
      ptx::mbarrier_arrive_expect_tx(filled, kAttentionGroupRows * S.head_dim() * 2);
      ptx::tma_load_5d(ptx::smem_addr(&smem.q[stage][group]), maps.q, filled, 0, token, 0,
                       unit.head, batch);
    }
  }
  // Which no copy writes, and the tensor cores read.
  DK_DEVICE void clear_rows_without_query() const {
    DK_NO_UNROLL
    for (i32 stage = 0; stage < S.q_stages(); ++stage)
      for (i32 group = 0; group < Smem<S>::kGroups; ++group)
        clear_rows(smem.q[stage][group], group_rows());
    ptx::sync_warp();
  }

  // Behind a member's last value in memory stands another member's, whose NaN would not vanish when
  // it is multiplied by 0.
  DK_DEVICE void clear_tails() const {
    auto stages = tile::Ring<S.v_stages>::drainer();
    each_unit([&](const RowTile& unit) {
      DK_NO_UNROLL
      for (i32 tile = unit.keys.end - 1; tile >= unit.keys.begin; --tile, stages.next()) {
        const i32 values = unit.member.num_kv - tile * S.tile_keys;
        ptx::mbarrier_wait(ptx::smem_addr(&smem.v_landed[stages.slot]), stages.parity);
        if (values < S.tile_keys) clear_rows(smem.v[stages.slot], values);
        tile::arrive_in_blocks<1>(ptx::smem_addr(&smem.v_filled[stages.slot]));
      }
    });
  }
  // From row `first` on.
  template <i32 kRows>
  static DK_DEVICE void clear_rows(u16 (&tile)[S.head_panels][kRows][kHeadPanel], i32 first) {
    DK_NO_UNROLL
    for (i32 panel = 0; panel < S.head_panels; ++panel) {
      const u32 begin = ptx::smem_addr(&tile[panel]);
      constexpr i32 kRowBytes = kHeadPanel * 2;
      DK_NO_UNROLL
      for (i32 at = first * kRowBytes + 16 * ptx::lane_index(); at < kRows * kRowBytes;
           at += 16 * 32)
        ptx::store_shared_x4(begin + static_cast<u32>(at), 0, 0, 0, 0);
    }
    ptx::fence_proxy_async();
  }
};

}  // namespace deep_kernels::flash

namespace deep_kernels {

template <AttentionSpec S, class Maps>
DK_DEVICE void attention_sm90(const AttentionArgs& args, const Maps& maps) {
  using namespace flash;
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(Smem<S>) <= S.smem_bytes());
  using Registers = RoleRegisters<S>;
  auto& smem = ptx::dynamic_smem<Smem<S>>();
  constexpr i32 kMathWarps = Smem<S>::kMathWarps;
  const i32 warp = ptx::warp_index();
  if (ptx::thread_index() == S.num_threads() - 32) {
    ptx::prefetch_tensor_map(maps.q);
    if (args.total_kv > 0) {  // of no keys there are no maps
      ptx::prefetch_tensor_map(maps.k);
      ptx::prefetch_tensor_map(maps.v);
    }
  }
  init_barriers<S>(smem);
  ptx::grid_dependency_wait();  // nothing above reads what a kernel ahead may have written
  tile::sync_blocks<S.cluster>();
  if constexpr (S.split) ptx::grid_dependency_launch();  // the join, which waits for all of this

  if (warp >= kMathWarps) {
    if constexpr (Registers::kMove) ptx::set_max_registers_down<Registers::kLoads>();
    const Loader<S, Maps> loader{args, maps, smem};
    if (warp == kMathWarps) {
      ptx::role("keys and values");
      loader.load_keys_and_values();
    } else if (warp == kMathWarps + 1) {
      ptx::role("queries");
      loader.load_queries();
    } else if (warp == kMathWarps + 2) {
      ptx::role("schedule");
      deal_out_units<S>(args, smem);
    } else if (S.varlen) {
      ptx::role("tails");
      loader.clear_tails();
    }
    return;
  }
  if constexpr (Registers::kMove) ptx::set_max_registers_up<Registers::kMath>();
  ptx::role("math");
  Math<S> math(args, smem, warp / 4);
  math.run();
}

}  // namespace deep_kernels
