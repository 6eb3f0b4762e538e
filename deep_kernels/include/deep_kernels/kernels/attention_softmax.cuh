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
  // Less than any maximum: of rows that have met no score above -inf.
  static constexpr float kLowest = -3.40282347e38f;
  // Exponents relative to a reference beyond this have lost too much to be moved to another one.
  static constexpr float kFar = 1024.0f;

  float reference[kLaneRows];  // m, base 2
  float sum[kLaneRows];        // of powers: the lane's share until close()
  bool far;                    // some row of the warp has a reference that is

  DK_DEVICE void open() {
    DK_UNROLL
    for (i32 row = 0; row < kLaneRows; ++row) reference[row] = kLowest, sum[row] = 0.0f;
    far = true;
  }

  // Converged. Makes powers of one tile's dot products. Where it returns true, to all lanes alike,
  // sums over earlier tiles have to be multiplied by the factor of their row, 1 for rows that keep
  // their reference.
  //
  // Most tiles move no reference, and whether one does is asked of exponents as integers, which
  // order positive ones like floats: a maximum of three is one instruction, and no lane has to know
  // that of its row. What is below 0 may come out in any order. NaN that arithmetic makes is
  // positive, and greater than all.
  DK_DEVICE bool add(float (&scores)[kScores], float scale_log2, float (&factor)[kLaneRows]) {
    bool moved = far;
    if (far) {
      factor[0] = factor[1] = 1.0f;
      follow_maxima(scores, scale_log2, factor);
    }
    i32 top[kLaneRows];
    take_exponents(scores, scale_log2, top);
    constexpr i32 kMost = __builtin_bit_cast(i32, kRescaleThreshold);
    if (ptx::any(max_of(top[0], top[1]) > kMost)) {
      if (!moved) factor[0] = factor[1] = 1.0f;
      DK_UNROLL
      for (i32 row = 0; row < kLaneRows; ++row) {
        const i32 greatest = quad_maximum(top[row]);
        if (greatest > kMost) factor[row] = move_exponents(scores, row, ptx::float_of(greatest));
      }
      moved = true;
    }
    if (moved) far = ptx::any(is_far(reference[0]) || is_far(reference[1]));
    take_powers(scores);
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
  DK_DEVICE Divisor divisor(i32 row) const { return Divisor(sum[row]); }
  DK_DEVICE float log2_sum(i32 row) const { return flash::log2_sum(reference[row], sum[row]); }

 private:
  static DK_DEVICE bool is_far(float reference) { return !(ptx::abs(reference) <= kFar); }

  // Over the four lanes that share a row.
  static DK_DEVICE i32 quad_maximum(i32 value) {
    DK_UNROLL
    for (i32 mask = 1; mask < 4; mask *= 2) value = max_of(value, ptx::shuffle_xor(value, mask));
    return value;
  }
  // Of a row; a NaN wins.
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

  // Adds a row's powers up relative to another reference, from which the old one was `step` away. A
  // step that is NaN or infinite takes the sum along, and nothing that is added or multiplied later
  // takes it away.
  DK_DEVICE float rescale(i32 row, float to, float step) {
    const float factor = ptx::ex2_approx_ftz(-step);
    reference[row] = to;
    sum[row] = step < infinity() ? sum[row] * factor : nan();
    return factor;
  }
  // Rows that are far: from the maximum of their scores.
  DK_DEVICE void follow_maxima(const float (&scores)[kScores], float scale_log2,
                               float (&factor)[kLaneRows]) {
    DK_UNROLL
    for (i32 row = 0; row < kLaneRows; ++row) {
      const float maximum = row_maximum(scores, row) * scale_log2;
      if (is_far(reference[row]) && attention_rescales(reference[row], maximum))
        factor[row] = rescale(row, maximum, maximum - reference[row]);
    }
  }
  // Other rows: from the greatest of their exponents, which are moved.
  DK_DEVICE float move_exponents(float (&exponents)[kScores], i32 row, float greatest) {
    DK_UNROLL
    for (i32 i = 0; i < kScores; ++i)
      if (row_of_element(i) == row) exponents[i] -= greatest;
    return rescale(row, reference[row] + greatest, greatest);
  }

  DK_DEVICE void take_exponents(float (&scores)[kScores], float scale_log2,
                                i32 (&top)[kLaneRows]) const {
    DK_UNROLL
    for (i32 i = 0; i < kScores; ++i)
      scores[i] = ptx::fma(scores[i], scale_log2, -reference[row_of_element(i)]);
    DK_UNROLL
    for (i32 row = 0; row < kLaneRows; ++row) {
      const auto bits = [&](i32 i) { return static_cast<i32>(ptx::bits_of(scores[i + 2 * row])); };
      top[row] = max_of(bits(0), bits(1));
      DK_UNROLL
      for (i32 i = 4; i < kScores; i += 4)
        top[row] = max_of(max_of(top[row], bits(i)), bits(i + 1));
    }
  }
  DK_DEVICE void take_powers(float (&exponents)[kScores]) {
    float part[kLaneRows][2];
    DK_UNROLL
    for (i32 i = 0; i < kScores; ++i) {
      float& power = exponents[i];
      power = ex2_is_emulated(S.ex2(), number_in_row(i), 0, 1) ? ex2_emulated<S.dtype>(power)
                                                               : ptx::ex2_approx_ftz(power);
      float& total = part[row_of_element(i)][i % 2];
      total = i < 4 ? power : total + power;
    }
    DK_UNROLL
    for (i32 row = 0; row < kLaneRows; ++row) sum[row] += part[row][0] + part[row][1];
  }
};

}  // namespace deep_kernels::flash
