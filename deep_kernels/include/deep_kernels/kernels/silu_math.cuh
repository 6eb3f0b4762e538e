// What every kernel of the FP8 prefill MLP does behind its accumulators: the gated activation, the
// maximum of a block of 128 columns, its scale, and e4m3 codes.
#pragma once

#include "deep_kernels/contract/silu_fold.h"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::fold {

inline constexpr float kLargest = 0x1.fffffep+127f;  // of finite float32 numbers

// 1 / (1 + exp(-x)) to about 3 ulp; 0 from x = -87 on.
DK_DEVICE float sigmoid(float x) {
  constexpr float kLog2E = 0x1.715476p+0f;
  return ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(-kLog2E * x));
}

// A NaN compares false and stays.
DK_DEVICE float at_most(float value, float limit) { return value > limit ? limit : value; }
DK_DEVICE float at_least(float value, float limit) { return value < limit ? limit : value; }

// act(gate); -infinity gives NaN, as 0 * infinity does.
template <Activation kActivation>
DK_DEVICE float activate(float gate, const ActivationArgs& args) {
  if constexpr (kActivation == Activation::silu) {
    return gate * sigmoid(gate);
  } else {
    const float g = at_most(gate, args.clamp);
    if constexpr (kActivation == Activation::silu_adjusted) return g * sigmoid(args.alpha * g);
    // (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (g + 0.044715 g^3)
    constexpr float kTwice = 0x1.988454p+0f;
    return g * sigmoid(kTwice * ptx::fma(0.044715f * g * g, g, g));
  }
}
// What act(gate) is multiplied by.
template <Activation kActivation>
DK_DEVICE float adjusted_up(float up, const ActivationArgs& args) {
  if constexpr (kActivation == Activation::silu) return up;
  return at_least(at_most(up, args.clamp), -args.clamp) + args.up_offset;
}

DK_DEVICE float low_bf16(u32 pair) { return ptx::float_of(pair << 16); }
DK_DEVICE float high_bf16(u32 pair) { return ptx::float_of(pair & 0xffff0000u); }

// The products of two neighbouring columns, rounded as the Spec says.
template <Rounding kRounding>
struct Products;

template <>
struct Products<Rounding::bfloat16> {
  u32 bits;

  static DK_DEVICE Products of(const float (&activated)[2], const float (&up)[2]) {
    const u32 s = ptx::bf16x2_of(activated[0], activated[1]);
    return {ptx::bf16x2_of(low_bf16(s) * up[0], high_bf16(s) * up[1])};
  }
  DK_DEVICE float low() const { return low_bf16(bits); }
  DK_DEVICE float high() const { return high_bf16(bits); }
};
template <>
struct Products<Rounding::float32> {
  float value[2];

  static DK_DEVICE Products of(const float (&activated)[2], const float (&up)[2]) {
    return {{activated[0] * up[0], activated[1] * up[1]}};
  }
  DK_DEVICE float low() const { return value[0]; }
  DK_DEVICE float high() const { return value[1]; }
};

// Two columns of act(gate) times what their up columns give.
template <Activation kActivation, Rounding kRounding>
DK_DEVICE Products<kRounding> multiplied(const float (&activated)[2], const float (&up)[2],
                                         const ActivationArgs& args) {
  const float factor[2] = {adjusted_up<kActivation>(up[0], args),
                           adjusted_up<kActivation>(up[1], args)};
  return Products<kRounding>::of(activated, factor);
}
template <Activation kActivation, Rounding kRounding>
DK_DEVICE Products<kRounding> gated(const float (&gate)[2], const float (&up)[2],
                                    const ActivationArgs& args) {
  const float activated[2] = {activate<kActivation>(gate[0], args),
                              activate<kActivation>(gate[1], args)};
  return multiplied<kActivation, kRounding>(activated, up, args);
}

// The greatest magnitude of products; NaN if one of them is.
template <Rounding kRounding>
struct Maximum;

