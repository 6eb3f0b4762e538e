// In which order clusters, of one block or two, take tiles of rows.
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/kernels/attention_tiles.cuh"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::flash {

// All tiles of a launch, at most kMaxUnits. Heads come in bands whose keys and values stay in the
// L2 cache; inside of a band the tiles with most keys come first, heads and splits fastest. Of as
// many tiles as there are clusters each takes one, forth and back in turn, which deals
// longest-first lists out evenly.
template <AttentionSpec S>
struct TileQueue {
  static constexpr u32 kBandKeys = (32 << 20) / (S.head_dim() * 4);  // with their values 32 MB

  const AttentionArgs& args;
  u32 row_tiles;  // of a member, or with cu_seqlens of all
  u32 heads;      // S.unit_heads, times members where they are alike
  u32 band;       // of these
  u32 count;

  DK_DEVICE explicit TileQueue(const AttentionArgs& args) : args(args) {
    heads = static_cast<u32>(S.unit_heads(args)) * (S.varlen ? 1 : args.batch);
    count = static_cast<u32>(S.num_units(args));
    row_tiles = count / heads / args.num_splits;
    const u32 keys = S.varlen ? static_cast<u32>(args.total_kv) : args.num_kv;
    const i64 kv_heads = max_of(kBandKeys / max_of(keys, 1u), 1u);
    const i32 of_kv_head = S.packs_heads ? 1 : args.heads_per_kv();
    band = static_cast<u32>(min_of<i64>(kv_heads * of_kv_head, heads));
  }

  // deal(tile): of every tile of this cluster.
  template <class Deal>
  DK_DEVICE void each(Deal&& deal) const {
    const u32 clusters = static_cast<u32>(ptx::num_blocks() / S.cluster);
    const u32 cluster = static_cast<u32>(ptx::block_index() / S.cluster);
    bool forth = true;
    DK_NO_UNROLL
    for (u32 first = 0; first < count; first += clusters, forth = !forth) {
      const u32 index = first + (forth ? cluster : clusters - 1 - cluster);
      if (index < count) deal(at(index));
    }
  }

 private:
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
