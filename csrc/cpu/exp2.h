// 2^x for softmax: x at most 8; NaN stays.
#pragma once

#include <bit>
#include <cmath>

#include "cpu/select.h"
#include "deep_kernels/contract/attention.h"

namespace deep_kernels::cpu {

// 2^count in the exponent of `value`, count being what `shifted` holds above kEx2Magic.
DK_INLINE float add_exponent(float value, float shifted) {
  return std::bit_cast<float>(std::bit_cast<u32>(value) + (std::bit_cast<u32>(shifted) << 23));
}

// Within 2 units in the last place; below 2^-126 it is 0, as ex2.approx.ftz makes it.
DK_INLINE float exp2_exact(float x) {
  const float bounded = select(x < kEx2Lowest, kEx2Lowest, x);
  const float shifted = bounded + kEx2Magic;
  const float r = bounded - (shifted - kEx2Magic);
  // Taylor, ln(2)^n / n!; what follows is below 6e-9 for |r| <= 1/2.
  constexpr float kTaylor[] = {1.54035304e-4f,
                               1.33335581e-3f,
                               9.61812911e-3f,
                               5.55041087e-2f,
                               2.40226507e-1f,
                               6.93147181e-1f,
                               1.0f};
  float sum = 1.52527338e-5f;
  for (float coefficient : kTaylor) sum = std::fma(sum, r, coefficient);
  const float power = select(x < -126.0f, 0.0f, add_exponent(sum, shifted));
  return select(x != x, x, power);
}

// As kernels emulate it: see the contract.
template <i32 kDegree>
DK_INLINE float exp2_emulated(float x) {
  constexpr const float* kCoefficients = kDegree == 3 ? kEx2Degree3 : kEx2Degree4;
  const float bounded = select(x < kEx2Lowest, kEx2Lowest, x);
  const float nearest = bounded + kEx2Magic;
  // What adding the number would give if it rounded down.
  const float shifted = nearest - select(nearest - kEx2Magic > bounded, 1.0f, 0.0f);
  const float fraction = bounded - (shifted - kEx2Magic);
  float sum = kCoefficients[kDegree - 1];
  for (i32 i = kDegree - 2; i >= 0; --i) sum = std::fma(sum, fraction, kCoefficients[i]);
  sum = std::fma(sum, fraction, 1.0f);
  return select(x != x, x, add_exponent(sum, shifted));
}

}  // namespace deep_kernels::cpu
