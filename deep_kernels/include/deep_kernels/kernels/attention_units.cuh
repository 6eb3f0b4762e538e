// Which work a block of threads has: tiles of queries of a head, and of the keys perhaps a part.
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/kernels/attention_tiles.cuh"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::flash {

// The queries [first_query, ..) of a head against the tiles of keys [keys.begin, keys.end).
struct Unit {
  AttentionMember member;
  i32 head;
  i32 first_query;
  i32 split;
  KeyTiles keys;

  // Key tiles that the rows [first, first + count) of the unit see of it.
  template <AttentionSpec S>
  DK_DEVICE i32 end_for(i32 first, i32 count) const {
    const i32 last = min_of(first_query + first + count, member.num_q) - 1;
    if (last < first_query + first) return keys.begin;  // there are no such rows
    const i32 end = attention_visible_end(last, member.num_q, member.num_kv, S.causal);
    return clamp_to(ceil_div(end, i32{S.tile_keys}), keys.begin, keys.end);
  }
};

// All units of a launch. Heads come in bands whose keys and values stay in the L2 cache; inside of
// a band the tiles with most keys come first, heads and splits fastest. A block goes through every
// num_blocks()th, forth and back in turn, which deals longest-first lists out evenly.
template <AttentionSpec S>
struct Units {
  static constexpr i64 kBandBytes = 32 << 20;

  const AttentionArgs& args;
  i32 row_tiles;  // of a member, or with cu_seqlens of all
  i32 heads;      // times members where they are alike
  i32 band;       // of these
  i64 count;

  DK_DEVICE explicit Units(const AttentionArgs& args) : args(args) {
    row_tiles = S.varlen ? static_cast<i32>(ceil_div<i64>(args.total_q, S.tile_rows)) + args.batch
                         : ceil_div<i32>(args.num_q, S.tile_rows);
    heads = args.num_q_heads * (S.varlen ? 1 : args.batch);
    const i64 keys = S.varlen ? args.total_kv : args.num_kv;
    const i64 bytes = max_of<i64>(keys * S.head_dim() * 4, 1);  // of a kv head
    const i64 kv_heads = max_of<i64>(kBandBytes / bytes, 1);
    band = static_cast<i32>(min_of<i64>(kv_heads * args.heads_per_kv(), heads));
    count = i64{row_tiles} * heads * args.num_splits;
  }

  // The block's turn-th unit, perhaps none (negative).
  DK_DEVICE i64 index(i32 turn) const {
    const i64 first = i64{turn} * ptx::num_blocks();
    const i32 block = ptx::block_index();
    const i64 index = first + (turn % 2 == 0 ? block : ptx::num_blocks() - 1 - block);
    return index < count ? index : -1;
  }
  // Whether a turn has units of any block.
  DK_DEVICE bool has(i32 turn) const { return i64{turn} * ptx::num_blocks() < count; }

  DK_DEVICE Unit at(i64 index) const {
    const i64 of_band = i64{band} * row_tiles * args.num_splits;
    const i32 which = static_cast<i32>(index / of_band);
    const i64 inside = index - which * of_band;
    const i32 width = min_of(band, heads - which * band) * args.num_splits;
    const i32 rank = static_cast<i32>(inside / width);
    const i32 rest = static_cast<i32>(inside - i64{rank} * width);
    const i32 head = which * band + rest / args.num_splits;
    Unit unit;
    unit.split = rest % args.num_splits;
    unit.head = head % args.num_q_heads;
    i32 tile = S.causal ? row_tiles - 1 - rank : rank;
    i32 member = head / args.num_q_heads;
    if constexpr (S.varlen) {
      member = member_of_row_tile<S>(args, tile);
      tile -= static_cast<i32>(first_row_tile<S>(args, member));
    }
    unit.member = attention_member(args, member);
    unit.first_query = static_cast<i32>(min_of<i64>(i64{tile} * S.tile_rows, unit.member.num_q));
    unit.keys = attention_split(unit.split, args.num_splits, unit.member.num_kv, S.tile_keys);
    return unit;
  }
};

}  // namespace deep_kernels::flash
