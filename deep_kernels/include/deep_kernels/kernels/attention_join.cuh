// Joins the splits of each row, for every card: a warp takes a row.
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/kernels/attention_softmax.cuh"
#include "deep_kernels/ptx/base.cuh"

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

  const AttentionArgs& args;
  i64 row;
  float sum;
  float values[kLaneChunks][4];

  DK_DEVICE float partial_lse(i32 split) const {
    return ptx::load_global(args.partial_lse + split * args.num_rows() + row);
  }
  // A NaN is left out here and gets into the sum.
  DK_DEVICE float greatest() const {
    float result = -infinity();
    for (i32 split = 0; split < args.num_splits; ++split)
      result = ptx::max(result, partial_lse(split));
    return result;
  }
  static DK_DEVICE i32 chunk(i32 i) { return ptx::lane_index() + 32 * i; }

  DK_DEVICE void add(i32 split, float weight) {
    const float* from = args.partial_out + (split * args.num_rows() + row) * kHeadDim;
    sum += weight;
    DK_UNROLL
    for (i32 i = 0; i < kLaneChunks; ++i) {
      if (chunk(i) >= kChunks) continue;
      u32 words[4];
      ptx::load_global_x4(words, from + 4 * chunk(i));
      DK_UNROLL
      for (i32 j = 0; j < 4; ++j)
        values[i][j] = ptx::fma(ptx::float_of(words[j]), weight, values[i][j]);
    }
  }
  DK_DEVICE void run() {
    const float most = greatest();
    const float reference = most == -infinity() ? 0.0f : most;
    for (i32 split = 0; split < args.num_splits; ++split) {
      const float weight = ptx::ex2_approx_ftz(partial_lse(split) - reference);
      if (weight != 0.0f) add(split, weight);  // 0: without keys that the row sees
    }
    store(log2_sum(most, sum));
  }

  DK_DEVICE void store(float log2_sum) const {
    // Packed tokens are numbered through: one member has them all.
    const i64 token = row / args.num_q_heads;
    const bool packed = args.cu_seqlens_q != nullptr;
    const AttentionMember member{.batch = packed ? 0 : token / args.num_q};
    const i32 query = static_cast<i32>(token - member.batch * args.num_q);
    const i32 head = static_cast<i32>(row % args.num_q_heads);
    if (ptx::lane_index() == 0) store_lse(args, member, head, query, log2_sum);
    const Divisor divisor(sum);
    u16* to = out_row(args, member, head, query);
    DK_UNROLL
    for (i32 i = 0; i < kLaneChunks; ++i) {
      if (chunk(i) >= kChunks) continue;
      float shares[4];
      DK_UNROLL
      for (i32 j = 0; j < 4; ++j) shares[j] = divisor.divide(values[i][j]);
      ptx::store_global_x2(to + 4 * chunk(i), rounded_pair<S.dtype>(shares[0], shares[1]),
                           rounded_pair<S.dtype>(shares[2], shares[3]));
    }
  }
};

}  // namespace deep_kernels::flash

namespace deep_kernels {

template <AttentionJoinSpec S>
DK_DEVICE void attention_join(const AttentionArgs& args) {
  static_assert(S.invalid() == nullptr);
  constexpr i32 kWarps = S.num_threads() / 32;
  const i64 num_rows = flash::num_joined_rows(args);
  for (i64 row = i64{ptx::block_index()} * kWarps + ptx::warp_index(); row < num_rows;
       row += i64{ptx::num_blocks()} * kWarps)
    flash::RowJoin<S>{.args = args, .row = row, .sum = 0.0f, .values = {}}.run();
}

}  // namespace deep_kernels
