// What the rows of the measured tables of the FP8 prefill MLP say, and how one is found.
#pragma once

#include <cstddef>

#include "deep_kernels/contract/types.h"

namespace deep_kernels {

// Tokens of a tile of 128 output columns, and the SMs that share it.
struct TileShape {
  i32 tokens;
  i32 sms;  // more than 1: a cluster

  constexpr bool operator==(const TileShape&) const = default;
};
inline constexpr TileShape kByRounds{0, 0};  // no tile of its own

struct TileRow {
  Backend backend;
  TileShape tile;
  i32 time;          // of a round over the card; 1000: that of the backend's last row
  const char* gpu;   // that it was measured on
  const char* date;  // of the measurement
  const char* reason;
};

struct FoldRow {
  Backend backend;
  i64 num_columns;   // I
  i64 k;             // it was measured with; the choice does not ask
  i64 max_tokens;    // of the band, which begins where that of the row before ends
  bool fused;        // the fold, else the two launches
  TileShape tile;    // of the fold, where the rule by rounds was measured to choose badly
  i64 num_sms;       // of the card; 0 if nothing was measured
  const char* gpu;   // empty if nothing was measured
  const char* date;  // empty if nothing was measured
  double gain;       // share of the time that the other way would cost more; 0: no difference
  const char* reason;

  // The tile for calls of just these sizes; they may also only be nearest to them.
  constexpr TileShape tile_for(i64 columns, i64 tokens, i64 sms) const {
    const bool measured = columns == num_columns && tokens <= max_tokens && sms == num_sms;
    return measured ? tile : kByRounds;
  }
};

// How often the card is filled until all tiles are done.
constexpr i64 fold_rounds(TileShape tile, i64 num_tokens, i64 num_blocks, i64 num_sms) {
  const i64 tiles = ceil_div<i64>(num_tokens, tile.tokens) * num_blocks;
  return ceil_div<i64>(tiles, max_of<i64>(num_sms / tile.sms, 1));
}

// The time of a tile's round; 0 where it was not measured.
template <std::size_t kRows>
constexpr i64 tile_time(const TileRow (&table)[kRows], Backend backend, TileShape tile) {
  for (const TileRow& row : table)
    if (row.backend == backend && row.tile == tile) return row.time;
  return 0;
}

// The row of the nearest I, by ratio, and there of the band of these tokens, or of the last; null
// where the backend has none. Rows of an I stand together, bands in order.
template <std::size_t kRows>
constexpr const FoldRow* find_fold_row(const FoldRow (&table)[kRows], Backend backend,
                                       i64 num_columns, i64 num_tokens) {
  const auto distance = [&](const FoldRow& row) {
    const auto low = static_cast<double>(min_of(row.num_columns, num_columns));
    return static_cast<double>(max_of(row.num_columns, num_columns)) / low;
  };
  const FoldRow* best = nullptr;
  for (const FoldRow& row : table) {
    if (row.backend != backend) continue;
    const bool nearer = best == nullptr || distance(row) < distance(*best);
    const bool same = best != nullptr && row.num_columns == best->num_columns;
    if (nearer || (same && best->max_tokens < num_tokens)) best = &row;
  }
  return best;
}

// Whether the fold serves a call that does not say, and not the two launches.
template <std::size_t kRows>
constexpr bool fold_is_chosen(const FoldRow (&table)[kRows], Backend backend, i64 num_columns,
                              i64 num_tokens) {
  const FoldRow* row = find_fold_row(table, backend, num_columns, num_tokens);
  return row == nullptr || row->fused;
}

}  // namespace deep_kernels
