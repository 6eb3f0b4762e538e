// Joins the splits of each row, for every card: a warp takes a row.
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
struct RowJoin {
  static constexpr i32 kHeadDim = S.head_panels * kHeadPanel;
  static constexpr i32 kChunks = kHeadDim / 4;               // of 16 bytes
  static constexpr i32 kLaneChunks = ceil_div(kChunks, 32);  // 32 lie between them

  static constexpr i32 kLaneSplits = kMaxKvSplits / 32;
  static constexpr i32 kAhead = 4;  // splits that are loaded together: one by one they would wait

  const AttentionArgs& args;
  i64 row;
  float weight[kLaneSplits];  // of splits lane + 32 i, 0 where there is none
  float values[kLaneChunks][4] = {};

  static DK_DEVICE i32 chunk(i32 i) { return ptx::lane_index() + 32 * i; }

  // Converged. The logarithm of the sum of all splits' sums, by which the weights are to be
  // divided.
  DK_DEVICE float weigh() {
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
    return log2_sum(most, sum);
  }
  // Converged.
  DK_DEVICE float weight_of(i32 split) const {
    float mine = weight[0];
    DK_UNROLL
    for (i32 i = 1; i < kLaneSplits; ++i) mine = split / 32 == i ? weight[i] : mine;
    return ptx::shuffle(mine, split % 32);
  }
  DK_DEVICE void load(u32 (&words)[kLaneChunks][4], i32 split) const {
    const float* from = args.partial_out + (split * args.num_rows() + row) * kHeadDim;
    DK_UNROLL
    for (i32 i = 0; i < kLaneChunks; ++i)
      if (chunk(i) < kChunks) ptx::load_global_x4(words[i], from + 4 * chunk(i));
  }
  // A split without keys that the row sees has the weight 0, whatever is multiplied by it.
  DK_DEVICE void add(const u32 (&words)[kLaneChunks][4], float share) {
    DK_UNROLL
    for (i32 i = 0; i < kLaneChunks; ++i) {
      if (chunk(i) >= kChunks) continue;
      DK_UNROLL
      for (i32 j = 0; j < 4; ++j) {
        const float sum = ptx::fma(ptx::float_of(words[i][j]), share, values[i][j]);
        values[i][j] = share == 0.0f ? values[i][j] : sum;
      }
    }
  }
  DK_DEVICE void run() {
    const float lse = weigh();
    for (i32 first = 0; first < args.num_splits; first += kAhead) {
      u32 words[kAhead][kLaneChunks][4];
      DK_UNROLL
      for (i32 i = 0; i < kAhead; ++i)
        if (first + i < args.num_splits) load(words[i], first + i);
      DK_UNROLL
      for (i32 i = 0; i < kAhead; ++i)
        if (first + i < args.num_splits) add(words[i], weight_of(first + i));
    }
    store(lse);
  }

  DK_DEVICE void store(float log2_sum) const {
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
      if (chunk(i) >= kChunks) continue;
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
  static_assert(S.invalid() == nullptr);
  constexpr i32 kWarps = S.num_threads() / 32;
  if constexpr (S.backend != Backend::sm89) ptx::grid_dependency_wait();
  const i64 num_rows = flash::num_joined_rows(args);
  for (i64 row = i64{ptx::block_index()} * kWarps + ptx::warp_index(); row < num_rows;
       row += i64{ptx::num_blocks()} * kWarps)
    flash::RowJoin<S>{.args = args, .row = row}.run();
}

}  // namespace deep_kernels
