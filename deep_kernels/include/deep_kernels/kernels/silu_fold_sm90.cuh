// The fold on Hopper: block-scaled gate_up GEMM, activation and block-128 quantization in one
// launch. Gate and up of a column meet in the same lane, a token's 128 columns in four lanes.
#pragma once

#include "deep_kernels/contract/silu_fold.h"
#include "deep_kernels/kernels/block_gemm_core_sm90.cuh"
#include "deep_kernels/kernels/silu_math.cuh"
#include "deep_kernels/ptx/sm90.cuh"

namespace deep_kernels::fold_sm90 {

// The lane's codes of one row: word[j / 2] holds columns 2j and 2j + 1 of pairs j, j + 1.
template <i32 kPairs>
DK_DEVICE void store_codes(const SiluFoldArgs& args, const u32 (&word)[kPairs / 2], i32 token,
                           i32 first_column, bool permuted) {
  u8* row = args.y + token * args.y_stride + first_column;
  u8* mine = row + column_of(permuted, 0, 0);
  if (permuted && ptx::bytes_to_aligned(mine, 8) == 0) {
    DK_UNROLL
    for (i32 q = 0; q < kPairs / 4; ++q)
      ptx::store_global_x2(mine + 32 * q, word[2 * q], word[2 * q + 1]);
    return;
  }
  DK_UNROLL
  for (i32 j = 0; j < kPairs; ++j) {
    DK_UNROLL
    for (i32 e = 0; e < 2; ++e) {
      const i32 column = column_of(permuted, j, e);
      if (first_column + column < args.num_columns)
        ptx::store_global(row + column, static_cast<u8>(word[j / 2] >> (16 * (j % 2) + 8 * e)));
    }
  }
}

// The products of the lane's two rows, and the greatest magnitude of each.
template <SiluFoldSpec S>
struct LaneProducts {
  static constexpr i32 kPairs = S.tile().rows() / 16;  // columns two by two
  fold::Products<S.rounding> products[2][kPairs];
  float amax[2];
};

// Where a cluster's blocks have half of the columns each: the maxima of both. Every warp sends its
// tokens' to the warp that has the other columns of the same tokens. One that is a tile ahead uses
// the other half of the mailbox; two ahead it cannot be.
template <SiluFoldSpec S>
struct Exchange {
  Smem<S>& smem;
  tile::Ring<2> tiles = tile::Ring<2>::drainer();

  // Converged.
  DK_DEVICE void run(float (&amax)[2]) {
    const i32 warp = ptx::warp_index();
    const i32 lane = ptx::lane_index();
    const i32 token = lane_token();
    const i32 peer = 1 - ptx::cluster_rank();
    float(&maxima)[S.tile_tokens()] = smem.mailbox.maxima[tiles.slot];
    const u32 received = ptx::smem_addr(&smem.mailbox.received[tiles.slot][warp]);
    ptx::sync_warp();
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(received, 16 * sizeof(float));
      ptx::mbarrier_arrive_peer(ptx::peer_smem(received, peer));  // what came last has been read
    }
    if (lane % 4 < 2) {
      const u32 slot = ptx::smem_addr(&maxima[token + 8 * (lane % 4)]);
      ptx::store_async(ptx::peer_smem(slot, peer), ptx::bits_of(lane % 4 == 0 ? amax[0] : amax[1]),
                       ptx::peer_smem(received, peer));
    }
    ptx::mbarrier_wait(received, tiles.parity);
    DK_UNROLL
    for (i32 r = 0; r < 2; ++r)
      amax[r] = ptx::max_nan(amax[r], ptx::load_shared_f32(ptx::smem_addr(&maxima[token + 8 * r])));
    tiles.next();
  }
};

template <SiluFoldSpec S>
struct FoldEpilogue {
  static constexpr i32 kSums = Math<S>::kSums;
  static constexpr i32 kPairs = LaneProducts<S>::kPairs;

  const SiluFoldArgs& args;
  Exchange<S> exchange;
  i32 first_column;  // of the block of threads in a block of 128
  bool permuted;

