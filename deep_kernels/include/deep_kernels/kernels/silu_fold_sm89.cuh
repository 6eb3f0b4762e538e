// The FP8 prefill MLP up to its activations in one launch, by mma.sync: for sm_89 and every newer
// card. A tile is a few tokens and one block of 128 columns, which is what shares a scale of y.
//
//   interleaved  gate and up rows in one stage, both sums in registers: x is read once
//   two_pass     gate over all of k, act(gate) into shared memory, then up: half the registers and
//                half the stage, but x is read twice
#pragma once

#include "deep_kernels/contract/silu_fold.h"
#include "deep_kernels/kernels/block_scaled_sm89.cuh"
#include "deep_kernels/kernels/silu_math.cuh"
#include "deep_kernels/ptx/base.cuh"
#include "deep_kernels/tile/global_words.cuh"

namespace deep_kernels::fold_sm89 {

using namespace block_scaled_sm89;

template <SiluFoldSpec S>
inline constexpr bool kTwoPass = S.algorithm == FoldAlgorithm::two_pass;
// Octets that are summed at a time: what the largest tile has registers for.
template <SiluFoldSpec S>
inline constexpr i32 kPassOctets =
    S.token_groups == 4 && !kTwoPass<S> && S.rounding == Rounding::float32 ? 4 : 8;
template <SiluFoldSpec S>
using FoldShape = Shape<S.tile_tokens(), kTwoPass<S> ? 1 : 2, kPassOctets<S>>;

// Act(gate) between the passes of two_pass, a word or two for two columns. A thread reads what it
// has written itself.
template <i32 kPairs, Rounding kRounding>
struct GateTile {
  static constexpr i32 kPairBytes = kRounding == Rounding::bfloat16 ? 4 : 8;
  alignas(16) u8 pair[kPairs][kThreads][kPairBytes];

  DK_DEVICE u32 address(i32 i) const { return ptx::smem_addr(&pair[i][ptx::thread_index()]); }
  DK_DEVICE void store(i32 i, const float (&activated)[2]) {
    if constexpr (kRounding == Rounding::bfloat16) {
      const u32 both = ptx::bf16x2_of(activated[0], activated[1]);
      ptx::store_shared_i32(address(i), static_cast<i32>(both));
    } else {
      ptx::store_shared_f32(address(i), activated[0]);
      ptx::store_shared_f32(address(i) + 4, activated[1]);
    }
  }
  DK_DEVICE void load(float (&activated)[2], i32 i) const {
    if constexpr (kRounding == Rounding::bfloat16) {
      const u32 both = static_cast<u32>(ptx::load_shared_i32(address(i)));
      activated[0] = fold::low_bf16(both), activated[1] = fold::high_bf16(both);
    } else {
      ptx::load_shared_f32x2(activated, address(i));
    }
  }
};
template <Rounding kRounding>
struct GateTile<0, kRounding> {};

template <SiluFoldSpec S>
struct Smem {
  Rings<FoldShape<S>, S.stages> rings;
  float maximum[S.tile_tokens()][FoldShape<S>::kColumnWarps];  // of a warp's columns of a token
  [[no_unique_address]] GateTile<kTwoPass<S> ? 4 * FoldShape<S>::kOctets : 0, S.rounding> gate;
};

template <SiluFoldSpec S>
struct FoldWork {
  static constexpr i32 kUnitsPerTile = kTwoPass<S> ? 2 : 1;  // gate, up

  const SiluFoldArgs& args;

  DK_DEVICE i32 column_blocks() const { return ceil_div(args.num_columns, kScaleBlock); }
  DK_DEVICE TileOrder order() const {
    return TileOrder::of(args.gemm.num_tokens, S.tile_tokens(), column_blocks());
  }
  DK_DEVICE i32 num_units() const { return order().count() * kUnitsPerTile; }
  DK_DEVICE HalfStep half_step() const { return {args.num_columns, 0, column_blocks()}; }
  DK_DEVICE TileRows rows(i32 unit) const {
    const TileOrder::Tile at = order().at(unit / kUnitsPerTile);
    const i32 operand = unit % kUnitsPerTile;  // 1: up rows, of two_pass
    const i32 column = at.block * kScaleBlock;
    return {.first_token = at.token * S.tile_tokens(),
            .num_columns = args.num_columns - column,
            .first_row = i64{operand} * args.num_columns + column,
            .scale_row = operand * column_blocks() + at.block};
  }
};

// What happens to the sums of a tile, in registers but for the maxima.
template <SiluFoldSpec S>
struct Finish {
  using Shape = FoldShape<S>;
  using Products = fold::Products<S.rounding>;
  using Scale = fold::BlockScale<S.scale_format>;
  static constexpr i32 kUpHalf = Shape::kHalves - 1;

  const SiluFoldArgs& args;
  Smem<S>& smem;
  TileOrder::Tile tile;

