// Joins the splits of each row, for every card: a warp takes a row, or several share its splits, so
// that as many of them are on their way from memory at once.
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/kernels/attention_softmax.cuh"
#include "deep_kernels/ptx/base.cuh"
#include "deep_kernels/ptx/sm90.cuh"

namespace deep_kernels::flash {

// Tokens that belong to nobody have no results to be joined.
DK_DEVICE i64 num_joined_rows(const AttentionArgs& args) {
  const i64 tokens = args.cu_seqlens_q == nullptr
                         ? args.total_q
                         : clamp_to<i64>(args.cu_seqlens_q[args.batch], 0, args.total_q);
  return tokens * args.num_q_heads;
}

template <AttentionJoinSpec S>
struct JoinSmem {
  alignas(16) float values[S.num_warps()][S.head_panels * kHeadPanel];
};

// What a warp does of a row: splits way, way + ways, .. of them.
template <AttentionJoinSpec S>
struct RowJoin {
  static constexpr i32 kHeadDim = S.head_panels * kHeadPanel;
  static constexpr i32 kChunks = kHeadDim / 4;               // of 16 bytes
  static constexpr i32 kLaneChunks = ceil_div(kChunks, 32);  // 32 lie between them

  static constexpr i32 kLaneSplits = kMaxKvSplits / 32;
  using Words = u32[kJoinAhead][kLaneChunks][4];

  const AttentionArgs& args;
  i64 row;
  i32 way;
  i32 ways;
  float weight[kLaneSplits];  // of splits lane + 32 i, 0 where there is none
  float log2_sum;             // of all splits' sums
  float values[kLaneChunks][4] = {};

  static DK_DEVICE i32 chunk(i32 i) { return ptx::lane_index() + 32 * i; }
  static DK_DEVICE bool has_chunk(i32 i) { return chunk(i) < kChunks; }

  // Converged.
  DK_DEVICE void weigh() {
    float most = -infinity();  // a NaN is left out here and gets into the sum
    DK_UNROLL
    for (i32 i = 0; i < kLaneSplits; ++i) {
      const i32 split = ptx::lane_index() + 32 * i;
      weight[i] = split < args.num_splits
                      ? ptx::load_global(args.partial_lse + split * args.num_rows() + row)
                      : -infinity();
      most = ptx::max(most, weight[i]);
    }
    DK_UNROLL
    for (i32 mask = 1; mask < 32; mask *= 2) most = ptx::max(most, ptx::shuffle_xor(most, mask));
    const float reference = most == -infinity() ? 0.0f : most;
    float sum = 0.0f;
    DK_UNROLL
    for (i32 i = 0; i < kLaneSplits; ++i) {
      weight[i] = ptx::ex2_approx_ftz(weight[i] - reference);
      sum += weight[i];
    }
    DK_UNROLL
    for (i32 mask = 1; mask < 32; mask *= 2) sum += ptx::shuffle_xor(sum, mask);
    const Divisor divisor(sum);
    DK_UNROLL
    for (i32 i = 0; i < kLaneSplits; ++i) weight[i] = divisor.divide(weight[i]);
    log2_sum = flash::log2_sum(most, sum);
  }
  // Converged.
  DK_DEVICE float weight_of(i32 split) const {
    float mine = weight[0];
    DK_UNROLL
    for (i32 i = 1; i < kLaneSplits; ++i) mine = split / 32 == i ? weight[i] : mine;
    return ptx::shuffle(mine, split % 32);
  }
  DK_DEVICE void load(Words& words, i32 first) const {
    DK_UNROLL
    for (i32 i = 0; i < kJoinAhead; ++i) {
      const i32 split = first + i * ways;
      const float* from = args.partial_out + (split * args.num_rows() + row) * kHeadDim;
      DK_UNROLL
      for (i32 j = 0; j < kLaneChunks; ++j)
        if (split < args.num_splits && has_chunk(j))
          ptx::load_global_x4(words[i][j], from + 4 * chunk(j));
    }
  }
  // A split without keys that the row sees has the weight 0, whatever is multiplied by it.
  DK_DEVICE void add(const Words& words, i32 first) {
    DK_UNROLL
    for (i32 i = 0; i < kJoinAhead; ++i) {
      const i32 split = first + i * ways;
      if (split >= args.num_splits) continue;
      const float share = weight_of(split);
      DK_UNROLL
      for (i32 j = 0; j < kLaneChunks; ++j) {
        if (!has_chunk(j)) continue;
        DK_UNROLL
        for (i32 e = 0; e < 4; ++e) {
          const float sum = ptx::fma(ptx::float_of(words[i][j][e]), share, values[j][e]);
          values[j][e] = share == 0.0f ? values[j][e] : sum;
        }
      }
    }
  }
  DK_DEVICE void add_up() {
    Words words;
    load(words, way);
    weigh();
    add(words, way);
    DK_NO_UNROLL
    for (i32 first = way + kJoinAhead * ways; first < args.num_splits; first += kJoinAhead * ways) {
      load(words, first);
      add(words, first);
    }
  }

