// In which order clusters, of one block or two, take tiles of rows.
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/kernels/attention_tiles.cuh"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::flash {

// All tiles of a launch, at most kMaxUnits. Heads come in bands whose keys and values stay in the
// L2 cache; inside of a band the tiles with most keys come first, heads and splits fastest. Tiles
// that are alike are taken in turn. Where masks or members make them differ, each goes to the
// cluster that has least to do so far, as all clusters find out by the same sums.
template <AttentionSpec S>
struct TileQueue {
  static constexpr u32 kBandKeys = (32 << 20) / (S.head_dim() * 4);  // with their values 32 MB
  static constexpr bool kAlike = !S.causal && !S.varlen;
  static constexpr i32 kOfLane = kMaxQueueClusters / 32;  // clusters whose work a lane sums up
  // What begins and ends a tile of rows, in tiles of keys: 3 to 5 as timed.
  static constexpr i32 kTileCost = 4;
  static constexpr i32 kMostCost = 1 << 16;  // 32 of them, times 256, are an i32

  const AttentionArgs& args;
  u32 work;       // kMaxQueueClusters sums in shared memory
  u32 row_tiles;  // of a member, or with cu_seqlens of all
  u32 heads;      // S.unit_heads, times members where they are alike
  u32 band;       // of these
  u32 count;
  u32 clusters;
  u32 cluster;

  DK_DEVICE TileQueue(const AttentionArgs& args, u32 work) : args(args), work(work) {
    heads = static_cast<u32>(S.unit_heads(args)) * (S.varlen ? 1 : args.batch);
    count = static_cast<u32>(S.num_units(args));
    row_tiles = count / heads / args.num_splits;
    const u32 keys = S.varlen ? static_cast<u32>(args.total_kv) : args.num_kv;
    const i64 kv_heads = max_of(kBandKeys / max_of(keys, 1u), 1u);
    const i32 of_kv_head = S.packs_heads ? 1 : args.heads_per_kv();
    band = static_cast<u32>(min_of<i64>(kv_heads * of_kv_head, heads));
    clusters = static_cast<u32>(ptx::num_blocks() / S.cluster);
    cluster = static_cast<u32>(ptx::block_index() / S.cluster);
  }

  // Converged. deal(tile): of every tile of this cluster.
  template <class Deal>
  DK_DEVICE void each(Deal&& deal) const {
    if constexpr (kAlike) {
      DK_NO_UNROLL
      for (u32 index = cluster; index < count; index += clusters) deal(at(index));
    } else {
      if (cluster < count) deal(at(cluster));
      if (count > clusters) deal_by_work(deal);
    }
  }

 private:
  // Of all tiles but the first ones, which every cluster has one of. What a cluster has to do
  // stands as work * 256 + cluster, so that the least of all is one comparison; a lane looks after
  // the clusters lane, lane + 32, ..
  template <class Deal>
  DK_DEVICE void deal_by_work(Deal& deal) const {
    const u32 sums = work + 4 * static_cast<u32>(ptx::lane_index());
    DK_NO_UNROLL
    for (i32 first = 0; first < kMaxQueueClusters; first += 32) {
      const u32 which = static_cast<u32>(first + ptx::lane_index());
      const i32 sum = which < clusters ? cost_of(which) * 256 + static_cast<i32>(which) : kNobody;
      ptx::store_shared_i32(sums + 4 * static_cast<u32>(first), sum);
    }
    DK_NO_UNROLL
    for (u32 first = clusters; first < count; first += 32) {
      u32 mine = deal_some(sums, cost_of(first + static_cast<u32>(ptx::lane_index())));
      DK_NO_UNROLL
      for (u32 index = first; mine != 0 && index < count; ++index, mine >>= 1)
        if (mine % 2 != 0) deal(at(index));
    }
  }
  // The lanes' tiles, in turn; bit i: whether lane i's, if there is one, is for this cluster. Four
  // at a time have the latency of their shuffles in common.
  DK_DEVICE u32 deal_some(u32 sums, i32 cost) const {
    i32 sum[kOfLane];
    DK_UNROLL
    for (i32 i = 0; i < kOfLane; ++i) sum[i] = ptx::load_shared_i32(sums + 128 * i);
    u32 mine = 0;
    DK_NO_UNROLL
    for (i32 first = 0; first < 32; first += 4) {
      DK_UNROLL
      for (i32 i = 0; i < 4; ++i) {
        const i32 added = ptx::shuffle(cost, first + i) * 256;
        const i32 least = ptx::reduce_min(least_of(sum));
        DK_UNROLL
        for (i32 j = 0; j < kOfLane; ++j)
          if (sum[j] == least) sum[j] += added;
        if (static_cast<u32>(least % 256) == cluster) mine |= 1u << (first + i);
      }
    }
    const i32 done = ptx::reduce_min(least_of(sum)) / 256 * 256;  // differences count alone
    DK_UNROLL
    for (i32 i = 0; i < kOfLane; ++i)
      ptx::store_shared_i32(sums + 128 * i, sum[i] == kNobody ? kNobody : sum[i] - done);
    return mine;
  }
  static constexpr i32 kNobody = 0x7fffffff;
  static_assert(kMaxQueueClusters < 256 && 33 * i64{kMostCost} * 256 < kNobody);
  static DK_DEVICE i32 least_of(const i32 (&sum)[kOfLane]) {
    i32 least = sum[0];
    DK_UNROLL
    for (i32 i = 1; i < kOfLane; ++i) least = min_of(least, sum[i]);
    return least;
  }
  // Of a tile, in tiles of keys; 0 where there is none.
  DK_DEVICE i32 cost_of(u32 index) const {
    if (index >= count) return 0;
    const RowTile tile = at(index);
    if (!tile.exists()) return 0;
    return min_of(tile.keys.end - tile.keys.begin + kTileCost, kMostCost);
  }
  DK_DEVICE RowTile at(u32 index) const {
    const u32 num_splits = static_cast<u32>(args.num_splits);
    const u32 of_band = band * row_tiles * num_splits;
    const u32 which = index / of_band;
    const u32 inside = index - which * of_band;
    const u32 width = min_of(band, heads - which * band) * num_splits;
    const u32 rank = inside / width;
    const u32 rest = inside - rank * width;
    const u32 head = which * band + rest / num_splits;
    const u32 num_heads = static_cast<u32>(S.unit_heads(args));
    return make_row_tile<S>(args, static_cast<i32>(head / num_heads),
                            static_cast<i32>(S.causal ? row_tiles - 1 - rank : rank),
                            static_cast<i32>(head % num_heads),
                            static_cast<i32>(rest % num_splits));
  }
};

}  // namespace deep_kernels::flash
