#include "cpu/gated_activation.h"

#include <bit>
#include <cmath>

#include "cpu/bfloat16.h"
#include "cpu/select.h"
#include "cpu/vectorize.h"

namespace deep_kernels::cpu {
namespace {

constexpr u32 kMagnitude = 0x7fffffffu;
constexpr u32 kInfinityBits = 0x7f800000u;
constexpr u32 kNanCode = 0x7f;

// exp(x) of x <= 0, within 2 units in the last place; NaN stays. What float32 cannot hold is 0.
DK_INLINE float exp_of_negative(float x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693145751953125f;  // 15 bits, so that times a count it is exact
  constexpr float kLn2Low = 1.42860677e-6f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float bounded = select(x < -127.0f, -127.0f, x);  // NaN goes through
  const float shifted = bounded * kLog2E + kRound;
  const float count = shifted - kRound;
  const float r = (bounded - count * kLn2High) - count * kLn2Low;
  // Taylor; what follows is below 6e-9 for |r| <= ln(2) / 2.
  constexpr float kTaylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  float sum = 1.0f / 5040;
  for (float coefficient : kTaylor) sum = sum * r + coefficient;
  // 2^count in two factors: together they may lie below what one exponent can say.
  const i32 exponent = static_cast<i32>(std::bit_cast<u32>(shifted) - std::bit_cast<u32>(kRound));
  const i32 half = exponent >> 1;
  const u32 first = static_cast<u32>(half) + 127;
  const u32 second = static_cast<u32>(exponent) - static_cast<u32>(half) + 127;
  return sum * std::bit_cast<float>(first << 23) * std::bit_cast<float>(second << 23);
}

// Of -infinity 0, so that times -infinity it is NaN, as torch's silu and gelu are there.
DK_INLINE float sigmoid(float x) {
  const float e = exp_of_negative(-std::fabs(x));
  return select(x < 0.0f, e, 1.0f) / (1.0f + e);
}

// tanh-GELU as a sigmoid: 0.5 * (1 + tanh(t)) = sigmoid(2 t), which loses nothing where t < 0.
DK_INLINE float gelu_argument(float x) {
  constexpr float kTwiceSqrt2OverPi = 1.59576912f;
  return kTwiceSqrt2OverPi * (x + 0.044715f * (x * x * x));
}

DK_INLINE float clamp_above(float x, float limit) { return x > limit ? limit : x; }
DK_INLINE float clamp_below(float x, float limit) { return x < limit ? limit : x; }

// Nearest even of what lies within +-448; NaN is 0x7f.
DK_INLINE u8 to_e4m3(float value) {
  const u32 bits = std::bit_cast<u32>(value);
  const u32 magnitude = bits & kMagnitude;
  const u32 normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  // Below 2^-6 codes are multiples of 2^-9, and so are the floats from 2^14 on.
  constexpr float kRound = 16384.0f;
  const u32 subnormal =
      std::bit_cast<u32>(std::bit_cast<float>(magnitude) + kRound) - std::bit_cast<u32>(kRound);
  const u32 code = select(magnitude < std::bit_cast<u32>(0x1p-6f), subnormal, normal);
  return static_cast<u8>(select(magnitude > kInfinityBits, kNanCode, code | (bits >> 24 & 0x80)));
}

// Limits as the contract's: of the gate in place, of up with its offset.
DK_INLINE void adjust(const ActivationArgs& args, i32 count, float* gate, float* up) {
  for (i32 i = 0; i < count; ++i) gate[i] = clamp_above(gate[i], args.clamp);
  for (i32 i = 0; i < count; ++i)
    up[i] = clamp_below(clamp_above(up[i], args.clamp), -args.clamp) + args.up_offset;
}

DK_INLINE void activate(Activation activation, float alpha, i32 count, float* gate) {
  switch (activation) {
    case Activation::silu:
      for (i32 i = 0; i < count; ++i) gate[i] = gate[i] * sigmoid(gate[i]);
      break;
    case Activation::silu_adjusted:
      for (i32 i = 0; i < count; ++i) gate[i] = gate[i] * sigmoid(alpha * gate[i]);
      break;
    case Activation::gelu_tanh:
      for (i32 i = 0; i < count; ++i) gate[i] = gate[i] * sigmoid(gelu_argument(gate[i]));
      break;
  }
}

DK_INLINE void round_values(Rounding rounding, i32 count, float* values) {
  if (rounding == Rounding::float32) return;
  for (i32 i = 0; i < count; ++i) values[i] = round_to_bfloat16(values[i]);
}

// The product of gate and up, in place of the gate.
DK_INLINE void gated_product(const GatedActivation& rule, i32 count, float* gate, float* up) {
  if (rule.activation != Activation::silu) adjust(rule.args, count, gate, up);
  activate(rule.activation, rule.args.alpha, count, gate);
  round_values(rule.rounding, count, gate);
  for (i32 i = 0; i < count; ++i) gate[i] *= up[i];
  round_values(rule.rounding, count, gate);
}

float round_up_to_power_of_two(float scale) {
  if (!std::isfinite(scale)) return scale;
  return std::bit_cast<float>((std::bit_cast<u32>(scale) + 0x7fffff) & kInfinityBits);
}

float scale_of(u32 amax_bits, ScaleFormat format) {
  const float scale = clamp_below(std::bit_cast<float>(amax_bits) / kMaxE4m3, kMinBlockScale);
  return format == ScaleFormat::ue8m0 ? round_up_to_power_of_two(scale) : scale;
}

}  // namespace

DK_VECTORIZED float activate_and_quantize(const GatedActivation& rule, const float* gate,
                                          const float* up, i32 count, u8* codes) {
  float values[kScaleBlock];
  float factors[kScaleBlock];
  for (i32 i = 0; i < count; ++i) values[i] = gate[i];
  for (i32 i = 0; i < count; ++i) factors[i] = up[i];
  gated_product(rule, count, values, factors);

  // Magnitudes compare as integers, NaN above infinity: none gets lost in the maximum.
  u32 amax_bits = 0;
  for (i32 i = 0; i < count; ++i)
    amax_bits = max_of(amax_bits, std::bit_cast<u32>(values[i]) & kMagnitude);
  const float scale = scale_of(amax_bits, rule.scale_format);
  const float inverse = 1.0f / scale;
  for (i32 i = 0; i < count; ++i)
    values[i] = clamp_below(clamp_above(values[i] * inverse, kMaxE4m3), -kMaxE4m3);
  for (i32 i = 0; i < count; ++i) codes[i] = to_e4m3(values[i]);
  return scale;
}

u8 ue8m0_of(float scale) { return static_cast<u8>(std::bit_cast<u32>(scale) >> 23); }

}  // namespace deep_kernels::cpu
