#include "cpu/head_sum.h"

#include <algorithm>

#include "cpu/bfloat16.h"
#include "cpu/vectorize.h"

namespace deep_kernels::cpu {
namespace {

template <class Real>
inline __attribute__((always_inline)) void sum_heads_of(const Real* dots, i64 stride,
                                                        const Real* weights, i32 num_heads,
                                                        i32 begin, i32 end, Real* sums) {
  for (i32 first = begin - begin % kSumColumns; first < end; first += kSumColumns) {
    Real sum[kSumColumns] = {};
    const Real* column = dots + first;
    for (i32 head = 0; head < num_heads; ++head, column += stride) {
      const Real weight = weights[head];
      // Written so that NaN, which is not below zero, goes through.
      for (i32 i = 0; i < kSumColumns; ++i)
        sum[i] += weight * (column[i] < Real{0} ? Real{0} : column[i]);
    }
    for (i32 i = 0; i < kSumColumns; ++i) sums[first + i] = sum[i];
  }
}

}  // namespace

DK_VECTORIZED void sum_heads(const float* dots, i64 stride, const float* weights, i32 num_heads,
                             i32 begin, i32 end, float* sums) {
  sum_heads_of(dots, stride, weights, num_heads, begin, end, sums);
}

void sum_heads(const double* dots, i64 stride, const double* weights, i32 num_heads, i32 begin,
               i32 end, double* sums) {
  sum_heads_of(dots, stride, weights, num_heads, begin, end, sums);
}

void store_logits(const float* values, i64 count, float* logits) {
  std::copy_n(values, count, logits);
}

DK_VECTORIZED void store_logits(const float* values, i64 count, u16* logits) {
  for (i64 i = 0; i < count; ++i) logits[i] = to_bfloat16(values[i]);
}

}  // namespace deep_kernels::cpu
