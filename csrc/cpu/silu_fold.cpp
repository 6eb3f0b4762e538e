#include "cpu/silu_fold.h"

#include "cpu/bfloat16.h"
#include "cpu/block_product.h"
#include "cpu/gated_activation.h"
#include "cpu/tasks.h"
#include "cpu/vectorize.h"

namespace deep_kernels::cpu {
namespace {

// Activations below which a thread is not worth waking.
constexpr i64 kMinThreadColumns = i64{1} << 14;

// Tiles of all tokens and `num_column_tiles` columns. Those of one column tile follow each other,
// so that its weights stay in the cache that the threads share.
struct TileGrid {
  i64 num_tokens;
  i64 num_column_tiles;

  i64 num_token_tiles() const { return ceil_div<i64>(num_tokens, BlockProduct::kMaxTokens); }
  i64 num_tiles() const { return num_token_tiles() * num_column_tiles; }
  i64 column_tile(i64 tile) const { return tile / num_token_tiles(); }
  i64 first_token(i64 tile) const { return tile % num_token_tiles() * BlockProduct::kMaxTokens; }
  i32 tokens_of(i64 tile) const {
    return static_cast<i32>(min_of<i64>(BlockProduct::kMaxTokens, num_tokens - first_token(tile)));
  }
};

// work(product, tile) for every tile.
template <class Work>
void for_each_tile(const BlockScaledArgs& args, const TileGrid& grid, const Work& work) {
  for_each_task(grid.num_tiles(), [&] { return BlockProduct(args); }, work);
}

// --- outputs of the plain GEMM -------------------------------------------------------------------

float residual_at(const BlockGemmArgs& args, i64 token, i64 column) {
  const i64 index = token * args.residual_stride + column;
  return args.residual_dtype == DType::float32
             ? static_cast<const float*>(args.residual)[index]
             : from_bfloat16(static_cast<const u16*>(args.residual)[index]);
}

DK_VECTORIZED void store_rounded(const float* sums, i32 count, u16* out) {
  for (i32 i = 0; i < count; ++i) out[i] = to_bfloat16(sums[i]);
}

void store_row(const BlockGemmArgs& args, DType out_dtype, const float* sums, i64 token,
               i64 first_column, i32 count) {
  const i64 first = token * args.out_stride + first_column;
  const bool has_residual = args.residual != nullptr;
  if (out_dtype == DType::float32) {
    float* out = static_cast<float*>(args.out) + first;
    for (i32 i = 0; i < count; ++i)
      out[i] = has_residual ? sums[i] + residual_at(args, token, first_column + i) : sums[i];
    return;
  }
  u16* out = static_cast<u16*>(args.out) + first;
  if (!has_residual) return store_rounded(sums, count, out);
  for (i32 i = 0; i < count; ++i)
    out[i] = to_bfloat16(round_to_bfloat16(sums[i]) + residual_at(args, token, first_column + i));
}

// --- outputs of the activation -------------------------------------------------------------------

// Args is SiluFoldArgs or SiluMulArgs, whose outputs are the same.
template <class Args>
void quantize_block(const Args& args, const GatedActivation& rule, i64 token, i64 block, i32 count,
                    const float* gate, const float* up) {
  const float scale = activate_and_quantize(rule, gate, up, count,
                                            args.y + token * args.y_stride + block * kScaleBlock);
  const i64 index = token * args.y_scale_token_stride + block * args.y_scale_block_stride;
  if (rule.scale_format == ScaleFormat::float32)
    static_cast<float*>(args.y_scale)[index] = scale;
  else
    static_cast<u8*>(args.y_scale)[index] = ue8m0_of(scale);
}

DK_VECTORIZED void widen(const u16* from, i32 count, float* to) {
  for (i32 i = 0; i < count; ++i) to[i] = from_bfloat16(from[i]);
}

}  // namespace

void block_gemm(const BlockGemmArgs& args, DType out_dtype) {
  const i64 num_blocks = ceil_div(args.num_columns, kScaleBlock);
  const TileGrid grid{args.gemm.num_tokens, ceil_div<i64>(num_blocks, BlockProduct::kMaxBlocks)};
  for_each_tile(args.gemm, grid, [&](BlockProduct& product, i64 tile) {
    const i64 first_block = grid.column_tile(tile) * BlockProduct::kMaxBlocks;
    WeightBlock blocks[BlockProduct::kMaxBlocks];
    i32 tile_blocks = 0, num_columns = 0;
    for (i64 block = first_block; block < num_blocks && tile_blocks < BlockProduct::kMaxBlocks;
         ++block) {
      blocks[tile_blocks] = WeightBlock::of_grid(block, args.num_columns);
      num_columns += blocks[tile_blocks++].num_rows;
    }
    product.compute(grid.first_token(tile), grid.tokens_of(tile), blocks, tile_blocks);
    for (i32 token = 0; token < grid.tokens_of(tile); ++token)
      store_row(args, out_dtype, product.sums(token), grid.first_token(tile) + token,
                first_block * kScaleBlock, num_columns);
  });
}

void silu_mul(const SiluMulArgs& args, Activation activation, ScaleFormat scale_format) {
  const GatedActivation rule{args.activation, activation, Rounding::bfloat16, scale_format};
  const i64 tokens_per_thread = max_of<i64>(1, kMinThreadColumns / max_of(args.num_columns, 1));
  at::parallel_for(0, args.num_tokens, tokens_per_thread, [&](i64 begin, i64 end) {
    float gate[kScaleBlock], up[kScaleBlock];
    for (i64 token = begin; token < end; ++token) {
      const u16* row = args.gate_up + token * args.gate_up_stride;
      for (i32 first = 0; first < args.num_columns; first += kScaleBlock) {
        const i32 count = min_of(kScaleBlock, args.num_columns - first);
        widen(row + first, count, gate);
        widen(row + args.num_columns + first, count, up);
        quantize_block(args, rule, token, first / kScaleBlock, count, gate, up);
      }
    }
  });
}

void silu_fold(const SiluFoldArgs& args, Activation activation, Rounding rounding,
               ScaleFormat scale_format) {
  const GatedActivation rule{args.activation, activation, rounding, scale_format};
  const i64 num_blocks = ceil_div(args.num_columns, kScaleBlock);
  const TileGrid grid{args.gemm.num_tokens, num_blocks};
  for_each_tile(args.gemm, grid, [&](BlockProduct& product, i64 tile) {
    const i64 block = grid.column_tile(tile);
    const WeightBlock gate = WeightBlock::of_grid(block, args.num_columns);
    const WeightBlock up{args.num_columns + gate.first_row, num_blocks + block, gate.num_rows};
    const WeightBlock blocks[] = {gate, up};
    product.compute(grid.first_token(tile), grid.tokens_of(tile), blocks, 2);
    for (i32 token = 0; token < grid.tokens_of(tile); ++token) {
      const float* sums = product.sums(token);
      quantize_block(args, rule, grid.first_token(tile) + token, block, gate.num_rows, sums,
                     sums + gate.num_rows);
    }
  });
}

}  // namespace deep_kernels::cpu
