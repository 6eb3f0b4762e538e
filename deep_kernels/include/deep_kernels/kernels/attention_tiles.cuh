// Which rows and keys a block, or a cluster of them, works on.
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::flash {

// What S says of a unit, a constant where it can be: members of S that get Args are compiled as if
// S were not known.
template <AttentionSpec S>
DK_DEVICE i32 heads_per_unit(const AttentionArgs& args) {
  if constexpr (S.packs_heads) return S.heads_per_unit(args);
  return 1;
}
template <AttentionSpec S>
DK_DEVICE i32 group_queries(const AttentionArgs& args) {
  if constexpr (S.packs_heads) return S.group_queries(args);
  return kAttentionGroupRows;
}
template <AttentionSpec S>
DK_DEVICE i32 unit_queries(const AttentionArgs& args) {
  if constexpr (S.packs_heads) return S.unit_queries(args);
  return S.unit_rows();
}

// The keys [0, end(i)) that query i of a tile sees.
struct VisibleKeys {
  i32 count;
  i32 of_first;  // end(0), but may be negative

  DK_DEVICE i32 end(i32 query) const { return max_of(min_of(of_first, count - query) + query, 0); }
};

// A tile of queries, unit_queries<S>(args) of them, of one head or of all that share a kv head, and
// what keys a split has for them. Fit for copies of 16 bytes.
struct alignas(16) RowTile {
  AttentionMember member;
  i32 head;  // the first one
  i32 kv_head;
  i32 split;
  i32 first_query;  // of the member; there may be no such query
  KeyTiles keys;    // of which some query of the tile sees a key

  DK_DEVICE bool exists() const { return first_query >= 0 && first_query < member.num_q; }
  // What a query sees of keys, as a word of 32 bits for all queries of the tile.
  template <AttentionSpec S>
  DK_DEVICE VisibleKeys visible_keys() const {
    if constexpr (!S.causal) return {member.num_kv, member.num_kv};
    constexpr i64 kLowest = -(1 << 30);  // far enough below 0 for all queries of a tile
    const i64 of_first = i64{first_query} + 1 + member.num_kv - member.num_q;
    return {member.num_kv, static_cast<i32>(clamp_to<i64>(of_first, kLowest, member.num_kv))};
  }
  // Where the key tiles end of which one of `count` queries from the tile's `first` on sees a key.
  template <AttentionSpec S>
  DK_DEVICE i32 seen_end(i32 first, i32 count) const {
    const i32 left = member.num_q - first_query - first;
    if (left <= 0) return keys.begin;
    const i32 last_query = first_query + first + min_of(count, left) - 1;
    const i32 end = attention_visible_end(last_query, member.num_q, member.num_kv, S.causal);
    return clamp_to(static_cast<i32>(ceil_div<i64>(end, S.tile_keys)), keys.begin, keys.end);
  }
  // Before this key tile, the queries from `first` on see all keys.
  template <AttentionSpec S>
  DK_DEVICE i32 full_end(i32 first) const {
    const i32 query = first_query + first;
    return attention_visible_end(query, member.num_q, member.num_kv, S.causal) / S.tile_keys;
  }
};

// Packed members have their tiles one after the other, from cu_seqlens_q / queries + index on:
// at least as many for each as it needs, and nobody has to add them up.
template <AttentionSpec S>
DK_DEVICE i32 first_row_tile(const AttentionArgs& args, i32 index) {
  const i32 total = static_cast<i32>(args.total_q);
  return clamp_to(args.cu_seqlens_q[index], 0, total) / unit_queries<S>(args) + index;
}
template <AttentionSpec S>
DK_DEVICE i32 member_of_row_tile(const AttentionArgs& args, i32 number) {
  i32 low = 0;
  i32 high = args.batch;
  while (high - low > 1) {
    const i32 middle = low + (high - low) / 2;
    (first_row_tile<S>(args, middle) <= number ? low : high) = middle;
  }
  return low;
}

// Tile number `number` of a member, or with cu_seqlens of all of them; `which` of the
// S.unit_heads(args) that lie side by side.
template <AttentionSpec S>
DK_DEVICE RowTile make_row_tile(const AttentionArgs& args, i32 member, i32 number, i32 which,
                                i32 split) {
  RowTile tile{};
  if constexpr (S.varlen) {
    member = member_of_row_tile<S>(args, number);
    number -= first_row_tile<S>(args, member);
  }
  tile.member = attention_member(args, member);
  tile.head = which * heads_per_unit<S>(args);
  tile.kv_head = tile.head / args.heads_per_kv();
  tile.split = split;
  tile.first_query = static_cast<i32>(i64{number} * unit_queries<S>(args));
  if (!tile.exists()) return tile;
  tile.keys = attention_split(split, args.num_splits, tile.member.num_kv, S.tile_keys);
  tile.keys.end = tile.seen_end<S>(0, unit_queries<S>(args));
  return tile;
}

// Tile `index` of S.num_units(args). Heads follow each other, so that those of a kv head find its
// keys in the cache; the last queries, which see most of the keys, come first.
template <AttentionSpec S>
DK_DEVICE RowTile row_tile(const AttentionArgs& args, i32 index) {
  const i32 heads = S.unit_heads(args);
  const i32 last = static_cast<i32>(S.num_units(args)) / heads / args.num_splits - 1;
  const i32 head = index % heads;
  index /= heads;
  const i32 split = index % args.num_splits;
  const i32 number = last - index / args.num_splits;
  if constexpr (S.varlen) return make_row_tile<S>(args, 0, number, head, split);
  return make_row_tile<S>(args, number % args.batch, number / args.batch, head, split);
}

}  // namespace deep_kernels::flash
