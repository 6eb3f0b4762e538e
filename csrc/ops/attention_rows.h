// What a row of the measured table of exp2 emulation says, and how one is found.
#pragma once

#include <cstddef>
#include <optional>

#include "deep_kernels/contract/attention.h"

namespace deep_kernels {

struct Ex2Row {
  Backend backend;
  std::optional<DType> dtype;  // nothing: any
  i32 head_dim;                // 0: any
  std::optional<bool> causal;  // nothing: either
  i64 min_heads_per_kv;
  i64 min_num_kv;    // of the longest member
  Ex2Emulation ex2;  // all 0: off
  const char* gpu;   // that it was measured on; empty if it was not
  const char* date;  // of the measurement; empty if there was none
  double gain;  // share of the time that the next best choice would cost more; 0: no difference
  const char* reason;

  constexpr bool fits(Backend of, DType type, i64 dim, bool masked, i64 heads_per_kv,
                      i64 num_kv) const {
    return backend == of && dtype.value_or(type) == type && (head_dim == 0 || head_dim == dim) &&
           causal.value_or(masked) == masked && heads_per_kv >= min_heads_per_kv &&
           num_kv >= min_num_kv;
  }
};

// The first row that fits, or null. Rows of particular cases stand before those of any.
template <std::size_t kRows>
constexpr const Ex2Row* find_ex2_row(const Ex2Row (&table)[kRows], Backend backend, DType dtype,
                                     i64 head_dim, bool causal, i64 heads_per_kv, i64 num_kv) {
  for (const Ex2Row& row : table)
    if (row.fits(backend, dtype, head_dim, causal, heads_per_kv, num_kv)) return &row;
  return nullptr;
}

}  // namespace deep_kernels
