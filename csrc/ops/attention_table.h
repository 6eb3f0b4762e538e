// Share of the exponentials that a kernel emulates where a call does not say: the first row that
// fits. "off" is an answer: emulation pays only where MUFU is what a kernel waits for.
#pragma once

#include <optional>

#include "deep_kernels/contract/attention.h"

namespace deep_kernels {

struct Ex2Row {
  Backend backend;
  std::optional<DType> dtype;  // nothing: any
  i32 head_dim;                // 0: any
  std::optional<bool> causal;
  i64 min_heads_per_kv;
  i64 min_num_kv;  // of the longest member
  Ex2Emulation ex2;
  const char* gpu;
  const char* date;
  double gain;  // share of the time that the next best choice would cost more
  const char* reason;

  constexpr bool fits(Backend of, DType type, i64 dim, bool masked, i64 heads_per_kv,
                      i64 num_kv) const {
    return backend == of && dtype.value_or(type) == type && (head_dim == 0 || head_dim == dim) &&
           causal.value_or(masked) == masked && heads_per_kv >= min_heads_per_kv &&
           num_kv >= min_num_kv;
  }
};

inline constexpr Ex2Row kEx2Table[] = {
    {Backend::cpu,
     {},
     0,
     {},
     0,
     0,
     {},
     "",
     "",
     0.0,
     "a polynomial of eight instructions either way; emulation is there to compare bits with"},
    {Backend::sm89, {}, 0, {}, 0, 0, {}, "", "", 0.0, "not measured"},
    {Backend::sm90,
     {},
     0,
     {},
     0,
     0,
     {},
     "",
     "",
     0.0,
     "not measured; wgmma of head_dim 256 takes four times as long as MUFU, and at 64 the kernel "
     "is "
     "bound by how many instructions it issues, of which emulation adds eight for one"},
};

}  // namespace deep_kernels
