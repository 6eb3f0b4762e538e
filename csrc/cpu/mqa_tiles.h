// How a CPU call of MQA logits is computed, dense or paged: tiles of (query tokens, kv tokens) that
// threads take in turn. Inputs is MqaInputs or PagedMqaInputs.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "cpu/head_sum.h"
#include "cpu/mqa_inputs.h"
#include "cpu/product_tile.h"

namespace deep_kernels::cpu {

// A tile is kTileRows (token, head) pairs by kTileColumns kv tokens: 512 KiB of operands and
// products at head_dim 128, which stay in a core's second-level cache. Larger tiles gain 1%, tiles
// of half the rows lose 3% (one core of a Zen 4 server, MKL).
constexpr i32 kTileRows = 256;
constexpr i32 kTileColumns = 256;
static_assert(kTileRows >= kMqaMaxHeads && kTileColumns % kSumColumns == 0);

// Multiply-adds below which a thread is not worth waking.
constexpr i64 kMinThreadWork = i64{1} << 20;
constexpr i64 kRunsPerThread = 16;

// float32 can hold every product and every sum of a logit whose exponents stay in these bounds:
// |dot| < 2^25 before the exponents, at least 2^-18 where not zero, at most 2^7 heads. All others
// are computed in float64. The choice is made per token and per kv token, so that it does not
// depend on what else a call holds.
constexpr i32 kKvExponent = 40;     // of kv blocks, either sign
constexpr i32 kQueryExponent = 60;  // of query blocks, either sign
constexpr i32 kWeightedLow = -64;   // least exponent of a query block + least of a weight
constexpr i32 kWeightedHigh = 52;   // greatest + greatest

inline i32 tokens_per_tile(const MqaQueries& in) {
  return std::clamp(kTileRows / in.num_heads, 1, std::max(in.num_per_sequence, 1));
}

// The tiles of all token blocks in one row: tile t belongs to the block whose [first_tile[b],
// first_tile[b + 1]) holds it. A block's tokens are of one sequence.
struct TilePlan {
  struct Block {
    i64 first_token;
    i32 num_tokens;
    i32 begin = 0;  // kv tokens that some window of the block covers lie in [begin, end)
    i32 end = 0;

    bool is_empty() const { return begin >= end; }
    i64 first_column() const { return begin / kTileColumns * i64{kTileColumns}; }
    i64 num_tiles() const {
      return is_empty() ? 0 : ceil_div<i64>(end - first_column(), kTileColumns);
    }
  };
  std::vector<Block> blocks;
  std::vector<i64> first_tile;

  template <class Inputs>
  explicit TilePlan(const Inputs& in) {
    const i32 max_tokens = tokens_per_tile(in);
    first_tile.push_back(0);
    for (i64 sequence = 0; sequence < in.num_q; sequence += in.num_per_sequence) {
      const i64 end = sequence + in.num_per_sequence;
      for (i64 first = sequence; first < end; first += max_tokens) {
        blocks.push_back(block_of(in, first, std::min(first + max_tokens, end)));
        first_tile.push_back(first_tile.back() + blocks.back().num_tiles());
      }
    }
  }
  i64 num_tiles() const { return first_tile.back(); }

 private:
  template <class Inputs>
  static Block block_of(const Inputs& in, i64 first, i64 end) {
    Block block{first, static_cast<i32>(end - first), std::numeric_limits<i32>::max(), 0};
    for (i64 token = first; token < end; ++token) {
      const MqaWindow window = in.window(token);
      if (window.begin >= window.end) continue;
      block.begin = std::min(block.begin, window.begin);
      block.end = std::max(block.end, window.end);
    }
    return block;
  }
};

// The work of one thread: walks tiles, keeping the queries of a token block decoded.
template <class Inputs, class Logit>  // Logit: float, or u16 for bfloat16
class TileWorker {
 public:
  TileWorker(const Inputs& in, Logit* logits, i64 logits_stride)
      : in_(in),
        logits_(logits),
        logits_stride_(logits_stride),
        max_tokens_(tokens_per_tile(in)),
        narrow_(max_tokens_ * in.num_heads, kTileColumns, in.head_dim),
        weights_(max_tokens_ * in.num_heads),
        is_wide_token_(max_tokens_) {}

  void run(const TilePlan& plan, i64 begin, i64 end) {
    const auto& firsts = plan.first_tile;
    i64 block = std::upper_bound(firsts.begin(), firsts.end(), begin) - firsts.begin() - 1;
    load_block(plan.blocks[block]);
    for (i64 tile = begin; tile < end; ++tile) {
      if (tile == firsts[block + 1]) {
        while (tile == firsts[block + 1]) ++block;
        load_block(plan.blocks[block]);
      }
      const TilePlan::Block& span = plan.blocks[block];
      const i64 column = span.first_column() + (tile - firsts[block]) * kTileColumns;
      run_tile(std::max<i64>(column, span.begin), std::min<i64>(column + kTileColumns, span.end));
    }
  }