template <>
struct Maximum<Rounding::bfloat16> {
  u32 bits = 0;

  DK_DEVICE void add(Products<Rounding::bfloat16> pair) {
    bits = ptx::max_nan_abs_bf16x2(bits, pair.bits);
  }
  DK_DEVICE float value() const {
    return ptx::max_nan(ptx::abs(low_bf16(bits)), ptx::abs(high_bf16(bits)));
  }
};
template <>
struct Maximum<Rounding::float32> {
  float greatest = 0.0f;

  DK_DEVICE void add(const Products<Rounding::float32>& pair) {
    greatest = ptx::max_nan(greatest, ptx::max_nan(ptx::abs(pair.low()), ptx::abs(pair.high())));
  }
  DK_DEVICE float value() const { return greatest; }
};

// Of kLanes neighbouring lanes, which all learn it. Converged.
template <i32 kLanes>
DK_DEVICE float lanes_maximum(float value) {
  DK_UNROLL
  for (i32 step = 1; step < kLanes; step *= 2)
    value = ptx::max_nan(value, ptx::shuffle_xor(value, step));
  return value;
}

// a / 448 and 1 / a, correctly rounded and without a branch: an approximation, then one step with
// its exact remainder. Infinity has none and is left alone.
DK_DEVICE float over_448(float a) {
  constexpr float kInverse = 1.0f / kMaxE4m3;
  const float near = a * kInverse;
  const float exact = ptx::fma(ptx::fma(-near, kMaxE4m3, a), kInverse, near);
  return near > kLargest ? near : exact;
}
DK_DEVICE float reciprocal(float a) {
  const float near = ptx::rcp_approx_ftz(a);
  const float exact = ptx::fma(ptx::fma(-a, near, 1.0f), near, near);
  return a > kLargest ? near : exact;
}

// The scale of a block whose greatest magnitude is `amax`.
template <ScaleFormat kFormat>
struct BlockScale;

template <>
struct BlockScale<ScaleFormat::float32> {
  float scale;

  static DK_DEVICE BlockScale of(float amax) {
    return {ptx::max_nan(over_448(amax), kMinBlockScale)};
  }
  DK_DEVICE float inverse() const { return reciprocal(scale); }
  DK_DEVICE void store(void* scales, i64 index) const {
    ptx::store_global(static_cast<float*>(scales) + index, scale);
  }
};
// The least power of two that is not below amax / 448, by the bits of amax: 448 is 1.75 * 2^8.
template <>
struct BlockScale<ScaleFormat::ue8m0> {
  u32 exponent;   // as it is stored; 255: infinite or NaN
  float extreme;  // 1 / amax of those: 0 or NaN

  static DK_DEVICE BlockScale of(float amax) {
    constexpr u32 kMantissa = 0x7fffffu;
    constexpr u32 kThreeQuarters = 0x600000u;
    constexpr u32 kLeast = 127 - 39;  // 2^-39 is the least that is not below kMinBlockScale
    const u32 bits = ptx::bits_of(amax);
    const u32 biased = bits >> 23;
    if (biased == 255) return {255, ptx::rcp_approx_ftz(amax)};
    const u32 up = (bits & kMantissa) > kThreeQuarters ? 1 : 0;
    return {max_of(biased + up, kLeast + 8) - 8, 0.0f};
  }
  // Products with that of an infinite scale become NaN or 0, never wrong numbers.
  DK_DEVICE float inverse() const {
    return exponent == 255 ? extreme : ptx::float_of((254 - exponent) << 23);
  }
  DK_DEVICE void store(void* scales, i64 index) const {
    ptx::store_global(static_cast<u8*>(scales) + index, static_cast<u8>(exponent));
  }
};

// Two codes.
template <Rounding kRounding>
DK_DEVICE u32 codes_of(const Products<kRounding>& pair, float inverse) {
  return ptx::e4m3x2_of_f32x2(pair.low() * inverse, pair.high() * inverse);
}

}  // namespace deep_kernels::fold
