// The pre-pass of the folded reduction: half of the weighted sum of a token's query rows, as e4m3
// digits that the tensor cores multiply like four more query rows. A warp takes a token.
#pragma once

#include "deep_kernels/contract/mqa_logits.h"
#include "deep_kernels/kernels/mqa_logits_tile.cuh"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels {

// What the digits of a token are multiples of, so that none leaves e4m3, and the power of two its
// weights are divided by beforehand.
struct FoldScales {
  float power;
  float unit;
};
// Converged.
DK_DEVICE FoldScales fold_scales(const MqaLogitsArgs& args, i32 row) {
  i32 greatest = kNoExponent;
  DK_NO_UNROLL
  for (i32 head = ptx::lane_index(); head < args.num_heads; head += 32)
    greatest = max_of(greatest, exponent_of(load_weight(args, row, head)));
  const float power = power_of(ptx::reduce_max(greatest));
  float sum = 0.0f;
  DK_NO_UNROLL
  for (i32 head = ptx::lane_index(); head < args.num_heads; head += 32)
    sum += ptx::abs(load_weight(args, row, head) * reciprocal(power));
  DK_UNROLL
  for (i32 step = 1; step < 32; step *= 2) sum += ptx::shuffle_xor(sum, step);
  // A power of two above the sum: no element of the weighted sum of codes up to 448 passes 448
  // units. Infinities and NaNs among the weights make all of the token NaN, zeros need no unit.
  const i32 exponent = exponent_of(sum);
  if (exponent != kNoExponent) return {power, ptx::float_of(static_cast<u32>(exponent + 128) << 23)};
  return {power, sum == 0.0f ? 1.0f : sum - sum};
}

template <MqaFoldSpec S>
DK_DEVICE void mqa_fold(const MqaFoldArgs& args) {
  static_assert(S.invalid() == nullptr);
  constexpr i32 kLanes = S.head_dim / 4;  // that share a query row, four elements each
  constexpr i32 kHeads = 32 / kLanes;     // of one step
  const MqaLogitsArgs& logits = args.logits;
  const i32 lane = ptx::lane_index();
  const i32 row = ptx::block_index() * (S.num_threads() / 32) + ptx::warp_index();
  if (row >= logits.num_q) return;  // the whole warp
  const FoldScales scales = fold_scales(logits, row);
  const u8* query = logits.q + row * logits.q_token_stride + lane % kLanes * 4;
  float sum[4] = {};
  DK_UNROLL_BY_8
  for (i32 head = lane / kLanes; head < logits.num_heads; head += kHeads) {
    const float weight = load_weight(logits, row, head) * reciprocal(scales.power);
    const u32 codes = static_cast<u32>(
        ptx::load_global(reinterpret_cast<const i32*>(query + head * logits.q_head_stride)));
    DK_UNROLL
    for (i32 i = 0; i < 2; ++i) {
      const u32 pair = ptx::f16x2_of_e4m3x2(static_cast<u16>(codes >> (16 * i)));
      sum[2 * i] = ptx::fma(ptx::float_of_f16(static_cast<u16>(pair)), weight, sum[2 * i]);
      sum[2 * i + 1] =
          ptx::fma(ptx::float_of_f16(static_cast<u16>(pair >> 16)), weight, sum[2 * i + 1]);
    }
  }
  DK_UNROLL
  for (i32 i = 0; i < 4; ++i) {
    DK_UNROLL
    for (i32 step = kLanes; step < 32; step *= 2) sum[i] += ptx::shuffle_xor(sum[i], step);
    sum[i] *= reciprocal(scales.unit);
  }
  if (lane >= kLanes) return;
  u8* to = args.folded + i64{row} * S.folded_rows() * S.head_dim + lane * 4;
  DK_UNROLL
  for (i32 digit = 0; digit < S.folded_rows(); ++digit, to += S.head_dim) {
    u32 codes = 0;  // of the rows behind the last digit, for a group with one token
    DK_UNROLL
    for (i32 i = 0; digit < kMqaDigits && i < 2; ++i) {
      const u16 pair = ptx::e4m3x2_of_f32x2(sum[2 * i], sum[2 * i + 1]);
      const u32 back = ptx::f16x2_of_e4m3x2(pair);
      sum[2 * i] = (sum[2 * i] - ptx::float_of_f16(static_cast<u16>(back))) * 16.0f;
      sum[2 * i + 1] = (sum[2 * i + 1] - ptx::float_of_f16(static_cast<u16>(back >> 16))) * 16.0f;
      codes |= static_cast<u32>(pair) << (16 * i);
    }
    ptx::store_global(reinterpret_cast<i32*>(to), static_cast<i32>(codes));
  }
  if (lane == 0) ptx::store_global(args.folded_scale + row, 0.5f * scales.unit);
}

}  // namespace deep_kernels
