// Softmax of flash attention on accumulators of an MMA, whichever made them: a lane holds parts of
// two rows that are 8 apart, and of them two neighbours of every eight columns. Element i of its
// scores belongs to its row i / 2 % 2 and is number i / 4 * 2 + i % 2 of that row.
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::flash {

inline constexpr i32 kLaneRows = 2;
inline constexpr float kLn2 = 0.693147181f;

DK_DEVICE float infinity() { return ptx::float_of(0x7f800000u); }
DK_DEVICE float nan() { return ptx::float_of(0x7fffffffu); }

// --- where things are
// -----------------------------------------------------------------------------

constexpr i32 row_of_element(i32 i) { return i / 2 % 2; }
constexpr i32 number_in_row(i32 i) { return i / 4 * 2 + i % 2; }
// Of the 16 rows of a warp's MMA.
DK_DEVICE i32 lane_row(i32 row) { return ptx::lane_index() / 4 + 8 * row; }
// The column of an element, less what all elements of the lane have in common.
constexpr i32 column_of_element(i32 i) { return i / 4 * 8 + i % 2; }
DK_DEVICE i32 lane_column() { return ptx::lane_index() % 4 * 2; }

// Leaves of the tile's keys those that the rows see, `visible` from its first one on.
template <i32 kCount>
DK_DEVICE void mask_scores(float (&scores)[kCount], const i32 (&visible)[kLaneRows]) {
  const i32 column = lane_column();
  DK_UNROLL
  for (i32 i = 0; i < kCount; ++i)
    if (column_of_element(i) >= visible[row_of_element(i)] - column) scores[i] = -infinity();
}

// --- powers of 2
// ----------------------------------------------------------------------------------

template <DType kType>
DK_DEVICE float ex2_polynomial(float fraction) {
  constexpr i32 kDegree = ex2_degree(kType);
  float sum = kDegree == 3 ? kEx2Degree3[2] : kEx2Degree4[3];
  DK_UNROLL
  for (i32 i = kDegree - 2; i >= 0; --i)
    sum = ptx::fma(sum, fraction, kDegree == 3 ? kEx2Degree3[i] : kEx2Degree4[i]);
  return ptx::fma(sum, fraction, 1.0f);
}
// See the contract. A NaN gives 0 here: it gets into the sum of its row by the maximum.
template <DType kType>
DK_DEVICE float ex2_emulated(float x) {
  const float bounded = ptx::max(x, kEx2Lowest);
  const float shifted = ptx::add_rm(bounded, kEx2Magic);
  const float power = ex2_polynomial<kType>(bounded - (shifted - kEx2Magic));
  return ptx::add_to_exponent(power, shifted);
}

// Two neighbours as they are multiplied, the first one in the lower half.
template <DType kType>
DK_DEVICE u32 rounded_pair(float first, float second) {
  if constexpr (kType == DType::float16)
    return ptx::f16x2_of(first, second);
  else
    return ptx::bf16x2_of(first, second);
}
// Columns [16 step, 16 step + 16) of the powers as the first operand of an MMA.
template <DType kType, i32 kCount>
DK_DEVICE void powers_as_a(u32 (&a)[4], const float (&powers)[kCount], i32 step) {
  DK_UNROLL
  for (i32 i = 0; i < 4; ++i)
    a[i] = rounded_pair<kType>(powers[8 * step + 2 * i], powers[8 * step + 2 * i + 1]);
}

// --- what a row ends with
// -------------------------------------------------------------------------

// Divides what a row has summed up. Of a row that saw nothing, or nothing but -inf, 0 whatever that
// was multiplied with. The reciprocal is made without a branch, which would be a call that saves
// registers: an approximation, and a step with its exact remainder. Sums are at least 1, or 0, NaN.
struct Divisor {
  float inverse;
  bool saw_nothing;

  DK_DEVICE explicit Divisor(float sum) : saw_nothing(sum == 0.0f) {
    const float near = ptx::rcp_approx_ftz(sum);
    inverse = saw_nothing ? 0.0f : ptx::fma(ptx::fma(-sum, near, 1.0f), near, near);
  }
  DK_DEVICE float divide(float value) const { return saw_nothing ? 0.0f : value * inverse; }
  // The same of what is not NaN or infinite, or of a row that saw something.
  DK_DEVICE float divide_finite(float value) const { return value * inverse; }
};
DK_DEVICE float log2_sum(float reference, float sum) {
  return reference + ptx::lg2_approx_ftz(sum);
}
DK_DEVICE void store_lse(const AttentionArgs& args, const AttentionMember& member, i32 head,
                         i32 query, float log2_sum) {
  ptx::store_global(args.lse + attention_lse_index(args, member, head, query), log2_sum * kLn2);
}
DK_DEVICE u16* out_row(const AttentionArgs& args, const AttentionMember& member, i32 head,
                       i32 query) {
  return args.out + member.batch * args.out_batch_stride +
         (member.first_q + query) * args.out_token_stride + head * args.out_head_stride;
}
// Where a split has a row, in partial_out and partial_lse.
DK_DEVICE i64 partial_row(const AttentionArgs& args, const AttentionMember& member, i32 split,
                          i32 head, i32 query) {
  return split * args.num_rows() + attention_row(args, member, head, query);
}

// --- rows on their way through the tiles of keys
// --------------------------------------------------

template <AttentionSpec S>
struct RowSoftmax {
  static constexpr i32 kScores = kLaneRows * S.fragments().length;
  // Less than any maximum: of rows that have met no score above -inf.
  static constexpr float kLowest = -3.40282347e38f;
  static constexpr float kBelow = reference_below_maximum(S.dtype);
  static constexpr float kMost = kRescaleThreshold + kBelow;  // exponent that moves no reference

  float reference[kLaneRows];  // m, base 2
  float sum[kLaneRows];        // of powers: the lane's share until close()
  bool low;                    // some row of the warp has a reference that scores below 0 may move

  DK_DEVICE void open() {
    DK_UNROLL
    for (i32 row = 0; row < kLaneRows; ++row) reference[row] = kLowest, sum[row] = 0.0f;
    low = true;
  }

  // Converged. Makes powers of one tile's dot products. Where it returns true, to all lanes alike,
  // sums over earlier tiles have to be multiplied by the factor of their row, 1 for rows that keep
  // their reference.
  //
  // Most tiles move no reference. Whether one does is asked of each lane's greatest score as an
  // integer: those order positive floats alike, a maximum of three is one instruction, and no lane
  // has to know that of its row. Scores below 0 come out in any order, and do not matter unless a
  // reference is low. NaN that arithmetic makes is positive, and greater than all.
  DK_DEVICE bool add(float (&scores)[kScores], float scale_log2, float (&factor)[kLaneRows]) {
    bool moved = low;
    DK_UNROLL
    for (i32 row = 0; row < kLaneRows; ++row)
      moved |= moves(row, ptx::float_of(static_cast<u32>(greatest_bits(scores, row))), scale_log2);
    moved = ptx::any(moved);
    if (moved) {
      DK_UNROLL
      for (i32 row = 0; row < kLaneRows; ++row) {
        const float maximum = row_maximum(scores, row);
        factor[row] = moves(row, maximum, scale_log2) ? follow(row, maximum * scale_log2) : 1.0f;
      }
      low = ptx::any(is_low(reference[0]) || is_low(reference[1]));
    }
    take_powers(scores, scale_log2);
    return moved;
  }

  // Converged. From here on the sums are those of whole rows.
  DK_DEVICE void close() {
    DK_UNROLL
    for (i32 row = 0; row < kLaneRows; ++row) {
      DK_UNROLL
      for (i32 mask = 1; mask < 4; mask *= 2) sum[row] += ptx::shuffle_xor(sum[row], mask);
    }
  }
  // True, which the compiler cannot know: what hangs on it waits for the powers to be added up.
  DK_DEVICE bool has_added() const { return !(sum[0] < 0.0f) && !(sum[1] < 0.0f); }
  DK_DEVICE Divisor divisor(i32 row) const { return Divisor(sum[row]); }
  DK_DEVICE float log2_sum(i32 row) const { return flash::log2_sum(reference[row], sum[row]); }

 private:
  static DK_DEVICE bool is_low(float reference) { return !(reference >= -kMost); }
  DK_DEVICE float exponent(i32 row, float score, float scale_log2) const {
    return ptx::fma(score, scale_log2, -reference[row]);
  }
  // By the exponent that a power would have: greater scores have no smaller ones, so that the row's
  // maximum decides as all its scores do. NaN moves it.
  DK_DEVICE bool moves(i32 row, float score, float scale_log2) const {
    return !(exponent(row, score, scale_log2) <= kMost);
  }

  static DK_DEVICE i32 greatest_bits(const float (&scores)[kScores], i32 row) {
    const auto bits = [&](i32 i) { return static_cast<i32>(ptx::bits_of(scores[i + 2 * row])); };
    i32 greatest = max_of(bits(0), bits(1));
    DK_UNROLL
    for (i32 i = 4; i < kScores; i += 4) greatest = max_of(max_of(greatest, bits(i)), bits(i + 1));
    return greatest;
  }
  // Over the four lanes that share it; a NaN wins.
  static DK_DEVICE float row_maximum(const float (&scores)[kScores], i32 row) {
    float maximum = scores[2 * row];
    DK_UNROLL
    for (i32 i = 0; i < kScores; ++i)
      if (row_of_element(i) == row) maximum = ptx::max_nan(maximum, scores[i]);
    DK_UNROLL
    for (i32 mask = 1; mask < 4; mask *= 2)
      maximum = ptx::max_nan(maximum, ptx::shuffle_xor(maximum, mask));
    return maximum;
  }

  // Adds a row's powers up relative to its new maximum. A step that is NaN or infinite takes the
  // sum along, and nothing that is added or multiplied later takes it away.
  DK_DEVICE float follow(i32 row, float maximum) {
    const float to = maximum - kBelow;
    const float step = to - reference[row];
    const float factor = ptx::ex2_approx_ftz(-step);
    reference[row] = to;
    sum[row] = step < infinity() ? sum[row] * factor : nan();
    return factor;
  }

  DK_DEVICE void take_powers(float (&scores)[kScores], float scale_log2) {
    float part[kLaneRows][2];
    DK_UNROLL
    for (i32 i = 0; i < kScores; ++i) {
      const float x = exponent(row_of_element(i), scores[i], scale_log2);
      float& power = scores[i];
      power = ex2_is_emulated(S.ex2(), number_in_row(i), 0, 1) ? ex2_emulated<S.dtype>(x)
                                                               : ptx::ex2_approx_ftz(x);
      float& total = part[row_of_element(i)][i % 2];
      total = i < 4 ? power : total + power;
    }
    DK_UNROLL
    for (i32 row = 0; row < kLaneRows; ++row) sum[row] += part[row][0] + part[row][1];
  }
};

}  // namespace deep_kernels::flash