 private:
  void load_block(const TilePlan::Block& block) {
    first_token_ = block.first_token;
    num_tokens_ = block.num_tokens;
    sequence_ = first_token_ / in_.num_per_sequence;
    has_wide_token_ = false;
    wide_queries_loaded_ = false;
    for (i32 token = 0; token < num_tokens_; ++token) {
      in_.load_weights(first_token_ + token, &weights_[token * in_.num_heads]);
      for (i32 head = 0; head < in_.num_heads; ++head)
        decode_row(in_.format, in_.head_dim, in_.query(first_token_ + token, head),
                   narrow_.left(token * in_.num_heads + head));
      is_wide_token_[token] = is_wide_token(token);
      has_wide_token_ = has_wide_token_ || is_wide_token_[token];
    }
  }

  bool is_wide_token(i32 token) const {
    ExponentRange query, weight;
    for (i32 head = 0; head < in_.num_heads; ++head) {
      if (in_.is_mx())
        add_exponents(in_.format, in_.head_dim, in_.query(first_token_ + token, head), query);
      const float value = weights_[token * in_.num_heads + head];
      if (!std::isfinite(value)) return true;
      if (value != 0.0f) weight.add(std::ilogb(value));
    }
    if (!in_.is_mx()) query.add(0);
    if (query.is_empty()) return false;
    if (weight.is_empty()) weight.add(0);  // 0 times a dot product that has left float32 is no 0
    return !query.within(-kQueryExponent, kQueryExponent) ||
           query.low + weight.low < kWeightedLow || query.high + weight.high > kWeightedHigh;
  }

  // Logits of the block's tokens for kv tokens [begin, end), all within one tile's columns.
  void run_tile(i64 begin, i64 end) {
    // Whole groups of columns, also where a window begins or ends within one.
    const i64 first = begin - begin % kSumColumns;
    const i32 num_columns = static_cast<i32>(in_.readable_end(end, kSumColumns) - first);
    const i32 num_rows = num_tokens_ * in_.num_heads;
    for (i32 column = 0; column < num_columns; ++column)
      decode_row(in_.format, in_.head_dim, in_.kv_row(sequence_, first + column),
                 narrow_.right(column));
    narrow_.multiply(num_rows, num_columns);
    load_columns(first, begin, end);
    const bool is_wide = has_wide_token_ || has_wide_column_;
    if (is_wide) multiply_wide(first, num_rows, num_columns);
    for (i32 token = 0; token < num_tokens_; ++token) {
      const MqaWindow window = in_.window(first_token_ + token);
      const i32 low = static_cast<i32>(std::max<i64>(window.begin, begin) - first);
      const i32 high = static_cast<i32>(std::min<i64>(window.end, end) - first);
      if (low >= high) continue;
      finish_token(token, low, high, is_wide);
      Logit* row = logits_ + (first_token_ + token) * logits_stride_ + in_.column_of_zero(window);
      store_logits(values_ + low, high - low, row + first + low);
    }
  }

  // Scales and exponent classes of the columns [begin, end); what lies outside is not looked at.
  void load_columns(i64 first, i64 begin, i64 end) {
    has_wide_column_ = false;
    for (i64 kv = begin; kv < end; ++kv) {
      const i64 column = kv - first;
      if (in_.is_mx()) {
        ExponentRange range;
        add_exponents(in_.format, in_.head_dim, in_.kv_row(sequence_, kv), range);
        is_wide_column_[column] = !range.within(-kKvExponent, kKvExponent);
        has_wide_column_ = has_wide_column_ || is_wide_column_[column];
      } else {
        scales_[column] = in_.scale_of(sequence_, kv);
      }
    }
  }

  void multiply_wide(i64 first, i32 num_rows, i32 num_columns) {
    if (wide_ == nullptr)
      wide_ = std::make_unique<ProductTile<double>>(max_tokens_ * in_.num_heads, kTileColumns,
                                                    in_.head_dim);
    if (!wide_queries_loaded_) {
      for (i32 row = 0; row < num_rows; ++row)
        decode_row(in_.format, in_.head_dim,
                   in_.query(first_token_ + row / in_.num_heads, row % in_.num_heads),
                   wide_->left(row));
      wide_queries_loaded_ = true;
    }
    for (i32 column = 0; column < num_columns; ++column)
      decode_row(in_.format, in_.head_dim, in_.kv_row(sequence_, first + column),
                 wide_->right(column));
    wide_->multiply(num_rows, num_columns);
  }