  // --- what the warps of a row have added up

  DK_DEVICE void give(float (&to)[kHeadDim]) const {
    DK_UNROLL
    for (i32 i = 0; i < kLaneChunks; ++i) {
      if (!has_chunk(i)) continue;
      const float(&value)[4] = values[i];
      ptx::store_shared_x4(ptx::smem_addr(&to[4 * chunk(i)]), ptx::bits_of(value[0]),
                           ptx::bits_of(value[1]), ptx::bits_of(value[2]), ptx::bits_of(value[3]));
    }
  }
  DK_DEVICE void take(const float (&from)[kHeadDim]) {
    DK_UNROLL
    for (i32 i = 0; i < kLaneChunks; ++i) {
      if (!has_chunk(i)) continue;
      u32 words[4];
      ptx::load_shared_x4(words, ptx::smem_addr(&from[4 * chunk(i)]));
      DK_UNROLL
      for (i32 e = 0; e < 4; ++e) values[i][e] += ptx::float_of(words[e]);
    }
  }

  DK_DEVICE void store() const {
    // Packed tokens are numbered through: one member has them all.
    const i64 token = row / args.num_q_heads;
    const bool packed = args.cu_seqlens_q != nullptr;
    const AttentionMember member{.batch = packed ? 0 : token / args.num_q};
    const i32 query = static_cast<i32>(token - member.batch * args.num_q);
    const i32 head = static_cast<i32>(row % args.num_q_heads);
    if (ptx::lane_index() == 0) store_lse(args, member, head, query, log2_sum);
    u16* to = out_row(args, member, head, query);
    DK_UNROLL
    for (i32 i = 0; i < kLaneChunks; ++i) {
      if (!has_chunk(i)) continue;
      const float(&value)[4] = values[i];
      ptx::store_global_x2(to + 4 * chunk(i), rounded_pair<S.dtype>(value[0], value[1]),
                           rounded_pair<S.dtype>(value[2], value[3]));
    }
  }
};

}  // namespace deep_kernels::flash

namespace deep_kernels {

template <AttentionJoinSpec S>
DK_DEVICE void attention_join(const AttentionArgs& args) {
  using namespace flash;
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(JoinSmem<S>) <= S.smem_bytes());
  if constexpr (S.backend != Backend::sm89) ptx::grid_dependency_wait();
  auto& smem = ptx::dynamic_smem<JoinSmem<S>>();
  const i64 num_rows = num_joined_rows(args);
  const i32 warp = ptx::warp_index();
  const i32 ways = S.warps_per_row(args.num_splits);
  const i32 rows = S.num_warps() / ways;
  for (i64 first = i64{ptx::block_index()} * rows; first < num_rows;
       first += i64{ptx::num_blocks()} * rows) {
    RowJoin<S> join{.args = args, .row = first + warp / ways, .way = warp % ways, .ways = ways};
    const bool exists = join.row < num_rows;
    if (exists) join.add_up();
    if (ways > 1) {
      if (join.way > 0) join.give(smem.values[warp]);
      ptx::sync_threads();
      if (join.way == 0)
        for (i32 other = 1; other < ways; ++other) join.take(smem.values[warp + other]);
      ptx::sync_threads();  // before the next rows
    }
    if (exists && join.way == 0) join.store();
  }
}

}  // namespace deep_kernels
