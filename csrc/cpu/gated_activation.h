// The gated activation of one token's 128 columns, and its quantization to e4m3 with one scale.
#pragma once

#include "deep_kernels/contract/silu_fold.h"

namespace deep_kernels::cpu {

struct GatedActivation {
  ActivationArgs args;
  Activation activation;
  Rounding rounding;
  ScaleFormat scale_format;
};

// codes[c] = e4m3(v[c] / scale), v = act(gate) * (up + up_offset) as the contract says, for `count`
// columns, at most kScaleBlock. Returns the scale, for ue8m0 a power of two: infinity where some v
// is infinite, NaN where one is NaN. A finite v beside an infinite one gets code 0, beside a NaN
// the code NaN.
float activate_and_quantize(const GatedActivation& rule, const float* gate, const float* up,
                            i32 count, u8* codes);

// The UE8M0 exponent of a scale as above; 0xff for infinity and NaN.
u8 ue8m0_of(float scale);

}  // namespace deep_kernels::cpu