  // values[low, high) = the token's logits.
  void finish_token(i32 token, i32 low, i32 high, bool is_wide) {
    const float* weights = &weights_[token * in_.num_heads];
    const i64 row = i64{token} * in_.num_heads;
    sum_heads(narrow_.dots(row), narrow_.stride(), weights, in_.num_heads, low, high, values_);
    if (!in_.is_mx())
      for (i32 column = low; column < high; ++column) values_[column] *= scales_[column];
    if (!is_wide) return;
    const double* wide_weights = widened_weights(weights);
    double sums[kTileColumns];
    sum_heads(wide_->dots(row), wide_->stride(), wide_weights, in_.num_heads, low, high, sums);
    for (i32 column = low; column < high; ++column) {
      if (!is_wide_token_[token] && !(in_.is_mx() && is_wide_column_[column])) continue;
      values_[column] =
          static_cast<float>(in_.is_mx() ? sums[column] : sums[column] * scales_[column]);
    }
  }
  const double* widened_weights(const float* weights) {
    wide_weights_.assign(weights, weights + in_.num_heads);
    return wide_weights_.data();
  }

  const Inputs& in_;
  Logit* logits_;  // [num_q, width]
  i64 logits_stride_;
  i32 max_tokens_;
  ProductTile<float> narrow_;
  std::unique_ptr<ProductTile<double>> wide_;  // made when the first wide token or column appears

  // Of the current token block.
  i64 first_token_ = 0;
  i64 sequence_ = 0;
  i32 num_tokens_ = 0;
  bool has_wide_token_ = false;
  bool wide_queries_loaded_ = false;
  std::vector<float> weights_;  // [max_tokens, num_heads]
  std::vector<double> wide_weights_;
  std::vector<u8> is_wide_token_;  // [max_tokens]

  // Of the current tile.
  bool has_wide_column_ = false;
  bool is_wide_column_[kTileColumns];
  float scales_[kTileColumns];
  float values_[kTileColumns];
};

template <class Inputs, class Logit>
void fill_outside(const Inputs& in, Logit* logits, i64 stride, Logit minus_infinity) {
  const i64 rows_per_thread = std::max<i64>(1, (i64{1} << 15) / std::max(in.width, 1));
  at::parallel_for(0, in.num_q, rows_per_thread, [&](i64 begin, i64 end) {
    for (i64 token = begin; token < end; ++token) {
      const MqaWindow window = in.window(token);
      Logit* row = logits + token * stride;
      std::fill(row, row + window.begin + in.column_of_zero(window), minus_infinity);
      std::fill(row + window.end + in.column_of_zero(window), row + in.width, minus_infinity);
    }
  });
}

template <class Inputs, class Logit>
void score_tiles(const Inputs& in, Logit* logits, i64 stride, bool clean, Logit minus_infinity) {
  if (clean) fill_outside(in, logits, stride, minus_infinity);
  const TilePlan plan(in);
  const i64 tile_work =
      i64{kTileColumns} * in.head_dim * std::max(16, tokens_per_tile(in) * in.num_heads);
  const i64 tiles_per_thread = std::max<i64>(1, kMinThreadWork / tile_work);
  const i64 num_workers =
      std::min<i64>(at::get_num_threads(), ceil_div(plan.num_tiles(), tiles_per_thread));
  // Threads take runs of tiles as they come to them: cores differ, are shared with others, and
  // float64 tiles are slow. Runs, because a new token block has to be decoded.
  const i64 run_length = std::max<i64>(1, plan.num_tiles() / (kRunsPerThread * num_workers + 1));
  std::atomic<i64> next_tile{0};
  at::parallel_for(0, num_workers, 1, [&](i64, i64) {
    TileWorker<Inputs, Logit> worker(in, logits, stride);
    for (;;) {
      const i64 begin = next_tile.fetch_add(run_length, std::memory_order_relaxed);
      if (begin >= plan.num_tiles()) return;
      worker.run(plan, begin, std::min(begin + run_length, plan.num_tiles()));
    }
  });
}

// Writes logits [num_q, width] of logits_dtype; outside the windows only where `clean`.
template <class Inputs>
void score(const Inputs& in, DType logits_dtype, void* logits, i64 stride, bool clean) {
  if (logits_dtype == DType::float32)
    score_tiles(in, static_cast<float*>(logits), stride, clean,
                -std::numeric_limits<float>::infinity());
  else
    score_tiles(in, static_cast<u16*>(logits), stride, clean, u16{0xff80});
}

}  // namespace deep_kernels::cpu
