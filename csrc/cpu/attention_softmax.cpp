#include "cpu/attention_softmax.h"

#include <cmath>

#include "cpu/exp2.h"
#include "cpu/vectorize.h"

namespace deep_kernels::cpu {
namespace {

constexpr i32 kLanes = 16;  // partial maxima and sums, so that loops stay on vectors
static_assert(kCpuTileKeys % kLanes == 0);

// NaN is left out; it gets into the sum of powers.
DK_INLINE float maximum_of(const float* scores, i32 width) {
  float lanes[kLanes];
  for (i32 i = 0; i < kLanes; ++i) lanes[i] = -__builtin_inff();
  for (i32 first = 0; first < width; first += kLanes)
    for (i32 i = 0; i < kLanes; ++i)
      lanes[i] = scores[first + i] > lanes[i] ? scores[first + i] : lanes[i];
  float result = lanes[0];
  for (i32 i = 1; i < kLanes; ++i) result = max_of(result, lanes[i]);
  return result;
}

DK_INLINE float sum_of(const float* powers, i32 width) {
  float lanes[kLanes] = {};
  for (i32 first = 0; first < width; first += kLanes)
    for (i32 i = 0; i < kLanes; ++i) lanes[i] += powers[first + i];
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  return sum;
}

template <i32 kDegree>
DK_INLINE void emulate(const u32* emulated, const float* exponents, i32 width, float* powers) {
  for (i32 i = 0; i < width; ++i)
    powers[i] = select(emulated[i] != 0, exp2_emulated<kDegree>(exponents[i]), powers[i]);
}

}  // namespace

Ex2Rule::Ex2Rule(Ex2Emulation ex2, DType dtype) {
  if (ex2 == Ex2Emulation{}) return;
  degree = ex2_degree(dtype);
  const RowFragments fragments = attention_fragments(Backend::cpu, kCpuTileKeys);
  for (i32 i = 0; i < kCpuTileKeys; ++i)
    emulated[i] = ex2_is_emulated(ex2, i % fragments.length, i / fragments.length, fragments.count);
}

DK_VECTORIZED_FMA float softmax_tile(const Ex2Rule& rule, float scale_log2, i32 count,
                                     float* scores, RowState& state) {
  const i32 width = align_up(count, kLanes);  // more would add zeros
  float exponents[kCpuTileKeys];
  for (i32 i = 0; i < width; ++i)
    exponents[i] = select(i < count, scores[i] * scale_log2, -__builtin_inff());
  const float maximum = maximum_of(exponents, width);
  float factor = 1.0f;
  if (!(maximum <= state.reference + kRescaleThreshold)) {
    factor = exp2_exact(state.reference - maximum);
    state.reference = maximum;
    state.sum *= factor;
  }
  // Where all are -inf so far, any number keeps their powers 0.
  const float reference = state.reference == -__builtin_inff() ? 0.0f : state.reference;
  for (i32 i = 0; i < width; ++i) exponents[i] -= reference;
  for (i32 i = 0; i < width; ++i) scores[i] = exp2_exact(exponents[i]);
  if (rule.degree == 3) emulate<3>(rule.emulated, exponents, width, scores);
  if (rule.degree == 4) emulate<4>(rule.emulated, exponents, width, scores);
  state.sum += sum_of(scores, width);
  return factor;
}

DK_VECTORIZED void divide_row(const float* values, float divisor, i32 count, float* out) {
  for (i32 i = 0; i < count; ++i) out[i] = select(divisor == 0.0f, 0.0f, values[i] / divisor);
}

DK_VECTORIZED void scale_row(float factor, i32 count, float* values) {
  for (i32 i = 0; i < count; ++i) values[i] *= factor;
}

DK_VECTORIZED_FMA void add_scaled_row(const float* values, float factor, i32 count, float* out) {
  for (i32 i = 0; i < count; ++i) out[i] = std::fma(values[i], factor, out[i]);
}

float log_sum(const RowState& state) { return state.reference + std::log2(state.sum); }

float power_of_two(float x) { return exp2_exact(x); }

}  // namespace deep_kernels::cpu