  DK_DEVICE FoldEpilogue(const SiluFoldArgs& args, bool permuted)
      : args(args),
        exchange{ptx::dynamic_smem<Smem<S>>()},
        first_column(tile::block_rank<S.cluster>() * (S.tile().rows() / 2)),
        permuted(permuted) {}

  DK_DEVICE i32 column_of_tile(TileOrder::Tile tile) const {
    return tile.block * kScaleBlock + first_column;
  }
  DK_DEVICE LaneProducts<S> collect(Math<S>& math, TileOrder::Tile tile) const {
    if (!permuted) drop_columns(math.sum, args.num_columns - column_of_tile(tile));
    LaneProducts<S> lane;
    DK_UNROLL
    for (i32 r = 0; r < 2; ++r) {
      fold::Maximum<S.rounding> maximum;
      DK_UNROLL
      for (i32 j = 0; j < kPairs; ++j) {
        const float* sum = math.sum + 4 * j + 2 * r;
        const float gate[2] = {sum[0], sum[1]};
        const float up[2] = {sum[kSums / 2], sum[kSums / 2 + 1]};
        lane.products[r][j] = fold::gated<S.activation, S.rounding>(gate, up, args.activation);
        maximum.add(lane.products[r][j]);
      }
      lane.amax[r] = maximum.value();
    }
    return lane;
  }
  // Columns from `end` on do not exist. Their sums are zeros, but for a scale that is none.
  static DK_DEVICE void drop_columns(float (&sum)[kSums], i32 end) {
    DK_UNROLL
    for (i32 j = 0; j < kPairs; ++j) {
      DK_UNROLL
      for (i32 e = 0; e < 2; ++e) {
        const bool exists = column_of(false, j, e) < end;
        DK_UNROLL
        for (i32 i = 4 * j + e; i < 4 * j + 4; i += 2) {
          sum[i] = exists ? sum[i] : 0.0f;
          sum[kSums / 2 + i] = exists ? sum[kSums / 2 + i] : 0.0f;
        }
      }
    }
  }
  // Scales and codes. Converged.
  DK_DEVICE void store(const LaneProducts<S>& lane, TileOrder::Tile tile) {
    using Scale = fold::BlockScale<S.scale_format>;
    const i32 first_row = tile.token * S.tile_tokens() + lane_token();
    float amax[2] = {fold::lanes_maximum<4>(lane.amax[0]), fold::lanes_maximum<4>(lane.amax[1])};
    if constexpr (S.exchanges_maxima()) exchange.run(amax);
    DK_UNROLL
    for (i32 r = 0; r < 2; ++r) {
      const Scale scale = Scale::of(amax[r]);
      const float inverse = scale.inverse();
      u32 codes[kPairs / 2];
      DK_UNROLL
      for (i32 i = 0; i < kPairs / 2; ++i)
        codes[i] = fold::codes_of(lane.products[r][2 * i], inverse) |
                   fold::codes_of(lane.products[r][2 * i + 1], inverse) << 16;
      const i32 row = first_row + 8 * r;
      if (row >= args.gemm.num_tokens) continue;
      store_codes<kPairs>(args, codes, row, column_of_tile(tile), permuted);
      if (first_column == 0 && ptx::lane_index() % 4 == 0)
        scale.store(args.y_scale,
                    row * args.y_scale_token_stride + tile.block * args.y_scale_block_stride);
    }
  }
};

}  // namespace deep_kernels::fold_sm90

namespace deep_kernels {

template <SiluFoldSpec S, class Maps>
DK_DEVICE void silu_fold_sm90(const SiluFoldArgs& args, const Maps& maps) {
  using namespace fold_sm90;
  const i32 blocks = ceil_div(args.num_columns, kScaleBlock);
  const bool permuted = weight_rows_permuted(args.num_columns);
  run<S>(
      args.gemm, maps, blocks, permuted, [](i32 block) { return TileRows{block, block}; },
      [&](i32 block) { return TileRows{block, blocks + block}; }, FoldEpilogue<S>(args, permuted));
}

}  // namespace deep_kernels