  // The first of the lane's neighbouring columns of a group.
  DK_DEVICE i32 column(i32 group) const { return tile.block * kScaleBlock + Shape::column(group); }
  DK_DEVICE bool has_columns(i32 group) const { return column(group) < args.num_columns; }
  DK_DEVICE void activated(float (&activated)[2], const Sums<Shape>& sums, i32 octet,
                           i32 row) const {
    float gate[2];
    sums.pair(gate, 0, octet, row);
    DK_UNROLL
    for (i32 i = 0; i < 2; ++i)
      activated[i] = fold::activate<S.activation>(gate[i], args.activation);
  }
  DK_DEVICE void keep_gate(const Sums<Shape>& sums) const {
    DK_UNROLL
    for (i32 row = 0; row < 4; ++row) DK_UNROLL
    for (i32 octet = 0; octet < Shape::kOctets; ++octet) {
      float pair[2];
      activated(pair, sums, octet, row);
      smem.gate.store(row * Shape::kOctets + octet, pair);
    }
  }
  DK_DEVICE Products product(const Sums<Shape>& sums, i32 octet, i32 row) const {
    float gate[2];
    float up[2];
    if constexpr (kTwoPass<S>)
      smem.gate.load(gate, row * Shape::kOctets + octet);
    else
      activated(gate, sums, octet, row);
    sums.pair(up, kUpHalf, octet, row);
    return fold::multiplied<S.activation, S.rounding>(gate, up, args.activation);
  }

  // Of the warp's columns of a token.
  DK_DEVICE float maximum(const Products (&products)[Shape::kOctets]) const {
    fold::Maximum<S.rounding> maximum;
    DK_UNROLL
    for (i32 octet = 0; octet < Shape::kOctets; ++octet)
      if (has_columns(octet / Shape::kGroupOctets)) maximum.add(products[octet]);
    return fold::lanes_maximum<4>(maximum.value());
  }
  // Of all 128, once all warps have posted theirs.
  DK_DEVICE float block_maximum(i32 row) const {
    float greatest = 0.0f;
    DK_UNROLL
    for (i32 warp = 0; warp < Shape::kColumnWarps; ++warp)
      greatest = ptx::max_nan(
          greatest, ptx::load_shared_f32(ptx::smem_addr(&smem.maximum[Shape::token(row)][warp])));
    return greatest;
  }

  DK_DEVICE void store_codes(u8* y, const Products (&products)[Shape::kOctets], float inverse,
                             i32 group) const {
    constexpr i32 kWords = Shape::kGroupOctets / 2;
    u32 words[kWords];
    DK_UNROLL
    for (i32 i = 0; i < kWords; ++i) {
      const Products* pairs = &products[group * Shape::kGroupOctets + 2 * i];
      words[i] = fold::codes_of(pairs[0], inverse) | fold::codes_of(pairs[1], inverse) << 16;
    }
    tile::store_words(y, words);
  }
  DK_DEVICE void store(const Products (&products)[Shape::kOctets], i32 row) const {
    const i64 token = tile.token * S.tile_tokens() + Shape::token(row);
    if (token >= args.gemm.num_tokens) return;
    const Scale scale = Scale::of(block_maximum(row));
    if (Shape::column_warp() == 0 && ptx::lane_index() % 4 == 0)
      scale.store(args.y_scale,
                  token * args.y_scale_token_stride + tile.block * args.y_scale_block_stride);
    const float inverse = scale.inverse();
    DK_UNROLL
    for (i32 group = 0; group < Shape::kGroups; ++group)
      if (has_columns(group))
        store_codes(args.y + token * args.y_stride + column(group), products, inverse, group);
  }

  DK_DEVICE void run(const Sums<Shape>& sums) const {
    Products products[4][Shape::kOctets];
    DK_UNROLL
    for (i32 row = 0; row < 4; ++row) {
      DK_UNROLL
      for (i32 octet = 0; octet < Shape::kOctets; ++octet)
        products[row][octet] = product(sums, octet, row);
      const float greatest = maximum(products[row]);
      if (ptx::lane_index() % 4 == 0)
        ptx::store_shared_f32(
            ptx::smem_addr(&smem.maximum[Shape::token(row)][Shape::column_warp()]), greatest);
    }
    // The main loop's barriers stand between this tile's reads and the next one's writes.
    ptx::sync_threads();
    DK_UNROLL
    for (i32 row = 0; row < 4; ++row) store(products[row], row);
  }
};

}  // namespace deep_kernels::fold_sm89

namespace deep_kernels {

template <SiluFoldSpec S>
DK_DEVICE void silu_fold_sm89(const SiluFoldArgs& args) {
  using namespace fold_sm89;
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(Smem<S>) <= S.smem_bytes());
  static_assert(S.num_threads() == kThreads);
  using Work = FoldWork<S>;
  using Gemm = Multiplier<FoldShape<S>, S.stages, Work>;
  auto& smem = ptx::dynamic_smem<Smem<S>>();
  const Work work{args};
  Gemm gemm(args.gemm, work, smem.rings);
  DK_NO_UNROLL
  for (i32 tile = ptx::block_index(); tile < work.order().count(); tile += ptx::num_blocks()) {
    Sums<FoldShape<S>> sums;
    if constexpr (kTwoPass<S>) {
      gemm.run(sums, 2 * tile);
      Finish<S>{args, smem, {}}.keep_gate(sums);
      gemm.run(sums, 2 * tile + 1);
    } else {
      gemm.run(sums, tile);
    }
    Finish<S>{args, smem, work.order().at(tile)}.run(sums);
  }
  gemm.close();
}

}  // namespace deep_kernels
