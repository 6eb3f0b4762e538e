// Which rows and keys a block works on.
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::flash {

// A tile of queries of one head, and what keys a split has for them.
struct RowTile {
  AttentionMember member;
  i32 head;
  i32 kv_head;
  i32 split;
  i32 first_query;  // of the member; there may be no such query
  KeyTiles keys;    // of which some query of the tile sees a key
  i32 full_end;     // below: all queries see all keys

  DK_DEVICE bool exists() const { return first_query >= 0 && first_query < member.num_q; }
};

// Packed members have their tiles one after the other, from number cu_seqlens_q / rows + index on:
// at least as many for each as it needs, and nobody has to add them up.
template <AttentionSpec S>
DK_DEVICE i64 first_row_tile(const AttentionArgs& args, i32 index) {
  return clamp_to<i64>(args.cu_seqlens_q[index], 0, args.total_q) / S.tile_rows + index;
}
template <AttentionSpec S>
DK_DEVICE i32 member_of_row_tile(const AttentionArgs& args, i64 number) {
  i32 low = 0;
  i32 high = args.batch;
  while (high - low > 1) {
    const i32 middle = low + (high - low) / 2;
    (first_row_tile<S>(args, middle) <= number ? low : high) = middle;
  }
  return low;
}

template <AttentionSpec S>
DK_DEVICE void find_keys(const AttentionArgs& args, RowTile& tile) {
  const i32 num_q = tile.member.num_q;
  const i32 num_kv = tile.member.num_kv;
  const i32 last_query = tile.first_query + min_of<i32>(S.tile_rows, num_q - tile.first_query) - 1;
  const i32 end = attention_visible_end(last_query, num_q, num_kv, S.causal);
  tile.keys = attention_split(tile.split, args.num_splits, num_kv, S.tile_keys);
  tile.keys.end = min_of(tile.keys.end, static_cast<i32>(ceil_div<i64>(end, S.tile_keys)));
  tile.full_end = attention_visible_end(tile.first_query, num_q, num_kv, S.causal) / S.tile_keys;
}

// Tile `index` of S.num_tiles(args). Heads follow each other, so that those of a kv head find its
// keys in the cache; the last queries, which see most of the keys, come first.
template <AttentionSpec S>
DK_DEVICE RowTile row_tile(const AttentionArgs& args, i64 index) {
  RowTile tile{};
  const i64 last = S.num_tiles(args) / args.num_q_heads / args.num_splits - 1;
  tile.head = static_cast<i32>(index % args.num_q_heads);
  tile.kv_head = tile.head / args.heads_per_kv();
  index /= args.num_q_heads;
  tile.split = static_cast<i32>(index % args.num_splits);
  index = last - index / args.num_splits;
  if constexpr (S.varlen) {
    const i32 member = member_of_row_tile<S>(args, index);
    tile.member = attention_member(args, member);
    index -= first_row_tile<S>(args, member);
  } else {
    tile.member = attention_member(args, static_cast<i32>(index % args.batch));
    index /= args.batch;
  }
  tile.first_query = static_cast<i32>(index * S.tile_rows);
  if (tile.exists()) find_keys<S>(args, tile);
  return tile;
}

}  // namespace deep_kernels::flash
