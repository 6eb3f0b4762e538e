// In which order the blocks of threads take tiles of rows.
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/kernels/attention_tiles.cuh"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::flash {

// All tiles of a launch. Heads come in bands whose keys and values stay in the L2 cache; inside of
// a band the tiles with most keys come first, heads and splits fastest. A block goes through every
// num_blocks()th, forth and back in turn, which deals longest-first lists out evenly.
template <AttentionSpec S>
struct TileQueue {
  static constexpr i64 kBandBytes = 32 << 20;

  const AttentionArgs& args;
  i32 row_tiles;  // of a member, or with cu_seqlens of all
  i32 heads;      // times members where they are alike
  i32 band;       // of these
  i64 count;

  DK_DEVICE explicit TileQueue(const AttentionArgs& args) : args(args) {
    heads = args.num_q_heads * (S.varlen ? 1 : args.batch);
    count = S.num_tiles(args);
    row_tiles = static_cast<i32>(count / heads / args.num_splits);
    const i64 keys = S.varlen ? args.total_kv : args.num_kv;
    const i64 bytes = max_of<i64>(keys * S.head_dim() * 4, 1);  // of a kv head
    const i64 kv_heads = max_of<i64>(kBandBytes / bytes, 1);
    band = static_cast<i32>(min_of<i64>(kv_heads * args.heads_per_kv(), heads));
  }

  // The block's turn-th tile, perhaps none (negative).
  DK_DEVICE i64 index(i32 turn) const {
    const i64 first = i64{turn} * ptx::num_blocks();
    const i32 block = ptx::block_index();
    const i64 index = first + (turn % 2 == 0 ? block : ptx::num_blocks() - 1 - block);
    return index < count ? index : -1;
  }
  // Whether a turn has tiles of any block.
  DK_DEVICE bool has(i32 turn) const { return i64{turn} * ptx::num_blocks() < count; }

  DK_DEVICE RowTile at(i64 index) const {
    const i64 of_band = i64{band} * row_tiles * args.num_splits;
    const i32 which = static_cast<i32>(index / of_band);
    const i64 inside = index - which * of_band;
    const i32 width = min_of(band, heads - which * band) * args.num_splits;
    const i32 rank = static_cast<i32>(inside / width);
    const i32 rest = static_cast<i32>(inside - i64{rank} * width);
    const i32 head = which * band + rest / args.num_splits;
    return make_row_tile<S>(args, head / args.num_q_heads, S.causal ? row_tiles - 1 - rank : rank,
                            head % args.num_q_heads, rest % args.num_splits);
  }
};

}  // namespace deep_kernels::flash
