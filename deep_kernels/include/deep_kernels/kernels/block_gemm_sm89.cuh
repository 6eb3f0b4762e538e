// x times the transpose of w, both FP8 with a scale for 128 elements, by mma.sync: for sm_89 and
// every newer card. A tile is a few tokens and two neighbouring blocks of 128 columns.
#pragma once

#include "deep_kernels/contract/silu_fold.h"
#include "deep_kernels/kernels/block_scaled_sm89.cuh"
#include "deep_kernels/ptx/base.cuh"
#include "deep_kernels/tile/global_words.cuh"

namespace deep_kernels::block_gemm_sm89_parts {

using namespace block_scaled_sm89;

// Octets that are summed at a time: what the largest tile has registers for.
template <BlockGemmSpec S>
inline constexpr i32 kPassOctets = S.token_groups == 4 && S.out_dtype == DType::float32 ? 4 : 8;
template <BlockGemmSpec S>
using GemmShape = Shape<S.tile_tokens(), 2, kPassOctets<S>>;

template <BlockGemmSpec S>
struct GemmWork {
  static constexpr i32 kUnitsPerTile = 1;

  const BlockGemmArgs& args;

  DK_DEVICE i32 column_tiles() const { return ceil_div(args.num_columns, kFoldTileRows); }
  DK_DEVICE TileOrder order() const {
    return TileOrder::of(args.gemm.num_tokens, S.tile_tokens(), column_tiles());
  }
  DK_DEVICE i32 num_units() const { return order().count(); }
  DK_DEVICE HalfStep half_step() const { return {kScaleBlock, kScaleBlock, 1}; }
  DK_DEVICE TileRows rows(i32 tile) const {
    const TileOrder::Tile at = order().at(tile);
    const i32 column = at.block * kFoldTileRows;
    return {.first_token = at.token * S.tile_tokens(),
            .num_columns = args.num_columns - column,
            .first_row = column,
            .scale_row = 2 * at.block};
  }
};

template <BlockGemmSpec S>
struct Finish {
  using Shape = GemmShape<S>;

  const BlockGemmArgs& args;
  TileOrder::Tile tile;

  // The two columns of an octet as they are stored: bfloat16 is rounded before the residual comes.
  DK_DEVICE void add_residual(float (&pair)[2], i64 at) const {
    if (args.residual == nullptr) return;
    DK_UNROLL
    for (i32 i = 0; i < 2; ++i) {
      if constexpr (S.out_dtype == DType::bfloat16)
        pair[i] = ptx::float_of_bf16(ptx::bf16_of(pair[i]));
      pair[i] += tile::load_float(args.residual, at + i, args.residual_dtype);
    }
  }
  // The lane's neighbouring columns of one token.
  DK_DEVICE void store(const Sums<Shape>& sums, i32 half, i32 group, i32 row) const {
    const i64 token = tile.token * S.tile_tokens() + Shape::token(row);
    const i64 column = tile.block * kFoldTileRows + half * kScaleBlock + Shape::column(group);
    if (token >= args.gemm.num_tokens || column >= args.num_columns) return;
    constexpr bool kNarrow = S.out_dtype == DType::bfloat16;
    u32 words[kNarrow ? Shape::kLaneColumns / 2 : Shape::kLaneColumns];
    DK_UNROLL
    for (i32 i = 0; i < Shape::kGroupOctets; ++i) {
      float pair[2];
      sums.pair(pair, half, group * Shape::kGroupOctets + i, row);
      add_residual(pair, token * args.residual_stride + column + 2 * i);
      if constexpr (kNarrow) {
        words[i] = ptx::bf16x2_of(pair[0], pair[1]);
      } else {
        words[2 * i] = ptx::bits_of(pair[0]);
        words[2 * i + 1] = ptx::bits_of(pair[1]);
      }
    }
    const i64 at = token * args.out_stride + column;
    if constexpr (kNarrow)
      tile::store_words(static_cast<u16*>(args.out) + at, words);
    else
      tile::store_words(static_cast<i32*>(args.out) + at, words);
  }
  DK_DEVICE void run(const Sums<Shape>& sums) const {
    DK_UNROLL
    for (i32 half = 0; half < 2; ++half) DK_UNROLL
    for (i32 group = 0; group < Shape::kGroups; ++group) DK_UNROLL
    for (i32 row = 0; row < 4; ++row) store(sums, half, group, row);
  }
};

}  // namespace deep_kernels::block_gemm_sm89_parts

namespace deep_kernels {

template <BlockGemmSpec S>
DK_DEVICE void block_gemm_sm89(const BlockGemmArgs& args) {
  using namespace block_gemm_sm89_parts;
  using Rings = block_scaled_sm89::Rings<GemmShape<S>, S.stages>;
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(Rings) <= S.smem_bytes());
  static_assert(S.num_threads() == kThreads);
  const GemmWork<S> work{args};
  Multiplier<GemmShape<S>, S.stages, GemmWork<S>> gemm(args.gemm, work, ptx::dynamic_smem<Rings>());
  DK_NO_UNROLL
  for (i32 tile = ptx::block_index(); tile < work.num_units(); tile += ptx::num_blocks()) {
    Sums<GemmShape<S>> sums;
    gemm.run(sums, tile);
    Finish<S>{args, work.order().at(tile)}.run(sums);
  }
  gemm.close();
}

}  // namespace deep_kernels
