// The plain block-scaled GEMM on Hopper: a tile is two neighbouring blocks of 128 columns.
#pragma once

#include "deep_kernels/contract/silu_fold.h"
#include "deep_kernels/kernels/block_gemm_core_sm90.cuh"
#include "deep_kernels/ptx/sm90.cuh"

namespace deep_kernels::fold_sm90 {

// Where eight of a lane's columns of a block go, pairs 4i to 4i + 3 of one token. Neighbours are
// columns that lie side by side in memory, at multiples of 16 bytes.
struct EightColumns {
  const BlockGemmArgs& args;
  i64 token;
  i32 first;  // column of the half
  i32 index;  // i
  bool permuted;

  DK_DEVICE i32 column(i32 c) const {
    return first + column_of(permuted, 4 * index + c / 2, c % 2);
  }
  template <class Element>
  DK_DEVICE bool are_neighbours(const Element* row) const {
    return permuted && ptx::bytes_to_aligned(row + column(0), 16) == 0;
  }
  DK_DEVICE void add_residual(float (&value)[8]) const {
    if (args.residual_dtype == DType::float32)
      add_floats(value, static_cast<const float*>(args.residual) + token * args.residual_stride);
    else
      add_bf16(value, static_cast<const u16*>(args.residual) + token * args.residual_stride);
  }
  DK_DEVICE void add_floats(float (&value)[8], const float* row) const {
    DK_UNROLL
    for (i32 c = 0; c < 8; ++c)
      if (column(c) < args.num_columns) value[c] += ptx::load_global(row + column(c));
  }
  DK_DEVICE void add_bf16(float (&value)[8], const u16* row) const {
    if (are_neighbours(row)) {
      u32 pair[4];
      ptx::load_global_x4(pair, row + column(0));
      DK_UNROLL
      for (i32 c = 0; c < 8; ++c)
        value[c] += c % 2 == 0 ? fold::low_bf16(pair[c / 2]) : fold::high_bf16(pair[c / 2]);
      return;
    }
    DK_UNROLL
    for (i32 c = 0; c < 8; ++c)
      if (column(c) < args.num_columns)
        value[c] += ptx::float_of_bf16(ptx::load_global(row + column(c)));
  }
  DK_DEVICE void store(const float (&value)[8]) const {
    float* row = static_cast<float*>(args.out) + token * args.out_stride;
    if (are_neighbours(row)) {
      DK_UNROLL
      for (i32 c = 0; c < 8; c += 4)
        ptx::store_global_x4(row + column(0) + c, ptx::bits_of(value[c]),
                             ptx::bits_of(value[c + 1]), ptx::bits_of(value[c + 2]),
                             ptx::bits_of(value[c + 3]));
      return;
    }
    DK_UNROLL
    for (i32 c = 0; c < 8; ++c)
      if (column(c) < args.num_columns) ptx::store_global(row + column(c), value[c]);
  }
  DK_DEVICE void store(const u32 (&pair)[4]) const {
    u16* row = static_cast<u16*>(args.out) + token * args.out_stride;
    if (are_neighbours(row)) {
      ptx::store_global_x4(row + column(0), pair[0], pair[1], pair[2], pair[3]);
      return;
    }
    DK_UNROLL
    for (i32 c = 0; c < 8; ++c)
      if (column(c) < args.num_columns)
        ptx::store_global(row + column(c), static_cast<u16>(pair[c / 2] >> (16 * (c % 2))));
  }
};

DK_DEVICE void round_to_bf16(u32 (&pair)[4], const float (&value)[8]) {
  DK_UNROLL
  for (i32 i = 0; i < 4; ++i) pair[i] = ptx::bf16x2_of(value[2 * i], value[2 * i + 1]);
}

template <DType kOut>
DK_DEVICE void finish_columns(const EightColumns& columns, float (&value)[8]) {
  const bool adds = columns.args.residual != nullptr;
  if constexpr (kOut == DType::float32) {
    if (adds) columns.add_residual(value);
    columns.store(value);
  } else {
    u32 pair[4];
    round_to_bf16(pair, value);
    if (adds) {
      DK_UNROLL
      for (i32 c = 0; c < 8; ++c)
        value[c] = c % 2 == 0 ? fold::low_bf16(pair[c / 2]) : fold::high_bf16(pair[c / 2]);
      columns.add_residual(value);
      round_to_bf16(pair, value);
    }
    columns.store(pair);
  }
}

template <BlockGemmSpec S>
struct GemmEpilogue {
  static constexpr i32 kSums = Math<S>::kSums;

  const BlockGemmArgs& args;
  bool permuted;

  struct Nothing {};
  static DK_DEVICE void store(Nothing, TileOrder::Tile) {}
  // The sums go straight to memory.
  DK_DEVICE Nothing collect(const Math<S>& math, TileOrder::Tile tile) const {
    DK_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      DK_UNROLL
      for (i32 r = 0; r < 2; ++r)
        store_half_row(math.sum, half, r, math.token_of(tile.token) + 8 * r,
                       (2 * tile.block + half) * kScaleBlock +
                           tile::block_rank<S.cluster>() * (S.tile().rows() / 2));
    }
    return {};
  }
  // Row r of the lane in one half of a tile.
  DK_DEVICE void store_half_row(const float (&sum)[kSums], i32 half, i32 r, i64 token,
                                i32 first) const {
    if (token >= args.gemm.num_tokens || first >= args.num_columns) return;
    DK_UNROLL
    for (i32 i = 0; i < kSums / 32; ++i) {
      float value[8];
      DK_UNROLL
      for (i32 c = 0; c < 8; ++c)
        value[c] = sum[kSums / 2 * half + 4 * (4 * i + c / 2) + 2 * r + c % 2];
      finish_columns<S.out_dtype>({args, token, first, i, permuted}, value);
    }
  }
};

}  // namespace deep_kernels::fold_sm90

namespace deep_kernels {

template <BlockGemmSpec S, class Maps>
DK_DEVICE void block_gemm_sm90(const BlockGemmArgs& args, const Maps& maps) {
  using namespace fold_sm90;
  const bool permuted = weight_rows_permuted(args.num_columns);
  const i32 last = ceil_div(args.num_columns, kScaleBlock) - 1;
  // The second block of the last tile may not exist: then its columns are not stored.
  const auto rows_of = [&](i32 block) { return TileRows{2 * block, min_of(2 * block + 1, last)}; };
  run<S>(args.gemm, maps, ceil_div(args.num_columns, kFoldTileRows), permuted, rows_of, rows_of,
         GemmEpilogue<S>{args, permuted});
}

}  // namespace deep_kernels
