// The fold on Hopper: block-scaled gate_up GEMM, activation and block-128 quantization in one
// launch. Gate and up of a column meet in the same lane, a token's 128 columns in four lanes.
#pragma once

#include "deep_kernels/contract/silu_fold.h"
#include "deep_kernels/kernels/block_gemm_core_sm90.cuh"
#include "deep_kernels/kernels/silu_math.cuh"
#include "deep_kernels/ptx/sm90.cuh"

namespace deep_kernels::fold_sm90 {

// The lane's 32 codes of one row: words[j / 2] holds columns 2j and 2j + 1 of pairs j, j + 1.
struct LaneCodes {
  u32 word[8];
};

DK_DEVICE void store_codes(const SiluFoldArgs& args, const LaneCodes& codes, i32 token,
                           i32 first_column, bool permuted) {
  u8* row = args.y + token * args.y_stride + first_column;
  u8* mine = row + column_of(permuted, 0, 0);
  if (permuted && ptx::bytes_to_aligned(mine, 8) == 0) {
    DK_UNROLL
    for (i32 q = 0; q < 4; ++q)
      ptx::store_global_x2(mine + 32 * q, codes.word[2 * q], codes.word[2 * q + 1]);
    return;
  }
  DK_UNROLL
  for (i32 j = 0; j < 16; ++j) {
    DK_UNROLL
    for (i32 e = 0; e < 2; ++e) {
      const i32 column = column_of(permuted, j, e);
      if (first_column + column < args.num_columns)
        ptx::store_global(row + column,
                          static_cast<u8>(codes.word[j / 2] >> (16 * (j % 2) + 8 * e)));
    }
  }
}

// The products of the lane's two rows, and the greatest magnitude of each row's block.
template <SiluFoldSpec S>
struct LaneProducts {
  fold::Products<S.rounding> products[2][16];
  float amax[2];
};

template <SiluFoldSpec S>
struct FoldEpilogue {
  const SiluFoldArgs& args;
  i32 first_token;  // of the lane in tile 0
  bool permuted;

  DK_DEVICE LaneProducts<S> collect(Math<S>& math, TileOrder::Tile tile) const {
    if (!permuted) drop_columns(math.sum, args.num_columns - tile.block * kScaleBlock);
    LaneProducts<S> lane;
    DK_UNROLL
    for (i32 r = 0; r < 2; ++r) {
      fold::Maximum<S.rounding> maximum;
      DK_UNROLL
      for (i32 j = 0; j < 16; ++j) {
        const float* sum = math.sum + 4 * j + 2 * r;
        const float gate[2] = {sum[0], sum[1]};
        const float up[2] = {sum[64], sum[65]};
        lane.products[r][j] = fold::gated<S.activation, S.rounding>(gate, up, args.activation);
        maximum.add(lane.products[r][j]);
      }
      lane.amax[r] = maximum.value();
    }
    return lane;
  }
  // Columns from `end` on do not exist. Their sums are zeros, but for a scale that is none.
  static DK_DEVICE void drop_columns(float (&sum)[128], i32 end) {
    DK_UNROLL
    for (i32 j = 0; j < 16; ++j) {
      DK_UNROLL
      for (i32 e = 0; e < 2; ++e) {
        const bool exists = column_of(false, j, e) < end;
        DK_UNROLL
        for (i32 i = 4 * j + e; i < 4 * j + 4; i += 2) {
          sum[i] = exists ? sum[i] : 0.0f;
          sum[64 + i] = exists ? sum[64 + i] : 0.0f;
        }
      }
    }
  }
  // Scales and codes. Converged.
  DK_DEVICE void store(const LaneProducts<S>& lane, TileOrder::Tile tile) const {
    using Scale = fold::BlockScale<S.scale_format>;
    float amax[2] = {lane.amax[0], lane.amax[1]};
    DK_UNROLL
    for (i32 lanes = 1; lanes < 4; lanes *= 2) {
      DK_UNROLL
      for (i32 r = 0; r < 2; ++r) amax[r] = ptx::max_nan(amax[r], ptx::shuffle_xor(amax[r], lanes));
    }
    DK_UNROLL
    for (i32 r = 0; r < 2; ++r) {
      const Scale scale = Scale::of(amax[r]);
      const float inverse = scale.inverse();
      LaneCodes codes;
      DK_UNROLL
      for (i32 i = 0; i < 8; ++i)
        codes.word[i] = fold::codes_of(lane.products[r][2 * i], inverse) |
                        fold::codes_of(lane.products[r][2 * i + 1], inverse) << 16;
      const i32 row = first_token + tile.token * S.tile_tokens() + 8 * r;
      if (row >= args.gemm.num_tokens) continue;
      store_codes(args, codes, row, tile.block * kScaleBlock, permuted);
      if (ptx::lane_index() % 4 == 0)
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
  run<S, S.overlaps()>(
      args.gemm, maps, blocks, permuted, [](i32 block) { return TileRows{block, block}; },
      [&](i32 block) { return TileRows{block, blocks + block}; },
      FoldEpilogue<S>{args, first_token<S>(), permuted});
}

}  // namespace deep_kernels
