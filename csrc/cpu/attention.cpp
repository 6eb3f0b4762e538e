#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/attention_softmax.h"
#include "cpu/row_products.h"
#include "cpu/tasks.h"

namespace deep_kernels::cpu {
namespace {

constexpr i32 kTileRows = 64;
constexpr i32 kGroupRows = 16;  // that take scores, softmax and sums in turn: 8 KB of scores
constexpr float kLn2 = 0.693147181f;

struct Problem {
  const AttentionArgs& args;
  DType dtype;
  i32 head_dim;
  bool causal;
};

// Rows [first_row, first_row + kTileRows) of a member's query tokens times heads of one kv head.
struct RowTile {
  i32 member;
  i32 kv_head;
  i64 first_row;
};

// A row's query and head.
struct RowPlace {
  i32 query;
  i32 head;
};
RowPlace place_of(const AttentionArgs& args, i32 kv_head, i64 row) {
  const i32 heads = args.heads_per_kv();
  return {static_cast<i32>(row / heads), kv_head * heads + static_cast<i32>(row % heads)};
}

// Longest rows first, and those of one kv head after each other, so that its keys stay in cache.
std::vector<RowTile> tiles_of(const AttentionArgs& args) {
  std::vector<RowTile> tiles;
  for (i32 index = 0; index < args.batch; ++index) {
    const i64 rows = i64{attention_member(args, index).num_q} * args.heads_per_kv();
    for (i32 kv_head = 0; kv_head < args.num_kv_heads; ++kv_head)
      for (i64 tile = ceil_div<i64>(rows, kTileRows); tile-- > 0;)
        tiles.push_back({index, kv_head, tile * kTileRows});
  }
  return tiles;
}

// One thread's tile.
class TileWorker {
 public:
  TileWorker(const Problem& problem, const Ex2Rule& rule)
      : args_(problem.args),
        problem_(problem),
        rule_(rule),
        dim_(problem.head_dim),
        q_(kTileRows * dim_),
        k_(dim_ * kCpuTileKeys),
        v_(kCpuTileKeys * dim_),
        sums_(kTileRows * dim_),
        scores_(kGroupRows * kCpuTileKeys) {}

  void compute(const RowTile& tile, i32 split) {
    open(tile);
    const KeyTiles range = attention_split(split, args_.num_splits, member_.num_kv, kCpuTileKeys);
    for (i32 key_tile = range.begin; key_tile < range.end; ++key_tile) {
      const i32 first_key = key_tile * kCpuTileKeys;
      if (first_key >= ends_[num_rows_ - 1]) break;  // later queries see no less
      load_keys(first_key);
      for (i32 row = 0; row < num_rows_; row += kGroupRows)
        add_group(row, min_of(kGroupRows, num_rows_ - row), first_key);
    }
    for (i32 row = 0; row < num_rows_; ++row) store(row, split);
  }

 private:
  void open(const RowTile& tile) {
    tile_ = tile;
    member_ = attention_member(args_, tile.member);
    const i64 rows = i64{member_.num_q} * args_.heads_per_kv();
    num_rows_ = static_cast<i32>(min_of<i64>(kTileRows, rows - tile.first_row));
    for (i32 row = 0; row < num_rows_; ++row) {
      const auto [query, head] = places_[row] = place_of(args_, tile.kv_head, tile.first_row + row);
      const u16* q = args_.q + member_.batch * args_.q_batch_stride +
                     (member_.first_q + query) * args_.q_token_stride + head * args_.q_head_stride;
      widen_rows(problem_.dtype, q, 0, 1, dim_, &q_[row * dim_], dim_);
      ends_[row] = attention_visible_end(query, member_.num_q, member_.num_kv, problem_.causal);
      states_[row] = kEmptyRow;
    }
    std::fill_n(sums_.begin(), num_rows_ * dim_, 0.0f);
  }

  void load_keys(i32 first_key) {
    const i64 token = member_.first_kv + first_key;
    const i32 count = min_of(kCpuTileKeys, member_.num_kv - first_key);
    const u16* k = args_.k + member_.batch * args_.k_batch_stride + token * args_.k_token_stride +
                   tile_.kv_head * args_.k_head_stride;
    const u16* v = args_.v + member_.batch * args_.v_batch_stride + token * args_.v_token_stride +
                   tile_.kv_head * args_.v_head_stride;
    widen_transposed(problem_.dtype, k, args_.k_token_stride, count, dim_, k_.data(), kCpuTileKeys);
    widen_rows(problem_.dtype, v, args_.v_token_stride, count, dim_, v_.data(), dim_);
  }

  // Keys of the tile that a row sees; no product and no sum has others in it.
  i32 visible(i32 row, i32 first_key) const {
    return clamp_to(ends_[row] - first_key, 0, kCpuTileKeys);
  }

  void add_group(i32 first, i32 count, i32 first_key) {
    const i32 most = visible(first + count - 1, first_key);
    if (most == 0) return;
    std::fill_n(scores_.begin(), count * kCpuTileKeys, 0.0f);
    add_row_products({&q_[first * dim_], dim_}, count, {k_.data(), kCpuTileKeys}, dim_,
                     align_up(most, kRowProductColumns), scores_.data(), kCpuTileKeys);
    for (i32 i = 0; i < count; ++i) {
      const i32 seen = visible(first + i, first_key);
      if (seen == 0) continue;
      const float factor = softmax_tile(rule_, args_.scale_log2, seen, &scores_[i * kCpuTileKeys],
                                        states_[first + i]);
      if (factor != 1.0f) scale_row(factor, dim_, sums(first + i));
    }
    // What all of them see at once, then what is left of each: a chain of keys for every row.
    const i32 common = visible(first, first_key);
    add_row_products({scores_.data(), kCpuTileKeys}, count, {v_.data(), dim_}, common, dim_,
                     sums(first), dim_);
    for (i32 i = 0; i < count; ++i) {
      const i32 rest = visible(first + i, first_key) - common;
      if (rest > 0)
        add_row_products({&scores_[i * kCpuTileKeys + common], kCpuTileKeys}, 1,
                         {v_.data() + common * dim_, dim_}, rest, dim_, sums(first + i), dim_);
    }
  }

