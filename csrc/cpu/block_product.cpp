#include "cpu/block_product.h"

#include <algorithm>
#include <cstring>

#include "cpu/bfloat16.h"
#include "cpu/decode.h"
#include "cpu/vectorize.h"

namespace deep_kernels::cpu {
namespace {

constexpr i32 kCacheLine = 64;  // bytes
static_assert(kScaleBlock == kMaxHeadDim, "decode_row takes a block of k as one row");

// sums[t][c] += products[t][c] * (token_scales[t] * weight_scale) for one block of columns.
DK_VECTORIZED void add_scaled(const float* products, i64 stride, const float* token_scales,
                              float weight_scale, i32 num_tokens, i32 num_columns, float* sums) {
  for (i32 token = 0; token < num_tokens; ++token) {
    const float scale = token_scales[token] * weight_scale;
    const float* from = products + token * stride;
    float* to = sums + i64{token} * BlockProduct::kMaxColumns;
    for (i32 column = 0; column < num_columns; ++column) to[column] += from[column] * scale;
  }
}

}  // namespace

BlockProduct::BlockProduct(const BlockScaledArgs& args)
    : args_(args),
      tile_(min_of(args.num_tokens, kMaxTokens), kMaxColumns, kScaleBlock),
      token_scales_(min_of(args.num_tokens, kMaxTokens)),
      sums_(token_scales_.size() * kMaxColumns) {}

void BlockProduct::compute(i64 first_token, i32 num_tokens, const WeightBlock* blocks,
                           i32 num_blocks) {
  std::fill(sums_.begin(), sums_.end(), 0.0f);
  for (i32 k_block = 0; k_block < ceil_div(args_.k, kScaleBlock); ++k_block) {
    load_tokens(first_token, num_tokens, k_block);
    i32 num_columns = 0;
    for (i32 i = 0; i < num_blocks; ++i) {
      load_weights(blocks[i], num_columns, k_block);
      num_columns += blocks[i].num_rows;
    }
    tile_.multiply(num_tokens, num_columns);
    i32 column = 0;
    for (i32 i = 0; i < num_blocks; ++i) {
      add_scaled(tile_.dots(0) + column, tile_.stride(), token_scales_.data(),
                 weight_scale(blocks[i], k_block), num_tokens, blocks[i].num_rows, &sums_[column]);
      column += blocks[i].num_rows;
    }
  }
}

void BlockProduct::load_tokens(i64 first_token, i32 num_tokens, i32 k_block) {
  for (i32 i = 0; i < num_tokens; ++i) {
    const i64 token = first_token + i;
    decode(args_.x + token * args_.x_stride, k_block, tile_.left(i));
    token_scales_[i] =
        args_.x_scale[token * args_.x_scale_token_stride + k_block * args_.x_scale_block_stride];
  }
}

void BlockProduct::load_weights(const WeightBlock& block, i32 first_column, i32 k_block) {
  for (i32 i = 0; i < block.num_rows; ++i)
    decode(args_.w + (block.first_row + i) * args_.w_stride, k_block,
           tile_.right(first_column + i));
}

// A last block that k cuts off is filled up with zeros.
void BlockProduct::decode(const u8* codes, i32 k_block, float* out) const {
  const i32 first = k_block * kScaleBlock;
  const i32 depth = min_of(args_.k - first, kScaleBlock);
  // What comes next in every row are lines that the hardware does not foresee: a tenth of the time
  // of large products (one core of a Zen 4 server, MKL).
  for (i32 line = 0; line < kScaleBlock; line += kCacheLine)
    __builtin_prefetch(codes + first + kScaleBlock + line);
  u8 padded[kScaleBlock] = {};
  const bool is_whole = depth == kScaleBlock;
  if (!is_whole) std::memcpy(padded, codes + first, depth);
  decode_row(Format::fp8, kScaleBlock, {is_whole ? codes + first : padded, nullptr, 0}, out);
}

float BlockProduct::weight_scale(const WeightBlock& block, i32 k_block) const {
  const i64 index =
      block.scale_row * args_.w_scale_row_stride + k_block * args_.w_scale_block_stride;
  return args_.w_scale_dtype == DType::float32
             ? static_cast<const float*>(args_.w_scale)[index]
             : from_bfloat16(static_cast<const u16*>(args_.w_scale)[index]);
}

}  // namespace deep_kernels::cpu
