// The pre-pass of the folded reduction: half of the weighted sum of a token's query rows, as e4m3
// digits that the tensor cores multiply like four more query rows. A warp takes a token: 16 bytes
// of a row to a lane, rows side by side.
#pragma once

#include "deep_kernels/contract/mqa_logits.h"
#include "deep_kernels/kernels/mqa_logits_tile.cuh"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels {

// The weights of a token, head 32 i + lane in [i], divided by a power of two where they are
// extreme.
template <MqaFoldSpec S>
struct FoldWeights {
  static constexpr i32 kPerLane = S.num_heads / 32;
  float weight[kPerLane];

  // Converged.
  DK_DEVICE void load(const MqaLogitsArgs& args, i32 row) {
    i32 greatest = kNoExponent;
    DK_UNROLL
    for (i32 i = 0; i < kPerLane; ++i) {
      weight[i] = load_weight(args, row, 32 * i + ptx::lane_index());
      greatest = max_of(greatest, exponent_of(weight[i]));
    }
    const float factor = reciprocal(power_of(ptx::reduce_max(greatest)));
    DK_UNROLL
    for (i32 i = 0; i < kPerLane; ++i) weight[i] *= factor;
  }
  // A power of two above the sum of the weights, so that no element of a weighted sum of codes up
  // to 448 passes 448 of it. Infinities and NaNs make all of the token NaN. Converged.
  DK_DEVICE float unit() const {
    float sum = 0.0f;
    DK_UNROLL
    for (i32 i = 0; i < kPerLane; ++i) sum += ptx::abs(weight[i]);
    DK_UNROLL
    for (i32 step = 1; step < 32; step *= 2) sum += ptx::shuffle_xor(sum, step);
    const i32 exponent = exponent_of(sum);
    if (exponent != kNoExponent) return ptx::float_of(static_cast<u32>(exponent + 128) << 23);
    return sum == 0.0f ? 1.0f : sum - sum;
  }
};

// Adds weight times four e4m3 codes.
DK_DEVICE void add_codes(float* sum, u32 codes, float weight) {
  DK_UNROLL
  for (i32 i = 0; i < 2; ++i) {
    const u32 pair = ptx::f16x2_of_e4m3x2(static_cast<u16>(codes >> (16 * i)));
    sum[2 * i] = ptx::fma(ptx::float_of_f16(static_cast<u16>(pair)), weight, sum[2 * i]);
    sum[2 * i + 1] =
        ptx::fma(ptx::float_of_f16(static_cast<u16>(pair >> 16)), weight, sum[2 * i + 1]);
  }
}
// The next digits of four elements, which are left with 16 times what the digits do not hold.
DK_DEVICE u32 take_digits(float* rest) {
  u32 codes = 0;
  DK_UNROLL
  for (i32 i = 0; i < 2; ++i) {
    const u16 pair = ptx::e4m3x2_of_f32x2(rest[2 * i], rest[2 * i + 1]);
    const u32 back = ptx::f16x2_of_e4m3x2(pair);
    rest[2 * i] = (rest[2 * i] - ptx::float_of_f16(static_cast<u16>(back))) * 16.0f;
    rest[2 * i + 1] = (rest[2 * i + 1] - ptx::float_of_f16(static_cast<u16>(back >> 16))) * 16.0f;
    codes |= static_cast<u32>(pair) << (16 * i);
  }
  return codes;
}

template <MqaFoldSpec S>
DK_DEVICE void mqa_fold(const MqaFoldArgs& args) {
  static_assert(S.invalid() == nullptr);
  constexpr i32 kLanes = S.head_dim / 16;  // that share a query row
  constexpr i32 kHeads = 32 / kLanes;      // of one step
  const MqaLogitsArgs& logits = args.logits;
  const i32 lane = ptx::lane_index();
  const i32 row = ptx::block_index() * (S.num_threads() / 32) + ptx::warp_index();
  if (row >= logits.num_q) return;  // the whole warp
  FoldWeights<S> weights;
  weights.load(logits, row);
  const u8* query = logits.q + row * logits.q_token_stride + lane % kLanes * 16;
  float sum[16] = {};
  DK_UNROLL
  for (i32 step = 0; step < S.num_heads / kHeads; ++step) {
    const i32 head = step * kHeads + lane / kLanes;
    u32 codes[4] = {};
    if (head < logits.num_heads) ptx::load_global_x4(codes, query + head * logits.q_head_stride);
    const float weight = ptx::shuffle(weights.weight[step * kHeads / 32], head % 32);
    DK_UNROLL
    for (i32 i = 0; i < 4; ++i) add_codes(sum + 4 * i, codes[i], weight);
  }
  const float unit = weights.unit();
  DK_UNROLL
  for (i32 i = 0; i < 16; ++i) {
    DK_UNROLL
    for (i32 step = kLanes; step < 32; step *= 2) sum[i] += ptx::shuffle_xor(sum[i], step);
    sum[i] *= reciprocal(unit);
  }
  if (lane >= kLanes) return;
  u8* to = args.folded + i64{row} * S.folded_rows() * S.head_dim + lane * 16;
  DK_UNROLL
  for (i32 digit = 0; digit < S.folded_rows(); ++digit, to += S.head_dim) {
    u32 codes[4] = {};  // zeros behind the last digit, for a group with one token
    DK_UNROLL
    for (i32 i = 0; digit < kMqaDigits && i < 4; ++i) codes[i] = take_digits(sum + 4 * i);
    ptx::store_global_x4(to, codes[0], codes[1], codes[2], codes[3]);
  }
  if (lane == 0) ptx::store_global(args.folded_scale + row, 0.5f * unit);
}

}  // namespace deep_kernels
