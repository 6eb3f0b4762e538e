// The gated activation and its quantization as a launch of their own, for every card: bfloat16 gate
// and up in, e4m3 and scales out. Half a warp takes 128 columns of a token, 8 columns a lane.
#pragma once

#include "deep_kernels/contract/silu_fold.h"
#include "deep_kernels/kernels/silu_math.cuh"
#include "deep_kernels/ptx/base.cuh"
#include "deep_kernels/tile/global_words.cuh"

namespace deep_kernels::fold {

inline constexpr i32 kLaneColumns = 8;
inline constexpr i32 kBlockLanes = kScaleBlock / kLaneColumns;

// A lane's part of one block.
template <SiluMulSpec S>
struct BlockPart {
  using Pair = Products<Rounding::bfloat16>;

  const SiluMulArgs& args;
  i64 token;
  i64 block;
  i64 column;    // the lane's first
  bool present;  // whether there are such a token and column

  DK_DEVICE void load(Pair (&products)[kLaneColumns / 2]) const {
    u32 gate[kLaneColumns / 2] = {};
    u32 up[kLaneColumns / 2] = {};
    if (present) {
      const u16* from = args.gate_up + token * args.gate_up_stride + column;
      tile::load_words(gate, from);
      tile::load_words(up, from + args.num_columns);
    }
    DK_UNROLL
    for (i32 i = 0; i < kLaneColumns / 2; ++i)
      products[i] = gated<S.activation, Rounding::bfloat16>({low_bf16(gate[i]), high_bf16(gate[i])},
                                                            {low_bf16(up[i]), high_bf16(up[i])},
                                                            args.activation);
  }
  // Converged. 0 where nothing is present.
  static DK_DEVICE float block_maximum(const Pair (&products)[kLaneColumns / 2]) {
    Maximum<Rounding::bfloat16> maximum;
    DK_UNROLL
    for (i32 i = 0; i < kLaneColumns / 2; ++i) maximum.add(products[i]);
    return lanes_maximum<kBlockLanes>(maximum.value());
  }
  DK_DEVICE void store(const Pair (&products)[kLaneColumns / 2],
                       const BlockScale<S.scale_format>& scale) const {
    if (!present) return;
    if (ptx::lane_index() % kBlockLanes == 0)
      scale.store(args.y_scale,
                  token * args.y_scale_token_stride + block * args.y_scale_block_stride);
    const float inverse = scale.inverse();
    const u32 words[] = {codes_of(products[0], inverse) | codes_of(products[1], inverse) << 16,
                         codes_of(products[2], inverse) | codes_of(products[3], inverse) << 16};
    tile::store_words(args.y + token * args.y_stride + column, words);
  }
};

}  // namespace deep_kernels::fold

namespace deep_kernels {

template <SiluMulSpec S>
DK_DEVICE void silu_mul(const SiluMulArgs& args) {
  using namespace fold;
  static_assert(S.invalid() == nullptr);
  static_assert(S.blocks_per_pass() * kBlockLanes == S.num_threads());
  const u32 blocks = static_cast<u32>(ceil_div(args.num_columns, kScaleBlock));
  const i64 num_blocks = i64{args.num_tokens} * blocks;
  const i32 in_pass = ptx::thread_index() / kBlockLanes;
  for (i64 first = i64{ptx::block_index()} * S.blocks_per_pass(); first < num_blocks;
       first += i64{ptx::num_blocks()} * S.blocks_per_pass()) {
    const u32 index = static_cast<u32>(first + in_pass);  // no tensor has 2^32 blocks
    const i64 token = index / blocks;
    const i64 block = index % blocks;
    const i64 column = block * kScaleBlock + ptx::lane_index() % kBlockLanes * kLaneColumns;
    const BlockPart<S> part{args, token, block, column,
                            token < args.num_tokens && column < args.num_columns};
    typename BlockPart<S>::Pair products[kLaneColumns / 2];
    part.load(products);
    part.store(products, BlockScale<S.scale_format>::of(part.block_maximum(products)));
  }
}

}  // namespace deep_kernels
