// Tiles of the block-scaled GEMM: products of 128 of k at a time, scaled and added in float32.
#pragma once

#include <vector>

#include "cpu/product_tile.h"
#include "deep_kernels/contract/silu_fold.h"

namespace deep_kernels::cpu {

// Rows of w that share their scales; as columns of a tile they lie side by side.
struct WeightBlock {
  i64 first_row;
  i64 scale_row;  // of w_scale
  i32 num_rows;   // at most kScaleBlock

  // Block `index` of a grid that covers num_rows rows.
  static WeightBlock of_grid(i64 index, i64 num_rows) {
    const i64 first = index * kScaleBlock;
    return {first, index, static_cast<i32>(min_of<i64>(kScaleBlock, num_rows - first))};
  }
};

// One thread's tile. Tokens and weights are decoded for every tile anew, which with the sums takes
// an eighth of the time, so that no thread ever holds more than 128 of k. Twice the tokens gain 4%,
// but leave threads without work where there are many.
class BlockProduct {
 public:
  static constexpr i32 kMaxTokens = 256;
  static constexpr i32 kMaxBlocks = 2;
  static constexpr i32 kMaxColumns = kMaxBlocks * kScaleBlock;

  explicit BlockProduct(const BlockScaledArgs& args);

  // Sums over all of k for tokens [first_token, first_token + num_tokens) and the rows of blocks.
  void compute(i64 first_token, i32 num_tokens, const WeightBlock* blocks, i32 num_blocks);
  const float* sums(i32 token) const { return &sums_[i64{token} * kMaxColumns]; }

 private:
  void load_tokens(i64 first_token, i32 num_tokens, i32 k_block);
  void load_weights(const WeightBlock& block, i32 first_column, i32 k_block);
  void decode(const u8* codes, i32 k_block, float* out) const;
  float weight_scale(const WeightBlock& block, i32 k_block) const;

  const BlockScaledArgs& args_;
  ProductTile<float> tile_;
  std::vector<float> token_scales_;  // [tokens] of the k block
  std::vector<float> sums_;          // [tokens, kMaxColumns]
};

}  // namespace deep_kernels::cpu
