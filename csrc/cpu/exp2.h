// 2^x for softmax: x at most 8; NaN stays.
#pragma once

#include <bit>
#include <cmath>

#include "cpu/select.h"
#include "deep_kernels/contract/attention.h"

namespace deep_kernels::cpu {

// 1 + c[0] x + c[1] x^2 + .., from the highest power on. Unrolled, since a loop within a loop stays
// off vectors.
template <i32 kCount>
DK_INLINE float polynomial(const float (&c)[kCount], float x) {
  float sum = c[kCount - 1];
#pragma GCC unroll 16
  for (i32 i = kCount - 2; i >= 0; --i) sum = std::fma(sum, x, c[i]);
  return std::fma(sum, x, 1.0f);
}

// 2^count in the exponent of `value`, count being what `shifted` holds above kEx2Magic.
DK_INLINE float add_exponent(float value, float shifted) {
  return std::bit_cast<float>(std::bit_cast<u32>(value) + (std::bit_cast<u32>(shifted) << 23));
}

// Within 2 units in the last place; below 2^-126 it is 0, as ex2.approx.ftz makes it.
DK_INLINE float exp2_exact(float x) {
  // Taylor, ln(2)^n / n!; what follows is below 6e-9 for |r| <= 1/2.
  constexpr float kTaylor[] = {6.93147181e-1f, 2.40226507e-1f, 5.55041087e-2f, 9.61812911e-3f,
                               1.33335581e-3f, 1.54035304e-4f, 1.52527338e-5f};
  const float bounded = select(x < kEx2Lowest, kEx2Lowest, x);
  const float shifted = bounded + kEx2Magic;
  const float r = bounded - (shifted - kEx2Magic);
  const float power = add_exponent(polynomial(kTaylor, r), shifted);
  return select(x != x, x, select(x < -126.0f, 0.0f, power));
}

// As kernels emulate it: see the contract.
template <i32 kDegree>
DK_INLINE float exp2_emulated(float x) {
  const float bounded = select(x < kEx2Lowest, kEx2Lowest, x);
  const float nearest = bounded + kEx2Magic;
  // What adding the number would give if it rounded down.
  const float shifted = nearest - select(nearest - kEx2Magic > bounded, 1.0f, 0.0f);
  const float f = bounded - (shifted - kEx2Magic);
  const float power = kDegree == 3 ? polynomial(kEx2Degree3, f) : polynomial(kEx2Degree4, f);
  return select(x != x, x, add_exponent(power, shifted));
}

}  // namespace deep_kernels::cpu