  float* sums(i32 row) { return &sums_[row * dim_]; }

  void store(i32 row, i32 split);

  const AttentionArgs& args_;
  const Problem& problem_;
  const Ex2Rule& rule_;
  const i32 dim_;
  std::vector<float> q_;       // [rows, head_dim]
  std::vector<float> k_;       // [head_dim, keys]
  std::vector<float> v_;       // [keys, head_dim]
  std::vector<float> sums_;    // [rows, head_dim] of powers times v
  std::vector<float> scores_;  // [rows of a group, keys], then powers
  RowState states_[kTileRows];
  RowPlace places_[kTileRows];
  i32 ends_[kTileRows];  // of the keys that a row sees
  RowTile tile_;
  AttentionMember member_;
  i32 num_rows_ = 0;
};

void store_row(const Problem& problem, const AttentionMember& member, RowPlace place,
               const float* values, float log2_sum) {
  const AttentionArgs& args = problem.args;
  const auto [query, head] = place;
  u16* out = args.out + member.batch * args.out_batch_stride +
             (member.first_q + query) * args.out_token_stride + head * args.out_head_stride;
  round_row(problem.dtype, values, problem.head_dim, out);
  args.lse[attention_lse_index(args, member, head, query)] = log2_sum * kLn2;
}

void TileWorker::store(i32 row, i32 split) {
  const RowState& state = states_[row];
  const RowPlace place = places_[row];
  if (args_.num_splits == 1) {
    divide_row(sums(row), state.sum, dim_, sums(row));
    return store_row(problem_, member_, place, sums(row), log_sum(state));
  }
  const i64 index =
      split * args_.num_rows() + attention_row(args_, member_, place.head, place.query);
  divide_row(sums(row), state.sum, dim_, args_.partial_out + index * dim_);
  args_.partial_lse[index] = log_sum(state);
}

// Joins the splits of one row.
void join_row(const Problem& problem, const AttentionMember& member, RowPlace place,
              float* values) {
  const AttentionArgs& args = problem.args;
  const i64 row = attention_row(args, member, place.head, place.query);
  const auto partial_lse = [&](i32 split) {
    return args.partial_lse[split * args.num_rows() + row];
  };
  float greatest = -INFINITY;
  for (i32 split = 0; split < args.num_splits; ++split)
    greatest = max_of(greatest, partial_lse(split));
  RowState state{greatest, 0.0f};
  std::fill_n(values, problem.head_dim, 0.0f);
  const float reference = greatest == -INFINITY ? 0.0f : greatest;
  for (i32 split = 0; split < args.num_splits; ++split) {
    const float weight = power_of_two(partial_lse(split) - reference);
    if (weight == 0.0f) continue;  // of a split without keys that the row sees
    state.sum += weight;
    add_scaled_row(args.partial_out + (split * args.num_rows() + row) * problem.head_dim, weight,
                   problem.head_dim, values);
  }
  divide_row(values, state.sum, problem.head_dim, values);
  store_row(problem, member, place, values, log_sum(state));
}

void join_splits(const Problem& problem, const std::vector<RowTile>& tiles) {
  const AttentionArgs& args = problem.args;
  const auto make_values = [&] { return std::vector<float>(problem.head_dim); };
  for_each_task(static_cast<i64>(tiles.size()), make_values, [&](auto& values, i64 task) {
    const RowTile& tile = tiles[task];
    const AttentionMember member = attention_member(args, tile.member);
    const i64 rows = i64{member.num_q} * args.heads_per_kv();
    const i64 end = min_of<i64>(tile.first_row + kTileRows, rows);
    for (i64 row = tile.first_row; row < end; ++row)
      join_row(problem, member, place_of(args, tile.kv_head, row), values.data());
  });
}

}  // namespace

i64 attention_num_tiles(const AttentionArgs& args) {
  i64 tiles = 0;
  for (i32 index = 0; index < args.batch; ++index)
    tiles +=
        ceil_div<i64>(i64{attention_member(args, index).num_q} * args.heads_per_kv(), kTileRows);
  return tiles * args.num_kv_heads;
}

void attention(const AttentionArgs& args, DType dtype, i32 head_dim, bool causal,
               Ex2Emulation ex2) {
  const Problem problem{args, dtype, head_dim, causal};
  const Ex2Rule rule(ex2, dtype);
  const std::vector<RowTile> tiles = tiles_of(args);
  const i64 num_splits = args.num_splits;
  for_each_task(
      static_cast<i64>(tiles.size()) * num_splits, [&] { return TileWorker(problem, rule); },
      [&](TileWorker& worker, i64 task) {
        worker.compute(tiles[task / num_splits], static_cast<i32>(task % num_splits));
      });
  if (num_splits > 1) join_splits(problem, tiles);
}

}  // namespace deep_kernels::cpu
