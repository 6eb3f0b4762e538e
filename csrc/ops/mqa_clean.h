// What a row of the measured cleaning table says, and how one is found.
#pragma once

#include <cstddef>

#include "deep_kernels/contract/mqa_logits.h"

namespace deep_kernels {

struct CleanRow {
  Backend backend;
  Format format;
  Schedule schedule;
  Clean placement;
  const char* gpu;   // that it was measured on; empty if it was not
  const char* date;  // of the measurement; empty if there was none
  double gain;       // share of the time that the other placement would cost more; 0: no difference
  const char* reason;
};

// The row of a case, or null where the table has none.
template <std::size_t kRows>
constexpr const CleanRow* find_clean_row(const CleanRow (&table)[kRows], Backend backend,
                                         Format format, Schedule schedule) {
  for (const CleanRow& row : table)
    if (row.backend == backend && row.format == format && row.schedule == schedule) return &row;
  return nullptr;
}

}  // namespace deep_kernels
