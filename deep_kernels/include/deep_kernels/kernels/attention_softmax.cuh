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
  return ptx::float_of(ptx::bits_of(power) + (ptx::bits_of(shifted) << 23));
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
    inverse = ptx::fma(ptx::fma(-sum, near, 1.0f), near, near);
  }
  DK_DEVICE float divide(float value) const { return saw_nothing ? 0.0f : value * inverse; }
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

  // Where no score was greater than -inf so far, any number does for m that none is less than.
  static constexpr float kLowest = -3.40282347e38f;
  float reference[kLaneRows];  // m, base 2
  float sum[kLaneRows];        // of powers: the lane's share until close()

  DK_DEVICE void open() {
    DK_UNROLL
    for (i32 row = 0; row < kLaneRows; ++row) reference[row] = kLowest, sum[row] = 0.0f;
  }

  // Converged. Makes powers of one tile's dot products. Where it returns true, to all lanes alike,
  // sums over earlier tiles have to be multiplied by the factor of their row, 1 for rows that keep
  // their reference.
  DK_DEVICE bool add(float (&scores)[kScores], float scale_log2, float (&factor)[kLaneRows]) {
    float maximum[kLaneRows];
    bool rescales = false;
    DK_UNROLL
    for (i32 row = 0; row < kLaneRows; ++row) {
      maximum[row] = row_maximum(scores, row) * scale_log2;
      rescales |= attention_rescales(reference[row], maximum[row]);
    }
    rescales = ptx::any(rescales);
    if (rescales) {
      DK_UNROLL
      for (i32 row = 0; row < kLaneRows; ++row) factor[row] = follow(row, maximum[row]);
    }
    take_powers(scores, scale_log2);
    return rescales;
  }

  // Converged. From here on the sums are those of whole rows.
  DK_DEVICE void close() {
    DK_UNROLL
    for (i32 row = 0; row < kLaneRows; ++row) {
      DK_UNROLL
      for (i32 mask = 1; mask < 4; mask *= 2) sum[row] += ptx::shuffle_xor(sum[row], mask);
    }
  }
  DK_DEVICE Divisor divisor(i32 row) const { return Divisor(sum[row]); }
  DK_DEVICE float log2_sum(i32 row) const { return flash::log2_sum(reference[row], sum[row]); }

 private:
  // Over the four lanes that share the row; a NaN wins.
  static DK_DEVICE float row_maximum(const float (&scores)[kScores], i32 row) {
    float part[] = {scores[2 * row], scores[2 * row + 1]};
    DK_UNROLL
    for (i32 i = 4; i < kScores; i += 4) DK_UNROLL
    for (i32 j = 0; j < 2; ++j) part[j] = ptx::max_nan(part[j], scores[i + 2 * row + j]);
    float maximum = ptx::max_nan(part[0], part[1]);
    DK_UNROLL
    for (i32 mask = 1; mask < 4; mask *= 2)
      maximum = ptx::max_nan(maximum, ptx::shuffle_xor(maximum, mask));
    return maximum;
  }

  // What the row's sums have to be multiplied by. A score that is NaN or infinite takes the sum of
  // powers along, and nothing that is added or multiplied later takes it away.
  DK_DEVICE float follow(i32 row, float maximum) {
    if (!attention_rescales(reference[row], maximum)) return 1.0f;
    const float factor = ptx::ex2_approx_ftz(reference[row] - maximum);
    reference[row] = maximum;
    sum[row] = maximum < infinity() ? sum[row] * factor : nan();
    return factor;
  }

  DK_DEVICE void take_powers(float (&scores)[kScores], float scale_log2) {
    float part[kLaneRows][2];
    DK_UNROLL
    for (i32 i = 0; i < kScores; ++i) {
      const i32 row = row_of_element(i);
      const float exponent = ptx::fma(scores[i], scale_log2, -reference[row]);
      scores[i] = ex2_is_emulated(S.ex2(), number_in_row(i), 0, 1) ? ex2_emulated<S.dtype>(exponent)
                                                                   : ptx::ex2_approx_ftz(exponent);
      part[row][i % 2] = i < 4 ? scores[i] : part[row][i % 2] + scores[i];
    }
    DK_UNROLL
    for (i32 row = 0; row < kLaneRows; ++row) sum[row] += part[row][0] + part[row][1];
  }
};

}  // namespace deep_kernels::flash
